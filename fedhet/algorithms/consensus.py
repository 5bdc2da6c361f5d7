"""Consensus of several models: from K clients' scores or votes on samples to one of each.

Scores are [K, R, C] on R samples: means (FedMD, DS-FL), entropy reduction (DS-FL), and means that a
minority of malicious clients cannot move far (Cronus). Computed in float64, returned in float32.

Votes make pseudolabels: CoFED's Algorithm 1, and the selection for a participant's label space
(Cao, Li, Sun, Yu and Guizani, Cross-Silo Heterogeneous Model Federated Multitask Learning, Sections
4.3 and 4.6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

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
    """Return the coordinate-wise median over clients of probabilities [K, R, C], normalized."""
    return _normalized(np.median(probabilities.astype(np.float64), axis=0), probabilities)


def trimmed_scores(probabilities: Array, share: float) -> Array:
    """Return the coordinate-wise trimmed mean of probabilities [K, R, C], normalized.

    Of each coordinate the `share` of the clients with the lowest values, and as many with the
    highest, are left out, rounded up; at least one or two values in the middle remain.
    """
    clients = len(probabilities)
    cut = min(math.ceil(share * clients), (clients - 1) // 2)
    ordered = np.sort(probabilities.astype(np.float64), axis=0)
    return _normalized(ordered[cut : clients - cut].mean(0), probabilities)


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
    found = np.ones(points.shape[1::-1])
    for start in range(0, points.shape[1], BLOCK):
        x = points[:, start : start + BLOCK].astype(np.float64).transpose(1, 0, 2)
        weights = found[start : start + BLOCK]
        going = np.arange(len(x))
        while len(going):
            variance, distance = _largest_variance(x[going], weights[going])
            odd = variance > (DEVIATIONS * sigma) ** 2
            going, distance = going[odd], distance[odd]
            lower = weights[going] * (1 - distance / distance.max(1, keepdims=True))
            agreed = lower.sum(1) >= MAJORITY * len(points)
            going = going[agreed]
            weights[going] = lower[agreed]
    return found.T


def _largest_variance(x: Array, weights: Array) -> tuple[Array, Array]:
    """Return the variance [R] along the direction v in which it is largest, and distances along v.

    Of points x [R, K, C] with weights [R, K]. The distances, [R, K], are squared and from the mean;
    0 for points without weight. With the points' K x K matrix of inner products, which has the
    covariance's eigenvalues, memory does not grow with C^2.
    """
    total = weights.sum(1)
    centered = x - ((weights[:, None] @ x)[:, 0] / total[:, None])[:, None]
    scaled = np.sqrt(weights)[..., None] * centered
    values, vectors = np.linalg.eigh(scaled @ scaled.transpose(0, 2, 1) / total[:, None, None])
    variance, top = values[:, -1], vectors[..., -1]
    along = (variance * total)[:, None] * top**2
    return variance, np.divide(along, weights, out=np.zeros_like(along), where=weights > 0)


def weighted_scores(points: Array, weights: Array) -> Array:
    """Return the mean over clients of points [K, R, C] with weights [K, R] of sum above 0."""
    x = points.astype(np.float64).transpose(1, 0, 2)
    mean: Array = (weights.T[:, None] @ x)[:, 0] / weights.sum(0)[:, None]
    return mean.astype(np.float32)


def _normalized(scores: Array, probabilities: Array) -> Array:
    """Return scores [R, C] that sum to 1 (ours); the clients' mean where all of a row are 0."""
    total = scores.sum(1, keepdims=True)
    mean = probabilities.mean(0, dtype=np.float64)
    whole: Array = np.divide(scores, total, out=mean, where=total > 0)
    return whole.astype(np.float32)


CELLS = 2**17
"""Size of a block of counts (classes x instances), chosen to fit the processor's cache."""


@dataclass(frozen=True)
class Vote:
    """One participant's vote: predictions [N] within its label space [P], and its weight.

    A prediction of C, the number of classes, is an abstention.
    """

    predictions: Array
    space: Array
    weight: float = 1.0


def aggregate(votes: Sequence[Vote], classes: int, threshold: float) -> Array:
    """Return the pseudolabeled sets, [C, N] bool: row k is P_k (Algorithm 1).

    Instance x joins P_k if a share strictly above `threshold` of the participants whose label space
    holds c_k, by weight, predicts c_k for x (Eq. 18; the weights are Section 4.6's). An instance
    may join several sets. A participant that abstains still counts in the denominator: line 5
    counts the label spaces that hold c_k before anybody has voted. Sums run in the order of
    `votes`; with integer or equal weights, the order does not affect the result.
    """
    instances = len(votes[0].predictions) if votes else 0
    holders = np.zeros(classes)  # TOTAL, the weight by class of the label spaces (line 5)
    for vote in votes:
        holders[vote.space] += vote.weight
    total = holders[:, None]
    joined = np.zeros((classes, instances), bool)
    step = max(1, CELLS // max(classes, 1))
    for start in range(0, instances, step):
        width = min(step, instances - start)
        # COUNT [C, block], the weight of those that predict each class (lines 8 to 10); row C is
        # for abstentions. Each instance has one prediction, so no index appears twice.
        counts, place = np.zeros((classes + 1) * width), np.arange(width)
        for vote in votes:
            predicted = vote.predictions[start : start + width].astype(np.intp)
            counts[predicted * width + place] += vote.weight
        count = counts.reshape(classes + 1, width)[:classes]
        share = np.divide(count, total, out=np.zeros_like(count), where=total > 0)
        np.greater(share, threshold, out=joined[:, start : start + step])
    return joined


def undecided(probabilities: Array, margin: float) -> Array:
    """Return, as bool [N], where the two best of the probabilities [N, C] differ by at most margin.

    There a participant abstains. The paper predicts everywhere; the authors' published script
    leaves these predictions out, with a margin of 0.3. Raises ValueError for fewer than two
    classes.
    """
    if probabilities.shape[1] < 2:
        raise ValueError(f"{probabilities.shape[1]} class: two or more are needed")
    second, best = np.partition(probabilities, -2, axis=1)[:, -2:].T
    undecided: Array = best - second <= margin
    return undecided


def for_space(joined: Array, space: Array) -> tuple[Array, Array]:
    """Return R_i for a label space [P]: instances [M], ascending, and their classes [M] (Eq. 19).

    Instances in more than one of these P_k are removed (Section 4.3, last paragraph).
    """
    own = joined[space]
    kept = np.flatnonzero(own.sum(0) == 1)
    return kept, np.asarray(space)[own[:, kept].argmax(0)]


def conflicts(joined: Array, space: Array) -> int:
    """Return the number of instances in more than one P_k of a label space [P]."""
    return int((joined[space].sum(0) > 1).sum())
