"""A deployment across hosts: network namespaces with addresses of their own, and a cut link."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import threading
import time

import pytest
from federation import records, small

from fedhet.config import resolve
from fedhet.connection import submit
from fedhet.deploy import LocalDeployment

BRIDGE = f"fh{os.getpid() % 100_000}"
NET = "10.231.77"
SERVER = f"{NET}.1"
NAMES = ("server", "site-0", "site-1", "site-2")
CUT_SECONDS = 20


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def link(name: str) -> str:
    return f"{BRIDGE}{NAMES.index(name)}"


def host(name: str) -> str:
    return f"{BRIDGE}-{name}"


@contextlib.contextmanager
def hosts():
    """Four namespaces on a bridge; skips, and says why, where they cannot be made."""
    if shutil.which("ip") is None:
        pytest.skip("`ip` is not installed: no network namespaces")
    try:
        ip("link", "add", BRIDGE, "type", "bridge")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        ip("addr", "add", f"{NET}.254/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(NAMES):
            address = SERVER if name == "server" else f"{NET}.{10 + number}"
            ip("netns", "add", host(name))
            peer = ("peer", "name", "eth0", "netns", host(name))
            ip("link", "add", link(name), "type", "veth", *peer)
            ip("link", "set", link(name), "master", BRIDGE, "up")
            for words in (
                ["addr", "add", f"{address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                ip("netns", "exec", host(name), "ip", *words)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", host(name)], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", BRIDGE], check=False, capture_output=True)


@pytest.mark.timeout(900)
def test_a_client_whose_link_is_cut_in_mid_round_is_back_at_the_end(tmp_path):
    out = tmp_path / "run"
    with (
        hosts(),
        LocalDeployment(
            tmp_path / "deployment",
            nodes=3,
            host=SERVER,
            within=lambda name: ("ip", "netns", "exec", host(name)),
        ) as deployment,
    ):
        config = small(
            clients=3,
            models="mlp,cnn2,cnn3",
            rounds=3,
            local_epochs=5,
            join_timeout=300.0,
            round_timeout=200.0,
            min_clients=3,
        )
        placed = resolve({**config.flat(), "out": str(out)})
        said: list[str] = []
        run = threading.Thread(
            target=submit, args=(placed, deployment.connection, said.append), daemon=True
        )
        run.start()
        end = time.monotonic() + 500
        while not (out / "metrics.jsonl").exists():
            assert time.monotonic() < end, said
            time.sleep(0.2)
        ip("link", "set", link("site-1"), "down")
        time.sleep(CUT_SECONDS)
        ip("link", "set", link("site-1"), "up")
        run.join(500)
        assert not run.is_alive(), said
        told = deployment.log_of("site-1")
    assert f"superlink {SERVER}" in told or "Sent successfully" in told
    found = records(out)
    assert [record["round"] for record in found] == [1, 2, 3]
    assert all({"client-0", "client-2"} <= set(record["answered"]) for record in found)
    assert "client-1" in found[-1]["answered"]
    summary = json.loads((out / "summary.json").read_text())
    assert set(summary["models"]) == {f"client-{k}" for k in range(3)}
