"""How many samples a model is evaluated on at a time, by the size of its activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.devices import Compute

MIB = 2**20
PROCESSOR_BYTES, ACCELERATOR_BYTES = 8 * MIB, 256 * MIB
"""What a layer's output of a whole batch may take. On a processor twice as much takes more than
twice the time with some models: tensors leave its cache, and glibc returns their pages to the
system after every batch."""
LEAST, MOST = 32, {True: 1024, False: 8192}
"""Bounds of a batch; the second one on a processor, and on an accelerator."""


def evaluation_batch(model: nn.Module, x: Tensor, compute: Compute) -> int:
    """Return how many samples of x [N, ...] `model`, in evaluation mode, takes at a time.

    It is 'engine.eval-batch-size', or else as many as keep the largest output of any layer within
    a bound, which takes a forward pass of one sample to find.
    """
    if compute.eval_batch:
        return compute.eval_batch
    processor = compute.device.type == "cpu"
    bound = PROCESSOR_BYTES if processor else ACCELERATOR_BYTES
    fitting = bound // max(1, largest_output(model, x[:1], compute))
    return min(max(fitting, LEAST), MOST[processor])


@torch.no_grad()
def largest_output(model: nn.Module, x: Tensor, compute: Compute) -> int:
    """Return the bytes of the largest tensor that a module of `model` returns for x [N, ...]."""
    sizes = [0]

    def note(module: nn.Module, given: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel() * output.element_size())

    hooks = [module.register_forward_hook(note) for module in model.modules()]
    try:
        with compute.autocast():
            model(compute.images(x))
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)
