"""Selective knowledge fusion: from which teacher a server learns each public sample.

Cheng et al., FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge Fusion,
Sections 3.3 and 3.4. Logits are [N, C], labels [N]; K clients' logits are [K, N, C].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

LEAST_ENTROPY = 1e-6
"""Lower bound of an entropy: 1/H of Eq. 4 is unbounded otherwise."""


@dataclass(frozen=True)
class Targets:
    """Teacher logits [N, C], and a mask of the samples that have them, bool [N]."""

    logits: Tensor
    known: Tensor

    @classmethod
    def none(cls, samples: int, classes: int, device: torch.device) -> Targets:
        """Return targets with no known samples."""
        known = torch.zeros(samples, dtype=torch.bool, device=device)
        return cls(torch.zeros(samples, classes, device=device), known)

    def keep(self, rows: Tensor, logits: Tensor, where: Tensor) -> None:
        """Store logits [B, C] for those of the samples `rows` [B] where `where` [B] is true."""
        self.logits[rows] = torch.where(where.unsqueeze(1), logits, self.logits[rows])
        self.known[rows] |= where

    def copy(self) -> Targets:
        """Return a copy that `keep` changes alone."""
        return Targets(self.logits.clone(), self.known.clone())


def entropy(logits: Tensor) -> Tensor:
    """Return H(p), Eq. 3, of the predictions p = softmax(logits), [..., C] -> [...]."""
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1)


def reliability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the weights alpha of Eq. 4, [K, N]: each client's share in each sample's target.

    Softmax of 1/H over the clients that predict the sample correctly, 0 for the others; all 0 if no
    client does. In float64 and log space, with H at least LEAST_ENTROPY.
    """
    exact = logits.double()
    confidence = entropy(exact).clamp_min(LEAST_ENTROPY).reciprocal()
    reliable = exact.argmax(-1) == labels
    confidence = confidence.masked_fill(~reliable, -torch.inf)
    alpha = (confidence - confidence.logsumexp(0)).exp()
    return alpha.masked_fill(~reliable, 0.0).to(logits.dtype)


def fuse(logits: Tensor, labels: Tensor) -> Targets:
    """Return the targets of Eq. 5 from K clients' logits: sum_j alpha_j l_j.

    Samples that no client predicts correctly have no target.
    """
    alpha = reliability(logits, labels)
    return Targets((alpha.unsqueeze(-1) * logits).sum(0), alpha.sum(0) > 0)


def fuse_all(logits: Tensor) -> Targets:
    """Return the targets from K clients' logits without selection, as in FedGEM: their mean."""
    mean = (logits / len(logits)).sum(0)  # divided first, as the sum of finite logits may overflow
    return Targets(mean, torch.ones(logits.shape[1], dtype=torch.bool))


def correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Return S_Correct of Section 3.3.1 as a mask, bool [N]: logits [N, C] that predict labels [N].

    Their logits enter the pool of global logits.
    """
    return logits.argmax(1) == labels


def split(
    right: Tensor, pooled: Tensor, *, self_training: bool = True, self_distillation: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masks of S1, S2 and S3 of Section 3.3, each bool [N]; every sample is in one.

    S1: predicted correctly (`right`, bool [N]). S2: wrong, but in the pool of global logits
    (`pooled`, bool [N]). S3: wrong, and not in the pool. Without self-training or self-distillation
    (Table 5) S1 or S2 is empty, and its samples go the way of the others (lines 8 and 10).
    """
    first = right if self_training else torch.zeros_like(right)
    second = ~first & pooled if self_distillation else torch.zeros_like(right)
    return first, second, ~first & ~second


def targets_of(parts: tuple[Tensor, Tensor, Tensor], recalled: Targets, fused: Targets) -> Targets:
    """Return the targets of samples in S1 (none), S2 (`recalled`, Eq. 2) and S3 (`fused`, Eq. 5).

    A sample without a target of its part's has none.
    """
    _, second, third = parts
    logits = torch.where(second.unsqueeze(1), recalled.logits, fused.logits)
    return Targets(logits, (second & recalled.known) | (third & fused.known))


def taught_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, taught: Tensor, epsilon: float
) -> Tensor:
    """Return the mean over samples of Eq. 1, 2, 5 and 6, a scalar.

    epsilon CE + (1 - epsilon) KL(teacher || own) for the samples in `taught`, bool [N], with
    teacher logits `teacher` [N, C] (Eq. 2, 5, 6); CE for the others (Eq. 1). No gradient flows into
    the teacher.
    """
    own = logits.float().log_softmax(1)
    # Finite logits can still give a log of -inf, whose share of the divergence is 0.
    target = teacher.detach().float().log_softmax(1).clamp_min(torch.finfo(torch.float32).min)
    classified = F.nll_loss(own, labels, reduction="none")
    distilled = F.kl_div(own, target, reduction="none", log_target=True).sum(1)
    mixed = epsilon * classified + (1 - epsilon) * distilled
    return torch.where(taught, mixed, classified).mean()
