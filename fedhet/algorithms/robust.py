"""Averages of K clients' replies that a minority of malicious clients cannot move far.

Each client is a point; NaN stands in its coordinates of which it has no value, such as the classes
that it lacks. Each client counts once: the number of its samples is a claim. An average is either
a value in the middle (coordinate-wise median and trimmed mean, geometric median), or the mean of
the clients that do not stand out (Krum, filter), which only needs the distances between them.
"""

from __future__ import annotations

import math

import numpy as np

from fedhet.base.arrays import Array

STEPS, TOLERANCE = 100, 1e-8
"""Weiszfeld's iterations: the most of them, and the change of weights at which they end."""
SMOOTHING = 1e-6
"""Least distance in Weiszfeld's weights, in times of that between the two nearest clients."""
EXCESS = 1.0
"""The variance along one direction that the filter allows, in times of the variance of two clients
at the usual distance. The published filter allows nine times a variance that is known."""
MOSTLY = 0.5
"""The weight below which the filter leaves a client out."""
EQUAL = 1e-12
"""Mean squared differences up to this multiple of the mean square are rounding errors."""
MOST = 100.0
"""Squared distances are cut off at this multiple of the usual one: none decides alone."""


def withstood(clients: int, share: float) -> int:
    """Return the number f of malicious clients that an average of this many clients withstands.

    The share, rounded up, as far as the others are a majority.
    """
    return max(min(math.ceil(share * clients - 1e-9), (clients - 1) // 2), 0)


def min_replies(average: str, malicious: int) -> int:
    """Return the least number of replies in which `average` withstands `malicious` clients.

    A majority must be honest. Krum needs two more replies (Blanchard et al., Proposition 4.2).
    """
    return 2 * malicious + (3 if average == "krum" else 1)


def trimmed_mean(points: Array, share: float) -> Array:
    """Return the coordinate-wise trimmed mean [...] of points [K, ...].

    Yin, Chen, Ramchandran and Bartlett, Byzantine-Robust Distributed Learning, ICML 2018,
    Definition 2. Of each coordinate the f lowest and the f highest values are left out; with a
    `share` of 0.5 the median remains (Definition 1). NaN where no client has a value.
    """
    ordered = np.sort(points, axis=0)  # NaN last
    known = np.count_nonzero(~np.isnan(points), axis=0)
    table = np.array([withstood(n, share) for n in range(len(points) + 1)])
    rank = np.arange(len(points)).reshape(-1, *[1] * (points.ndim - 1))
    kept = (rank >= table[known]) & (rank < known - table[known])
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(kept, ordered, 0).sum(0) / kept.sum(0)
    return mean


def weighted_mean(points: Array, weights: Array) -> Array:
    """Return the mean [...] of points [K, ...] with weights [K] over those that have a value."""
    each = weights.reshape(-1, *[1] * (points.ndim - 1)) * ~np.isnan(points)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(each > 0, points * each, 0).sum(0) / each.sum(0)
    return mean


def mean_squares(points: Array) -> Array:
    """Return the mean squared differences [K, K] of points [K, D], over common coordinates.

    NaN where two clients have none in common.
    """
    known = ~np.isnan(points)
    values = np.where(known, points, 0.0)
    x = np.where(known, values - values.sum(0) / np.maximum(known.sum(0), 1), 0.0)
    one = known.astype(np.float64)
    square, common = x**2 @ one.T, one @ one.T
    total = square + square.T - 2 * x @ x.T
    found = np.divide(total, common, out=np.full_like(total, np.nan), where=common > 0)
    found[found <= EQUAL * np.square(values).sum() / max(known.sum(), 1)] = 0.0
    np.fill_diagonal(found, 0.0)
    squares: Array = found
    return squares


def usual(squared: Array, share: float) -> float:
    """Return the usual squared distance of two clients, from those of all pairs [K, K]; or NaN.

    It is the largest between two of K - f clients if f are malicious, and farther off: of the known
    distances, that of the rank of so many pairs, rounded down.
    """
    pairs = np.sort(squared[np.triu_indices(len(squared), 1)])
    pairs = pairs[~np.isnan(pairs)]
    if not pairs.size:
        return math.nan
    majority = len(squared) - withstood(len(squared), share)
    rank = math.comb(majority, 2) / math.comb(len(squared), 2) * pairs.size
    return float(pairs[max(math.floor(rank + 1e-9), 1) - 1])


def relative(squared: Array, share: float) -> Array:
    """Return squared distances [K, K] in times of the usual one, MOST at the most."""
    with np.errstate(divide="ignore", invalid="ignore"):
        times = np.minimum(squared / usual(squared, share), MOST)
    found: Array = np.where(squared > 0, times, squared)
    return found


def geometric_weights(squared: Array) -> Array:
    """Return the weights [K] of clients, of sum 1, with which their mean is the geometric median.

    Weiszfeld's iterations, smoothed as in Pillutla, Kakade and Harchaoui, Robust Aggregation for
    Federated Learning (RFA), IEEE Transactions on Signal Processing 2022, Algorithm 2. From
    squared distances [K, K]: those to a mean follow from them.
    """
    least = SMOOTHING * math.sqrt(squared[squared > 0].min(initial=np.inf))
    weights = np.full(len(squared), 1 / len(squared))
    for _ in range(STEPS):
        away = np.sqrt(np.maximum(squared @ weights - weights @ squared @ weights / 2, 0.0))
        if away.max() <= least:
            break
        new = 1 / np.maximum(away, least)
        new /= new.sum()
        change, weights = np.abs(new - weights).max(), new
        if change <= TOLERANCE:
            break
    return weights


def krum(squared: Array, share: float) -> Array:
    """Return which clients Multi-Krum keeps, bool [K], from their squared distances [K, K].

    Blanchard, El Mhamdi, Guerraoui and Stainer, Machine Learning with Adversaries, NeurIPS 2017,
    Sections 4 and 6: the K - f clients whose summed distances to their K - f - 2 nearest others
    (one at least) are the smallest. Of equal ones the first are kept.
    """
    clients, f = len(squared), withstood(len(squared), share)
    if not f:
        return np.ones(clients, bool)
    others = np.sort(np.where(np.eye(clients, dtype=bool), np.inf, squared), axis=1)
    score = others[:, : max(clients - f - 2, 1)].sum(1)
    kept = np.zeros(clients, bool)
    kept[np.argsort(score, kind="stable")[: clients - f]] = True
    return kept


def filtered(squared: Array, share: float) -> Array:
    """Return which clients the filter keeps, bool [K], from their squared distances [K, K].

    Diakonikolas, Kamath, Kane, Li, Moitra and Stewart, Being Robust (in High Dimensions) Can Be
    Practical, ICML 2017, as `consensus.filter_weights` has it: while the variance along the
    direction in which it is largest is too large, weights fall by a client's share in it. What is
    too large follows from the usual distance of two clients, as the variance of honest replies is
    not known (ours). At most f clients, those of the least weight, are left out, and only if
    they have lost most of it (ours). Where all clients are alike, all are kept.
    """
    clients, f = len(squared), withstood(len(squared), share)
    weights, limit = np.ones(clients), EXCESS * usual(squared, share) / 2
    while f:
        variance, distance = _largest_variance(squared, weights)
        if variance <= limit or distance.max() <= 0:
            break
        lower = weights * (1 - distance / distance.max())
        if (lower < MOSTLY).sum() > f:
            break
        weights = lower
    kept: Array = weights >= MOSTLY
    return kept


def _largest_variance(squared: Array, weights: Array) -> tuple[float, Array]:
    """Return the variance along its largest direction, and clients' squared distances [K] along it.

    The matrix of inner products follows from the squared distances [K, K] (classical scaling).
    """
    share = weights / weights.sum()
    row = squared @ share
    inner = (row[:, None] + row[None, :] - squared - share @ row) / 2
    root = np.sqrt(share)
    values, vectors = np.linalg.eigh(root[:, None] * inner * root[None, :])
    along = values[-1] * vectors[:, -1] ** 2
    return float(values[-1]), np.divide(along, share, out=np.zeros_like(along), where=share > 0)
