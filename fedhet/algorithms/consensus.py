"""Consensus of several models: from K clients' scores [K, R, C] on R samples to one [R, C].

Means (FedMD, DS-FL), entropy reduction (DS-FL), and means that a minority of hostile clients cannot
move far (Cronus). Computed in float64, returned in float32.
"""

from __future__ import annotations

import math

import numpy as np

from fedhet.base.arrays import Array

DEVIATIONS = 3.0
"""How many standard deviations the filter allows: the published code filters above a variance of 9,
at sigma = 1."""
MAJORITY = 0.5
"""Least share of the clients' weight that the filter leaves: honest clients are the majority."""
BLOCK = 1024
"""Samples that the filter treats at once, to bound its memory."""


def mean_scores(answers: Array) -> Array:
    """Return the mean over clients.

    Li and Wang, FedMD, Algorithm 1, "Aggregate"; Itahara et al., DS-FL, simple aggregation (SA).
    """
    mean: Array = answers.mean(0, dtype=np.float64).astype(np.float32)
    return mean


def entropy_reduced(probabilities: Array, temperature: float) -> Array:
    """Return softmax(mean over clients / T) of probabilities [K, R, C]: ERA of Itahara et al.

    The lower T, the lower the entropy. For T to infinity it goes to the uniform distribution: the
    mean of the probabilities is not a limit of it, but is `mean_scores`.
    """
    scaled = probabilities.mean(0, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max(1, keepdims=True))
    reduced: Array = (powers / powers.sum(1, keepdims=True)).astype(np.float32)
    return reduced


def median_scores(probabilities: Array) -> Array:
    """Return the coordinate-wise median over clients of probabilities [K, R, C], normalised."""
    return _normalised(np.median(probabilities.astype(np.float64), axis=0), probabilities)


def trimmed_scores(probabilities: Array, share: float) -> Array:
    """Return the coordinate-wise trimmed mean of probabilities [K, R, C], normalised.

    Of each coordinate the `share` of the clients with the lowest values, and as many with the
    highest, are left out, rounded up; at least one or two values in the middle remain.
    """
    clients = len(probabilities)
    cut = min(math.ceil(share * clients), (clients - 1) // 2)
    ordered = np.sort(probabilities.astype(np.float64), axis=0)
    return _normalised(ordered[cut : clients - cut].mean(0), probabilities)


def filter_weights(points: Array, sigma: float) -> Array:
    """Return the weights [K, R], in [0, 1], that the filter gives to each client on each sample.

    Diakonikolas, Kamath, Kane, Li, Moitra and Stewart, Being Robust (in High Dimensions) Can Be
    Practical, ICML 2017: the filter for distributions of bounded second moment, on each sample's K
    vectors of R^C. While the variance along the direction v in which it is largest is above 9
    sigma^2, weights fall by the factor 1 - (v . (x - mean))^2 / the largest of these. So the
    farthest client loses its whole weight. The published filter instead removes the clients beyond
    a random threshold; this one draws nothing (ours). It stops on a sample where it would leave
    less than half of the weight: no majority agrees there (ours).
    """
    blocks = range(0, points.shape[1], BLOCK)
    parts = [_filter_weights(points[:, start : start + BLOCK], sigma) for start in blocks]
    return np.concatenate(parts, axis=1) if parts else np.ones(points.shape[:2])


def _filter_weights(points: Array, sigma: float) -> Array:
    x = points.astype(np.float64).transpose(1, 0, 2)
    weights: Array = np.ones(x.shape[:2])
    going = np.arange(len(x))
    while len(going):
        variance, distance = _largest_variance(x[going], weights[going])
        odd = variance > (DEVIATIONS * sigma) ** 2
        going, distance = going[odd], distance[odd]
        lower = weights[going] * (1 - distance / distance.max(1, keepdims=True))
        agreed = lower.sum(1) >= MAJORITY * len(points)
        going = going[agreed]
        weights[going] = lower[agreed]
    return weights.T


def _largest_variance(x: Array, weights: Array) -> tuple[Array, Array]:
    """Return the variance [R] along the direction v in which it is largest, and distances along v.

    Of points x [R, K, C] with weights [R, K]. The distances, [R, K], are squared and from the mean;
    0 for points without weight. With the points' K x K matrix of inner products, which has the
    covariance's eigenvalues, memory does not grow with C^2.
    """
    total = weights.sum(1)
    centred = x - (weighted_sum(x, weights) / total[:, None])[:, None]
    scaled = np.sqrt(weights)[..., None] * centred
    values, vectors = np.linalg.eigh(scaled @ scaled.transpose(0, 2, 1) / total[:, None, None])
    variance, top = values[:, -1], vectors[..., -1]
    along = (variance * total)[:, None] * top**2
    return variance, np.divide(along, weights, out=np.zeros_like(along), where=weights > 0)


def weighted_sum(x: Array, weights: Array) -> Array:
    """Return the sum over K of points x [R, K, C] times weights [R, K]: [R, C]."""
    summed: Array = (weights[:, None] @ x)[:, 0]
    return summed


def weighted_scores(points: Array, weights: Array) -> Array:
    """Return the mean over clients of points [K, R, C] with weights [K, R] of sum above 0."""
    x = points.astype(np.float64).transpose(1, 0, 2)
    mean: Array = weighted_sum(x, weights.T) / weights.sum(0)[:, None]
    return mean.astype(np.float32)


def _normalised(scores: Array, probabilities: Array) -> Array:
    """Return scores [R, C] that sum to 1 (ours); the clients' mean where all of a row are 0."""
    total = scores.sum(1, keepdims=True)
    mean = probabilities.mean(0, dtype=np.float64)
    whole: Array = np.divide(scores, total, out=mean, where=total > 0)
    return whole.astype(np.float32)
