"""Federated distillation: the class means of all clients but one, and the loss they teach by.

Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and
Augmentation under Non-IID Private Data, Algorithm 1. F is a model's softmax output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedhet.algorithms.classwise import Teacher
from fedhet.base.arrays import Array

SMALLEST = 1e-12
"""The least probability of which a logarithm is taken."""
ROUNDING = 1e-4
"""How far the sum of a mean of probabilities may be from 1 by rounding."""


@dataclass(frozen=True)
class ClassTotals:
    """Sums over clients (line 12): classes [P] ascending, vectors [P, C], and clients [P] of each.

    In float64: what one client contributed can be subtracted again without a loss.
    """

    classes: Array
    vectors: Array
    clients: Array


def totals_of(parts: Sequence[tuple[Array, Array]], width: int) -> ClassTotals:
    """Return the sums of the clients' vectors of each class, of [K] classes and [K, `width`]."""
    present = [classes for classes, _ in parts]
    classes = np.unique(np.concatenate(present)) if parts else np.zeros(0, np.int64)
    vectors, clients = np.zeros((len(classes), width)), np.zeros(len(classes), np.int64)
    for own, values in parts:
        rows = np.searchsorted(classes, own)
        vectors[rows] += values
        clients[rows] += 1
    return ClassTotals(classes.astype(np.int64), vectors, clients)


def without(totals: ClassTotals, classes: Array, vectors: Array) -> tuple[Array, Array]:
    """Return the other clients' classes [Q] and their means [Q, C] (line 15).

    `classes` [K] and `vectors` [K, C] are what the one client contributed to `totals`; none, if it
    contributed nothing. The paper divides by M - 1, as all its M devices have all labels; here by
    the number of other clients that have the class (ours). A class that no other has is left out.
    """
    rows = np.searchsorted(totals.classes, classes)
    sums, clients = totals.vectors.copy(), totals.clients.copy()
    sums[rows] -= vectors
    clients[rows] -= 1
    others = clients > 0
    means = sums[others] / clients[others, None]
    return totals.classes[others], np.maximum(means, 0.0).astype(np.float32)


def nearest_distributions(vectors: Array) -> Array:
    """Return vectors [P, C] in float32, each as it is if it is a distribution, or the nearest one.

    Nearest by Euclidean distance (Duchi et al., Efficient Projections onto the l1-Ball for Learning
    in High Dimensions, ICML 2008, Fig. 1): of what is noised, the most likely. One of zeros becomes
    uniform.
    """
    given = vectors.astype(np.float64)
    whole = (given >= 0).all(1) & (np.abs(given.sum(1) - 1) <= ROUNDING)
    ordered = -np.sort(-given, axis=1)
    excess = ordered.cumsum(1) - 1
    kept = (ordered * np.arange(1, given.shape[1] + 1) > excess).sum(1)
    threshold = excess[np.arange(len(given)), kept - 1] / kept
    nearest = np.maximum(given - threshold[:, None], 0.0)
    chosen: Array = np.where(whole[:, None], given, nearest).astype(np.float32)
    return chosen


def class_cross_entropy(logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return the distillation regulariser per sample, [N]: the cross-entropy phi(F, teacher's F).

    Of the own logits [N, C] with the teacher's distribution of the sample's class (line 5); 0 for a
    class without one.
    """
    target = teacher.log_probabilities[labels].exp()
    return -(target * logits.float().log_softmax(1)).sum(1) * teacher.known[labels]
