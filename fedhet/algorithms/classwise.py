"""Class-wise features, logits and probabilities: averages over clients, and losses.

- Felo: Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section
  3.1. FedHe, FedProto and FedTGP use parts of this algorithm.
- FD: Jeong et al., Communication-Efficient On-Device Machine Learning: Federated Distillation and
  Augmentation under Non-IID Private Data, Algorithm 1. F denotes a model's softmax output.

Shapes: N samples, C classes, P classes on a client, features of width D.
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

MIN_MEAN_SQUARE = 1e-6
"""Constant added to mean squares by the norm "unit", so that zero vectors stay zero and gradients
stay finite."""


@dataclass(frozen=True)
class ClassMeans:
    """Class means of one client: (s_y, p_y, y) in Section 3.1.1.

    Attributes:
        classes: Classes with at least one sample, ascending, of shape [P].
        features: Mean features of each class, of shape [P, D].
        logits: Mean logits of each class, of shape [P, C].
        counts: Number of samples of each class, of shape [P].
    """

    classes: Array
    features: Array
    logits: Array
    counts: Array


class ClassSums(nn.Module):
    """Sums of features and logits per class, accumulated over batches on the device."""

    features: Tensor
    logits: Tensor
    counts: Tensor

    def __init__(self, classes: int, width: int, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("features", torch.zeros(classes, width, device=device))
        self.register_buffer("logits", torch.zeros(classes, classes, device=device))
        self.register_buffer("counts", torch.zeros(classes, device=device))

    def clear(self) -> None:
        """Reset all sums to zero."""
        for total in (self.features, self.logits, self.counts):
            total.zero_()

    @torch.no_grad()
    def add(self, features: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch of features [N, D], logits [N, C] and labels [N]."""
        # Multiply by one-hot labels, because index_add_ is not deterministic on every device.
        member = F.one_hot(labels, self.counts.shape[-1]).T.float()
        with torch.autocast(member.device.type, enabled=False):
            self.features += member @ features.detach().float()
            self.logits += member @ logits.detach().float()
        self.counts += member.sum(1)

    def means(self, min_count: int = 1) -> ClassMeans:
        """Return the means of the classes with at least `min_count` samples."""
        sums = {"features": self.features, "logits": self.logits, "counts": self.counts}
        on_host = all_to_device(sums, HOST)
        present = on_host["counts"] >= min_count
        count = on_host["counts"][present].unsqueeze(1)
        return ClassMeans(
            classes=present.nonzero().flatten().numpy(),
            features=(on_host["features"][present] / count).numpy(),
            logits=(on_host["logits"][present] / count).numpy(),
            counts=on_host["counts"][present].long().numpy(),
        )


def class_average(parts: Sequence[tuple[Array, Array, Array]]) -> tuple[Array, Array]:
    """Average vectors per class over the clients that have the class.

    The order of the clients may affect the last bit of the result, so sort them.

    Args:
        parts: One entry for each client (at least one): the client's distinct classes [K], a vector
            for each class [K, W], and the client's positive weight in each mean [K].

    Returns:
        The classes of all clients [P], ascending, and their weighted means [P, W].
    """
    classes = np.unique(np.concatenate([present for present, _, _ in parts]))
    total = np.zeros((len(classes), parts[0][1].shape[1]))
    for present, vectors, weights in parts:
        rows = np.searchsorted(classes, present)
        total[rows] += weights.astype(np.float64)[:, None] * vectors
    weight = class_totals(classes, [(present, weights) for present, _, weights in parts])
    return classes.astype(np.int64), (total / weight[:, None]).astype(np.float32)


def class_totals(classes: Array, parts: Sequence[tuple[Array, Array]]) -> Array:
    """Sum the clients' values per class, and return the sums for `classes` [P].

    Each entry in `parts` contains the classes [K] and the values [K] of one client.
    """
    total = np.zeros(len(classes))
    for present, numbers in parts:
        total[np.searchsorted(classes, present)] += numbers
    return total


def average(
    means: Sequence[ClassMeans], *, by_samples: bool, factors: Sequence[float] | None = None
) -> ClassMeans:
    """Average class means over the clients that have the class (Section 3.1.2).

    The order of `means` may affect the last bit of the result, so sort them by client.

    Args:
        means: The clients' class means.
        by_samples: Whether to weight clients by their number of samples in the class, instead of
            equally.
        factors: Factors by which the clients' weights are multiplied, or None for unchanged
            weights.

    Returns:
        The averages, with the clients' total numbers of samples as counts.
    """
    if not means:
        none = np.zeros(0, np.int64)
        return ClassMeans(none, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.float32), none)
    weights = [m.counts if by_samples else np.ones(len(m.counts)) for m in means]
    if factors is not None:
        weights = [weight * factor for weight, factor in zip(weights, factors, strict=True)]
    pairs = list(zip(means, weights, strict=True))
    classes, features = class_average([(m.classes, m.features, w) for m, w in pairs])
    _, logits = class_average([(m.classes, m.logits, w) for m, w in pairs])
    counts = class_totals(classes, [(m.classes, m.counts) for m in means]).astype(np.int64)
    return ClassMeans(classes, features, logits, counts)


def cap_counts(counts: Array, samples: int) -> Array:
    """Scale down a client's class counts [P] so that their sum is at most about `samples`.

    Every count stays at least 1.
    """
    reported = int(counts.sum())
    if reported <= samples:
        return counts
    return np.maximum(counts * (samples / reported), 1).astype(np.int64)


class Teacher(nn.Module):
    """Features and probabilities from the server, indexed by class, on the training device."""

    features: Tensor
    log_probabilities: Tensor
    known: Tensor

    def __init__(
        self, features: Tensor, log_probabilities: Tensor, known: Tensor, scale: float = 1.0
    ) -> None:
        """Create a teacher.

        Args:
            features: Features of each class, of shape [C, D].
            log_probabilities: Log softmax of the logits of each class, of shape [C, C].
            known: Mask of the classes that the server has sent, of shape [C].
            scale: Root mean square of the features, or 1 if they are all zero.
        """
        super().__init__()
        self.register_buffer("features", features)
        self.register_buffer("log_probabilities", log_probabilities)
        self.register_buffer("known", known)
        self.scale = scale

    def targets(self, labels: Tensor) -> Tensor:
        """Return the target features [N, D] for samples with labels [N]."""
        return self.features[labels]

    @classmethod
    def from_tensors(
        cls,
        present: Array,
        features: Array,
        logits: Array | None,
        classes: int,
        device: torch.device,
    ) -> Teacher:
        """Create a teacher from the features and logits that the server has sent.

        Args:
            present: Classes that were sent, of shape [P]. The rows of other classes are zero.
            features: Features of each class, of shape [P, ...].
            logits: Logits of each class, of shape [P, C], or None for a teacher with features only.
            classes: Number of classes C.
            device: Device of the tensors.
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
    """Teacher for Velo, with S feature vectors per class: `features` has the shape [C, S, D].

    In Section 3.1.3, each sample is paired with the features of its class. Unlike in the paper,
    each sample in a batch is paired with one of the S vectors, drawn uniformly at random.
    """

    def __init__(self, teacher: Teacher, generator: torch.Generator) -> None:
        """Wrap a teacher with features [C, S, D]; `generator` draws the features of each sample."""
        super().__init__(teacher.features, teacher.log_probabilities, teacher.known, teacher.scale)
        choices = teacher.features.shape[1]
        self._picks = Numbers(
            lambda count: torch.randint(choices, (count,), generator=generator),
            teacher.features.device,
        )

    def targets(self, labels: Tensor) -> Tensor:
        """Draw the target features [N, D] for samples with labels [N]."""
        return self.features[labels, self._picks.take(len(labels))]


def newest_rows(classes: Array, count: int) -> Array:
    """Return the row indices of the last `count` entries of each class, ascending.

    `classes` [N] contains the class of each entry, in order of arrival.
    """
    backwards = classes[::-1]
    by_class = np.argsort(backwards, kind="stable")
    ordered = backwards[by_class]
    age = np.arange(len(classes)) - np.searchsorted(ordered, ordered)
    return np.sort(len(classes) - 1 - by_class[age < count])


@dataclass(frozen=True)
class Terms:
    """Weights of the terms in Eq. 1. With the defaults, the loss is Eq. 1 as printed.

    The loss is l_ce + alpha (feature l_mse + logit l_kl). The paper has only alpha. The factors
    `feature` and `logit`, and the scaling `norm` for l_mse, are additions.
    """

    alpha: float = 1.0
    feature: float = 1.0
    logit: float = 1.0
    norm: FeatureNorm = "none"


def class_feature_loss(
    features: Tensor, labels: Tensor, teacher: Teacher, norm: FeatureNorm = "none"
) -> Tensor:
    """Return l_mse in Felo's Eq. 1 for each sample, of shape [N].

    This is the mean over the D components of the squared difference between the sample's features
    and the teacher's features of its class, or 0 if the teacher does not know the class. FedHe,
    FedProto, and FedTGP with `distance = mse` also use this loss.

    Architectures differ in the scale of their features, and class means have smaller norms than the
    features. With the norm "none", the loss is as printed. The other two norms are not in the
    paper:

    - "rms" divides all features by one number, the root mean square of the teacher's features. The
      term then does not depend on the scale of the clients' features, but still compares lengths.
    - "unit" scales each vector to a root mean square of 1, so that only directions are compared.
    """
    student, target = features.float(), teacher.targets(labels)
    if norm == "unit":  # Let the gradient pass through the division.
        student, target = (
            vectors * (vectors.square().mean(-1, keepdim=True) + MIN_MEAN_SQUARE).rsqrt()
            for vectors in (student, target)
        )
    elif norm == "rms":
        student, target = student / teacher.scale, target / teacher.scale
    return (student - target).square().mean(1) * teacher.known[labels]


def class_mean_distance(features: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return the distance term in FedTGP's Eq. 11, as a scalar.

    This is the mean, over the known classes in the batch, of the Euclidean distance between the
    mean features of the class in the batch and the teacher's features. The term is 0 if the batch
    has no known class. The gradient of a distance has norm 1, or 0 if the two vectors are equal.
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
    """Return l_kl in Felo's Eq. 1 for each sample, of shape [N].

    This is KL(teacher || model) for the teacher's logits of the sample's class, or 0 if the teacher
    does not know the class.
    """
    log_p = logits.float().log_softmax(1)
    target = teacher.log_probabilities[labels]
    divergence = kl_divergence(log_p, target).sum(1)
    return divergence * teacher.known[labels]


def felo_loss(
    features: Tensor, logits: Tensor, labels: Tensor, teacher: Teacher | None, terms: Terms
) -> Tensor:
    """Return Felo's loss, l_ce + alpha (l_mse + l_kl), as a scalar (Eq. 1).

    The loss is the cross-entropy alone if there is no teacher, i.e. in a client's first round, and
    for samples of classes that the teacher does not know.
    """
    loss = F.cross_entropy(logits.float(), labels)
    if teacher is None:
        return loss
    mse = class_feature_loss(features, labels, teacher, terms.norm)
    kl = class_logit_loss(logits, labels, teacher)
    return loss + terms.alpha * torch.mean(terms.feature * mse + terms.logit * kl)


MIN_PROBABILITY = 1e-12
"""Lower bound for probabilities before their logarithm is computed."""
ROUNDING = 1e-4
"""Maximum difference between a sum of probabilities and 1 that counts as a rounding error."""


@dataclass(frozen=True)
class ClassTotals:
    """Class-wise sums of the clients' vectors (FD, Algorithm 1, line 12).

    The sums are in float64, so that a client's contribution can be subtracted without rounding
    errors.

    Attributes:
        classes: Classes, ascending, of shape [P].
        vectors: Sums of the clients' vectors, of shape [P, C].
        clients: Number of clients that have the class, of shape [P].
    """

    classes: Array
    vectors: Array
    clients: Array


def sum_by_class(parts: Sequence[tuple[Array, Array]], width: int) -> ClassTotals:
    """Sum the clients' vectors per class.

    Each entry in `parts` contains the classes [K] and the vectors [K, `width`] of one client.
    """
    present = [classes for classes, _ in parts]
    classes = np.unique(np.concatenate(present)) if parts else np.zeros(0, np.int64)
    vectors, clients = np.zeros((len(classes), width)), np.zeros(len(classes), np.int64)
    for client_classes, values in parts:
        rows = np.searchsorted(classes, client_classes)
        vectors[rows] += values
        clients[rows] += 1
    return ClassTotals(classes.astype(np.int64), vectors, clients)


def means_of_others(totals: ClassTotals, classes: Array, vectors: Array) -> tuple[Array, Array]:
    """Return the class means over all other clients (FD, Algorithm 1, line 15).

    The paper divides by M - 1, because each of its M devices has all labels. Here, the divisor is
    the number of other clients that have the class.

    Args:
        totals: Sums over all clients.
        classes: Classes that this client has contributed to `totals`, of shape [K]; may be empty.
        vectors: Vectors that this client has contributed, of shape [K, C].

    Returns:
        The other clients' classes [Q], and the class means [Q, C].
    """
    rows = np.searchsorted(totals.classes, classes)
    sums, clients = totals.vectors.copy(), totals.clients.copy()
    sums[rows] -= vectors
    clients[rows] -= 1
    present = clients > 0
    means = sums[present] / clients[present, None]
    return totals.classes[present], np.maximum(means, 0.0).astype(np.float32)


def nearest_distributions(vectors: Array) -> Array:
    """Project each row of `vectors` [P, C] onto the probability simplex, in float32.

    Rows that are already distributions are unchanged; all-zero rows become uniform. For vectors
    with Gaussian noise, the projection is the most likely distribution. The algorithm is from Duchi
    et al., Efficient Projections onto the l1-Ball for Learning in High Dimensions, ICML 2008, Fig.
    1.
    """
    exact = vectors.astype(np.float64)
    is_distribution = (exact >= 0).all(1) & (np.abs(exact.sum(1) - 1) <= ROUNDING)
    ordered = -np.sort(-exact, axis=1)
    excess = ordered.cumsum(1) - 1
    support = (ordered * np.arange(1, exact.shape[1] + 1) > excess).sum(1)
    threshold = excess[np.arange(len(exact)), support - 1] / support
    projected = np.maximum(exact - threshold[:, None], 0.0)
    result: Array = np.where(is_distribution[:, None], exact, projected).astype(np.float32)
    return result


def class_cross_entropy(logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return FD's distillation regularizer for each sample, of shape [N] (line 5).

    This is the cross-entropy between the model's logits [N, C] and the teacher's distribution for
    the sample's class, or 0 if the teacher does not know the class.
    """
    target = teacher.log_probabilities[labels].exp()
    return -(target * logits.float().log_softmax(1)).sum(1) * teacher.known[labels]
