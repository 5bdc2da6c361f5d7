"""Seeds for all random draws of a run, derived from names instead of global state.

`derive(seed, "client-3", 7, "batches")` is the same number on every machine and in every process,
whatever ran before. A run therefore gives the same results however it is distributed, and a resumed
run continues as if it had never stopped. PyTorch is imported by the functions that need it, because
some commands do without.
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
    """Return a seed in [0, 2**63) for the run's `seed` and the use named by `names`."""
    # Doubled inside a name, so that no name can contain the separator.
    parts = [f"{type(n).__name__}:{n}".replace("\x1f", "\x1f\x1f") for n in names]
    path = "\x1f".join([str(seed), *parts])
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def torch_generator(seed: int, *names: str | int) -> torch.Generator:
    """Return a CPU generator seeded by `derive`."""
    import torch

    return torch.Generator().manual_seed(derive(seed, *names))


def numpy_rng(seed: int, *names: str | int) -> np.random.Generator:
    """Return a numpy generator seeded by `derive`."""
    return np.random.default_rng(derive(seed, *names))


@contextmanager
def seeded(seed: int, *names: str | int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators inside the block, and restore their state afterwards.

    These are the generators of the CPU and of `device`. For draws that torch makes from global
    state only: weight initialization and dropout.
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
