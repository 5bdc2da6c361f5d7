"""Knowledge distillation: losses of a student on what teachers say of the same samples.

Teachers are the server (Hinton et al.), peers (FML, Deep Mutual Learning), a mentor and a mentee
of one client (FedKD: Wu et al., Communication-efficient federated learning via knowledge
distillation, Nature Communications 13, 2022, Methods), a model itself on weakly changed samples
(FixMatch: Sohn et al. 2020), or for each public sample the teacher that selective knowledge fusion
chooses (Cheng et al., FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge
Fusion, Sections 3.3 and 3.4). N samples, C classes, K clients: logits [N, C] and [K, N, C].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms import DigestLoss, ScoreKind


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 KL(teacher || student) of logits [N, C] / T, averaged over samples.

    FedType's Eq. 1 at T = 1. The factor keeps the gradient's size (Hinton et al., Distilling the
    Knowledge in a Neural Network, Section 2). No gradient flows into the teacher.
    """
    target = (teacher.detach().float() / temperature).log_softmax(1)
    own = (student.float() / temperature).log_softmax(1)
    divergence = kl_divergence(own, target).sum() / len(own)
    return temperature**2 * divergence


def kl_divergence(own: Tensor, target: Tensor) -> Tensor:
    """Return the terms of KL(target || own) [N, C] of log probabilities [N, C].

    As `F.kl_div` does, which `torch.func.vmap` computes client by client.
    """
    return target.exp() * (target - own)


def digest_losses(kind: DigestLoss, logits: Tensor, consensus: Tensor, scores: ScoreKind) -> Tensor:
    """Return the losses [N] of a model's logits [N, C] against a consensus [N, C] of `scores`.

    "mae" and "mse" compare logits with logits, or probabilities with probabilities, averaged over
    classes. "cross-entropy" is -sum_c p_c log q_c between probabilities. No gradient flows into the
    consensus.
    """
    own, target = logits.float(), consensus.detach().float()
    if kind == "cross-entropy":
        soft = target if scores == "probabilities" else target.softmax(1)
        return F.cross_entropy(own, soft, reduction="none")
    gap = (own.softmax(1) if scores == "probabilities" else own) - target
    return (gap.abs() if kind == "mae" else gap.square()).mean(1)


def mutual_loss(own: Tensor, peer: Tensor, labels: Tensor, share: float) -> Tensor:
    """Return share CE(own) + (1 - share) KL(peer || own): FML's loss of either model, a scalar.

    Logits [N, C] of the model and of its peer, labels [N]. No gradient flows into the peer.
    """
    supervised = F.cross_entropy(own.float(), labels)
    return share * supervised + (1 - share) * distillation_loss(peer, own)


MIN_TASK_LOSS = 1e-3
"""The least sum of task losses by which distillation is divided (ours): a model that is sure of all
its samples would otherwise learn from nothing but the other one."""


@dataclass(frozen=True)
class Adapting:
    """How the intensity of distillation, 1 / (L^t_t + L^t_s), is read."""

    by_sample: bool = False
    """Whether each sample has its own, or a batch has one, of its mean losses, as in the code."""
    learned: bool = True
    """Whether its gradient counts, as in Eqs. 6 and 7 and in the code, or it is a weight (ours)."""
    hidden: float = 1.0
    """The weight of the hidden loss, L^h (ours)."""


@dataclass(frozen=True)
class View:
    """What one of the two makes of a batch.

    Logits [N, C], and features [N, D] of the mentor's width: the mentee's are W^h H^s.
    """

    logits: Tensor
    features: Tensor


def mutual_losses(
    mentor: View, mentee: View, labels: Tensor, how: Adapting
) -> tuple[Tensor, Tensor, Tensor]:
    """Return L_t and L_s (Eqs. 6 and 7), scalars, and the batch's mean intensity.

    L_t's gradient reaches the mentor alone, L_s's the mentee and W^h.
    """
    reduction = "none" if how.by_sample else "mean"
    first, second = (  # L^t_t and L^t_s (Eqs. 1 and 2)
        F.cross_entropy(view.logits.float(), labels, reduction=reduction)
        for view in (mentor, mentee)
    )
    losses, intensities = [], []
    pairs = (mentor, mentee, first, second), (mentee, mentor, second, first)
    for own, other, task, other_task in pairs:
        intensity = 1 / (task + other_task.detach()).clamp(min=MIN_TASK_LOSS)
        intensity = intensity if how.learned else intensity.detach()
        intensities.append(intensity)
        # L^d, the divergence from the other (Eqs. 3 and 4), and L^h of the features (Eq. 5).
        target = other.logits.detach().float().log_softmax(1)
        log_p = own.logits.float().log_softmax(1)
        apart = F.kl_div(log_p, target, reduction="none", log_target=True).sum(1)
        gap = own.features.float() - other.features.detach().float()
        apart = apart + how.hidden * gap.square().mean(1)
        losses.append(task.mean() + (intensity * (apart if how.by_sample else apart.mean())).mean())
    return losses[0], losses[1], intensities[0].detach().mean()


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest class [N], and whether its likelihood reaches `threshold`, bool [N]."""
    likelihood, labels = logits.detach().float().softmax(1).max(1)
    return labels, likelihood >= threshold


def unlabeled_loss(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """Return FixMatch's loss of unlabeled images (Eq. 4), a scalar: a mean over all N of them.

    It is the cross-entropy of the logits [N, C] of strong images with pseudo-labels [N], and 0 for
    images whose pseudo-label is not `confident` [N].
    """
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (each * confident).sum() / len(labels)


MIN_ENTROPY = 1e-6
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


def reliability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the weights alpha of Eq. 4, [K, N]: each client's share in each sample's target.

    Softmax of 1/H over the clients that predict the sample correctly, 0 for the others; all 0 if no
    client does. In float64 and log space, with H at least MIN_ENTROPY.
    """
    exact = logits.double()
    log_p = exact.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)  # H(p), Eq. 3
    confidence = entropy.clamp_min(MIN_ENTROPY).reciprocal()
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
