"""What everything else builds on: arrays, errors, seeds, metrics, files, and the version."""

import importlib.metadata
import platform

__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Return the package versions on which a run's results may depend."""
    found = {"python": platform.python_version()}
    for package in ("fedhet", "flwr", "torch", "torchvision", "numpy", "scikit-learn"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
