"""FixMatch (Sohn et al. 2020): weak and strong augmentation, and the loss of unlabelled samples.

Images are float32, scaled to [-1, 1], texts [N, L] int64 (ours: the paper has images alone). N
samples, C classes.
"""

from __future__ import annotations

from torch import Generator, Tensor
from torch.nn import functional as F

from fedhet.algorithms.augment import check_images, erase, flip, rand_augment, shift
from fedhet.algorithms.token_changes import strong_tokens, weak_tokens


def check_shape(shape: tuple[int, ...]) -> None:
    """Raise DataError unless samples of `shape`, no texts, are images of one or three channels."""
    check_images(shape, "FixMatch augments")


def weak(x: Tensor, generator: Generator) -> Tensor:
    """Shift images [N, C, H, W] by up to an eighth; mirror colour images at random.

    A mirrored digit is not a digit, so that grey images are not mirrored. Of texts, tokens are left
    out.
    """
    if _is_text(x):
        return weak_tokens(x, generator)
    return shift(flip(x, generator) if x.shape[1] == 3 else x, generator, reflect=True)


def strong(x: Tensor, generator: Generator) -> Tensor:
    """Apply to images [N, C, H, W] the weak augmentation, RandAugment and random erasing.

    Of texts, more tokens are left out, and the others move.
    """
    if _is_text(x):
        return strong_tokens(x, generator)
    return erase(rand_augment(weak(x, generator), generator), generator)


def _is_text(x: Tensor) -> bool:
    return not x.is_floating_point()


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
