"""Averaging of model weights: McMahan et al., Communication-Efficient Learning (FedAvg)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.arrays import Array

Weights = Mapping[str, Array]


def average_weights(models: Sequence[tuple[Weights, float]]) -> dict[str, Array]:
    """Return the average of models of one architecture, weighted by their numbers of samples.

    Sums are in float64, one tensor at a time. Running statistics of batch normalisation are
    averaged like weights (ours), its integer counters rounded. The order of `models` may affect the
    last bit: pass them sorted. Raises ValueError if there is no model or no sample.
    """
    total = sum(weight for _, weight in models)
    if total <= 0:
        raise ValueError("an average needs at least one model with at least one sample")
    first = models[0][0]
    return {name: _mean([(m[name], w) for m, w in models], total) for name in first}


def _mean(parts: Sequence[tuple[Array, float]], total: float) -> Array:
    if len(parts) == 1:
        return parts[0][0].copy()
    mean = np.zeros(parts[0][0].shape, dtype=np.float64)
    for value, weight in parts:
        mean += value.astype(np.float64) * (weight / total)
    dtype = parts[0][0].dtype
    return np.asarray(np.rint(mean) if np.issubdtype(dtype, np.integer) else mean, dtype=dtype)


def moved_towards(new: Weights, old: Weights, share: float) -> dict[str, Array]:
    """Return (1 - `share`) old + `share` new, `new` itself for a share of 1 (pFedMe's beta)."""
    return dict(new) if share == 1 else average_weights([(old, 1 - share), (new, share)])
