"""Seeds for random draws, derived from names instead of global state.

`derive(seed, "client-3", 7, "batches")` returns the same number on every machine and in every
process. The results of a run therefore do not depend on how the run is distributed, and a resumed
run continues as if it had never stopped. `isolated` keeps the process's global
state and a run apart. PyTorch is imported lazily, because some commands do not need it.
"""

from __future__ import annotations

import hashlib
import random
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

_LOCK = threading.RLock()
"""Lock of the process's global state."""


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
    """Seed the global generators in the block, and restore their states afterward.

    The generators are those of `random`, NumPy, and PyTorch (for the CPU and `device`). Use this
    function only for draws from global state, i.e. weight initialization, dropout, and user code.
    """
    import torch

    derived = derive(seed, *names)
    on_gpu = device is not None and device.type == "cuda"
    with preserve_global_rng(), torch.random.fork_rng(devices=[device] if on_gpu else []):
        random.seed(derived)
        np.random.seed(derived % 2**32)
        torch.default_generator.manual_seed(derived)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(derived)
        elif device is not None and device.type == "mps":
            torch.mps.manual_seed(derived)
        yield


@contextmanager
def preserve_global_rng() -> Iterator[None]:
    """Restore the global state of `random` and NumPy on exit, because some imports draw from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextmanager
def isolated() -> Iterator[None]:
    """Use the default global state of Python, NumPy, and PyTorch in the block, then restore it.

    The block starts with the default data type, device, and modes of PyTorch, and without warnings
    that raise errors. On exit, these, the states of the generators, and the number of threads are
    restored. Because threads share this state, a second thread waits until the block is left.
    """
    import torch

    deterministic = torch.utils.deterministic
    with _LOCK, ExitStack() as stack:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(torch.set_deterministic_debug_mode, torch.get_deterministic_debug_mode())
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        stack.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        stack.callback(torch.random.set_rng_state, torch.random.get_rng_state())
        for holder, name in (
            (deterministic, "fill_uninitialized_memory"),
            (torch.backends.cudnn, "benchmark"),
        ):
            stack.callback(setattr, holder, name, getattr(holder, name))
        torch.set_default_dtype(torch.float32)
        torch.set_deterministic_debug_mode("default")
        torch.set_float32_matmul_precision("highest")
        if torch.get_default_device().type != "cpu":
            stack.enter_context(torch.device("cpu"))
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(np.errstate(all="warn", under="ignore"))
        stack.enter_context(preserve_global_rng())
        stack.enter_context(warnings.catch_warnings())
        warnings.filters = [each for each in warnings.filters if each[0] != "error"]
        yield
