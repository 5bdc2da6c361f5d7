"""fedhet: federated learning for clients whose models differ."""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

from fedhet.base import __version__

if TYPE_CHECKING:
    from fedhet.data.spec import Dataset, Split
    from fedhet.inference.api import Result as Result
    from fedhet.inference.api import compare as compare
    from fedhet.inference.api import load as load
    from fedhet.inference.api import run as run

__all__ = ["Dataset", "Result", "Split", "__version__", "compare", "load", "run"]

# Flower collects usage statistics unless this is set, and reads it once, on import.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")

# These are imported when they are first asked for: torch and Flower take seconds.
_HOMES = {
    "run": "fedhet.inference.api",
    "load": "fedhet.inference.api",
    "compare": "fedhet.inference.api",
    "Result": "fedhet.inference.api",
    "Dataset": "fedhet.data.spec",
    "Split": "fedhet.data.spec",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fedhet' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
