"""What a machine of a cluster lacks for a run: `faults` is sent to each machine, and runs there.

This module needs nothing but Python's own library, since a machine may lack the others. Ray itself
refuses a machine with another version of Python.
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
"""Files below a path, their bytes together, and a digest of their names and sizes."""


@dataclass(frozen=True)
class Needs:
    """What a run needs of each machine, as the machine that starts the run has it."""

    directory: str
    """The run's directory."""
    token: str
    """The name of a file in it, and its content."""
    device: str
    """cpu, cuda or mps."""
    torch: str
    """Major and minor of PyTorch's version."""
    data: dict[str, Listing | None]
    """Files and folders that the run reads, and what lies there; None: nothing."""
    modules: tuple[str, ...]
    """Modules that the run imports."""


def faults(needs: Needs) -> list[str]:
    """Return what this machine lacks, one line for each fault."""
    found = []
    if (torch := version_of("torch")) != needs.torch:
        found.append(f"has PyTorch {torch or '(none)'}, this machine {needs.torch}")
    path = os.path.join(needs.directory, needs.token)
    try:
        with open(path, encoding="utf-8") as file:
            unseen = "" if file.read() == needs.token else "it holds another file of that name"
    except OSError as error:
        unseen = error.strerror or str(error)
    if unseen:
        found.append(
            f"does not see the run's directory {needs.directory} as this machine does ({unseen}): "
            "give an 'out' in a folder that all machines share"
        )
    else:
        trial = f"{path}-{secrets.token_hex(6)}"
        try:
            with open(trial, "x", encoding="utf-8") as file:
                file.write(needs.token)
            os.remove(trial)
        except OSError as error:
            fault = error.strerror or str(error)
            found.append(f"cannot write into the run's directory {needs.directory} ({fault})")
    for path, here in needs.data.items():
        there = listing(path)
        if there is None and here is not None:
            found.append(f"does not see the data {path}")
        elif there and here and there != here and there[:2] == here[:2]:
            found.append(f"has other data in {path}: the files have other names or sizes than here")
        elif there and there != here:
            found.append(
                f"has other data in {path}: {_counted(there)} there, {_counted(here)} here"
            )
    if not _has_device(needs.device):
        found.append(
            f"has no device {needs.device}, which the run uses here: give another "
            "'engine.device', or start Ray there with --num-cpus 0, so that it takes no clients"
        )
    found += [
        f"does not find the module '{module}', which the run imports: install it there, in the "
        "Python that `ray start` runs in"
        for module in needs.modules
        if not is_found(module)
    ]
    return found


def version_of(package: str) -> str:
    """Return major and minor of an installed package's version; "" if it is not installed."""
    try:
        return ".".join(importlib.metadata.version(package).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_found(module: str) -> bool:
    """Return whether a module can be imported, as far as can be told without doing so."""
    try:
        return importlib.util.find_spec(module) is not None
    except Exception:
        return False


def listing(path: str) -> Listing | None:
    """Return what lies at a path: one file, or all files below a folder; None if nothing does."""
    if not os.path.exists(path):
        return None
    below = os.walk(path, followlinks=True)
    files = sorted(os.path.join(folder, name) for folder, _, names in below for name in names)
    if os.path.isfile(path):
        files = [path]
    digest, total = hashlib.blake2b(digest_size=16), 0
    for file in files:
        size = os.stat(file).st_size if os.path.exists(file) else -1
        digest.update(os.fsencode(f"{os.path.relpath(file, path)}\0{size}\n"))
        total += max(size, 0)
    return len(files), total, digest.hexdigest()


def _counted(found: Listing | None) -> str:
    return f"{plural(found[0], 'file')} of {plural(found[1], 'byte')}" if found else "nothing"


def _has_device(device: str) -> bool:
    if device == "cpu":
        return True
    try:
        torch = importlib.import_module("torch")
    except Exception:
        return False
    there = torch.cuda if device == "cuda" else torch.backends.mps
    return bool(there.is_available())
