"""Foundations: arrays, errors, seeds, metrics, files, and the version."""

import importlib.metadata
import platform

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
