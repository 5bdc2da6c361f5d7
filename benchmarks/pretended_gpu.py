"""Simulated CUDA device that raises CUDA's errors, and counts launches, copies and waits.

    python -m benchmarks.pretended_gpu -m fedhet run felo --backend inline --set engine.device=cuda

The command runs a module or a script like `python`, on a machine without a GPU. Tensors on `cuda`
are stored in host memory, but PyTorch treats them as CUDA tensors: they have CUDA's dispatch keys
and autocast, and `.numpy()` rejects them. Every operator with a CUDA kernel gets a kernel in
Python, which

- rejects tensors on two devices, except where CUDA accepts them: in copies, as indices of
  `x[index]`, and as CPU scalars where the real kernel iterates over elements (`device_check:
  NoCheck` in PyTorch's native_functions.yaml);
- rejects CPU generators, allocations that exceed the memory, and, if algorithms must be
  deterministic, algorithms that are nondeterministic on CUDA;
- runs the CPU kernel on the same memory;
- counts launches, copies between host and device, and waits, by the innermost line of this project.

The device requires a CUDA build of PyTorch, which lists the CUDA kernels, but no driver and no
compiler. It cannot detect errors within kernels (such as an index out of range) or races, and it
does not reproduce the order of float sums, speed, streams (each operator ends before the next
begins), cuDNN, fused attention, or several GPUs.
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
"""Packages whose lines appear in the counts."""
PASSED_OVER = ("fedhet.base.transfer",)
"""Modules that are skipped in the counts, because the line of their caller is more informative."""
PRETENDED = "Pretended GPU"
KEPT = {"as_strided", "view", "_reshape_alias", "unfold", "set_", "view_as_real", "view_as_complex"}
"""Operators that change only shapes, and therefore keep PyTorch's kernels."""
COMPOSED = ("aten::copy_", "aten::convolution", "aten::convolution_backward")
"""Operators that PyTorch composes from different kernels on CUDA and on the CPU."""
INDEXING = re.compile(r"index(\.Tensor|_put)|_unsafe_index|_index_put_impl_")
WAITING = re.compile(
    "_local_scalar_dense|nonzero|masked_select|_unique|unique_|bincount|equal$|"
    "repeat_interleave|histc|linalg_cholesky_ex"
)
"""Operators that wait for the device, because the host reads a value or a size from it."""
NOT_DETERMINISTIC = re.compile(
    "_adaptive_avg_pool[23]d_backward|adaptive_max_pool2d_backward|avg_pool3d_backward|"
    "upsample_.*_backward|re(flection|plication)_pad.*_backward|max_unpool|kthvalue|histc|put_|"
    "_embedding_bag_dense_backward|grid_sampler_2d_backward|cumsum|cumsum_"
)
"""Operators that PyTorch considers nondeterministic on CUDA, for floats only."""


@dataclass
class Gpu:
    """Simulated device: its memory, and the counts of its operations."""

    memory: int = 16 * 2**30
    """Size of the memory in bytes. Exceeding it raises OutOfMemoryError."""
    fraction: float = 1.0
    """Fraction of the memory that this process may use."""
    live: int = 0
    """Bytes in use, including unused bytes that have not been reclaimed yet."""
    peak: int = 0
    counts: collections.Counter[tuple[str, str, str]] = field(default_factory=collections.Counter)
    """Number of operations by kind (launch, up, down, wait), operator, and line of the project."""
    _held: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = field(default_factory=dict)
    """Device storage (as a weak reference) and host storage, by memory address."""
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def total(self, *kinds: str) -> int:
        """Return the number of operations of the given kinds."""
        return sum(times for (kind, _, _), times in self.counts.items() if kind in kinds)

    def keep(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a device storage in host memory. Raises OutOfMemoryError if the device is full."""
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
        """Return the free memory in bytes."""
        with self._lock:
            self._sweep()
        return self.memory - self.live

    def forget(self, memory: int) -> None:
        """Set the memory size in bytes, and reset the counts and the peak."""
        self.memory, self.peak, self.fraction = memory, 0, 1.0
        self.counts.clear()

    def take_part(self, fraction: float, device: Any = None) -> None:
        """Limit this process to a fraction of the memory."""
        self.fraction = fraction

    def host_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return the host storage of a device storage."""
        address = storage.data_ptr()
        return self._held[address][1] if address else torch.UntypedStorage(0)

    def _sweep(self) -> None:
        held = list(self._held.items())
        self._held = {a: pair for a, pair in held if not pair[0].expired()}
        self.live = sum(host.nbytes() for _, host in self._held.values())

    def count(self, kind: str, operator: str) -> None:
        """Count an operation at the innermost line of the project, or at "(backward)"."""
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
    """Random generator of the device, which draws the same numbers as a CPU generator."""

    known: ClassVar[set[int]] = set()
    """Addresses of all generators, because kernels get a new Python object for each generator."""

    def __init__(self) -> None:
        """Create a generator with the default seed."""
        self.known.add(self._cdata)

    def __del__(self) -> None:
        self.known.discard(self._cdata)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The simulated device."""
        return GPU


class Choosing(type(PLAIN)):
    """Metaclass of the replacement for `torch.Generator`, which supports both devices."""

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        """Create a generator for a device."""
        return Numbers() if torch.device(device).type == "cuda" else PLAIN(device)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether an object is a generator for either device."""
        return isinstance(instance, PLAIN)


class Call:
    """Call of an operator, which lends its device tensors to the CPU and takes them back."""

    def __init__(self, gpu: Gpu, name: str, *, iterates: bool) -> None:
        self.gpu, self.name, self.iterates = gpu, name, iterates
        self.copies = name in ("copy_", "_foreach_copy_")
        self.pairs: list[tuple[Tensor, Tensor]] = []
        """Device tensors, each with a CPU tensor on the same memory."""
        self.masks = False

    def lend(self, value: Any, place: int = -1) -> Any:
        """Convert an argument for the CPU kernel. Raises RuntimeError if CUDA would reject it."""
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
            self.gpu.count("up, waiting", self.name)  # PyTorch copies the index
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
        """Convert a result to the device: a lent tensor, a view of it, or a new tensor."""
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
        """Update device tensors whose CPU tensors were resized by a kernel."""
        for gpu, cpu in self.pairs:
            mine, lent = gpu.untyped_storage(), cpu.untyped_storage()
            moved = mine.data_ptr() != lent.data_ptr() or mine.nbytes() != lent.nbytes()
            if moved or gpu.shape != cpu.shape or gpu.stride() != cpu.stride():
                there = self.gpu.keep(lent) if moved else mine
                gpu.set_(there, cpu.storage_offset(), cpu.shape, cpu.stride())  # type: ignore[call-overload]


def placed(like: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """Return a device tensor on `storage` with the layout of `like`."""
    layout = {
        "size": like.shape,
        "stride": like.stride(),
        "storage_offset": like.storage_offset(),
        "dtype": like.dtype,
    }
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(layout, storage)


def kernel_of(gpu: Gpu, op: Any, iterates: bool) -> Callable[..., Any]:
    """Return the simulated device's kernel for an operator."""
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
            values[0], values[2] = values[0].float(), False  # half to float, as in CUDA's kernel
        found = op(*values, **options)
        call.take_back()
        return given[0] if plain == "copy_" else call.returned(found)

    return kernel


def kind_of(call: Call, given: Any, named: Any) -> str:
    """Return the kind of a call: "launch", "wait", or "up" or "down" for a copy.

    If the host waits for a copy, its kind ends with ", waiting".
    """
    if call.name != "copy_":
        return "wait" if call.masks else "launch"
    to, source = given[0].is_cuda, given[1].is_cuda
    waits = not (given[2] if len(given) > 2 else named.get("non_blocking", False))
    if to and source:
        return "launch"
    return ("up" if to else "down") + (", waiting" if waits else "")


def refuse_unsteady(name: str, values: list[Any]) -> None:
    """Raise RuntimeError for float tensors, because the order of additions varies on CUDA."""
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
    """Return the operators whose CUDA kernels accept CPU scalars."""
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
    """Return the simulated device of this process, and register its kernels with PyTorch."""
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
    sdp = lambda *given, **named: 0  # noqa: E731  math backend
    library.impl("_fused_sdp_choice", sdp, "CUDA", allow_override=True)
    device.library = library  # type: ignore[attr-defined]
    return gpu


def say_that_no_driver_is_used() -> None:
    """Make PyTorch's CUDA hooks report to autograd that CUDA has not been used on the device.

    Autograd calls a virtual function, the fifth entry in the table of the hooks' class. The hooks
    object gets a copy of this table in which the function is replaced.
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
    """Compute a GRU step, a single kernel on CUDA, using operators that have gradients."""
    x = (given if b is None else given + b).chunk(3, 1)
    h = (hidden if c is None else hidden + c).chunk(3, 1)
    reset, gate = (x[0] + h[0]).sigmoid(), (x[1] + h[1]).sigmoid()
    new = (x[2] + reset * h[2]).tanh()
    return (before - new) * gate + new, before.new_empty(0)


def answers(gpu: Gpu) -> dict[str, Any]:
    """Return replacements for functions of `torch.cuda`, by name."""
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
    """Return a replacement for a storage's `clone`, which `copy.deepcopy` calls on models."""

    def clone(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        there = storage.device.type == "cuda"
        return gpu.keep(plain(gpu.host_of(storage))) if there else plain(storage)

    return clone


@contextlib.contextmanager
def pretended(memory: int = 16 * 2**30) -> Iterator[Gpu]:
    """Let PyTorch find the simulated device, with `memory` bytes, in the block."""
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
    """Run a module or a script with the device, and print the counts at the end."""
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

    pretended_gpu.main()  # the module that others import, not this copy
