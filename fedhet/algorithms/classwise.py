"""Class-wise features, logits and probabilities, averaged over clients, and what they teach.

Felo: Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section
3.1; FedHe, FedProto and FedTGP use its parts. FD, the class means of all clients but one: Jeong et
al., Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation
under Non-IID Private Data, Algorithm 1, whose F is a model's softmax output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms import FeatureNorm
from fedhet.algorithms.distillation import kl_divergence
from fedhet.base.arrays import Array
from fedhet.base.transfer import HOST, Numbers, all_to_device, to_device

SMALLEST = 1e-6
"""The mean square below which a feature vector is no longer scaled up, for `unit`: a vector of
zeros stays one, and gradients stay finite."""


@dataclass(frozen=True)
class ClassMeans:
    """Means over the samples of each class present: (s_y, p_y, y) of Section 3.1.1.

    classes [P] ascending, features [P, D], logits [P, C], counts [P] of samples (>= 1).
    """

    classes: Array
    features: Array
    logits: Array
    counts: Array


class ClassSums(nn.Module):
    """Running sums of features and logits per class, accumulated on the device over batches."""

    features: Tensor
    logits: Tensor
    counts: Tensor

    def __init__(self, classes: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("features", torch.zeros(classes, width, device=device))
        self.register_buffer("logits", torch.zeros(classes, classes, device=device))
        self.register_buffer("counts", torch.zeros(classes, device=device))

    def clear(self) -> None:
        """Forget all batches."""
        for total in (self.features, self.logits, self.counts):
            total.zero_()

    @torch.no_grad()
    def add(self, features: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: features [N, D], logits [N, C], labels [N]."""
        # Multiplying by one-hot labels is deterministic on every device; index_add_ is not.
        member = F.one_hot(labels, self.counts.shape[-1]).T.float()
        with torch.autocast(member.device.type, enabled=False):
            self.features += member @ features.detach().float()
            self.logits += member @ logits.detach().float()
        self.counts += member.sum(1)

    def means(self, least: int = 1) -> ClassMeans:
        """Return the means of the classes of which `least` samples were seen."""
        sums = {"features": self.features, "logits": self.logits, "counts": self.counts}
        there = all_to_device(sums, HOST)
        seen = there["counts"] >= least
        count = there["counts"][seen].unsqueeze(1)
        return ClassMeans(
            classes=seen.nonzero().flatten().numpy(),
            features=(there["features"][seen] / count).numpy(),
            logits=(there["logits"][seen] / count).numpy(),
            counts=there["counts"][seen].long().numpy(),
        )


def class_average(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array]:
    """Return the classes [P] of any client, ascending, and the weighted mean of each, [P, W].

    Each part, of which there must be one at least, is of one client: its classes [K], each once, a
    vector for each, [K, W], and its weight in the mean of each, [K] (> 0). A class's mean is over
    the clients that have it. The order of the parts may affect the last bit: pass them sorted.
    """
    classes = np.unique(np.concatenate([present for present, _, _ in parts]))
    total = np.zeros((len(classes), parts[0][1].shape[1]))
    for present, vectors, weights in parts:
        rows = np.searchsorted(classes, present)
        total[rows] += weights.astype(np.float64)[:, None] * vectors
    weight = class_totals(classes, [(present, weights) for present, _, weights in parts])
    return classes.astype(np.int64), (total / weight[:, None]).astype(np.float32)


def class_totals(classes: Array, parts: Sequence[tuple[Array, Array]]) -> Array:
    """Return the sum over the parts, each classes [K] and their numbers [K], for `classes` [P]."""
    total = np.zeros(len(classes))
    for present, numbers in parts:
        total[np.searchsorted(classes, present)] += numbers
    return total


def average(
    means: Sequence[ClassMeans], *, by_samples: bool, factors: Sequence[float] | None = None
) -> ClassMeans:
    """Return, per class, the mean over the clients that have it (Section 3.1.2).

    A client's weight is 1, or its samples of the class, times its factor. The returned counts are
    of samples. The order of `means` may affect the last bit of the result: pass them sorted.
    """
    if not means:
        none = np.zeros(0, np.int64)
        return ClassMeans(none, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32), none)
    weights = [m.counts if by_samples else np.ones(len(m.counts)) for m in means]
    if factors is not None:
        weights = [each * factor for each, factor in zip(weights, factors, strict=True)]
    pairs = list(zip(means, weights, strict=True))
    classes, features = class_average([(m.classes, m.features, w) for m, w in pairs])
    _, logits = class_average([(m.classes, m.logits, w) for m, w in pairs])
    counts = class_totals(classes, [(m.classes, m.counts) for m in means]).astype(np.int64)
    return ClassMeans(classes, features, logits, counts)


def capped(counts: Array, samples: int) -> Array:
    """Return a client's counts [P] of each class, lowered in proportion if they exceed `samples`.

    None falls below 1.
    """
    claimed = int(counts.sum())
    if claimed <= samples:
        return counts
    return np.maximum(counts * (samples / claimed), 1).astype(np.int64)


class Teacher(nn.Module):
    """The server's knowledge arranged by class, on the client's training device."""

    features: Tensor
    log_probabilities: Tensor
    known: Tensor

    def __init__(
        self, features: Tensor, log_probabilities: Tensor, known: Tensor, scale: float = 1.0
    ) -> None:
        """`features` [C, D]; `log_probabilities` [C, C], the log softmax of the logits.

        `known` [C]: has the class an entry? `scale`: the root mean square of all entries'
        features; 1 if they are all zero.
        """
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("log_probabilities", log_probabilities)
        self.register_buffer("known", known)
        self.scale = scale

    def targets(self, labels: Tensor) -> Tensor:
        """Return the target features for samples of these classes: [N] -> [N, D]."""
        return self.features[labels]

    @classmethod
    def of(
        cls,
        present: Array,
        features: Array,
        logits: Array | None,
        classes: int,
        device: torch.device,
    ) -> Teacher:
        """Arrange entries for the classes `present` [P], features [P, ...], logits [P, C].

        Rows of the other classes are zero and not known. Logits None: only features are taught.
        """
        if logits is None:
            logits = np.zeros((len(present), 0), np.float32)
        rows = torch.tensor(present, dtype=torch.long)
        all_features = torch.zeros(classes, *features.shape[1:])
        all_logits = torch.zeros(classes, logits.shape[1])
        known = torch.zeros(classes, dtype=torch.bool)
        all_features[rows] = torch.tensor(features)
        all_logits[rows] = torch.tensor(logits)
        known[rows] = True
        log_probabilities = all_logits.log_softmax(1)
        return cls(
            to_device(all_features, device),
            to_device(log_probabilities, device),
            to_device(known, device),
            float(np.sqrt(np.mean(np.square(features, dtype=np.float64)))) or 1.0
            if features.size
            else 1.0,
        )


class VariedTeacher(Teacher):
    """A teacher with several features per class, [C, S, D], as Velo's server can send.

    Section 3.1.3 pairs each sample with the entry of its class; here each sample of each batch is
    paired with one of the S features, drawn uniformly (ours).
    """

    def __init__(self, teacher: Teacher, generator: torch.Generator) -> None:
        """`teacher` has features [C, S, D]; `generator` draws."""
        super().__init__(teacher.features, teacher.log_probabilities, teacher.known, teacher.scale)
        choices = teacher.features.shape[1]
        self._picks = Numbers(
            lambda count: torch.randint(choices, (count,), generator=generator),
            teacher.features.device,
        )

    def targets(self, labels: Tensor) -> Tensor:
        """Return a random feature of its class for each sample: [N] -> [N, D]."""
        return self.features[labels, self._picks.take(len(labels))]


def newest(classes: Array, most: int) -> Array:
    """Return the rows of the last `most` entries of each class, ascending.

    classes [N] are in order of arrival.
    """
    backwards = classes[::-1]
    by_class = np.argsort(backwards, kind="stable")
    ordered = backwards[by_class]
    age = np.arange(len(classes)) - np.searchsorted(ordered, ordered)
    return np.sort(len(classes) - 1 - by_class[age < most])


@dataclass(frozen=True)
class Terms:
    """How the terms of Eq. 1 are weighed and measured; the defaults are the printed form.

    The loss is l_ce + alpha (feature l_mse + logit l_kl). The paper has one weight, alpha. Ours:
    `feature` and `logit`, which weigh one term against the other, and `norm`, the scale of l_mse.
    """

    alpha: float = 1.0
    feature: float = 1.0
    logit: float = 1.0
    norm: FeatureNorm = "none"


def class_feature_loss(
    features: Tensor, labels: Tensor, teacher: Teacher, norm: FeatureNorm = "none"
) -> Tensor:
    """Return l_mse of Felo's Eq. 1 per sample, [N]: its features against its class's entry.

    The mean over the D components; 0 if the teacher has no entry for the class. FedHe, FedProto and
    FedTGP (`distance = mse`) use it too. The printed form of Felo's Eq. 1 is `none`. Architectures
    differ in the scale of their features, and a mean over samples is shorter than the samples are;
    hence two other scales (ours):

    - `rms`: in units of the entries' root mean square, one number for all classes and components.
      The term weighs the same whatever scale the clients' features have settled on. Lengths still
      matter: a sample is drawn to its entry's length as well as to its direction.
    - `unit`: every vector, a sample's and an entry's, at a root mean square of 1. Directions alone
      are compared.
    """
    own, target = features.float(), teacher.targets(labels)
    if norm == "unit":  # only the direction is left; the gradient passes through the division
        own, target = (
            vectors * (vectors.square().mean(-1, keepdim=True) + SMALLEST).rsqrt()
            for vectors in (own, target)
        )
    elif norm == "rms":
        own, target = own / teacher.scale, target / teacher.scale
    return (own - target).square().mean(1) * teacher.known[labels]


def class_mean_distance(features: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return the mean distance of a batch's class means to the entries, a scalar: FedTGP's Eq. 11.

    The Euclidean distance, of the mean features [D] of the batch's samples of a class to the entry
    of the class. Each class in the batch that has an entry counts once; 0 if no class has one. The
    gradient of a distance has length 1, and is 0 where a mean coincides with its entry.
    """
    member = F.one_hot(labels, len(teacher.known)).T.float()
    with torch.autocast(member.device.type, enabled=False):
        counts = member.sum(1)
        means = (member @ features.float()) / counts.clamp(min=1).unsqueeze(1)
        gaps = torch.linalg.vector_norm(means - teacher.features, dim=1)
    compared = (counts > 0) & teacher.known
    mean: Tensor = (gaps * compared).sum() / compared.sum().clamp(min=1)
    return mean


def class_logit_loss(logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return l_kl of Felo's Eq. 1 per sample, [N]: KL(teacher's class logits || own logits).

    0 if the teacher has no entry for the class.
    """
    own = logits.float().log_softmax(1)
    target = teacher.log_probabilities[labels]
    divergence = kl_divergence(own, target).sum(1)
    return divergence * teacher.known[labels]


def felo_loss(
    features: Tensor, logits: Tensor, labels: Tensor, teacher: Teacher | None, terms: Terms
) -> Tensor:
    """Return Felo's Eq. 1, a scalar: the mean of l_ce + alpha (l_mse + l_kl), weighed by `terms`.

    Cross-entropy alone without a teacher (a client's first participation), and for samples whose
    class has no entry.
    """
    loss = F.cross_entropy(logits.float(), labels)
    if teacher is None:
        return loss
    mse = class_feature_loss(features, labels, teacher, terms.norm)
    kl = class_logit_loss(logits, labels, teacher)
    return loss + terms.alpha * torch.mean(terms.feature * mse + terms.logit * kl)


MIN_PROBABILITY = 1e-12
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
    """Return the distillation regularizer per sample, [N]: the cross-entropy phi(F, teacher's F).

    Of the own logits [N, C] with the teacher's distribution of the sample's class (line 5); 0 for a
    class without one.
    """
    target = teacher.log_probabilities[labels].exp()
    return -(target * logits.float().log_softmax(1)).sum(1) * teacher.known[labels]
