"""FedKD: the losses of a mentor and a mentee, who teach each other as well as they know.

Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang and Xing Xie, Communication-efficient federated
learning via knowledge distillation, Nature Communications 13, 2022, Methods.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

SMALLEST = 1e-3
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
    found = 1 / (own + other.detach()).clamp(min=SMALLEST)
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
