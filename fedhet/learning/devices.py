"""Devices, precision, input conversion, and evaluation batch sizes."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import platform
import shutil
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from fedhet.base.errors import SettingsError
from fedhet.base.transfer import all_to_device, to_device
from fedhet.settings.engine import ComputeSettings, EngineSettings

Module = TypeVar("Module", bound=nn.Module)
Loss = TypeVar("Loss", bound=Callable[..., Tensor])

CPU_BYTES, ACCELERATOR_BYTES = 8 * 2**20, 256 * 2**20
"""Maximum size of a layer's output for one batch, in bytes. On CPUs, larger batches are slower with
some models, because tensors no longer fit into the cache and glibc returns their pages to the
system."""
CPU_CHANNELS_LAST = 2**15
"""Maximum number of weights of a convolution in the channels-last format on CPUs. Gradients of
larger weights are computed more slowly in this format if feature maps are small, as in a ResNet's
last layers."""
MIN_BATCH, MAX_BATCH_CPU, MAX_BATCH_ACCELERATOR = 32, 1024, 8192
"""Minimum and maximum of the evaluation batch size, in samples."""


@dataclass(frozen=True)
class Compute:
    """Device, precision, and memory format of computations."""

    device: torch.device
    autocast_dtype: torch.dtype | None = None
    """Data type for mixed precision, or None for float32 without autocast."""
    channels_last: bool = False
    """Whether images and convolutions use the channels-last memory format."""
    eval_batch: int | None = None
    """Evaluation batch size, or None to let `evaluation_batch` determine it."""
    sample_bytes: int = 0
    """Maximum accelerator memory for the samples of all clients in a process, in bytes."""
    compiles: bool = False
    """Whether to compile the steps of local training with `torch.compile`."""

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return the autocast context for a forward pass and its loss."""
        if self.autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)

    def place(self, module: Module) -> Module:
        """Move `module` to the device in place, set its memory format, and return it.

        On CPUs, convolutions with more than `CPU_CHANNELS_LAST` weights keep their format.
        """
        move(module, self.device)
        largest = CPU_CHANNELS_LAST if self.device.type == "cpu" else math.inf
        if self.channels_last:
            # `Module.to` would also convert the weights of 3D convolutions, and fail.
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.ndim == 4 and tensor.numel() <= largest:
                    tensor.data = tensor.data.contiguous(memory_format=torch.channels_last)
        return module

    def to_inputs(self, x: Tensor) -> Tensor:
        """Convert samples [N, ...] to model inputs on the device.

        uint8 images are scaled, and images [N, C, H, W] are converted to the memory format. The
        inputs are a copy, because a model may write into them.
        """
        inputs = scaled(self.to_device(x))
        if self.channels_last and x.ndim == 4:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        return inputs.clone() if inputs.data_ptr() == x.data_ptr() else inputs

    def compiled(self, loss_of: Loss) -> Loss:
        """Compile a batch loss if `compiles` is set and the loss is a module.

        On CUDA, the operations of a step are recorded once and launched together (CUDA graphs).
        """
        if not (self.compiles and isinstance(loss_of, nn.Module)):
            return loss_of
        mode = "reduce-overhead" if self.device.type == "cuda" else "default"
        return cast(Loss, torch.compile(loss_of, mode=mode))

    def to_device(self, x: Tensor) -> Tensor:
        """Copy `x` [N, ...] to the device without conversion. On a CPU, no copy is made."""
        return to_device(x, self.device)

    def fit_on_device(self, *parts: Tensor) -> list[Tensor]:
        """Copy samples [N, ...] to the device if all of them fit; otherwise return them unchanged.

        The samples fit if they need at most half of the free memory, and if the total size of all
        samples on the device does not exceed `sample_bytes`. Samples that do not fit are copied
        batch by batch.
        """
        if self.device.type == "cpu":
            return list(parts)
        alive = [x for x in (ref() for ref in _on_accelerators) if x is not None]
        _on_accelerators[:] = map(weakref.ref, alive)
        size = sum(part.nbytes for part in parts)
        used = sum(x.nbytes for x in alive if x.device.type == self.device.type)
        # Query the free memory only on CUDA, because other accelerators do not report it.
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 2**62
        if used + size > self.sample_bytes or size > free // 2:
            return list(parts)
        copies = [self.to_device(part) for part in parts]
        _on_accelerators.extend(map(weakref.ref, copies))
        return copies


CPU = Compute(torch.device("cpu"))
_on_accelerators: list[weakref.ref[Tensor]] = []
"""Samples that this process has copied to accelerators."""


def move(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device, with one copy for all tensors of the same type."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    if any(each.device.type != device.type for each in tensors.values()):
        for name, each in all_to_device(tensors, device).items():
            tensors[name].data = each.clone()  # Each tensor gets separate, aligned memory.
    module.to(device)


def scaled(x: Tensor) -> Tensor:
    """Scale uint8 images to x/127.5 - 1 in float32, or return other tensors unchanged."""
    return x.to(torch.float32).div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


@torch.no_grad()
def evaluation_batch(
    model: nn.Module, x: Tensor, compute: Compute, smallest: int = MIN_BATCH
) -> int:
    """Return the evaluation batch size for `model` on samples x [N, ...].

    If 'engine.eval-batch-size' is not set, the batch size is chosen to limit the largest layer
    output, which is measured with a forward pass of one sample, but is at least `smallest`.
    """
    if compute.eval_batch:
        return compute.eval_batch
    sizes = [1]

    def measure(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        with compute.autocast():
            model(compute.to_inputs(x[:1]))
    finally:
        for hook in hooks:
            hook.remove()
    max_bytes, max_batch = ACCELERATOR_BYTES, MAX_BATCH_ACCELERATOR
    if compute.device.type == "cpu":
        max_bytes, max_batch = CPU_BYTES, MAX_BATCH_CPU
    return min(max(max_bytes // max(sizes), smallest), max_batch)


def compute_for(settings: ComputeSettings) -> Compute:
    """Create the `Compute` object for engine settings.

    Raises SettingsError if the device or the precision is unavailable.
    """
    device, precision = find_device(settings.device), settings.precision
    if precision == "float16" and device.type == "cpu":
        raise SettingsError(
            "engine.precision must be auto, float32, or bfloat16 on device cpu, got 'float16'"
        )
    if precision == "auto":
        # On CPUs, bfloat16 is faster with AMX; with AVX-512 alone, some methods gain nothing
        # (docs/performance.md). PyTorch 2.11 may lack `get_capabilities`.
        capabilities: dict[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
        on_gpu, on_cpu = device.type == "cuda", device.type == "cpu"
        is_faster = (
            torch.cuda.is_bf16_supported() if on_gpu else on_cpu and capabilities.get("amx_bf16")
        )
        precision = "bfloat16" if is_faster else "float32"
    if device.type == "cuda" and settings.deterministic:
        # Only warn about operations without a deterministic algorithm, e.g. in a custom model.
        # Deterministic algorithms in cuBLAS require the environment variable.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # only for debugging
        torch.backends.cudnn.benchmark = False
    if settings.compile:
        gpu, compiler = device.type == "cuda", os.environ.get("CXX", "g++")
        if not (importlib.util.find_spec("triton") if gpu else shutil.which(compiler)):
            missing = "package 'triton'" if gpu else f"C++ compiler ({compiler})"
            raise SettingsError(
                f"engine.compile = true requires {missing} on {device}, but it was not found"
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


def resolve_precision(settings: EngineSettings) -> EngineSettings:
    """Replace `auto` in the precision and the memory format with the values for this machine.

    Raises SettingsError if the device or the precision is unavailable.
    """
    compute = compute_for(settings)
    name = str(compute.autocast_dtype or torch.float32).removeprefix("torch.")
    last = str(compute.channels_last).lower()
    return settings.model_copy(update={"precision": name, "channels_last": last})


def find_device(name: str) -> torch.device:
    """Return the device `name`. "auto" selects the first GPU, or the CPU if there is no GPU.

    Raises SettingsError if the device does not exist.
    """
    devices = available_devices()
    if name == "auto":
        return torch.device(devices[-1] if len(devices) == 1 else devices[1])
    if name not in devices:
        why = f" ({why_no_cuda()})" if name.startswith("cuda") and "cuda" not in devices else ""
        raise SettingsError(
            f"device {name!r} not found on this machine{why}. Set engine.device, or 'device' of "
            f"a node, to auto or one of {', '.join(devices)}."
        )
    return torch.device(name)


def why_no_cuda() -> str:
    """Return the reason why PyTorch finds no GPU on this machine."""
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        first = " ".join(str(error).split()).partition(". ")[0].removesuffix(".")
        hint = (
            f"; PyTorch {torch.__version__} requires a driver for CUDA {torch.version.cuda}, see "
            "docs/guide.md"
        )
        return first + (hint if "too old" in first or "insufficient" in first else "")
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    return "no GPU is in CUDA_VISIBLE_DEVICES" if hidden else "no GPU"


def available_devices() -> list[str]:
    """Return the names of this machine's devices, starting with the CPU."""
    names = ["cpu"]
    if torch.cuda.is_available():
        names += ["cuda", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    if torch.backends.mps.is_available():
        names.append("mps")
    return names


def hardware(device: str) -> dict[str, str]:
    """Return the names of this machine's processor and, for runs on a GPU, of the GPU."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        name = next(models, name)
    found = {"cpu": f"{name}, {os.cpu_count()} CPUs"}
    with contextlib.suppress(SettingsError):  # The server of a deployment may have no such device.
        if find_device(device).type == "cuda":
            found["gpu"] = torch.cuda.get_device_name()
    return found
