"""A GPU's memory: a share for each worker, and what follows where it does not suffice."""

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
"""What CUDA itself takes of a GPU's memory in each process."""
IN_USE = 0.9
"""The share of the memory that is planned with."""
MAX_WORKERS = 8
"""Workers on a GPU at most, if their number follows from the models' size."""
ASKED_ALONE = "finds too little memory on the GPU: it is asked again alone"
COPIES = 4
"""Of a weight: itself, its gradient, and two that Adam keeps."""


def with_gpu_share(config: Config, data: RunData) -> Config:
    """Return the settings with a share of a GPU for each worker, if they leave it open.

    It follows from what training takes for the largest of the run's models. A method that trains
    further models of its own takes as much for each.
    """
    run, dataset = config.run, data.dataset
    device = find_device(run.engine.device)
    if run.engine.gpus_per_client or device.type != "cuda":
        return config
    kind, shape, own = dataset.kind, tuple(dataset.shape), config.method_settings.flat()
    others = [str(own[kebab(name)]) for name in config.method.spec.model_settings]
    batches = run.training.pools().get("batch_size", (run.training.batch_size,))
    sizes = {
        name: training_bytes(
            build_any(name, shape, len(dataset.classes), seed=run.seed, kind=kind),
            KINDS[kind],
            shape,
            max(2, *map(int, batches)),
        )
        for name in dict.fromkeys([*run.models.pool, *others])
    }
    largest = max(sizes[name] for name in run.models.pool)
    needed = CONTEXT_BYTES + largest + sum(sizes[name] for name in others)
    total = torch.cuda.get_device_properties(device.index or 0).total_memory
    share = share_for(needed, total)
    return config.replacing(engine=run.engine.model_copy(update={"gpus_per_client": share}))


def share_for(needed: int, total: int) -> float:
    """Return the share of a GPU of `total` bytes for a worker: 1/k, for k that fit side by side."""
    fitting = int(IN_USE * total / needed)
    return math.floor(100 / min(max(fitting, 1), MAX_WORKERS)) / 100


@torch.no_grad()
def training_bytes(model: nn.Module, kind: Kind, shape: Shape, batch: int) -> int:
    """Return about what a training step on samples [batch, *shape] takes, in bytes.

    The weights, with gradients and what the optimizer keeps; and what each layer returns, which
    is kept for the backward pass, with its gradient.
    """
    if isinstance(model, Refitted):  # it is fitted on the host
        return 0
    outputs = [0]

    def note(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            outputs.append(output.nbytes)

    leaves = [part for part in model.modules() if not any(part.children())]
    hooks = [part.register_forward_hook(note) for part in leaves]
    try:
        model.eval()(kind.blank(1, shape))
    finally:
        for hook in hooks:
            hook.remove()
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return COPIES * weights + 2 * batch * sum(outputs)


def make_room() -> None:
    """Give back what this process does not need at the moment: its open clients too."""
    close_clients()
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def too_small(error: torch.OutOfMemoryError) -> FedhetError:
    """Return the error for a client that does not fit into its GPU even alone."""
    said = one_line(" ".join(str(error).split()).partition(". ")[0])
    return FedhetError(
        f"does not fit into the GPU's memory, not even alone ({said}): a smaller "
        "'training.batch-size' or model, or 'engine.precision' = bfloat16, takes less"
    )
