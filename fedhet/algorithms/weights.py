"""Model weights: their averages, their parts, and their compression.

- Averages: McMahan et al., Communication-Efficient Learning (FedAvg).
- Sub-models, leading parts of a model's layers, and their average where they overlap: Diao et al.,
  HeteroFL, ICLR 2021, Section 3 and Algorithm 1.
- Compression: stochastic rounding as in QSGD (Alistarh et al., NeurIPS 2017), with a scale for
  each row; top-k with error feedback as in Stich et al., Sparsified SGD with Memory (NeurIPS 2018);
  factors that keep most of a matrix's energy as in FedKD (Wu et al., Nature Communications 13,
  2022, "Dynamic gradients approximation").
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

from fedhet.base.arrays import Array, Arrays, Shapes
from fedhet.learning.devices import Compute
from fedhet.learning.training import batches, evaluating

PART = 2**18
"""Elements of a tensor that are averaged at once: sums in float64 take twice their memory."""


def average_weights(models: Sequence[tuple[Arrays, float]]) -> dict[str, Array]:
    """Return the average of models of one architecture, weighted by their numbers of samples.

    Sums are in float64, a part of one tensor at a time: models that are read from disk need not fit
    into memory together. Running statistics of batch normalization are averaged like weights
    (ours), its integer counters rounded. The order of `models` may affect the last bit: pass them
    sorted. Raises ValueError if there is no model or no sample.
    """
    total = sum(weight for _, weight in models)
    if total <= 0:
        raise ValueError("an average needs at least one model with at least one sample")
    if len(models) == 1:
        return {name: value.copy() for name, value in models[0][0].items()}
    averaged = {name: np.empty(value.shape, value.dtype) for name, value in models[0][0].items()}
    for name, mean in averaged.items():
        for part in _parts(mean.size):
            sums = np.zeros(len(mean.reshape(-1)[part]))
            for model, weight in models:
                sums += _elements(model[name], part) * (weight / total)
            mean.reshape(-1)[part] = as_type(sums, mean.dtype)
    return averaged


def _parts(size: int) -> list[slice]:
    """Return slices that cover a number of elements, PART at a time."""
    return [slice(start, start + PART) for start in range(0, size, PART)]


def _elements(value: Array, part: slice) -> Array:
    """Return some elements of a tensor, counted in C order, in float64."""
    return value.reshape(-1)[part].astype(np.float64)


def as_type(mean: Array, dtype: np.dtype[Any]) -> Array:
    """Return an average as `dtype`: rounded if that is an integer's."""
    return np.asarray(np.rint(mean) if np.issubdtype(dtype, np.integer) else mean, dtype=dtype)


def moved_toward(new: Arrays, old: Arrays, share: float) -> dict[str, Array]:
    """Return (1 - `share`) old + `share` new, `new` itself for a share of 1 (pFedMe's beta)."""
    return dict(new) if share == 1 else average_weights([(old, 1 - share), (new, share)])


def changed(weights: Arrays, changes: Arrays) -> dict[str, Array]:
    """Return `weights` with `changes` added to them, each in its own type; variances stay >= 0."""
    added = {name: (value + changes[name]).astype(value.dtype) for name, value in weights.items()}
    return {n: v.clip(min=0) if n.endswith("running_var") else v for n, v in added.items()}


class RunningAverage:
    """A weighted average of models of one architecture, which are added one at a time.

    It holds their sums alone, in float64: its memory does not grow with the number of models.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._types: dict[str, np.dtype[Any]] = {}
        self._total = 0.0

    def add(self, weights: Arrays, weight: float) -> None:
        """Add a model. The order of models may affect the last bit: add them sorted."""
        for name, value in weights.items():
            if first := name not in self._sums:
                self._sums[name] = np.empty(value.shape)
                self._types[name] = value.dtype
            sums = self._sums[name].reshape(-1)
            for part in _parts(value.size):
                share = _elements(value, part) * weight
                sums[part] = share if first else sums[part] + share
        self._total += weight

    def mean(self) -> dict[str, Array]:
        """Return the average, in the models' own types; integer counters are rounded.

        Raises ValueError if there is no model or no weight.
        """
        if self._total <= 0:
            raise ValueError("an average needs at least one model with a positive weight")
        means = {name: np.empty(sums.shape, self._types[name]) for name, sums in self._sums.items()}
        for name, mean in means.items():
            for part in _parts(mean.size):
                sums = _elements(self._sums[name], part)
                mean.reshape(-1)[part] = as_type(sums / self._total, mean.dtype)
        return means


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


def cut(weights: Arrays, shapes: Shapes) -> dict[str, Array]:
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

    weights: Arrays
    weight: float
    labels: Array | None = None
    head: str = "classifier."

    def region(self, name: str) -> tuple[Any, ...]:
        """Return the index of the elements of a global tensor that the client has trained."""
        region: tuple[Any, ...] = tuple(map(slice, self.weights[name].shape))
        if self.labels is not None and name.startswith(self.head):
            return (self.labels, *region[1:])
        return region


def average_overlaps(before: Arrays, models: Sequence[SubModel]) -> dict[str, Array]:
    """Return the global weights after a round: each element's mean over those who trained it.

    An element that nobody trained keeps its value of `before`. Sums are in float64. The order of
    `models` may affect the last bit: pass them sorted.
    """
    averaged = {}
    for name, value in before.items():
        held = np.zeros(value.shape)
        for model in models:
            held[model.region(name)] += model.weight
        mean = np.where(held > 0, 0.0, value.astype(np.float64))
        for model in models:
            region = model.region(name)
            trained = model.weights[name][region].astype(np.float64)
            mean[region] += trained * (model.weight / held[region])
        averaged[name] = as_type(mean, value.dtype)
    return averaged


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
            model(compute.to_inputs(x[rows]))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


LEVELS = 127
"""The greatest integer of a row, which stands for its largest absolute value."""


def scales_of(rows: Array) -> Array:
    """Return the scale [R] of each of the rows [R, M], float32: s = max |x| / 127.

    It is rounded up, so that no value is more than 127 scales.
    """
    largest = np.abs(rows).max(1, initial=0).astype(np.float64)
    scales: Array = (largest / LEVELS).astype(np.float32)
    short = scales.astype(np.float64) * LEVELS < largest
    scales[short] = np.nextafter(scales[short], np.float32(np.inf))
    return scales


def rounded(rows: Array, scales: Array, rng: np.random.Generator) -> Array:
    """Return the rows [R, M] in units of their scales [R], rounded at random to int8.

    q = floor(x / s + u) with u uniform in [0, 1), so that the mean of s q over u is x. A row of
    zeros stays zero.
    """
    units = rows / np.where(scales > 0, scales, 1)[:, None]
    units += rng.random(units.shape, dtype=np.float32)
    return np.clip(np.floor(units), -LEVELS, LEVELS).astype(np.int8)


def largest(values: Array, count: int) -> Array:
    """Return which of the values [N] are the `count` of largest size, bool [N].

    Of equal ones, those that come first: the choice is the same on every machine.
    """
    sizes = np.abs(values)
    least = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    chosen: Array = sizes > least
    equal = np.flatnonzero(sizes == least)
    chosen[equal[: count - int(chosen.sum())]] = True
    return chosen


def energy_kept(round: int, rounds: int, start: float, end: float) -> float:
    """Return T(t) = T_start + (T_end - T_start) t (Eq. 9), t the share of rounds, from 1 / R to 1.

    So early rounds are approximated roughly, and late ones finely.
    """
    return start + (end - start) * round / rounds


def min_rank(singular: Array, energy: float) -> int:
    """Return the least K whose first squares, of [Q], sum to more than `energy` of all (Eq. 8).

    All that are not zero, if no K does; 0 for a matrix of zeros.
    """
    squares = np.cumsum(np.square(singular))
    if not squares.size or not squares[-1] > 0:
        return 0
    above = np.flatnonzero(squares > energy * squares[-1])
    return int(above[0]) + 1 if above.size else int(np.count_nonzero(singular))


def factors(matrix: Array, energy: float) -> tuple[Array, Array]:
    """Return U Sigma [P, K] and V [K, Q] of a matrix [P, Q], K the least rank for `energy`.

    Sigma travels in U (ours): the paper sends it as a matrix of its own. By PyTorch, whose threads
    the run sets; numpy's take thirty times as long for matrices as small as these.
    """
    wide = torch.from_numpy(matrix.astype(np.float64))
    u, singular, v = (each.numpy() for each in torch.linalg.svd(wide, full_matrices=False))
    rank = min_rank(singular, energy)
    left, right = u[:, :rank] * singular[:rank], v[:rank]
    return left.astype(matrix.dtype), right.astype(matrix.dtype)
