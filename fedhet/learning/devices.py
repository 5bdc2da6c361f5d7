"""The device and precision of a model's computations, its inputs, and evaluation batches."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedhet.base.errors import SettingsError
from fedhet.base.transfer import all_to_device, to_device
from fedhet.settings.engine import ComputeSettings, EngineSettings

Module = TypeVar("Module", bound=nn.Module)
Loss = TypeVar("Loss", bound=Callable[..., Tensor])

PROCESSOR_BYTES, ACCELERATOR_BYTES = 8 * 2**20, 256 * 2**20
"""What a layer's output of a whole batch may take. On a processor twice as much takes more than
twice the time with some models: tensors leave its cache, and glibc returns their pages to the
system after every batch."""
LEAST, MAX_ON_PROCESSOR, MAX_ON_ACCELERATOR = 32, 1024, 8192
"""Bounds of a batch of evaluation, in samples."""


class _DeferredCompiler(ModuleType):
    """Stand-in for `torch._dynamo` until a name other than those defined here is used.

    PyTorch's optimizers and torchvision import PyTorch's compiler, although only a compiled graph
    needs it, and the import takes longer than a small run. Any other name imports the compiler.
    """

    @classmethod
    def install(cls) -> None:
        """Defer the import of the compiler, unless something has imported it already."""
        if "torch._dynamo" not in sys.modules:
            for name in ("torch._dynamo", "torch._dynamo.utils"):
                sys.modules[name] = cls(name)
            torch._dynamo = sys.modules["torch._dynamo"]

    def __getattr__(self, name: str) -> Any:
        """Import the compiler in place of the stand-ins, and return its attribute."""
        is_package = self.__name__ == "torch._dynamo"
        if name.startswith("__") and not (is_package and name in ("__path__", "__all__")):
            raise AttributeError(name)  # `inspect` asks every module for its file
        for each, module in list(sys.modules.items()):
            if isinstance(module, _DeferredCompiler):
                del sys.modules[each]
        if isinstance(vars(torch).get("_dynamo"), _DeferredCompiler):
            del torch._dynamo
        return getattr(importlib.import_module(self.__name__), name)

    @staticmethod
    def disable(function: Any, *_: Any, **__: Any) -> Any:
        """Return the function unchanged, because it is not compiled."""
        return function

    @staticmethod
    def graph_break(*_: Any, **__: Any) -> None:
        """Do nothing, because no graph is being compiled."""

    @staticmethod
    def is_compile_supported(device_type: Any) -> Any:
        """Import the compiler, and return whether it supports a type of device."""
        return importlib.import_module("torch._dynamo").utils.is_compile_supported(device_type)


_DeferredCompiler.install()


@dataclass(frozen=True)
class Compute:
    """A device, its mixed-precision dtype (None: plain float32), a memory format, a batch size."""

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    channels_last: bool = False
    eval_batch: int | None = None
    """Samples in a batch of evaluation; None: see `evaluation_batch`."""
    sample_bytes: int = 0
    """What the samples of a process's clients may take of an accelerator's memory."""
    compiles: bool = False
    """Whether `torch.compile` makes the steps of local training."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context for a forward pass and its loss."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def place(self, module: Module) -> Module:
        """Move `module` to the device, in the memory format, and return it."""
        move(module, self.device)
        if self.channels_last:
            module.to(memory_format=torch.channels_last)
        return module

    def to_inputs(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] on the device as models expect it: bytes are scaled there.

        Images [N, C, H, W] are in the memory format.
        """
        there = scaled(self.to_device(x))
        if self.channels_last and x.ndim == 4:
            return there.contiguous(memory_format=torch.channels_last)
        return there

    def compiled(self, loss_of: Loss) -> Loss:
        """Return the loss of a batch compiled, if this compiles and it is a module, or as it is.

        On CUDA the operations of a step are recorded once, and launched as one (CUDA graphs).
        """
        if not (self.compiles and isinstance(loss_of, nn.Module)):
            return loss_of
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        return cast(Loss, torch.compile(loss_of, mode=mode))

    def to_device(self, x: Tensor) -> Tensor:
        """Return `x` [N, ...] on the device as it is: on a processor no copy is made."""
        return to_device(x, self.device)

    def fit_on_device(self, *parts: Tensor) -> list[Tensor]:
        """Return samples [N, ...] on the device if there is room for all, or else as they are.

        There is if they fit into what `sample_bytes` leaves beside the samples that are there, and
        into half of the memory that is free. The batches of others are copied one by one.
        """
        if self.device.type == "cpu":
            return list(parts)
        held = [x for x in (ref() for ref in _kept) if x is not None]
        _kept[:] = map(weakref.ref, held)
        size = sum(part.nbytes for part in parts)
        here = sum(x.nbytes for x in held if x.device.type == self.device.type)
        # Other accelerators do not report their free memory.
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2**62
        if here + size > self.sample_bytes or size > free // 2:
            return list(parts)
        there = [self.to_device(part) for part in parts]
        _kept.extend(map(weakref.ref, there))
        return there


CPU = Compute(torch.device("cpu"))
_kept: list[weakref.ref[Tensor]] = []
"""The samples that this process has put onto accelerators."""


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, its tensors of a type in one piece."""
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if any(each.device.type != device.type for each in own.values()):
        for name, each in all_to_device(own, device).items():
            own[name].data = each.clone()  # each in memory of its own, where it is aligned
    module.to(device)


def scaled(x: Tensor) -> Tensor:
    """Return `x` as models expect it: uint8 becomes x/127.5 - 1 in float32, others are kept."""
    return x.to(torch.float32).div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


@torch.no_grad()
def evaluation_batch(model: nn.Module, x: Tensor, compute: Compute) -> int:
    """Return how many samples of x [N, ...] `model`, in evaluation mode, takes at a time.

    It is 'engine.eval-batch-size', or else as many as keep the largest output of any layer within
    a bound, which takes a forward pass of one sample to find.
    """
    if compute.eval_batch:
        return compute.eval_batch
    sizes = [1]

    def note(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with compute.autocast():
            model(compute.to_inputs(x[:1]))
    finally:
        for hook in hooks:
            hook.remove()
    bound, most = ACCELERATOR_BYTES, MAX_ON_ACCELERATOR
    if compute.device.type == "cpu":
        bound, most = PROCESSOR_BYTES, MAX_ON_PROCESSOR
    return min(max(bound // max(sizes), LEAST), most)


def compute_for(settings: ComputeSettings) -> Compute:
    """Return the `Compute` for the device and precision of `settings`. Raises SettingsError."""
    device, precision = find_device(settings.device), settings.precision
    if precision == "float16" and device.type == "cpu":
        raise SettingsError(
            "setting 'engine.precision' = 'float16' is not available on the device cpu: "
            "it takes auto, float32 or bfloat16"
        )
    if precision == "auto":
        # A CPU multiplies matrices of bfloat16 by AMX; by AVX-512 alone some methods gain nothing
        # (docs/performance.md). PyTorch 2.11 may not have the function.
        known: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        on_gpu, on_cpu = device.type == "cuda", device.type == "cpu"
        gains = torch.cuda.is_bf16_supported() if on_gpu else on_cpu and known.get("amx_bf16")
        precision = "bfloat16" if gains else "float32"
    if device.type == "cuda" and settings.deterministic:
        # Algorithms that give the same bits each time. PyTorch warns of an operation that has none,
        # as a user's model may have.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS demands it
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # only to find errors
        torch.backends.cudnn.benchmark = False
    if settings.compile:
        gpu, compiler = device.type == "cuda", os.environ.get("CXX", "g++")
        if not (importlib.util.find_spec("triton") if gpu else shutil.which(compiler)):
            needed = "the package triton" if gpu else f"a C++ compiler ({compiler})"
            raise SettingsError(
                f"setting 'engine.compile' = true is not allowed: on {device} it needs {needed}"
            )
    last = {"true": True, "false": False, "auto": device.type != "mps"}[settings.channels_last]
    return Compute(
        device,
        None if precision == "float32" else getattr(torch, precision),
        last,
        settings.eval_batch_size or None,
        settings.sample_mb * 2**20,
        settings.compile,
    )


def settled(settings: EngineSettings) -> EngineSettings:
    """Return the settings with what `auto` means on this machine as precision and memory format.

    Raises SettingsError.
    """
    compute = compute_for(settings)
    name = str(compute.autocast_dtype or torch.float32).removeprefix("torch.")
    last = str(compute.channels_last).lower()
    return settings.model_copy(update={"precision": name, "channels_last": last})


def find_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is the first GPU, or else the CPU.

    Raises SettingsError naming the missing device and the available ones.
    """
    there = available_devices()
    if name == "auto":
        return torch.device(there[-1] if len(there) == 1 else there[1])
    if name not in there:
        why = f" ({why_no_cuda()})" if name.startswith("cuda") and "cuda" not in there else ""
        raise SettingsError(
            f"device {name!r} does not exist here{why}: 'engine.device', or a node's own 'device', "
            f"takes auto or a device of this machine: {', '.join(there)}"
        )
    return torch.device(name)


def why_no_cuda() -> str:
    """Return in words why PyTorch finds no GPU on this machine."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        first = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
        hint = (
            f"; PyTorch {torch.__version__} is built for CUDA {torch.version.cuda}, and needs a "
            "driver for it: docs/guide.md"
        )
        return first + (hint if "too old" in first or "insufficient" in first else "")
    return "CUDA_VISIBLE_DEVICES leaves none" if "CUDA_VISIBLE_DEVICES" in os.environ else "no GPU"


def available_devices() -> list[str]:
    """Return the names of this machine's devices, the CPU first."""
    names = ["cpu"]
    if torch.cuda.is_available():
        names += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names
