"""fedhet: federated learning for clients with different models."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fedhet.base import __version__

if TYPE_CHECKING:
    from fedhet.data.dataset import Dataset, Format, Split
    from fedhet.inference.api import Result as Result
    from fedhet.inference.api import compare as compare
    from fedhet.inference.api import load as load
    from fedhet.inference.api import run as run

__all__ = ["Dataset", "Format", "Result", "Split", "__version__", "compare", "load", "run"]

# Flower collects usage statistics unless this variable is 0, and reads the variable only on import.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

# Import these on first access, because PyTorch and Flower take seconds to load.
_LAZY_IMPORTS = {
    "run": "fedhet.inference.api",
    "load": "fedhet.inference.api",
    "compare": "fedhet.inference.api",
    "Result": "fedhet.inference.api",
    "Dataset": "fedhet.data.dataset",
    "Format": "fedhet.data.dataset",
    "Split": "fedhet.data.dataset",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'fedhet' has no attribute '{name}'")
    return getattr(importlib.import_module(_LAZY_IMPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_IMPORTS})
