"""What a machine of a cluster reports about itself.

It uses nothing but Python's own library, since a machine may lack the others.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import secrets
from typing import TypedDict

Listing = tuple[int, int, str]
"""Files below a path, their bytes together, and a digest of their names and sizes."""


class Question(TypedDict):
    """What a run needs of each machine."""

    directory: str
    """The run's directory."""
    token: str
    """The name of a file in it, and its content."""
    device: str
    """cpu, cuda or mps."""
    data: list[str]
    """Files and folders that the run reads."""
    modules: list[str]
    """Modules that the run imports."""


class Answer(TypedDict):
    """What a machine has. An empty fault means that there is none."""

    python: str
    torch: str
    read_fault: str
    """Why the token in the run's directory cannot be read."""
    write_fault: str
    """Why no file can be written in the run's directory."""
    has_device: bool
    data: dict[str, Listing | None]
    """What lies at each path; None: nothing."""
    missing: list[str]
    """The modules that are not found."""


def inspect(question: Question) -> Answer:
    """Answer `question` for the machine and the Python in which this runs."""
    read_fault = _read_fault(question["directory"], question["token"])
    return {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version_of("torch"),
        "read_fault": read_fault,
        "write_fault": "" if read_fault else _write_fault(question["directory"], question["token"]),
        "has_device": _has_device(question["device"]),
        "data": {path: _listing(path) for path in question["data"]},
        "missing": [name for name in question["modules"] if not _is_found(name)],
    }


def _version_of(package: str) -> str:
    """Return major and minor of an installed package's version; "" if it is not installed."""
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def _files(root: str) -> list[str]:
    """Return the paths of all files below a folder, sorted."""
    below = os.walk(root, followlinks=True)
    return sorted(os.path.join(folder, name) for folder, _, names in below for name in names)


def _read_fault(directory: str, token: str) -> str:
    try:
        with open(os.path.join(directory, token), encoding="utf-8") as file:
            return "" if file.read() == token else "it holds another file of that name"
    except OSError as error:
        return error.strerror or str(error)


def _write_fault(directory: str, token: str) -> str:
    path = os.path.join(directory, f"{token}-{secrets.token_hex(6)}")
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(token)
        os.remove(path)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _has_device(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch = importlib.import_module("torch")
    except Exception:
        return False
    there = torch.cuda if device == "cuda" else torch.backends.mps
    return bool(there.is_available())


def _listing(path: str) -> Listing | None:
    """Return what lies at a path: one file, or all files below a folder; None if nothing does."""
    if not os.path.exists(path):
        return None
    files = [path] if os.path.isfile(path) else _files(path)
    digest, total = hashlib.blake2b(digest_size=16), 0
    for file in files:
        size = os.stat(file).st_size if os.path.exists(file) else -1
        digest.update(os.fsencode(f"{os.path.relpath(file, path)}\0{size}\n"))
        total += max(size, 0)
    return len(files), total, digest.hexdigest()


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        return False
