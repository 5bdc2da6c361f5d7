"""FixMatch (Sohn et al. 2020): weak and strong augmentation, and its unsupervised loss.

Images are float32, scaled to [-1, 1]; the augmentations are torchvision's and draw from torch's
global generator. N samples, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torchvision.transforms import v2

from fedhet.errors import DataError

GROUP = 16
"""Images that share one draw: torchvision draws per call, and a call per image would be slow."""


@dataclass(frozen=True)
class Augmentations:
    """The weak and the strong augmentation of FixMatch."""

    weakly: v2.Transform
    strongly: v2.Transform

    def weak(self, x: Tensor) -> Tensor:
        """Shift images [N, C, H, W] by up to an eighth; flip colour images at random."""
        return _in_groups(self.weakly, x)

    def strong(self, x: Tensor) -> Tensor:
        """Apply to images [N, C, H, W] the weak augmentation, RandAugment and random erasing."""
        return _in_groups(self.strongly, x)


@lru_cache(maxsize=16)
def augmentations(shape: tuple[int, ...]) -> Augmentations:
    """Return the augmentations for images of `shape`.

    Raises DataError unless the samples are images with one or three channels.
    """
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(
            f"FixMatch augments images [1 or 3, H, W], the samples have shape {list(shape)}"
        )
    channels, height, width = shape
    # Only colour images are flipped: a mirrored digit is not a digit.
    flip = [v2.RandomHorizontalFlip()] if channels == 3 else []
    shift = v2.RandomCrop((height, width), padding=max(1, height // 8), padding_mode="reflect")
    strong = [v2.RandAugment(num_ops=2, magnitude=10), v2.RandomErasing(p=1.0, scale=(0.02, 0.2))]
    return Augmentations(v2.Compose([*flip, shift]), v2.Compose([*flip, shift, *strong]))


def _in_groups(transform: v2.Transform, x: Tensor) -> Tensor:
    bright = (x + 1) / 2
    return torch.cat([transform(part) for part in torch.split(bright, GROUP)]) * 2 - 1


def confident_labels(logits: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """Return the likeliest class [N], and whether its likelihood reaches `threshold`, bool [N]."""
    likelihood, labels = logits.detach().float().softmax(1).max(1)
    return labels, likelihood >= threshold


def fixmatch_loss(
    logits: Tensor, labels: Tensor, labelled: Tensor, confident: Tensor, weight: float
) -> Tensor:
    """Return the loss of a batch of logits [N, C], a scalar: the mean over all of its samples.

    For `labelled` [N] samples (weak images), cross-entropy with the label; for the others (strong
    images), cross-entropy with the pseudo-label times `weight` if it is `confident` [N], else 0.
    With weight 1 this is UM-pFSSL's Eq. 1 with FixMatch's unsupervised loss as L^u.
    """
    each = F.cross_entropy(logits.float(), labels, reduction="none")
    return (each * torch.where(labelled, 1.0, weight * confident)).mean()
