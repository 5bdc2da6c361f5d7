"""Loss terms, each a pure function of tensors. Logits are [N, C], features [N, D], labels [N]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.classwise import Teacher


def class_feature_loss(features: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return l_mse of Felo's Eq. 1 per sample, [N]: features against their class's entry.

    The mean over the D components; 0 where the teacher has no entry for the class.
    """
    error = (features.float() - teacher.targets(labels)).square().mean(1)
    return error * teacher.known[labels]


def class_logit_loss(logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
    """Return l_kl of Felo's Eq. 1 per sample, [N]: KL(teacher's class logits || own logits).

    0 where the teacher has no entry for the class.
    """
    own = logits.float().log_softmax(1)
    target = teacher.log_probabilities[labels]
    divergence = F.kl_div(own, target, reduction="none", log_target=True).sum(1)
    return divergence * teacher.known[labels]


def felo_loss(
    features: Tensor, logits: Tensor, labels: Tensor, teacher: Teacher | None, alpha: float
) -> Tensor:
    """Return Felo's Eq. 1, a scalar: the mean of l_ce + alpha (l_mse + l_kl).

    Without a teacher (a client's first participation), or for samples of a class that it has no
    entry for, cross-entropy alone.
    """
    loss = F.cross_entropy(logits.float(), labels)
    if teacher is None:
        return loss
    mse = class_feature_loss(features, labels, teacher)
    kl = class_logit_loss(logits, labels, teacher)
    return loss + alpha * torch.mean(mse + kl)


def distillation_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of logits [N, C], the mean over samples: FedType's Eq. 1.

    No gradient flows into the teacher.
    """
    target = teacher.detach().float().log_softmax(1)
    own = student.float().log_softmax(1)
    return F.kl_div(own, target, reduction="batchmean", log_target=True)


def imitation_loss(logits: Tensor, sets: Tensor, eta: Tensor) -> Tensor:
    """Return FedType's backward loss, Eq. 3, the mean over samples, with the minus that it needs.

    - eta sum_{k in S} log softmax(logits)_k, for logits [N, C], sets S [N, C] of bool, eta [N]. As
    printed, without the minus, minimising it would push the confident labels down.
    """
    inside = (logits.float().log_softmax(1) * sets).sum(1)
    return -(eta * inside).mean()


LEAST_PSEUDO = 1e-7
"""No class of a pseudo-label is less likely than this; the divergence takes its logarithm."""


def pseudo_label_loss(logits: Tensor, pseudo: Tensor) -> Tensor:
    """Return KL(own || pseudo) of UM-pFSSL's Eq. 5 per sample, [N]: logits, pseudo [N, C].

    The gradient reaches the logits alone.
    """
    own = logits.float().log_softmax(1)
    return (own.exp() * (own - pseudo.detach().clamp(min=LEAST_PSEUDO).log())).sum(1)


def semi_supervised_loss(
    logits: Tensor, labels: Tensor, pseudo: Tensor, labelled: Tensor
) -> Tensor:
    """Return UM-pFSSL's Eq. 1 of a batch, a scalar; `labels` [N], `pseudo` [N, C] where needed.

    mu L^s + (1 - mu) L^u with the means of Eqs. 4 and 5 is the mean over all samples, each with
    its own term: cross-entropy where `labelled` [N], else the divergence. That is also, but for
    the factor, what lines 22 and 23 of Algorithm 1 sum.
    """
    supervised = F.cross_entropy(logits.float(), labels, reduction="none")
    return torch.where(labelled, supervised, pseudo_label_loss(logits, pseudo)).mean()
