"""Simulated hosts on this machine: network namespaces, each with its own addresses."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import subprocess
from collections.abc import Iterable, Iterator

import pytest

TAG = f"fh{secrets.token_hex(3)}"
SUBNET = f"10.{secrets.randbelow(128) + 128}.{secrets.randbelow(256)}"
"""Of this run alone: what a killed run leaves behind (its link, its route) is not in the way."""


def ip(*words: str, within: str = "") -> None:
    before = ["ip", "netns", "exec", host(within)] if within else []
    subprocess.run([*before, "ip", *words], check=True, capture_output=True, text=True)


def host(name: str) -> str:
    return f"{TAG}-{name}"


@contextlib.contextmanager
def namespaces(names: Iterable[str]) -> Iterator[None]:
    """Create a namespace for each name, or skip the test and state the reason."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed: no network namespaces")
    made: list[str] = []
    try:
        for name in names:
            try:
                ip("netns", "add", host(name))
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(name)
            ip("link", "set", "lo", "up", within=name)
        yield
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", host(name)], check=False, capture_output=True)


def processes(name: str) -> list[int]:
    """Return the processes of a namespace."""
    command = ["ip", "netns", "pids", host(name)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    return [int(word) for word in found.stdout.split()]
