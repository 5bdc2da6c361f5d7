"""Compression of tensors: rounding to integers of one byte, and the choice of the largest values.

Stochastic rounding as in QSGD (Alistarh et al., NeurIPS 2017), with a scale for each row; top-k
with error feedback as in Stich, Cordonnier and Jaggi, Sparsified SGD with Memory (NeurIPS 2018).
"""

from __future__ import annotations

import numpy as np

from fedhet.base.arrays import Array

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
