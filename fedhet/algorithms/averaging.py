"""Averaging of model weights: McMahan et al., Communication-Efficient Learning (FedAvg)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from fedhet.base.arrays import Array

Weights = Mapping[str, Array]
PART = 2**18
"""Elements of a tensor that are averaged at once: sums in float64 take twice their memory."""


def average_weights(models: Sequence[tuple[Weights, float]]) -> dict[str, Array]:
    """Return the average of models of one architecture, weighted by their numbers of samples.

    Sums are in float64, a part of one tensor at a time: models that are read from disk need not fit
    into memory together. Running statistics of batch normalisation are averaged like weights
    (ours), its integer counters rounded. The order of `models` may affect the last bit: pass them
    sorted. Raises ValueError if there is no model or no sample.
    """
    total = sum(weight for _, weight in models)
    if total <= 0:
        raise ValueError("an average needs at least one model with at least one sample")
    return {name: _mean(name, models, total) for name in models[0][0]}


def _mean(name: str, models: Sequence[tuple[Weights, float]], total: float) -> Array:
    """Return the average of one tensor; of each model, only a part of it is read at a time."""
    first = models[0][0][name]
    if len(models) == 1:
        return first.copy()
    mean = np.empty(first.shape, first.dtype)
    for part in _parts(first.size):
        total_of_part = np.zeros(len(mean.reshape(-1)[part]))
        for model, weight in models:
            total_of_part += _elements(model[name], part) * (weight / total)
        mean.reshape(-1)[part] = as_type(total_of_part, mean.dtype)
    return mean


def _parts(size: int) -> Iterator[slice]:
    """Yield slices that cover a number of elements, PART at a time."""
    return (slice(start, start + PART) for start in range(0, size, PART))


def _elements(value: Array, part: slice) -> Array:
    """Return some elements of a tensor, counted in C order, in float64."""
    return value.reshape(-1)[part].astype(np.float64)


def as_type(mean: Array, dtype: np.dtype[Any]) -> Array:
    """Return an average as `dtype`: rounded if that is an integer's."""
    return np.asarray(np.rint(mean) if np.issubdtype(dtype, np.integer) else mean, dtype=dtype)


def moved_towards(new: Weights, old: Weights, share: float) -> dict[str, Array]:
    """Return (1 - `share`) old + `share` new, `new` itself for a share of 1 (pFedMe's beta)."""
    return dict(new) if share == 1 else average_weights([(old, 1 - share), (new, share)])


def changed(weights: Weights, changes: Weights) -> dict[str, Array]:
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

    def add(self, weights: Weights, weight: float) -> None:
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
        return {name: self._mean(name) for name in self._sums}

    def _mean(self, name: str) -> Array:
        sums = self._sums[name]
        mean = np.empty(sums.shape, self._types[name])
        for part in _parts(sums.size):
            mean.reshape(-1)[part] = as_type(_elements(sums, part) / self._total, mean.dtype)
        return mean
