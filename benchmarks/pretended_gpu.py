"""A CUDA device that is only pretended: it refuses what CUDA refuses, and counts what costs time.

    python -m benchmarks.pretended_gpu -m fedhet run felo --backend inline --set engine.device=cuda

runs a module or a script as `python` does, on a machine without a GPU. The tensors of `cuda` lie
in the processor's memory, but to PyTorch they are CUDA's: they have its dispatch keys, go through
its autocast, and `.numpy()` refuses them. Every operator with a CUDA kernel gets another one here,
in Python, which

- refuses tensors of two devices, but for what CUDA takes too: copies, indices of `x[index]`, and
  scalars of the processor where the real kernel iterates (`device_check: NoCheck` in PyTorch's
  native_functions.yaml); it also refuses a generator of the processor, more memory than there is,
  and, if algorithms must be deterministic, those that on CUDA are not;
- runs the processor's kernel on the same memory;
- counts launches, copies between host and device, and waits, by the last line of this project.

It needs PyTorch's build for CUDA, whose list of kernels this is, but no driver, and no compiler.
It cannot show kernels' own errors (an index out of range), races, the order of float sums, speed,
streams (each operator ends before the next begins), cuDNN, fused attention, nor several GPUs.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import importlib.util
import os
import re
import runpy
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

GPU, HOST = torch.device("cuda:0"), torch.device("cpu")
PROJECT = ("fedhet", "benchmarks")
"""Packages whose lines are counted."""
PASSED_OVER = ("fedhet.base.transfer",)
"""Modules of which it matters more who calls them."""
PRETENDED = "Pretended GPU"
KEPT = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "view_as_real", "view_as_complex"}
"""Operators on shapes alone run as they are."""
COMPOSED = ("aten::copy_", "aten::convolution", "aten::convolution_backward")
"""Operators that PyTorch composes, of other kernels than on a processor."""
INDEXING = re.compile(r"index(\.Tensor|_put)|_unsafe_index|_index_put_impl_")
WAITING = re.compile(
    "_local_scalar_dense|nonzero|masked_select|_unique|unique_|bincount|equal$|"
    "repeat_interleave|histc|linalg_cholesky_ex"
)
"""Operators that wait for the device: the host reads a value or a size from it."""
NOT_DETERMINISTIC = re.compile(
    "_adaptive_avg_pool[23]d_backward|adaptive_max_pool2d_backward|avg_pool3d_backward|"
    "upsample_.*_backward|re(flection|plication)_pad.*_backward|max_unpool|kthvalue|histc|put_|"
    "_embedding_bag_dense_backward|grid_sampler_2d_backward|cumsum|cumsum_"
)
"""What PyTorch calls so on CUDA; sums and counts of integers are exact in any order."""


@dataclass
class Gpu:
    """The pretended device: its memory, and what has been done on it."""

    memory: int = 16 * 2**30
    """Its size in bytes; more raises OutOfMemoryError."""
    fraction: float = 1.0
    """The part of it that this process may have."""
    live: int = 0
    """Bytes in use, with those of which it has not been seen yet that nobody uses them."""
    peak: int = 0
    counts: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    """Times by kind (launch, up, down, wait), operator, and line of the project."""
    _held: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = field(default_factory=dict)
    """Memory of the processor by address, and who is still using it."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def total(self, *kinds: str) -> int:
        """Return how often anything of these kinds happened."""
        return sum(times for (kind, _, _), times in self.counts.items() if kind in kinds)

    def keep(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return the device's storage on memory of the processor. Raises OutOfMemoryError."""
        address, size = storage.data_ptr(), storage.nbytes()
        found = torch._C._construct_storage_from_data_pointer(address, GPU, size)
        with self._lock:
            most = self.memory * self.fraction
            if self.live + size > min(self.peak, most):
                self._sweep()
            if self.live + size > most:
                raise torch.OutOfMemoryError(f"CUDA out of memory (pretended). {size} bytes")
            if address:
                self._held[address] = (StorageWeakRef(found), storage)
            self.live += size
            self.peak = max(self.peak, self.live)
        return found

    def free(self) -> int:
        """Return the bytes that are free."""
        with self._lock:
            self._sweep()
        return self.memory - self.live

    def forget(self, memory: int) -> None:
        """Begin anew, with so much memory and nothing counted."""
        self.memory, self.peak, self.fraction = memory, 0, 1.0
        self.counts.clear()

    def take_part(self, fraction: float, device: Any = None) -> None:
        """Let this process have a part of the memory."""
        self.fraction = fraction

    def host_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return the processor's storage under one of the device's."""
        address = storage.data_ptr()
        return self._held[address][1] if address else torch.UntypedStorage(0)

    def _sweep(self) -> None:
        held = list(self._held.items())
        self._held = {a: pair for a, pair in held if not pair[0].expired()}
        self.live = sum(host.nbytes() for _, host in self._held.values())

    def count(self, kind: str, operator: str) -> None:
        """Count one event at the innermost line of the project; backward passes have none."""
        frame: Any = sys._getframe()
        while frame is not None:
            name = frame.f_globals.get("__name__", "")
            if name.partition(".")[0] in PROJECT and name not in (__name__, *PASSED_OVER):
                break
            frame = frame.f_back
        line = f"{name}:{frame.f_lineno}" if frame is not None else "(backward)"
        with self._lock:
            self.counts[kind, operator, line] += 1


PLAIN = torch.Generator


class Numbers(PLAIN):
    """A generator of the device; its numbers are the processor's."""

    known: ClassVar[set[int]] = set()
    """Where those are that there are: a kernel gets another Python object for the same one."""

    def __init__(self) -> None:
        """Begin at the default seed."""
        self.known.add(self._cdata)

    def __del__(self) -> None:
        self.known.discard(self._cdata)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The pretended device."""
        return GPU


class Choosing(type(PLAIN)):
    """The class of what stands for `torch.Generator`: it makes one of either device."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        """Return a generator of a device."""
        return Numbers() if torch.device(device).type == "cuda" else PLAIN(device)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether it is a generator of any device."""
        return isinstance(instance, PLAIN)


class Call:
    """One call of an operator: its tensors are lent to the processor, and taken back."""

    def __init__(self, gpu: Gpu, name: str, *, iterates: bool) -> None:
        self.gpu, self.name, self.iterates = gpu, name, iterates
        self.copies = name in ("copy_", "_foreach_copy_")
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Tensors of the device, and the same memory as tensors of the processor."""
        self.masks = False

    def lend(self, value: Any, place: int = -1) -> Any:
        """Return an argument for the processor's kernel. Raises RuntimeError as CUDA does."""
        if isinstance(value, Tensor):
            return self._lend(value, place)
        if isinstance(value, list | tuple):
            return [self.lend(each, place) for each in value]
        if isinstance(value, torch.device) and value.type == "cuda":
            return HOST
        if isinstance(value, PLAIN) and value._cdata not in Numbers.known:
            raise RuntimeError("Expected a 'cuda' device type for generator but found 'cpu'")
        return value

    def _lend(self, given: Tensor, place: int) -> Tensor:
        is_index = place == 1 and INDEXING.match(self.name) is not None
        self.masks |= is_index and given.dtype in (torch.bool, torch.uint8)
        if is_index and not given.is_cuda:
            self.gpu.count("up, waiting", self.name)  # PyTorch copies it
        if given.is_cuda:
            for gpu, cpu in self.pairs:
                if gpu is given:
                    return cpu
            self.pairs.append((given, self._on_host(given)))
            return self.pairs[-1][1]
        if not (self.copies or is_index or (self.iterates and given.dim() == 0 and place)):
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"cuda:0 and cpu! (pretended: {self.name}, argument {place}, {list(given.shape)})"
            )
        return given

    def _on_host(self, given: Tensor) -> Tensor:
        lent = torch.empty(0, dtype=given.dtype)
        host = self.gpu.host_of(given.untyped_storage())
        return lent.set_(host, given.storage_offset(), given.shape, given.stride())

    def returned(self, value: Any) -> Any:
        """Return a result as the device's: what was lent, a view of it, or something new."""
        if isinstance(value, list | tuple):
            return type(value)(map(self.returned, value))
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        for gpu, cpu in self.pairs:
            if value is cpu:
                return gpu
            if storage.data_ptr() and storage.data_ptr() == cpu.untyped_storage().data_ptr():
                return placed(value, gpu.untyped_storage())
        return placed(value, self.gpu.keep(storage))

    def take_back(self) -> None:
        """Let tensors of the device have what a kernel has resized."""
        for gpu, cpu in self.pairs:
            mine, lent = gpu.untyped_storage(), cpu.untyped_storage()
            moved = mine.data_ptr() != lent.data_ptr() or mine.nbytes() != lent.nbytes()
            if moved or gpu.shape != cpu.shape or gpu.stride() != cpu.stride():
                there = self.gpu.keep(lent) if moved else mine
                gpu.set_(there, cpu.storage_offset(), cpu.shape, cpu.stride())  # type: ignore[call-overload]


def placed(like: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a tensor of the device on `storage`, laid out as `like`."""
    layout = {
        "size": like.shape,
        "stride": like.stride(),
        "storage_offset": like.storage_offset(),
        "dtype": like.dtype,
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(layout, storage)


def kernel_of(gpu: Gpu, op: Any, iterates: bool) -> Callable[..., Any]:
    """Return the device's kernel of an operator."""
    name = op._schema.name.removeprefix("aten::") + f".{op._schema.overload_name}".rstrip(".")
    plain = name.partition(".")[0]
    draws = any(argument.name == "generator" for argument in op._schema.arguments)
    waits, unsteady = WAITING.match(plain), NOT_DETERMINISTIC.fullmatch(plain)

    def kernel(*given: Any, **named: Any) -> Any:
        call = Call(gpu, plain if plain == "copy_" else name, iterates=iterates)
        values = [call.lend(value, place) for place, value in enumerate(given)]
        options = {key: call.lend(value) for key, value in named.items()}
        if draws and options.get("generator") is None:
            options["generator"] = gpu_numbers()
        if unsteady and torch.are_deterministic_algorithms_enabled():
            refuse_unsteady(name, values)
        if plain not in ("empty", "empty_strided"):
            gpu.count("wait" if waits else kind_of(call, given, named), plain)
        if plain.endswith("softmax") and len(values) == 3 and values[2] is True:
            values[0], values[2] = values[0].float(), False  # half to float, as one kernel
        found = op(*values, **options)
        call.take_back()
        return given[0] if plain == "copy_" else call.returned(found)

    return kernel


def kind_of(call: Call, given: Any, named: Any) -> str:
    """Return what a call costs: "launch", "up" or "down" (a copy), "wait", or both of the last."""
    if call.name != "copy_":
        return "wait" if call.masks else "launch"
    to, source = given[0].is_cuda, given[1].is_cuda
    waits = not (given[2] if len(given) > 2 else named.get("non_blocking", False))
    if to and source:
        return "launch"
    return ("up" if to else "down") + (", waiting" if waits else "")


def refuse_unsteady(name: str, values: list[Any]) -> None:
    """Raise RuntimeError as PyTorch does on CUDA, where the order of additions may vary."""
    if any(isinstance(value, Tensor) and value.is_floating_point() for value in values):
        raise RuntimeError(f"{name} does not have a deterministic implementation (pretended)")


_numbers: list[Numbers] = []


def gpu_numbers() -> Numbers:
    """Return the device's default generator."""
    if not _numbers:
        _numbers.append(Numbers())
    return _numbers[0]


@functools.cache
def free_of_check() -> frozenset[str]:
    """Return the operators whose CUDA kernel takes a scalar of the processor."""
    spec = importlib.util.find_spec("torchgen")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "packaged/ATen/native/native_functions.yaml"
    entries = path.read_text().split("\n- func: ")[1:]
    names = [entry.partition("(")[0] for entry in entries]
    parts = [re.search(r"structured_delegate: (\S+)", entry) for entry in entries]
    marked = {n for n, e in zip(names, entries, strict=True) if "device_check: NoCheck" in e}
    marked |= {p[1] for n, p in zip(names, parts, strict=True) if p and n in marked}
    marked |= {n for n, p in zip(names, parts, strict=True) if p and p[1] in marked}
    return frozenset(marked)


@functools.cache
def device() -> Gpu:
    """Return the pretended device, with its kernels in PyTorch's table; there is one a process."""
    gpu, library = Gpu(), torch.library.Library("aten", "IMPL")
    torch._C._ensureCUDADeviceGuardSet()
    say_that_no_driver_is_used()
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for full in sorted({*names, *COMPOSED}):
        space, _, name = full.partition("::")
        plain, _, overload = name.partition(".")
        if space != "aten" or plain in KEPT:
            continue
        op = getattr(getattr(torch.ops.aten, plain), overload or "default")
        iterates = name in free_of_check() or plain.startswith("_foreach")
        library.impl(name, kernel_of(gpu, op, iterates), "CUDA", allow_override=True)
    for key in ("CUDA", "AutogradCUDA"):
        library.impl("_thnn_fused_gru_cell", gru_cell, key, allow_override=True)
    sdp = lambda *given, **named: 0  # noqa: E731  by matrices
    library.impl("_fused_sdp_choice", sdp, "CUDA", allow_override=True)
    device.library = library  # type: ignore[attr-defined]
    return gpu


def say_that_no_driver_is_used() -> None:
    """Let autograd hear that CUDA has not been used on the device, when it asks.

    It asks by a virtual function, the fifth entry of its class: the object gets a copy of the
    table of that class, with another function in it.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libtorch_cpu.so"))
    hooks = library["_ZN2at6detail12getCUDAHooksEv"]
    hooks.restype = ctypes.c_void_p
    place = ctypes.cast(hooks(), ctypes.POINTER(ctypes.c_void_p))
    table = ctypes.cast(place[0], ctypes.POINTER(ctypes.c_void_p))
    never = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_byte)(
        lambda hooks, index: False
    )
    copy = (ctypes.c_void_p * 66)(*table[-2:64])
    copy[2 + 4] = ctypes.cast(never, ctypes.c_void_p)
    place[0] = ctypes.addressof(copy) + 2 * ctypes.sizeof(ctypes.c_void_p)
    device.kept = (copy, never)  # type: ignore[attr-defined]


def gru_cell(
    given: Tensor, hidden: Tensor, before: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a step of a GRU, which is one kernel on CUDA; gradients are those of its parts."""
    x = (given if b is None else given + b).chunk(3, 1)
    h = (hidden if c is None else hidden + c).chunk(3, 1)
    reset, gate = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
    new = (x[2] + reset * h[2]).tanh()
    return (before - new) * gate + new, before.new_empty(0)


def answers(gpu: Gpu) -> dict[str, Any]:
    """Return what `torch.cuda` says of the device."""
    numbers = gpu_numbers()

    properties = SimpleNamespace(name=PRETENDED, major=9, minor=0, total_memory=gpu.memory)
    return {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "_exchange_device": lambda index: 0,
        "_maybe_exchange_device": lambda index: 0,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "get_device_name": lambda device=None: PRETENDED,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (gpu.free(), gpu.memory),
        "memory_allocated": lambda device=None: gpu.memory - gpu.free(),
        "max_memory_allocated": lambda device=None: gpu.peak,
        "reset_peak_memory_stats": lambda device=None: None,
        "set_per_process_memory_fraction": gpu.take_part,
        "manual_seed": lambda seed: numbers.manual_seed(seed) and None,
        "get_rng_state": lambda device="cuda": numbers.get_state(),
        "set_rng_state": lambda state, device="cuda": numbers.set_state(state) and None,
    }


def clone_of(gpu: Gpu, plain: Any) -> Any:
    """Return what copies a storage, as `copy.deepcopy` does with those of a model."""

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        there = storage.device.type == "cuda"
        return gpu.keep(plain(gpu.host_of(storage))) if there else plain(storage)

    return clone


@contextlib.contextmanager
def pretended(memory: int = 16 * 2**30) -> Iterator[Gpu]:
    """Let PyTorch find the device, with so many bytes, in the block."""
    gpu = device()
    gpu.forget(memory)
    with contextlib.ExitStack() as patches:
        patches.callback(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        patches.enter_context(mock.patch.dict(os.environ))
        for name, answer in answers(gpu).items():
            for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
                if hasattr(module, name):
                    patches.enter_context(mock.patch.object(module, name, answer))
        generator = Choosing("Generator", (PLAIN,), {})
        patches.enter_context(mock.patch.object(torch, "Generator", generator))
        clone = clone_of(gpu, torch.UntypedStorage.clone)
        patches.enter_context(mock.patch.object(torch.UntypedStorage, "clone", clone))
        patches.enter_context(torch.backends.cudnn.flags(enabled=False))
        patches.enter_context(mock.patch.object(Tensor, "pin_memory", lambda self: self))
        yield gpu


def main() -> None:
    """Run a module or a script with the device; print its counts in the end."""
    if sys.argv[1:2] == ["-m"]:
        sys.argv[:] = sys.argv[2:]
        run = functools.partial(runpy.run_module, sys.argv[0], alter_sys=True)
    else:
        sys.argv[:] = sys.argv[1:]
        run = functools.partial(runpy.run_path, sys.argv[0])
    with pretended() as gpu:
        try:
            run(run_name="__main__")
        finally:
            for (kind, operator, line), times in gpu.counts.most_common(40):
                print(f"{times:8} {kind:14} {operator:28} {line}", file=sys.stderr)


if __name__ == "__main__":
    from benchmarks import pretended_gpu

    pretended_gpu.main()  # of the module that others import, not of this copy of it
