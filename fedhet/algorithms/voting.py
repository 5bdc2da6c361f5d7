"""Pseudolabels by vote: CoFED's Algorithm 1, and the selection for a participant's label space.

Cao, Li, Sun, Yu and Guizani, Cross-Silo Heterogeneous Model Federated Multitask Learning, Sections
4.3 and 4.6.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedhet.base.arrays import Array

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
    """Return the pseudolabelled sets, [C, N] bool: row k is P_k (Algorithm 1).

    Instance x joins P_k if a share strictly above `threshold` of the participants whose label space
    holds c_k, by weight, predicts c_k for x (Eq. 18; the weights are Section 4.6's). An instance
    may join several sets. A participant that abstains still counts in the denominator: line 5
    counts the label spaces that hold c_k before anybody has voted. Sums run in the order of
    `votes`; with integer or equal weights, the order does not affect the result.
    """
    instances = len(votes[0].predictions) if votes else 0
    total = holding(votes, classes)[:, None]
    joined = np.zeros((classes, instances), bool)
    step = max(1, CELLS // max(classes, 1))
    for start in range(0, instances, step):
        count = _counts(votes, classes, slice(start, min(start + step, instances)))
        share = np.divide(count, total, out=np.zeros_like(count), where=total > 0)
        np.greater(share, threshold, out=joined[:, start : start + step])
    return joined


def holding(votes: Sequence[Vote], classes: int) -> Array:
    """Return TOTAL [C]: the weight of participants by class of their label space (line 5)."""
    total = np.zeros(classes)
    for vote in votes:
        total[vote.space] += vote.weight
    return total


def _counts(votes: Sequence[Vote], classes: int, block: slice) -> Array:
    """Return COUNT [C, block]: the weight of those that predict each class (lines 8 to 10)."""
    width = block.stop - block.start
    count = np.zeros((classes + 1) * width)  # row C is for abstentions
    place = np.arange(width)
    for vote in votes:
        # Each instance has one prediction, so no index appears twice and += adds correctly.
        count[vote.predictions[block].astype(np.intp) * width + place] += vote.weight
    return count.reshape(classes + 1, width)[:classes]


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
