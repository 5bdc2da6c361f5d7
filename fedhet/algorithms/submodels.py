"""Sub-models: leading parts of a model's layers, and their average where they overlap.

Enmao Diao, Jie Ding and Vahid Tarokh, HeteroFL: Computation and Communication Efficient Federated
Learning for Heterogeneous Clients, ICLR 2021: Section 3 (sub-models, scaler, static batch norm,
masked cross-entropy) and Algorithm 1.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms.averaging import Weights, as_type
from fedhet.base.arrays import Array, Shapes
from fedhet.learning.devices import Compute
from fedhet.learning.training import batches, evaluating

SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
"""The layers that the scaler follows."""
STATISTICS_BATCH = 128
"""Samples in a batch whose statistics are queried: on every machine the same ones."""


def fits(shapes: Shapes, whole: Shapes) -> bool:
    """Return whether tensors of `shapes` are leading parts of tensors of the shapes `whole`."""
    return shapes.keys() == whole.keys() and all(
        len(shape) == len(whole[name][0])
        and all(size <= most for size, most in zip(shape, whole[name][0], strict=True))
        for name, (shape, _) in shapes.items()
    )


def cut(weights: Weights, shapes: Shapes) -> dict[str, Array]:
    """Return the leading part, of each of `shapes`, of every tensor of a model."""
    return {
        name: np.array(weights[name][tuple(map(slice, shape))])
        for name, (shape, _) in shapes.items()
    }


@dataclass(frozen=True)
class SubModel:
    """A client's part of the global model, after training.

    `weight` is what it counts for. If `labels` [P] are given, it has trained the rows of these
    classes alone of the tensors whose names begin with `head`.
    """

    weights: Weights
    weight: float
    labels: Array | None = None
    head: str = "classifier."

    def region(self, name: str) -> tuple[Any, ...]:
        """Return the index of the elements of a global tensor that the client has trained."""
        region: tuple[Any, ...] = tuple(map(slice, self.weights[name].shape))
        if self.labels is not None and name.startswith(self.head):
            return (self.labels, *region[1:])
        return region

    def trained(self, name: str) -> Array:
        """Return the elements at `region`."""
        value: Array = self.weights[name][self.region(name)]
        return value


def average_overlaps(before: Weights, models: Sequence[SubModel]) -> dict[str, Array]:
    """Return the global weights after a round: each element's mean over those who trained it.

    An element that nobody trained keeps its value of `before`. Sums are in float64. The order of
    `models` may affect the last bit: pass them sorted.
    """
    return {name: _mean(name, value, models) for name, value in before.items()}


def _mean(name: str, before: Array, models: Sequence[SubModel]) -> Array:
    held = np.zeros(before.shape)
    for model in models:
        held[model.region(name)] += model.weight
    mean = np.where(held > 0, 0.0, before.astype(np.float64))
    for model in models:
        region = model.region(name)
        mean[region] += model.trained(name).astype(np.float64) * (model.weight / held[region])
    return as_type(mean, before.dtype)


def masked(logits: Tensor, absent: Tensor) -> Tensor:
    """Return logits [N, C] for the masked cross-entropy: 0 for the classes `absent`, bool [C].

    Their outputs get no gradient; in the sum over classes each stands as exp(0).
    """
    return logits.masked_fill(absent, 0.0)


@contextlib.contextmanager
def scaling(module: nn.Module, rate: float) -> Iterator[None]:
    """Divide the outputs of the SCALED layers in `module` by `rate`: the scaler.

    It makes up, while a narrow sub-model trains, for what its outputs lack against the global
    model's. Outside of the block, as in evaluation, nothing is divided.
    """
    layers = [part for part in module.modules() if isinstance(part, SCALED)]
    hooks = [layer.register_forward_hook(lambda _, x, out: out / rate) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def query_statistics(
    model: nn.Module, x: Tensor, compute: Compute, generator: torch.Generator
) -> None:
    """Set the running statistics of batch norms to the mean over batches of x [N, ...].

    Static batch norm: nothing is tracked in training, and the statistics are queried afterwards.
    """
    norms: list[Any] = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    with evaluating(model), compute.autocast():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean over batches
            norm.train()
        for rows in batches(len(x), STATISTICS_BATCH, generator, x.device):
            model(compute.images(x[rows]))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
