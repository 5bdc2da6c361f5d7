"""Knowledge distillation: losses of a student on what teachers say of the same samples."""

from __future__ import annotations

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
