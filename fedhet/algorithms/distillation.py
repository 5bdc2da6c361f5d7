"""Knowledge distillation: losses between a student's and a teacher's predictions.

The teacher is:

- the server's model: Hinton et al., Distilling the Knowledge in a Neural Network;
- a peer: FML (Shen et al., Federated Mutual Learning);
- the mentor or the mentee on the same client: FedKD (Wu et al., Communication-efficient federated
  learning via knowledge distillation, Nature Communications 13, 2022, Methods);
- the model itself on weakly augmented samples: FixMatch (Sohn et al. 2020);
- the mean of all clients' logits, compared by cross-correlation: FCCL (Huang, Ye and Du, Learn from
  Others and Be Yourself in Heterogeneous Federated Learning, CVPR 2022);
- the teacher selected for each public sample: FedGEMS (Cheng et al., FedGEMS: Federated Learning of
  Larger Server Models via Selective Knowledge Fusion, Sections 3.3 and 3.4).

Shapes: N samples, C classes, K clients; logits are [N, C] or [K, N, C].

Losses with arguments `loss_of` and `divergence_of` also support other tasks (see
`fedhet.tasks.Task`). The outputs [N, C] of these tasks take the place of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms import DigestLoss, ScoreKind

PairLoss = Callable[[Tensor, Tensor], Tensor]
"""Loss function of outputs [N, C] and targets [N, ...], or of a teacher's and a student's
outputs."""


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T^2 KL(teacher || student), averaged over samples, as a scalar.

    Both sets of logits [N, C] are divided by the temperature T. With T = 1, the loss is FedType's
    Eq. 1. The factor T^2 preserves the magnitude of the gradient (Hinton et al., Section 2). No
    gradient flows into the teacher.
    """
    target = (teacher.detach().float() / temperature).log_softmax(1)
    log_p = (student.float() / temperature).log_softmax(1)
    divergence = kl_divergence(log_p, target).sum() / len(log_p)
    return temperature**2 * divergence


def kl_divergence(log_p: Tensor, target: Tensor) -> Tensor:
    """Return the summands [N, C] of KL(target || p), given both as log probabilities [N, C].

    This replaces `F.kl_div`, which `torch.func.vmap` cannot batch over clients.
    """
    return target.exp() * (target - log_p)


def divergences(teacher: Tensor, student: Tensor) -> Tensor:
    """Return KL(teacher || student) of each sample, of shape [N], for logits [N, C].

    No gradient flows into the teacher.
    """
    target = teacher.detach().float().log_softmax(1)
    log_p = student.float().log_softmax(1)
    return F.kl_div(log_p, target, reduction="none", log_target=True).sum(1)


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of each sample, of shape [N], for outputs [N, C]."""
    return (outputs.float() - targets.float()).square().mean(1)


def pinball_errors(outputs: Tensor, targets: Tensor, levels: Sequence[float]) -> Tensor:
    """Return the quantile losses, of shape [N, K, Q], for outputs [N, K * Q] and targets [N, K].

    The loss of an output q at level t is t (y - q) if q <= y, and (1 - t) (q - y) otherwise.
    """
    errors = targets.unsqueeze(2) - outputs.reshape(*targets.shape, len(levels))
    slopes = errors.new_tensor(levels)
    return torch.maximum(slopes * errors, (slopes - 1) * errors)


def digest_losses(kind: DigestLoss, logits: Tensor, consensus: Tensor, scores: ScoreKind) -> Tensor:
    """Return each sample's loss with respect to the consensus, of shape [N].

    No gradient flows into the consensus.

    Args:
        kind: "mae" and "mse" are the mean absolute and squared error over classes. "cross-entropy"
            is -sum_c p_c log q_c, computed from probabilities.
        logits: Logits of the model, of shape [N, C].
        consensus: Scores of the consensus, of shape [N, C].
        scores: Kind of scores in the consensus.
    """
    student, target = logits.float(), consensus.detach().float()
    if kind == "cross-entropy":
        soft = target if scores == "probabilities" else target.softmax(1)
        return F.cross_entropy(student, soft, reduction="none")
    gap = (student.softmax(1) if scores == "probabilities" else student) - target
    return (gap.abs() if kind == "mae" else gap.square()).mean(1)


MIN_NORM = 1e-6
"""Lower bound of the norm of a class's logits in a batch (not in the paper). Without this bound, a
class whose logits are all equal would have an infinite gradient."""


def cross_correlation_loss(logits: Tensor, consensus: Tensor, off_diagonal: float) -> Tensor:
    """Return FCCL's loss on a batch of public samples, as a scalar.

    M is the matrix [C, C] of the correlations, over the batch, of the model's logits for class u
    with the mean logits for class v. The loss is sum_u (1 - M_uu)^2 + lambda sum_(u != v) (1 +
    M_uv)^2: equal classes become correlated, and different classes become anticorrelated. No
    gradient flows into the consensus.

    Args:
        logits: Logits of the model, of shape [N, C].
        consensus: Mean logits of all clients, of shape [N, C].
        off_diagonal: Weight lambda of the classes u != v.
    """
    scaled = []
    for scores in (logits.float(), consensus.detach().float()):
        centered = scores - scores.mean(0)
        scaled.append(centered / centered.norm(dim=0).clamp(min=MIN_NORM))
    matrix = scaled[0].T @ scaled[1]
    diagonal = matrix.diagonal()
    others = (1 + matrix).square().sum() - (1 + diagonal).square().sum()
    loss: Tensor = (1 - diagonal).square().sum() + off_diagonal * others
    return loss


def mutual_loss(
    own: Tensor,
    peer: Tensor,
    labels: Tensor,
    weight: float,
    loss_of: PairLoss = F.cross_entropy,
    divergence_of: PairLoss = distillation_loss,
) -> Tensor:
    """Return FML's loss, weight CE(own) + (1 - weight) KL(peer || own), as a scalar.

    `own` and `peer` are logits [N, C], and the labels have the shape [N]. No gradient flows into
    the peer. For other tasks, `loss_of` and `divergence_of` replace CE and KL (not in the paper).
    """
    supervised = loss_of(own.float(), labels)
    return weight * supervised + (1 - weight) * divergence_of(peer, own)


def has_label(labels: Tensor) -> Tensor:
    """Return a mask [N] of the samples that have at least one label other than NaN."""
    return ~labels.isnan().all(1)


MIN_TASK_LOSS = 1e-3
"""Lower bound of the sum of task losses by which the distillation losses are divided (not in the
paper). Without this bound, distillation would dominate once both models classify all samples
correctly."""


@dataclass(frozen=True)
class AdaptiveIntensity:
    """Options for FedKD's distillation intensity, 1 / (L^t_t + L^t_s).

    L^t_t and L^t_s are the task losses of the mentor and the mentee.
    """

    by_sample: bool = False
    """Whether to compute the intensity for each sample. The default is to use the mean losses of
    the batch, as in the authors' code."""
    learned: bool = True
    """Whether gradients pass through the intensity, as in Eqs. 6 and 7 and in the authors' code."""
    hidden: float = 1.0
    """Weight of the hidden loss L^h. The paper uses the weight 1."""


@dataclass(frozen=True)
class Outputs:
    """Outputs of the mentor or the mentee for a batch.

    Attributes:
        logits: Logits, of shape [N, C].
        features: Features, of shape [N, D], where D is the mentor's feature width. The matrix W^h
            projects the mentee's features H^s to this width.
    """

    logits: Tensor
    features: Tensor


def mutual_losses(
    mentor: Outputs,
    mentee: Outputs,
    labels: Tensor,
    options: AdaptiveIntensity,
    loss_of: PairLoss | None = None,
    divergence_of: PairLoss = divergences,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return FedKD's losses L_t and L_s (Eqs. 6 and 7) and the mean intensity, as scalars.

    The gradient of L_t reaches only the mentor; the gradient of L_s reaches the mentee and W^h.

    Args:
        mentor: Outputs of the mentor.
        mentee: Outputs of the mentee.
        labels: Labels, of shape [N].
        options: Options for the distillation intensity.
        loss_of: Loss function of another task (not in the paper), or None for cross-entropy.
            The function returns the loss of each sample [N] if `options.by_sample` is set, and the
            mean loss of the batch otherwise.
        divergence_of: Function that maps a teacher's and a student's outputs to the divergence of
            each sample [N].
    """
    if loss_of is None:
        loss_of = partial(F.cross_entropy, reduction="none" if options.by_sample else "mean")
    mentor_task, mentee_task = (  # The task losses are L^t_t and L^t_s (Eqs. 1 and 2).
        loss_of(outputs.logits.float(), labels) for outputs in (mentor, mentee)
    )
    # The loss of a sample without a label is 0, which must not count as a small loss.
    known = has_label(labels) if labels.is_floating_point() else None
    losses, intensities = [], []
    pairs = (
        (mentor, mentee, mentor_task, mentee_task),
        (mentee, mentor, mentee_task, mentor_task),
    )
    for own, other, task, other_task in pairs:
        total = task + other_task.detach()
        labeled = known
        if known is not None and not options.by_sample:
            # The mean loss is computed over the labeled samples.
            total = total / known.float().mean().clamp(min=1 / len(known))
            labeled = known.any()
        intensity = 1 / total.clamp(min=MIN_TASK_LOSS)
        intensity = intensity if labeled is None else intensity * labeled
        intensity = intensity if options.learned else intensity.detach()
        intensities.append(intensity)
        # L^d (Eqs. 3 and 4) is the divergence from the other model's predictions.
        distance = divergence_of(other.logits, own.logits)
        # The hidden loss L^h (Eq. 5) compares the features.
        gap = own.features.float() - other.features.detach().float()
        distance = distance + options.hidden * gap.square().mean(1)
        if known is not None:
            distance = distance * known
        distance = distance if options.by_sample else distance.mean()
        losses.append(task.mean() + (intensity * distance).mean())
    return losses[0], losses[1], intensities[0].detach().mean()


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the most likely classes [N], and the mask [N] of the confident predictions.

    A prediction is confident if its probability is at least `threshold`.
    """
    probability, labels = logits.detach().float().softmax(1).max(1)
    return labels, probability >= threshold


def unlabeled_loss(logits: Tensor, labels: Tensor, confident: Tensor) -> Tensor:
    """Return FixMatch's loss for unlabeled images (Eq. 4), averaged over all N images.

    Args:
        logits: Logits of the strongly augmented images, of shape [N, C].
        labels: Pseudo-labels, of shape [N].
        confident: Mask of the confident pseudo-labels, of shape [N]. The loss of all other images
            is 0.
    """
    losses = F.cross_entropy(logits.float(), labels, reduction="none")
    return (losses * confident).sum() / len(labels)


MIN_ENTROPY = 1e-6
"""Lower bound of entropies, because 1/H in Eq. 4 is unbounded otherwise."""


@dataclass(frozen=True)
class Targets:
    """Teacher logits [N, C], with a mask [N] of the samples that have teacher logits."""

    logits: Tensor
    known: Tensor

    @classmethod
    def none(cls, samples: int, classes: int, device: torch.device) -> Targets:
        """Return targets without any teacher logits."""
        known = torch.zeros(samples, dtype=torch.bool, device=device)
        return cls(torch.zeros(samples, classes, device=device), known)

    def keep(self, rows: Tensor, logits: Tensor, where: Tensor) -> None:
        """Store the logits [B, C] of the samples `rows` [B] for which `where` [B] is true."""
        self.logits[rows] = torch.where(where.unsqueeze(1), logits, self.logits[rows])
        self.known[rows] |= where

    def copy(self) -> Targets:
        """Return a copy with separate tensors."""
        return Targets(self.logits.clone(), self.known.clone())


def reliability(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the clients' weights alpha [K, N] in each sample's target (FedGEMS, Eq. 4).

    H is the entropy of a client's prediction, clamped to at least MIN_ENTROPY. The weights are the
    softmax of 1/H over the clients that predict the sample correctly, and 0 for all other clients.
    They are computed in log space and in float64.
    """
    exact = logits.double()
    log_p = exact.log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)  # This is H(p) in Eq. 3.
    confidence = entropy.clamp_min(MIN_ENTROPY).reciprocal()
    reliable = exact.argmax(-1) == labels
    confidence = confidence.masked_fill(~reliable, -torch.inf)
    alpha = (confidence - confidence.logsumexp(0)).exp()
    return alpha.masked_fill(~reliable, 0.0).to(logits.dtype)


class Selection:
    """Rules with which FedGEMS selects knowledge, based on predicted classes and labels."""

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mask [N] of the samples that are predicted correctly."""
        return logits.argmax(1) == labels

    def reliability(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the clients' weights [K, N] in each sample's target, given logits [K, N, C]."""
        return reliability(logits, labels)

    def loss(
        self, logits: Tensor, labels: Tensor, teacher: Tensor, known: Tensor, epsilon: float
    ) -> Tensor:
        """Return the mean loss of a batch; see `selective_loss`."""
        return selective_loss(logits, labels, teacher, known, epsilon)


@dataclass(frozen=True)
class SelectionByError(Selection):
    """Selection by error, for tasks without classes (not in the paper).

    A prediction is correct if its error is at most `tolerance`. Each client with a correct
    prediction has a weight proportional to the reciprocal of its error, because the paper's entropy
    is defined only for probabilities. Predictions for samples without labels are never correct.
    """

    errors: PairLoss
    """Function that maps outputs [N, C] and targets [N, ...] to the error of each sample [N]."""
    losses: PairLoss
    """Function that maps outputs [N, C] and targets [N, ...] to the loss of each sample [N]."""
    divergences: PairLoss
    """Function that maps a teacher's and a student's outputs [N, C] to each sample's loss [N]."""
    tolerance: float

    def right(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mask [N] of the samples whose error is at most the tolerance."""
        return (self.errors(logits.float(), labels) <= self.tolerance) & has_label(labels)

    def reliability(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the clients' weights [K, N] in each sample's target, given outputs [K, N, C].

        The weights are computed in float64. Errors are clamped to at least a thousandth of the
        tolerance.
        """
        errors = torch.stack([self.errors(own.float(), labels) for own in logits]).double()
        precision = errors.clamp_min(self.tolerance / 1000).reciprocal()
        precision = precision * (errors <= self.tolerance) * has_label(labels)
        alpha = precision / precision.sum(0).clamp_min(torch.finfo(torch.float64).tiny)
        return alpha.to(logits.dtype)

    def loss(
        self, logits: Tensor, labels: Tensor, teacher: Tensor, known: Tensor, epsilon: float
    ) -> Tensor:
        """Return the mean loss of a batch, including distillation for the samples in `known`."""
        supervised = self.losses(logits.float(), labels)
        distilled = self.divergences(teacher.detach().float(), logits.float())
        mixed = epsilon * supervised + (1 - epsilon) * distilled
        return torch.where(known, mixed, supervised).mean()


BY_CLASS = Selection()


def fuse(logits: Tensor, labels: Tensor, selection: Selection = BY_CLASS) -> Targets:
    """Fuse the clients' logits [K, N, C] into targets, sum_j alpha_j l_j (Eq. 5).

    Samples that no client predicts correctly have no target.
    """
    alpha = selection.reliability(logits, labels)
    return Targets((alpha.unsqueeze(-1) * logits).sum(0), alpha.sum(0) > 0)


def fuse_all(logits: Tensor) -> Targets:
    """Average the clients' logits [K, N, C] into targets for all samples, as in FedGEM."""
    # Divide first, because the sum of finite logits may overflow.
    mean = (logits / len(logits)).sum(0)
    return Targets(mean, torch.ones(logits.shape[1], dtype=torch.bool))


def split(
    right: Tensor, pooled: Tensor, *, self_training: bool = True, self_distillation: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Partition the samples into S1, S2 and S3 (Section 3.3).

    Args:
        right: Mask of the samples that the server predicts correctly, of shape [N].
        pooled: Mask of the samples with logits in the pool of global logits, of shape [N].
        self_training: Whether S1 contains the correctly predicted samples. If it is false, S1 is
            empty (Table 5).
        self_distillation: Whether S2 contains the remaining samples in the pool. If it is false, S2
            is empty (Table 5).

    Returns:
        The masks [N] of S1, S2 and S3. S3 contains the samples in neither S1 nor S2.
    """
    first = right if self_training else torch.zeros_like(right)
    second = ~first & pooled if self_distillation else torch.zeros_like(right)
    return first, second, ~first & ~second


def select_targets(
    parts: tuple[Tensor, Tensor, Tensor], recalled: Targets, fused: Targets
) -> Targets:
    """Select the targets of the samples in S1, S2 and S3.

    Samples in S1 have no target. Samples in S2 have the targets in `recalled` (Eq. 2), and samples
    in S3 have the targets in `fused` (Eq. 5), if these targets exist.
    """
    _, second, third = parts
    logits = torch.where(second.unsqueeze(1), recalled.logits, fused.logits)
    return Targets(logits, (second & recalled.known) | (third & fused.known))


def selective_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, known: Tensor, epsilon: float
) -> Tensor:
    """Return the loss in Eqs. 1, 2, 5 and 6, averaged over samples, as a scalar.

    Samples with teacher logits have the loss epsilon CE + (1 - epsilon) KL(teacher || model) (Eqs.
    2, 5 and 6); the remaining samples have the loss CE (Eq. 1). No gradient flows into the teacher.

    Args:
        logits: Logits of the model, of shape [N, C].
        labels: Labels, of shape [N].
        teacher: Teacher logits, of shape [N, C].
        known: Mask of the samples with teacher logits, of shape [N].
        epsilon: Weight of the cross-entropy.
    """
    log_p = logits.float().log_softmax(1)
    # The log softmax of finite logits can be -inf. Clamp it, so that its class contributes 0, not
    # NaN, to the divergence.
    target = teacher.detach().float().log_softmax(1).clamp_min(torch.finfo(torch.float32).min)
    classified = F.nll_loss(log_p, labels, reduction="none")
    distilled = F.kl_div(log_p, target, reduction="none", log_target=True).sum(1)
    mixed = epsilon * classified + (1 - epsilon) * distilled
    return torch.where(known, mixed, classified).mean()
