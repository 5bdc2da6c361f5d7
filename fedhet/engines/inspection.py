"""Checks that a machine in a cluster can take part in a run.

`faults` is sent to each machine and executed there. At module level, this module imports no package
that a machine may lack. Ray itself rejects machines with another version of Python.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import secrets
from dataclasses import dataclass

from fedhet.runs.units import plural

Listing = tuple[int, int, str]
"""Number of files below a path, their total size, and a digest of their names and sizes."""


@dataclass(frozen=True)
class Needs:
    """A run's requirements for each machine, taken from the machine that starts the run."""

    directory: str
    """The run's directory."""
    token: str
    """Name and content of a file in the run's directory."""
    device: str
    """Device type: cpu, cuda or mps."""
    torch: str
    """Major and minor version of PyTorch."""
    data: dict[str, Listing | None]
    """Files and directories that the run reads, each with its listing, or None if it is missing."""
    modules: tuple[str, ...]
    """Modules that the run imports."""


def faults(needs: Needs) -> list[str]:
    """Check the requirements on this machine, and return a line for each unmet requirement."""
    lines = []
    if (torch := version_of("torch")) != needs.torch:
        lines.append(f"PyTorch must be {needs.torch} as on this machine, got {torch or 'none'}")
    path = os.path.join(needs.directory, needs.token)
    try:
        with open(path, encoding="utf-8") as file:
            fault = "" if file.read() == needs.token else "a file with other content"
    except OSError as error:
        fault = error.strerror or str(error)
    if fault:
        lines.append(
            f"does not share the run's directory {needs.directory} with this machine ({fault}). "
            "Set 'out' to a directory that all machines share."
        )
    else:
        probe = f"{path}-{secrets.token_hex(6)}"
        try:
            with open(probe, "x", encoding="utf-8") as file:
                file.write(needs.token)
            os.remove(probe)
        except OSError as error:
            fault = error.strerror or str(error)
            lines.append(f"cannot write to the run's directory {needs.directory} ({fault})")
    for path, expected in needs.data.items():
        found = listing(path)
        if found is None and expected is not None:
            lines.append(f"data {path} not found")
        elif found and expected and found != expected and found[:2] == expected[:2]:
            lines.append(f"data {path} differs in the names or sizes of its files")
        elif found and found != expected:
            lines.append(f"data {path} differs: {_summary(found)} there, {_summary(expected)} here")
    if not _has_device(needs.device):
        lines.append(
            f"device {needs.device} not found, but the run uses it. Change 'engine.device', or "
            "start Ray with --num-cpus 0 on this machine, so that it trains no clients."
        )
    lines += [
        f"module '{module}' not found, but the run imports it. Install it in the Python "
        "environment of `ray start`."
        for module in needs.modules
        if not is_found(module)
    ]
    return lines


def version_of(package: str) -> str:
    """Return the major and minor version of a package, or "" if it is not installed."""
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_found(module: str) -> bool:
    """Return whether a module is found, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        return False


def listing(path: str) -> Listing | None:
    """Return the listing of a file or of all files below a directory, or None if it is missing."""
    if not os.path.exists(path):
        return None
    tree = os.walk(path, followlinks=True)
    files = sorted(os.path.join(directory, name) for directory, _, names in tree for name in names)
    if os.path.isfile(path):
        files = [path]
    digest, total = hashlib.blake2b(digest_size=16), 0
    for file in files:
        size = os.stat(file).st_size if os.path.exists(file) else -1
        digest.update(os.fsencode(f"{os.path.relpath(file, path)}\0{size}\n"))
        total += max(size, 0)
    return len(files), total, digest.hexdigest()


def _summary(files: Listing | None) -> str:
    return f"{plural(files[0], 'file')} of {plural(files[1], 'byte')}" if files else "nothing"


def _has_device(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch = importlib.import_module("torch")
    except Exception:
        return False
    backend = torch.cuda if device == "cuda" else torch.backends.mps
    return bool(backend.is_available())
