"""Foundations: arrays, errors, seeds, metrics, files, and the version."""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that may affect results."""
    installed = {"python": platform.python_version()}
    for package in ("fedhet", "flwr", "torch", "torchvision", "numpy", "scikit-learn"):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def commit() -> str:
    """Return the Git commit of fedhet's source code, or "" if it is not a Git checkout.

    The commit ends with "+" if tracked files have changed.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return ""

    command = ["git", "--no-optional-locks", "-C", str(root), "describe", "--always"]
    command += ["--exclude=*", "--abbrev=12", "--dirty=+"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
