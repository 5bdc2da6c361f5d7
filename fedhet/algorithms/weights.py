"""Model weights: averages, submodels and compression.

- Averages: McMahan et al., Communication-Efficient Learning of Deep Networks (FedAvg).
- Submodels, i.e. the leading parts of a model's layers, and averages over their overlaps: Diao et
  al., HeteroFL, ICLR 2021, Section 3 and Algorithm 1.
- Rolling submodels: Alam et al., FedRolex, NeurIPS 2022, Algorithm 1.
- Stochastic rounding: QSGD (Alistarh et al., NeurIPS 2017), but with a scale per row.
- Top-k sparsification with error feedback: Stich et al., Sparsified SGD with Memory, NeurIPS 2018.
- Low-rank factors: FedKD (Wu et al., Nature Communications 13, 2022, "Dynamic gradients
  approximation").
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
"""Number of elements averaged at the same time, which bounds the memory for float64 sums."""


def average_weights(models: Sequence[tuple[Arrays, float]]) -> dict[str, Array]:
    """Return the weighted average of models with the same architecture.

    Sums are computed in float64 for one part of a tensor at a time, so that models on disk need not
    fit into memory together. Running statistics of batch norms are averaged like weights, and
    integers are rounded. Pass the models in sorted order, because the order may affect the last
    bit.

    Args:
        models: Pairs of a model's tensors and its weight, e.g. its number of samples.

    Raises:
        ValueError: If there are no models, or if the weights sum to 0.

    Example:
        >>> average_weights([({"w": np.float32([0])}, 1), ({"w": np.float32([4])}, 3)])
        {'w': array([3.], dtype=float32)}
    """
    total = sum(weight for _, weight in models)
    if total <= 0:
        raise ValueError(f"expected models with a positive total weight, got {total:g}")
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
    """Return slices of at most PART elements that cover `size` elements."""
    return [slice(start, start + PART) for start in range(0, size, PART)]


def _elements(value: Array, part: slice) -> Array:
    """Return a slice of a tensor's elements, in C order and as float64."""
    return value.reshape(-1)[part].astype(np.float64)


def as_type(mean: Array, dtype: np.dtype[Any]) -> Array:
    """Convert an average to `dtype`, rounding if it is an integer type."""
    return np.asarray(np.rint(mean) if np.issubdtype(dtype, np.integer) else mean, dtype=dtype)


STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
"""Endings of the names of a batch norm's running statistics."""


def interpolate(old: Arrays, new: Arrays, beta: float) -> dict[str, Array]:
    """Return (1 - beta) old + beta new (pFedMe, Algorithm 1, line 12).

    With beta > 1, which moves beyond the new weights, running statistics are replaced with the new
    statistics, because a variance could become negative.
    """
    if beta == 1:
        return dict(new)
    moved = average_weights([(old, 1 - beta), (new, beta)])
    if beta > 1:
        moved |= {name: new[name].copy() for name in moved if name.endswith(STATISTICS)}
    return moved


def add_update(weights: Arrays, update: Arrays) -> dict[str, Array]:
    """Return the sum of weights and an update, in the types of the weights.

    Running variances are clipped at 0.
    """
    added = {name: (value + update[name]).astype(value.dtype) for name, value in weights.items()}
    return {n: v.clip(min=0) if n.endswith("running_var") else v for n, v in added.items()}


class RunningAverage:
    """Weighted average to which models of the same architecture are added one at a time.

    Only the sums are stored, in float64, so that the memory does not grow with the number of
    models.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Array] = {}
        self._types: dict[str, np.dtype[Any]] = {}
        self._total = 0.0

    def add(self, weights: Arrays, weight: float) -> None:
        """Add a model. Pass models in sorted order, because the order may affect the last bit."""
        for name, value in weights.items():
            if first := name not in self._sums:
                self._sums[name] = np.empty(value.shape)
                self._types[name] = value.dtype
            sums = self._sums[name].reshape(-1)
            for part in _parts(value.size):
                weighted = _elements(value, part) * weight
                sums[part] = weighted if first else sums[part] + weighted
        self._total += weight

    def mean(self) -> dict[str, Array]:
        """Return the average in the data types of the models; integers are rounded.

        Raises ValueError if there are no models, or if the weights sum to 0.
        """
        if self._total <= 0:
            raise ValueError(f"expected models with a positive total weight, got {self._total:g}")
        means = {name: np.empty(sums.shape, self._types[name]) for name, sums in self._sums.items()}
        for name, mean in means.items():
            for part in _parts(mean.size):
                sums = _elements(self._sums[name], part)
                mean.reshape(-1)[part] = as_type(sums / self._total, mean.dtype)
        return means


SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding)
"""Layers whose outputs HeteroFL's scaler divides."""
STATISTICS_BATCH = 128
"""Batch size for batch-norm statistics, fixed so that results do not depend on the machine."""


def is_submodel(shapes: Shapes, full: Shapes) -> bool:
    """Return whether `shapes` are shapes of leading slices of tensors with the shapes `full`."""
    return shapes.keys() == full.keys() and all(
        len(shape) == len(full[name][0])
        and all(size <= full_size for size, full_size in zip(shape, full[name][0], strict=True))
        for name, (shape, _) in shapes.items()
    )


def cut_submodel(weights: Arrays, shapes: Shapes) -> dict[str, Array]:
    """Return the leading slice of each tensor in a model, with the given shapes."""
    return {
        name: np.array(weights[name][tuple(map(slice, shape))])
        for name, (shape, _) in shapes.items()
    }


def roll_channels(weights: Arrays, narrow: Shapes) -> dict[str, Array]:
    """Move the first channel of each hidden layer to the end (FedRolex, Algorithm 1).

    The model computes the same function, but its leading submodels start one channel later.

    Args:
        weights: Parameters of the model, in any order.
        narrow: Shapes of a submodel, in the order of its layers. They differ from the model's
            shapes along hidden channels. Shapes of other tensors are ignored.
    """
    rolled, channels = {}, 1
    for name in (name for name in narrow if name in weights):
        value, (shape, _) = weights[name], narrow[name]
        for axis, size in enumerate(value.shape):
            if size == shape[axis]:
                continue
            # A linear layer after a convolution has several consecutive inputs per channel.
            block = size // channels if axis == 1 and value.ndim == 2 else 1
            value = np.roll(value, -block, axis)
        if value.ndim > 1:
            channels = value.shape[0]
        rolled[name] = value
    return rolled


@dataclass(frozen=True)
class SubModel:
    """A client's submodel after training.

    Attributes:
        weights: Tensors of the submodel, by name.
        weight: The client's weight in averages.
        labels: The client's classes, of shape [P], or None to average complete tensors. If set,
            tensors whose names start with `head` contribute only the rows of these classes.
        head: Prefix of the names of the head's tensors.
    """

    weights: Arrays
    weight: float
    labels: Array | None = None
    head: str = "classifier."

    def region(self, name: str) -> tuple[Any, ...]:
        """Return the index of the elements of a global tensor that the client trained."""
        region: tuple[Any, ...] = tuple(map(slice, self.weights[name].shape))
        if self.labels is not None and name.startswith(self.head):
            return (self.labels, *region[1:])
        return region


def average_overlaps(before: Arrays, models: Sequence[SubModel]) -> dict[str, Array]:
    """Average each element over the submodels that trained it (HeteroFL, Algorithm 1).

    Elements that no client trained keep their value in `before`. Sums are computed in float64. Pass
    the models in sorted order, because the order may affect the last bit.
    """
    averaged = {}
    for name, value in before.items():
        total = np.zeros(value.shape)
        for model in models:
            total[model.region(name)] += model.weight
        mean = np.where(total > 0, 0.0, value.astype(np.float64))
        for model in models:
            region = model.region(name)
            trained = model.weights[name][region].astype(np.float64)
            mean[region] += trained * (model.weight / total[region])
        averaged[name] = as_type(mean, value.dtype)
    return averaged


@contextlib.contextmanager
def scaling(module: nn.Module, rate: float) -> Iterator[None]:
    """Context manager that divides the outputs of the SCALED layers in `module` by `rate`.

    This is HeteroFL's scaler, which compensates for the smaller outputs of a narrow submodel during
    training. Outside the block, e.g. in evaluation, outputs are not divided.
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
    """Set the running statistics of batch norms to their means over batches of x [N, ...].

    With HeteroFL's static batch norm, statistics are not tracked in training but computed later.
    """
    norms: list[Any] = [part for part in model.modules() if isinstance(part, _BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    with evaluating(model), compute.autocast():
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # None means an average over batches.
            norm.train()
        for rows in batches(len(x), STATISTICS_BATCH, generator, x.device):
            model(compute.to_inputs(x[rows]))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


LEVELS = 127
"""Integer to which the largest absolute value in a row is quantized."""


def scales_of(rows: Array) -> Array:
    """Return the scale s = max |x| / 127 of each row of `rows` [R, M], as float32 of shape [R].

    Scales are rounded up, so that |x| / s is at most 127.
    """
    largest = np.abs(rows).max(1, initial=0).astype(np.float64)
    scales: Array = (largest / LEVELS).astype(np.float32)
    short = scales.astype(np.float64) * LEVELS < largest
    scales[short] = np.nextafter(scales[short], np.float32(np.inf))
    return scales


def rounded(rows: Array, scales: Array, rng: np.random.Generator) -> Array:
    """Quantize rows [R, M] to int8 with stochastic rounding, q = floor(x / s + u).

    u is uniform in [0, 1), so that s q is an unbiased estimate of x. Zero rows stay zero.
    """
    units = rows / np.where(scales > 0, scales, 1)[:, None]
    units += rng.random(units.shape, dtype=np.float32)
    return np.clip(np.floor(units), -LEVELS, LEVELS).astype(np.int8)


def largest(values: Array, count: int) -> Array:
    """Return a mask [N] of the `count` values with the largest magnitudes.

    Ties are resolved by order, so that all machines select the same values.
    """
    sizes = np.abs(values)
    threshold = np.partition(sizes, len(sizes) - count)[len(sizes) - count]
    selected: Array = sizes > threshold
    equal = np.flatnonzero(sizes == threshold)
    selected[equal[: count - int(selected.sum())]] = True
    return selected


def energy_kept(round: int, rounds: int, start: float, end: float) -> float:
    """Return the energy fraction T(t) = T_start + (T_end - T_start) t, with t = round / rounds.

    According to FedKD's Eq. 9, updates in late rounds are approximated more precisely.
    """
    return start + (end - start) * round / rounds


def min_rank(singular: Array, energy: float) -> int:
    """Return the minimum rank K that preserves more than a fraction `energy` of the energy.

    The energy is the sum of the squared singular values (Eq. 8). Returns the number of nonzero
    singular values if no rank exceeds the fraction, and 0 for a zero matrix.

    Args:
        singular: Singular values, descending, of shape [Q].
        energy: Fraction T of the energy.
    """
    squares = np.cumsum(np.square(singular))
    if not squares.size or not squares[-1] > 0:
        return 0
    above = np.flatnonzero(squares > energy * squares[-1])
    return int(above[0]) + 1 if above.size else int(np.count_nonzero(singular))


def factors(matrix: Array, energy: float) -> tuple[Array, Array]:
    """Return factors U Sigma [P, K] and V [K, Q] of a matrix [P, Q], where K is its `min_rank`.

    Unlike in the paper, Sigma is multiplied into U instead of sent separately. The SVD uses
    PyTorch, because NumPy ignores the run's number of threads and takes thirty times as long for
    small matrices.
    """
    exact = torch.from_numpy(matrix.astype(np.float64))
    u, singular, v = (part.numpy() for part in torch.linalg.svd(exact, full_matrices=False))
    rank = min_rank(singular, energy)
    left, right = u[:, :rank] * singular[:rank], v[:rank]
    return left.astype(matrix.dtype), right.astype(matrix.dtype)
