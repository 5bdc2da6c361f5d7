"""Compression of tensors: to integers of one byte, to the largest values, or to a low rank.

Stochastic rounding as in QSGD (Alistarh et al., NeurIPS 2017), with a scale for each row; top-k
with error feedback as in Stich, Cordonnier and Jaggi, Sparsified SGD with Memory (NeurIPS 2018);
factors that keep most of a matrix's energy as in FedKD (Chuhan Wu, Fangzhao Wu, Lingjuan Lyu,
Yongfeng Huang and Xing Xie, Communication-efficient federated learning via knowledge distillation,
Nature Communications 13, 2022, "Dynamic gradients approximation").
"""

from __future__ import annotations

import numpy as np
import torch

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


def energy_kept(round: int, rounds: int, start: float, end: float) -> float:
    """Return T(t) = T_start + (T_end - T_start) t (Eq. 9), t the share of rounds, from 1 / R to 1.

    So early rounds are approximated roughly, and late ones finely.
    """
    return start + (end - start) * round / rounds


def least_rank(singular: Array, energy: float) -> int:
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
    rank = least_rank(singular, energy)
    left, right = u[:, :rank] * singular[:rank], v[:rank]
    return left.astype(matrix.dtype), right.astype(matrix.dtype)
