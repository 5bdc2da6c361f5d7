"""Robust aggregation rules, on which a minority of malicious clients has little influence.

Each of K clients is a point. A coordinate is NaN if the client has no value for it, for example for
a class that the client lacks. All clients have the same weight, because the numbers of samples are
self-reported. Median, trimmed mean and geometric median return a central value. Krum and the filter
exclude outliers, and need only the distances between clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from fedhet.base.arrays import Array
from fedhet.settings.defense import RULES

STEPS, TOLERANCE = 100, 1e-8
"""Maximum number of Weiszfeld iterations, and the change in weights below which they stop."""
SMOOTHING = 1e-6
"""Lower bound of distances in Weiszfeld's weights, relative to the clients' smallest distance."""
EXCESS = 1.0
"""Maximum variance along a direction that the filter tolerates, relative to the variance of two
clients at the typical distance. The published filter tolerates nine times a known variance."""
MIN_WEIGHT = 0.5
"""Weight below which the filter excludes a client."""
ROUNDING = 1e-12
"""Multiple of the mean square up to which mean squared differences are treated as 0."""
MAX_RELATIVE = 100.0
"""Maximum squared distance, relative to the typical distance, so that no distance dominates."""


def max_malicious(clients: int, fraction: float) -> int:
    """Return the number f of malicious clients, out of `clients`, that robust rules must tolerate.

    f is the given fraction of the clients, rounded up, but always less than half of the clients.
    """
    return max(min(math.ceil(fraction * clients - 1e-9), (clients - 1) // 2), 0)


def min_replies(average: str, malicious: int) -> int:
    """Return the number of replies that an aggregation rule needs to tolerate malicious clients.

    A majority must be honest. Krum needs two more replies (Blanchard et al., Proposition 4.2).
    """
    return 2 * malicious + RULES[average].margin


def trimmed_mean(points: Array, fraction: float) -> Array:
    """Return the coordinate-wise trimmed mean [...] of points [K, ...].

    Yin, Chen, Ramchandran and Bartlett, Byzantine-Robust Distributed Learning, ICML 2018,
    Definition 2. For each coordinate with n values, the lowest and the highest values are removed,
    `max_malicious(n, fraction)` of each. With a `fraction` of 0.5, this is the median (Definition
    1). A coordinate without values is NaN.
    """
    ordered = np.sort(points, axis=0)  # NaN values are sorted last.
    known = np.count_nonzero(~np.isnan(points), axis=0)
    table = np.array([max_malicious(n, fraction) for n in range(len(points) + 1)])
    rank = np.arange(len(points)).reshape(-1, *[1] * (points.ndim - 1))
    kept = (rank >= table[known]) & (rank < known - table[known])
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(kept, ordered, 0).sum(0) / kept.sum(0)
    return mean


def weighted_mean(points: Array, weights: Array) -> Array:
    """Return the weighted mean [...] of points [K, ...] with weights [K], ignoring NaN."""
    used = weights.reshape(-1, *[1] * (points.ndim - 1)) * ~np.isnan(points)
    with np.errstate(invalid="ignore"):
        mean: Array = np.where(used > 0, points * used, 0).sum(0) / used.sum(0)
    return mean


def mean_squares(points: Array) -> Array:
    """Return mean squared differences [K, K] between points [K, D] over common coordinates.

    The difference between two clients without common coordinates is NaN.
    """
    known = ~np.isnan(points)
    values = np.where(known, points, 0.0)
    x = np.where(known, values - values.sum(0) / np.maximum(known.sum(0), 1), 0.0)
    one = known.astype(np.float64)
    square, common = x**2 @ one.T, one @ one.T
    total = square + square.T - 2 * x @ x.T
    means = np.divide(total, common, out=np.full_like(total, np.nan), where=common > 0)
    means[means <= ROUNDING * np.square(values).sum() / max(known.sum(), 1)] = 0.0
    np.fill_diagonal(means, 0.0)
    squares: Array = means
    return squares


def typical_distance(squared: Array, fraction: float) -> float:
    """Return the typical squared distance between honest clients, or NaN if no distance is known.

    With f malicious clients among K, both clients are honest in (K - f) (K - f - 1) / (K (K - 1))
    of the pairs. The typical distance is the quantile of the known distances at this fraction. If
    the malicious clients are farther away, it is the largest distance between honest clients.

    Args:
        squared: Squared distances, of shape [K, K].
        fraction: Fraction of malicious clients.
    """
    pairs = np.sort(squared[np.triu_indices(len(squared), 1)])
    pairs = pairs[~np.isnan(pairs)]
    if not pairs.size:
        return math.nan
    honest = len(squared) - max_malicious(len(squared), fraction)
    rank = math.comb(honest, 2) / math.comb(len(squared), 2) * pairs.size
    return float(pairs[max(math.floor(rank + 1e-9), 1) - 1])


def relative_distances(tensors: Iterable[tuple[Array, int, float]], fraction: float) -> Array:
    """Combine the squared distances of several tensors into relative squared distances [K, K].

    The distances of each tensor are divided by the tensor's typical distance. The result is the
    larger of two numbers: the mean over the tensors, weighted by their sizes, and the largest
    distance of a single tensor, divided by `tolerance`. A client is therefore an outlier if it
    differs strongly in one small tensor, or moderately in all tensors. If the typical distance is
    0, all other distances are MAX_RELATIVE. The result is NaN for clients without common
    coordinates.

    Args:
        tensors: Squared distances [K, K], number of coordinates, and lower bound of the typical
            distance of each tensor.
        fraction: Fraction of malicious clients.
    """
    total: Array = np.zeros(())
    largest: Array = np.zeros(())
    sizes: Array = np.zeros(())
    for squared, size, lowest in tensors:
        known, typical = ~np.isnan(squared), max(typical_distance(squared, fraction), lowest)
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(squared > 0, squared / typical, 0.0)
        total, sizes = total + ratio * size, sizes + known * size
        largest = np.maximum(largest, ratio / tolerance(size))
    mean = np.divide(total, sizes, out=np.full_like(total, np.nan), where=sizes > 0)
    result: Array = np.minimum(np.maximum(mean, largest), MAX_RELATIVE)
    return result


def tolerance(size: int) -> float:
    """Return the relative squared distance in a tensor that alone is no sign of an outlier.

    The distances between honest clients vary more in tensors with few coordinates.
    """
    return 2 + 8 / math.sqrt(size)


def complete_distances(squared: Array) -> Array:
    """Replace unknown squared distances, which are NaN in the array [K, K].

    The distance between two clients becomes the mean of both clients' median distances to other
    clients (the lower median). A client that is far from most comparable clients is therefore also
    far from the clients with which it is not comparable. All distances of a client without
    comparable clients remain NaN.
    """
    others = np.where(np.eye(len(squared), dtype=bool), np.nan, squared)
    known = np.count_nonzero(~np.isnan(others), axis=1)
    ordered = np.sort(others, axis=1)  # NaN values are sorted last.
    medians = ordered[np.arange(len(squared)), np.maximum(known - 1, 0) // 2]
    return np.where(np.isnan(squared), (medians[:, None] + medians[None, :]) / 2, squared)


def geometric_weights(squared: Array) -> Array:
    """Return normalized weights [K] for which the clients' weighted mean is their geometric median.

    Uses Weiszfeld's iterations with the smoothing from Pillutla, Kakade and Harchaoui, Robust
    Aggregation for Federated Learning (RFA), IEEE Transactions on Signal Processing 2022, Algorithm
    2. The distances from the weighted mean are computed from the clients' squared distances [K, K].
    """
    lower_bound = SMOOTHING * math.sqrt(squared[squared > 0].min(initial=np.inf))
    weights = np.full(len(squared), 1 / len(squared))
    for _ in range(STEPS):
        distance = np.sqrt(np.maximum(squared @ weights - weights @ squared @ weights / 2, 0.0))
        if distance.max() <= lower_bound:
            break
        new = 1 / np.maximum(distance, lower_bound)
        new /= new.sum()
        change, weights = np.abs(new - weights).max(), new
        if change <= TOLERANCE:
            break
    return weights


def krum(squared: Array, fraction: float) -> Array:
    """Return a mask [K] of the clients that Multi-Krum selects, given squared distances [K, K].

    Blanchard, El Mhamdi, Guerraoui and Stainer, Machine Learning with Adversaries, NeurIPS 2017,
    Sections 4 and 6. Selects the K - f clients with the smallest sum of distances to their K - f -
    2 nearest neighbors (at least one). Ties are resolved by order.
    """
    clients, f = len(squared), max_malicious(len(squared), fraction)
    if not f:
        return np.ones(clients, bool)
    neighbors = np.sort(np.where(np.eye(clients, dtype=bool), np.inf, squared), axis=1)
    score = neighbors[:, : max(clients - f - 2, 1)].sum(1)
    kept = np.zeros(clients, bool)
    kept[np.argsort(score, kind="stable")[: clients - f]] = True
    return kept


def filter_clients(squared: Array, fraction: float) -> Array:
    """Return a mask [K] of the clients that the filter selects, given squared distances [K, K].

    Diakonikolas, Kamath, Kane, Li, Moitra and Stewart, Being Robust (in High Dimensions) Can Be
    Practical, ICML 2017. While the largest variance along any direction exceeds a limit, the weight
    of each client is reduced by its contribution to the variance, as in `consensus.filter_weights`.

    Unlike in the published filter, the limit is derived from the typical distance between two
    clients, because the variance of honest replies is unknown. At most f clients are excluded, and
    only if their weight falls below MIN_WEIGHT. If all points are identical, all clients are
    selected.
    """
    clients, f = len(squared), max_malicious(len(squared), fraction)
    weights, limit = np.ones(clients), EXCESS * typical_distance(squared, fraction) / 2
    while f:
        variance, distance = _largest_variance(squared, weights)
        if variance <= limit or distance.max() <= 0:
            break
        lower = weights * (1 - distance / distance.max())
        if (lower < MIN_WEIGHT).sum() > f:
            break
        weights = lower
    kept: Array = weights >= MIN_WEIGHT
    return kept


def _largest_variance(squared: Array, weights: Array) -> tuple[float, Array]:
    """Return the largest variance along any direction, and the squared distances [K] along it.

    The inner products are computed from the squared distances [K, K] (classical scaling).
    """
    p = weights / weights.sum()
    row = squared @ p
    inner = (row[:, None] + row[None, :] - squared - p @ row) / 2
    root = np.sqrt(p)
    values, vectors = np.linalg.eigh(root[:, None] * inner * root[None, :])
    along = values[-1] * vectors[:, -1] ** 2
    return float(values[-1]), np.divide(along, p, out=np.zeros_like(along), where=p > 0)


# --- the function of each rule in `settings.defense.RULES`

Stacks = Callable[[str], Array]
"""Function that returns the values [K, ...] of K clients for the tensor with the given name."""


def _medians(
    stack: Stacks, names: Sequence[str], fraction: float, has_ids: bool
) -> Iterator[Array]:
    return (trimmed_mean(stack(name), 0.5) for name in names)


def _trimmed_means(
    stack: Stacks, names: Sequence[str], fraction: float, has_ids: bool
) -> Iterator[Array]:
    return (trimmed_mean(stack(name), fraction) for name in names)


def _geometric_medians(
    stack: Stacks, names: Sequence[str], fraction: float, has_ids: bool
) -> Iterator[Array]:
    """Yield the parts of the geometric median, computed over all tensors together.

    If some clients lack rows with ids, such as classes, each row has its own geometric median over
    the clients that have the row. With common weights, a client that sends few rows would have the
    most influence on these rows, because its distance from clients without them would be small.
    """
    total: Array = np.zeros(())
    by_row = False
    for name in names:
        values = stack(name)
        points = values.reshape(len(values), -1)
        total = total + np.nan_to_num(mean_squares(points)) * points.shape[1]
        by_row = by_row or (has_ids and bool(np.isnan(points).any()))
    if not by_row:
        weights = geometric_weights(total)
        yield from (weighted_mean(stack(name), weights) for name in names)
        return
    for name in names:
        values = stack(name)
        medians = np.full(values.shape[1:], np.nan)
        for row in range(values.shape[1]):
            points = values[:, row].reshape(len(values), -1)
            has_row = ~np.isnan(points).all(1)
            if has_row.any():
                own = points[has_row]
                median = weighted_mean(own, geometric_weights(mean_squares(own)))
                medians[row] = median.reshape(values.shape[2:])
        yield medians


SELECTIONS: Mapping[str, Callable[[Array, float], Array]] = {
    "krum": krum,
    "filter": filter_clients,
}
"""Functions of the rules that select: from the squared distances [K, K] and the fraction of
malicious clients to a mask [K] of the selected clients."""
COMBINATIONS: Mapping[str, Callable[[Stacks, Sequence[str], float, bool], Iterator[Array]]] = {
    "median": _medians,
    "trimmed-mean": _trimmed_means,
    "geometric-median": _geometric_medians,
}
"""Functions of the rules that combine: from the stacks of a field's tensors, their names, the
fraction of malicious clients, and whether rows have ids, to one robust value per tensor."""
