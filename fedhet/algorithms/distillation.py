"""Knowledge distillation: losses of a student on what teachers say of the same samples.

Teachers are the server (Hinton et al.), peers (FML, Deep Mutual Learning), a mentor and a mentee of
one client (FedKD: Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang and Xing Xie,
Communication-efficient federated learning via knowledge distillation, Nature Communications 13,
2022, Methods), or a model itself on weakly changed samples (FixMatch: Sohn et al. 2020).
N samples, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms.choices import DigestLoss, ScoreKind


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


LEAST_TASK_LOSS = 1e-3
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
    first, second = (task_losses(each.logits, labels, how) for each in (mentor, mentee))
    first_share, second_share = intensity(first, second, how), intensity(second, first, how)
    mentor_loss = first.mean() + distillation(mentee, mentor, first_share, how)
    mentee_loss = second.mean() + distillation(mentor, mentee, second_share, how)
    return mentor_loss, mentee_loss, first_share.detach().mean()


def intensity(own: Tensor, other: Tensor, how: Adapting) -> Tensor:
    """Return 1 / (L^t_t + L^t_s): of each sample [N], or of the batch, as the task losses are."""
    found = 1 / (own + other.detach()).clamp(min=LEAST_TASK_LOSS)
    return found if how.learned else found.detach()


def distillation(teacher: View, student: View, share: Tensor, how: Adapting) -> Tensor:
    """Return L^d + L^h of the student (Eqs. 3 to 5), a scalar; no gradient flows into the teacher.

    `share` is the intensity, of each sample [N] or of the batch.
    """
    distances = divergences(teacher.logits, student.logits)
    distances = distances + how.hidden * hidden_losses(teacher, student)
    return (share * (distances if how.by_sample else distances.mean())).mean()


def task_losses(logits: Tensor, labels: Tensor, how: Adapting) -> Tensor:
    """Return L^t_t or L^t_s (Eqs. 1 and 2): cross-entropies [N], or their mean, a scalar."""
    reduction = "none" if how.by_sample else "mean"
    return F.cross_entropy(logits.float(), labels, reduction=reduction)


def divergences(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher, student) of each sample [N], of Eqs. 3 and 4; the teacher is fixed."""
    target, own = teacher.detach().float().log_softmax(1), student.float().log_softmax(1)
    return F.kl_div(own, target, reduction="none", log_target=True).sum(1)


def hidden_losses(fixed: View, own: View) -> Tensor:
    """Return MSE(H^t, W^h H^s) of each sample [N] (Eq. 5), with a gradient into `own` alone."""
    return (own.features.float() - fixed.features.detach().float()).square().mean(1)


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest class [N], and whether its likelihood reaches `threshold`, bool [N]."""
    likelihood, labels = logits.detach().float().softmax(1).max(1)
    return labels, likelihood >= threshold


def unlabelled_loss(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """Return FixMatch's loss of unlabelled images (Eq. 4), a scalar: a mean over all N of them.

    It is the cross-entropy of the logits [N, C] of strong images with pseudo-labels [N], and 0 for
    images whose pseudo-label is not `confident` [N].
    """
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (each * confident).sum() / len(labels)
