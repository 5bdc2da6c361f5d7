"""FixMatch (Sohn et al. 2020): weak and strong augmentation, and its loss.

Images are float32, scaled to [-1, 1]. N samples, C classes.
"""

from __future__ import annotations

from torch import Generator, Tensor
from torch.nn import functional as F

from fedhet.algorithms.augment import check_images, erase, flip, rand_augment, shift


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise DataError unless samples of `shape` are images with one or three channels."""
    check_images(shape, "FixMatch augments")


def weak(x: Tensor, generator: Generator) -> Tensor:
    """Shift images [N, C, H, W] by up to an eighth; mirror colour images at random.

    A mirrored digit is not a digit, so that grey images are not mirrored.
    """
    return shift(flip(x, generator) if x.shape[1] == 3 else x, generator, reflect=True)


def strong(x: Tensor, generator: Generator) -> Tensor:
    """Apply to images [N, C, H, W] the weak augmentation, RandAugment and random erasing."""
    return erase(rand_augment(weak(x, generator), generator), generator)


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest class [N], and whether its likelihood reaches `threshold`, bool [N]."""
    likelihood, labels = logits.detach().float().softmax(1).max(1)
    return labels, likelihood >= threshold


def fixmatch_loss(
    logits: Tensor, labels: Tensor, labelled: Tensor, confident: Tensor, weight: float
) -> Tensor:
    """Return FixMatch's loss of a batch of logits [N, C], a scalar: L_s + `weight` L_u.

    L_s (Eq. 3) is the mean cross-entropy of the `labelled` [N] samples (weak images) with their
    labels. L_u (Eq. 4) is that of the others (strong images) with their pseudo-labels, where it is
    0 for those that are not `confident` [N]: a mean over all of them. Either is 0 for a batch that
    has no such samples.
    """
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    supervised = _mean(each, labelled, labelled)
    return supervised + weight * _mean(each, confident & ~labelled, ~labelled)


def _mean(each: Tensor, counted: Tensor, among: Tensor) -> Tensor:
    """Return the sum of the values [N] that are `counted`, by the number of those `among`."""
    return (each * counted).sum() / among.sum().clamp(min=1)
