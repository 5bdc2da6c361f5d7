"""Consensus of several models on public samples, computed from average scores or from votes.

- FedMD: mean of scores. Li and Wang, FedMD, Algorithm 1, "Aggregate".
- DS-FL: mean (SA) or entropy reduction (ERA) of probabilities. Itahara et al., DS-FL.
- Cronus: robust means, which a minority of malicious clients cannot shift far.
- KT-pFL: learned combinations. Zhang et al., Parameterized Knowledge Transfer for Personalized
  Federated Learning, Section 3.
- CoFED: pseudolabels from votes. Cao, Li, Sun, Yu and Guizani, Cross-Silo Heterogeneous Model
  Federated Multitask Learning, Algorithm 1, Sections 4.3 and 4.6.

Shapes: K clients, R public samples, C classes; scores are [K, R, C]. Averages are computed in
float64 and returned in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.algorithms.classwise import nearest_distributions
from fedhet.base.arrays import Array

DEVIATIONS = 3.0
"""Number of standard deviations that the filter tolerates. The published code filters if the
variance exceeds 9 and assumes sigma = 1."""
MAJORITY = 0.5
"""Minimum fraction of the clients' weight that the filter keeps, because most clients are assumed
to be honest."""
BLOCK = 1024
"""Number of samples to filter at the same time, which bounds the memory."""


def mean_scores(answers: Array) -> Array:
    """Return the mean [R, C] of the clients' scores [K, R, C].

    This is "Aggregate" in FedMD's Algorithm 1, and simple aggregation (SA) in DS-FL.
    """
    mean: Array = answers.mean(0, dtype=np.float64).astype(np.float32)
    return mean


def entropy_reduced(probabilities: Array, temperature: float) -> Array:
    """Return softmax(mean / T) of the clients' probabilities [K, R, C], of shape [R, C].

    This is entropy reduction aggregation (ERA) of Itahara et al. A lower temperature T gives a
    lower entropy. As T goes to infinity, the result approaches the uniform distribution instead of
    the mean.
    """
    scaled = probabilities.mean(0, dtype=np.float64) / temperature
    powers = np.exp(scaled - scaled.max(1, keepdims=True))
    reduced: Array = (powers / powers.sum(1, keepdims=True)).astype(np.float32)
    return reduced


def median_scores(probabilities: Array) -> Array:
    """Return the normalized coordinate-wise median [R, C] of probabilities [K, R, C]."""
    return _normalized(np.median(probabilities.astype(np.float64), axis=0), probabilities)


def trimmed_scores(probabilities: Array, fraction: float) -> Array:
    """Return the normalized coordinate-wise trimmed mean [R, C] of probabilities [K, R, C].

    For each coordinate, the lowest and the highest values are removed. At each end, ceil(`fraction`
    * K) values are removed, but at least one value remains if K is odd, and at least two if K is
    even.
    """
    clients = len(probabilities)
    cut = min(math.ceil(fraction * clients), (clients - 1) // 2)
    ordered = np.sort(probabilities.astype(np.float64), axis=0)
    return _normalized(ordered[cut : clients - cut].mean(0), probabilities)


def filter_weights(points: Array, sigma: float) -> Array:
    """Return the weight of each client for each sample, of shape [K, R], in [0, 1].

    This is the filter for distributions with bounded second moments from Diakonikolas, Kamath,
    Kane, Li, Moitra and Stewart, Being Robust (in High Dimensions) Can Be Practical, ICML 2017. The
    filter is applied to each sample's K vectors in R^C. Let v be the direction of the largest
    variance. While the variance along v exceeds 9 sigma^2, the weight of a client at x is
    multiplied by 1 - d / max d, where d = (v . (x - mean))^2. The farthest client therefore loses
    all weight.

    Unlike the published filter, which removes the clients beyond a random threshold, this filter is
    deterministic. It also stops if less than half of the weight would remain, because then no
    majority agrees on the sample.
    """
    all_weights = np.ones(points.shape[1::-1])
    for start in range(0, points.shape[1], BLOCK):
        x = points[:, start : start + BLOCK].astype(np.float64).transpose(1, 0, 2)
        weights = all_weights[start : start + BLOCK]
        active = np.arange(len(x))
        while len(active):
            variance, distance = _largest_variance(x[active], weights[active])
            exceeds = variance > (DEVIATIONS * sigma) ** 2
            active, distance = active[exceeds], distance[exceeds]
            lower = weights[active] * (1 - distance / distance.max(1, keepdims=True))
            has_majority = lower.sum(1) >= MAJORITY * len(points)
            active = active[has_majority]
            weights[active] = lower[has_majority]
    return all_weights.T


def _largest_variance(x: Array, weights: Array) -> tuple[Array, Array]:
    """Return the largest variance [R] along any direction v, and the distances [R, K] along v.

    The distances are squared distances from the mean, and 0 for points without weight. The
    eigenvalues are computed from the K x K matrix of inner products, which has the same nonzero
    eigenvalues as the covariance, so that the memory does not grow with C^2.

    Args:
        x: Points, of shape [R, K, C].
        weights: Weights of the points, of shape [R, K].
    """
    total = weights.sum(1)
    centered = x - ((weights[:, None] @ x)[:, 0] / total[:, None])[:, None]
    scaled = np.sqrt(weights)[..., None] * centered
    values, vectors = np.linalg.eigh(scaled @ scaled.transpose(0, 2, 1) / total[:, None, None])
    variance, top = values[:, -1], vectors[..., -1]
    along = (variance * total)[:, None] * top**2
    return variance, np.divide(along, weights, out=np.zeros_like(along), where=weights > 0)


def weighted_scores(points: Array, weights: Array) -> Array:
    """Return the weighted mean [R, C] of points [K, R, C] with weights [K, R].

    Each sample's weights must have a positive sum.
    """
    x = points.astype(np.float64).transpose(1, 0, 2)
    mean: Array = (weights.T[:, None] @ x)[:, 0] / weights.sum(0)[:, None]
    return mean.astype(np.float32)


MIN_PROBABILITY = 1e-12
"""Lower bound of probabilities in logarithms (not in the paper), because log 0 is infinite."""


def updated_coefficients(
    coefficients: Array, probabilities: Array, rate: float, rho: float
) -> Array:
    """Return KT-pFL's coefficients after a step of gradient descent, of shape [K, K].

    Row n descends on KL(sum_m c_nm s_m || s_n), averaged over public samples, plus rho times
    ||c_n - 1/K||^2. The step changes only the coefficients, for fixed soft predictions s. Each row
    is then projected onto the probability simplex, because the combination must be a distribution.
    The paper does not state a constraint; the authors' code applies a softmax instead.

    Args:
        coefficients: Coefficients c, of shape [K, K]; each row has the sum 1.
        probabilities: Soft predictions s of the clients, of shape [K, R, C].
        rate: Learning rate.
        rho: Weight of the penalty.
    """
    exact = probabilities.astype(np.float64)
    logs = np.log(np.maximum(exact, MIN_PROBABILITY))
    gradient = 2 * rho * (coefficients - 1 / len(exact))
    for own, row in enumerate(coefficients):
        combined = np.tensordot(row, exact, 1)
        # The derivative for c_nm is sum_c s_m (log(combined / s_n) + 1). The constant 1, summed
        # over a distribution, does not affect the projection.
        ratio = np.log(np.maximum(combined, MIN_PROBABILITY)) - logs[own]
        gradient[own] += np.tensordot(exact, ratio, 2) / exact.shape[1]
    return nearest_distributions(coefficients - rate * gradient).astype(np.float64)


def _normalized(scores: Array, probabilities: Array) -> Array:
    """Normalize each row of scores [R, C] to sum to 1 (not in the papers).

    All-zero rows become the mean of the clients' probabilities [K, R, C].
    """
    total = scores.sum(1, keepdims=True)
    mean = probabilities.mean(0, dtype=np.float64)
    normalized: Array = np.divide(scores, total, out=mean, where=total > 0)
    return normalized.astype(np.float32)


CELLS = 2**17
"""Number of counts (classes x instances) in a block that fits into the CPU cache."""


@dataclass(frozen=True)
class Vote:
    """Vote of one participant on the classes of all instances.

    Attributes:
        predictions: Predicted class of each instance, of shape [N]; C means an abstention.
        space: Label space of the participant, of shape [P].
        weight: Credibility weight (Section 4.6).
    """

    predictions: Array
    space: Array
    weight: float = 1.0


def aggregate(votes: Sequence[Vote], classes: int, threshold: float) -> Array:
    """Count the votes, and return the pseudolabeled sets (Algorithm 1).

    Instance x joins the set P_k if more than a fraction `threshold` of the participants with class
    c_k, counted by weight, predict c_k for x (Eq. 18). An instance can join several sets. A
    participant that abstains counts in the denominator, because line 5 counts the label spaces
    before the votes. The order of the votes does not affect the result if the weights are integers
    or equal.

    Args:
        votes: Votes of the participants.
        classes: Number of classes C.
        threshold: Fraction alpha.

    Returns:
        A mask of shape [C, N]; row k is the set P_k.
    """
    instances = len(votes[0].predictions) if votes else 0
    # TOTAL is the total weight of the participants with each class (line 5).
    weights = np.zeros(classes)
    for vote in votes:
        weights[vote.space] += vote.weight
    total = weights[:, None]
    sets = np.zeros((classes, instances), bool)
    step = max(1, CELLS // max(classes, 1))
    for start in range(0, instances, step):
        width = min(step, instances - start)
        # COUNT [C + 1, block] is the weight of the participants that predict each class (lines 8 to
        # 10); row C contains abstentions. A vote has one prediction per instance, so its indices
        # are distinct.
        counts, columns = np.zeros((classes + 1) * width), np.arange(width)
        for vote in votes:
            predicted = vote.predictions[start : start + width].astype(np.intp)
            counts[predicted * width + columns] += vote.weight
        count = counts.reshape(classes + 1, width)[:classes]
        fraction = np.divide(count, total, out=np.zeros_like(count), where=total > 0)
        np.greater(fraction, threshold, out=sets[:, start : start + step])
    return sets


def undecided(probabilities: Array, margin: float) -> Array:
    """Return a mask [N] of the instances for which a participant abstains.

    A participant abstains if the two highest probabilities for an instance differ by at most
    `margin`. The paper has no abstentions; the authors' published script uses a margin of 0.3.

    Args:
        probabilities: Probabilities of the classes, of shape [N, C] with C >= 2.
        margin: Maximum difference at which the participant abstains.

    Raises:
        ValueError: If there are fewer than two classes.
    """
    if probabilities.shape[1] < 2:
        raise ValueError(f"expected at least two classes, got {probabilities.shape[1]}")
    second, best = np.partition(probabilities, -2, axis=1)[:, -2:].T
    abstains: Array = best - second <= margin
    return abstains


def labels_in_space(sets: Array, space: Array) -> tuple[Array, Array]:
    """Return the pseudolabeled instances R_i for a label space [P] (Eq. 19).

    Instances in more than one P_k of the label space are removed (Section 4.3, last paragraph).

    Returns:
        The instances [M], ascending, and their classes [M].
    """
    in_space = sets[space]
    instances = np.flatnonzero(in_space.sum(0) == 1)
    return instances, np.asarray(space)[in_space[:, instances].argmax(0)]


def count_conflicts(sets: Array, space: Array) -> int:
    """Return the number of instances in more than one P_k of a label space [P]."""
    return int((sets[space].sum(0) > 1).sum())
