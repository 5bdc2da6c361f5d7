"""Seeds for random draws, derived from names instead of global state.

`derive(seed, "client-3", 7, "batches")` returns the same number on every machine and in every
process. The results of a run therefore do not depend on how the run is distributed, and a resumed
run continues as if it had never stopped. PyTorch is imported lazily, because some commands do not
need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def derive(seed: int, *names: str | int) -> int:
    """Derive a seed in [0, 2**63) from the run's `seed` and `names` that identify the draw."""
    # Double the separator inside names, so that different names never give the same path.
    parts = [f"{type(n).__name__}:{n}".replace("\x1f", "\x1f\x1f") for n in names]
    path = "\x1f".join([str(seed), *parts])
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *names: str | int) -> torch.Generator:
    """Create a CPU generator seeded with `derive`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_rng(seed: int, *names: str | int) -> np.random.Generator:
    """Create a NumPy generator seeded with `derive`."""
    return np.random.default_rng(derive(seed, *names))


@contextmanager
def seeded(seed: int, *names: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed PyTorch's global generators in the block, and restore their states afterward.

    This affects the generators of the CPU and of `device`. Use this function only for draws that
    PyTorch makes from global state, i.e. weight initialization and dropout.
    """
    import torch

    derived = derive(seed, *names)
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        torch.default_generator.manual_seed(derived)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derived)
        elif device is not None and device.type == "mps":
            torch.mps.manual_seed(derived)
        yield
