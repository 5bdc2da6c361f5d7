"""GPU memory: fraction of a GPU for each worker, and recovery if memory runs out."""

from __future__ import annotations

import gc
import math

import torch
from torch import Tensor, nn

from fedhet.base.errors import FedhetError, one_line
from fedhet.client_runtime.node import close_clients
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.kinds import KINDS, Kind, Shape
from fedhet.learning.devices import find_device
from fedhet.models import Refitted, build_any
from fedhet.settings.schema import kebab

CONTEXT_BYTES = 2**29
"""GPU memory that CUDA itself uses in each process, in bytes."""
USABLE_FRACTION = 0.9
"""Fraction of a GPU's memory that workers may use."""
MAX_WORKERS = 8
"""Maximum number of workers per GPU if the number is computed from the size of the models."""
RETRIED_ALONE = "ran out of GPU memory and is called again without other clients"
COPIES = 4
"""Number of values stored per weight in training: the weight, its gradient, and Adam's two
moments."""


def with_gpu_share(config: Config, data: RunData) -> Config:
    """Set 'engine.gpus-per-client' if the run trains on a GPU and the setting is 0.

    The fraction of a GPU for each worker is computed from the memory needed to train the largest
    model in the pool and the method's additional models.
    """
    run, described = config.run, data.dataset.format
    device = find_device(run.engine.device)
    if run.engine.gpus_per_client or device.type != "cuda":
        return config
    kind, shape, method_settings = described.kind, described.shape, config.method_settings.flat()
    others = [str(method_settings[kebab(name)]) for name in config.method.spec.model_settings]
    batch_sizes = run.training.pools().get("batch_size", (run.training.batch_size,))
    sizes = {
        name: training_bytes(
            build_any(
                name, shape, described.outputs, seed=run.seed, kind=kind, task=described.task
            ),
            KINDS[kind],
            shape,
            max(2, *map(int, batch_sizes)),
        )
        for name in dict.fromkeys([*run.models.pool, *others])
    }
    largest = max(sizes[name] for name in run.models.pool)
    needed = CONTEXT_BYTES + largest + sum(sizes[name] for name in others)
    total = torch.cuda.get_device_properties(device.index or 0).total_memory
    fraction = gpu_fraction(needed, total)
    return config.replacing(engine=run.engine.model_copy(update={"gpus_per_client": fraction}))


def gpu_fraction(needed: int, total: int) -> float:
    """Return each worker's fraction of a GPU.

    The fraction is 1/k, where k is the number of workers that fit into the GPU's memory, but at
    least 1 and at most MAX_WORKERS.

    Args:
        needed: Memory that a worker needs, in bytes.
        total: Memory of the GPU, in bytes.
    """
    num_fitting = int(USABLE_FRACTION * total / needed)
    return math.floor(100 / min(max(num_fitting, 1), MAX_WORKERS)) / 100


@torch.no_grad()
def training_bytes(model: nn.Module, kind: Kind, shape: Shape, batch: int) -> int:
    """Estimate the memory of a training step on samples of shape [batch, *shape], in bytes.

    The estimate includes the weights with their gradients and optimizer state, and the output of
    each layer with its gradient.
    """
    if isinstance(model, Refitted):  # Refitted models use only the CPU.
        return 0
    outputs = [0]

    def record_output(module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.nbytes)

    leaves = [module for module in model.modules() if not any(module.children())]
    hooks = [module.register_forward_hook(record_output) for module in leaves]
    try:
        model.eval()(kind.blank(1, shape))
    finally:
        for hook in hooks:
            hook.remove()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return COPIES * weights + 2 * batch * sum(outputs)


def release_memory() -> None:
    """Close the open clients in this process, and release unused GPU memory."""
    close_clients()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def memory_error(error: torch.OutOfMemoryError) -> FedhetError:
    """Return the error to raise if even a single client does not fit in GPU memory."""
    cause = one_line(" ".join(str(error).split()).partition(". ")[0])
    return FedhetError(
        f"does not fit in GPU memory, even without other clients ({cause}). Use a smaller "
        "'training.batch-size', a smaller model, or 'engine.precision' = bfloat16."
    )
