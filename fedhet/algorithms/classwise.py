"""Class-wise features and logits: what Felo's clients send and its server averages.

Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.arrays import Array


@dataclass(frozen=True)
class ClassMeans:
    """Means over the samples of each class present: (s_y, p_y, y) of Section 3.1.1.

    classes [P] ascending, features [P, D], logits [P, C], counts [P] of samples (>= 1).
    """

    classes: Array
    features: Array
    logits: Array
    counts: Array


class ClassSums:
    """Running sums of features and logits per class, accumulated on the device over batches."""

    def __init__(self, classes: int, width: int, device: torch.device) -> None:
        self.features = torch.zeros(classes, width, device=device)
        self.logits = torch.zeros(classes, classes, device=device)
        self.counts = torch.zeros(classes, device=device)

    @torch.no_grad()
    def add(self, features: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: features [N, D], logits [N, C], labels [N]."""
        # Multiplying by one-hot labels is deterministic on every device; index_add_ is not.
        member = F.one_hot(labels, len(self.counts)).T.float()
        with torch.autocast(member.device.type, enabled=False):
            self.features += member @ features.detach().float()
            self.logits += member @ logits.detach().float()
        self.counts += member.sum(1)

    def means(self) -> ClassMeans:
        """Return the means of the classes that were seen."""
        seen = self.counts > 0
        count = self.counts[seen].unsqueeze(1)
        return ClassMeans(
            classes=seen.nonzero().flatten().cpu().numpy(),
            features=(self.features[seen] / count).cpu().numpy(),
            logits=(self.logits[seen] / count).cpu().numpy(),
            counts=self.counts[seen].long().cpu().numpy(),
        )


def average(means: Sequence[ClassMeans], *, by_samples: bool) -> ClassMeans:
    """Return, per class, the mean over the clients that have it (Section 3.1.2).

    A client's weight is 1, or its samples of the class. The returned counts are of samples. The
    order of `means` may affect the last bit of the result: pass them sorted.
    """
    classes = np.unique(np.concatenate([m.classes for m in means])) if means else np.zeros(0, int)
    row = {int(label): position for position, label in enumerate(classes)}
    features = np.zeros((len(classes), means[0].features.shape[1] if means else 0))
    logits = np.zeros((len(classes), means[0].logits.shape[1] if means else 0))
    weight, counts = np.zeros(len(classes)), np.zeros(len(classes), np.int64)
    for part in means:
        rows = [row[int(label)] for label in part.classes]
        share = part.counts.astype(np.float64) if by_samples else np.ones(len(rows))
        features[rows] += share[:, None] * part.features
        logits[rows] += share[:, None] * part.logits
        weight[rows] += share
        counts[rows] += part.counts
    scale = weight[:, None]
    return ClassMeans(
        classes.astype(np.int64),
        (features / scale).astype(np.float32),
        (logits / scale).astype(np.float32),
        counts,
    )


@dataclass(frozen=True)
class Teacher:
    """The server's knowledge arranged by class, on the client's training device.

    features [C, D], log_probabilities [C, C] (log softmax of the logits), known [C] (has the class
    an entry?).
    """

    features: Tensor
    log_probabilities: Tensor
    known: Tensor

    def targets(self, labels: Tensor) -> Tensor:
        """Return the target features for samples of these classes: [N] -> [N, D]."""
        return self.features[labels]

    @classmethod
    def of(
        cls,
        present: Array,
        features: Array,
        logits: Array,
        classes: int,
        device: torch.device,
    ) -> Teacher:
        """Arrange entries for the classes `present` [P], features [P, ...], logits [P, C].

        Rows of the other classes are zero and not known.
        """
        rows = torch.tensor(present, dtype=torch.long)
        all_features = torch.zeros(classes, *features.shape[1:])
        all_logits = torch.zeros(classes, logits.shape[1])
        known = torch.zeros(classes, dtype=torch.bool)
        all_features[rows] = torch.tensor(features)
        all_logits[rows] = torch.tensor(logits)
        known[rows] = True
        log_probabilities = all_logits.log_softmax(1)
        return cls(all_features.to(device), log_probabilities.to(device), known.to(device))


@dataclass(frozen=True)
class VariedTeacher(Teacher):
    """A teacher with several features per class, [C, S, D], as Velo's server can send.

    Section 3.1.3 pairs each sample with the entry of its class; here each sample of each batch is
    paired with one of the S features, drawn uniformly (ours).
    """

    generator: torch.Generator

    def targets(self, labels: Tensor) -> Tensor:
        """Return a random feature of its class for each sample: [N] -> [N, D]."""
        # Drawn on the CPU, for the same draws on every device; the copy is asynchronous.
        pick = torch.randint(self.features.shape[1], labels.shape, generator=self.generator)
        return self.features[labels, pick.to(labels.device, non_blocking=True)]


def newest(classes: Array, most: int) -> Array:
    """Return the rows of the last `most` entries of each class, ascending.

    classes [N] are in order of arrival.
    """
    backwards = classes[::-1]
    by_class = np.argsort(backwards, kind="stable")
    ordered = backwards[by_class]
    age = np.arange(len(classes)) - np.searchsorted(ordered, ordered)
    return np.sort(len(classes) - 1 - by_class[age < most])


def class_feature_loss(features: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return l_mse of Felo's Eq. 1 per sample, [N]: its features against its class's entry.

    The mean over the D components; 0 if the teacher has no entry for the class.
    """
    error = (features.float() - teacher.targets(labels)).square().mean(1)
    return error * teacher.known[labels]


def class_logit_loss(logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return l_kl of Felo's Eq. 1 per sample, [N]: KL(teacher's class logits || own logits).

    0 if the teacher has no entry for the class.
    """
    own = logits.float().log_softmax(1)
    target = teacher.log_probabilities[labels]
    divergence = F.kl_div(own, target, reduction="none", log_target=True).sum(1)
    return divergence * teacher.known[labels]


def felo_loss(
    features: Tensor, logits: Tensor, labels: Tensor, teacher: Teacher | None, alpha: float
) -> Tensor:
    """Return Felo's Eq. 1, a scalar: the mean of l_ce + alpha (l_mse + l_kl).

    Cross-entropy alone without a teacher (a client's first participation), and for samples whose
    class has no entry.
    """
    loss = F.cross_entropy(logits.float(), labels)
    if teacher is None:
        return loss
    mse = class_feature_loss(features, labels, teacher)
    kl = class_logit_loss(logits, labels, teacher)
    return loss + alpha * torch.mean(mse + kl)
