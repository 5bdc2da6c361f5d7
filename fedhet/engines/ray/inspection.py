"""What a machine of a cluster says of itself.

`inspect` is sent to each machine as code, not by its name, since a machine may have another version
of fedhet, or none. It therefore uses nothing but Python's own library.
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
    packages: list[str]
    """Packages of which all machines must have the same source files."""


class Answer(TypedDict):
    """What a machine has; a fault that is empty is none."""

    import_fault: str
    """Why fedhet cannot be imported."""
    version: str
    """fedhet's."""
    source: str
    """A digest of the packages' source files."""
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
    import_fault, version = _fedhet()
    read_fault = _read_fault(question["directory"], question["token"])
    return {
        "import_fault": import_fault,
        "version": version,
        "source": "" if import_fault else _source(question["packages"]),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": _version_of("torch"),
        "read_fault": read_fault,
        "write_fault": "" if read_fault else _write_fault(question["directory"], question["token"]),
        "has_device": _has_device(question["device"]),
        "data": {path: _listing(path) for path in question["data"]},
        "missing": [name for name in question["modules"] if not _is_found(name)],
    }


def _fedhet() -> tuple[str, str]:
    """Return why fedhet cannot be imported, or "", and its version."""
    try:
        return "", str(importlib.import_module("fedhet").__version__)
    except Exception as error:
        return f"{type(error).__name__}: {error}", ""


def _version_of(package: str) -> str:
    """Return major and minor of an installed package's version; "" if it is not installed."""
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def _source(packages: list[str]) -> str:
    """Return a digest of the names and contents of the packages' source files."""
    digest = hashlib.blake2b(digest_size=16)
    for package in packages:
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or []) if spec else []:
            for path in _files(root):
                if path.endswith(".py"):
                    with open(path, "rb") as file:
                        content = hashlib.blake2b(file.read()).digest()
                    digest.update(os.fsencode(f"{package}/{os.path.relpath(path, root)}\0"))
                    digest.update(content)
    return digest.hexdigest()


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
