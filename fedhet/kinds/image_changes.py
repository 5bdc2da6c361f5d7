"""Random changes to training images, a draw of its own for each image.

Images [N, C, H, W] are float32, scaled to [-1, 1]. All draws come from a CPU generator that the
caller seeds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedhet.base.transfer import to_device
from fedhet.kinds.base import Change

BLACK = -1.0
IN_A_ROW = 2
"""How many operations RandAugment applies to an image."""


def shift(x: Tensor, generator: Generator, *, reflect: bool = False) -> Tensor:
    """Move each image by up to an eighth of its height, up or down, left or right.

    What comes in from outside is black or, with `reflect`, the image mirrored at its border.
    """
    count, _, height, width = x.shape
    reach = max(1, height // 8)
    edges = (reach, reach, reach, reach)
    wide = F.pad(x, edges, "reflect") if reflect else F.pad(x, edges, value=BLACK)
    top, left = to_device(torch.randint(2 * reach + 1, (2, count), generator=generator), x.device)
    places = wide.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, top, left, H, W]; a view
    return places[torch.arange(count, device=x.device), :, top, left]


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror each image, left to right, with probability 1/2."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(to_device(mirrored, x.device)[:, None, None, None], x.flip(3), x)


def rand_augment(x: Tensor, generator: Generator) -> Tensor:
    """Apply two operations of RandAugment to each image, one after the other.

    Its operations are torchvision's, which is imported only here: it takes as long as PyTorch.
    """
    from fedhet.kinds.randaugment import operated

    bright = (x + 1) / 2
    for _ in range(IN_A_ROW):
        bright = operated(bright, generator)
    return bright * 2 - 1


def erase(x: Tensor, generator: Generator) -> Tensor:
    """Blacken a rectangle in each image: 2 to 20 % of its area, sides in a ratio of 0.3 to 3.3.

    Zhong et al., Random Erasing Data Augmentation, 2020; the ranges are torchvision's, but for the
    greatest area, which is a third in theirs.
    """
    count, _, height, width = x.shape
    area, ratio, down, right = torch.rand(4, count, generator=generator)
    area = (0.02 + 0.18 * area) * height * width
    ratio = torch.exp(math.log(0.3) + math.log(3.3 / 0.3) * ratio)
    rows = _between(down, (area * ratio).sqrt(), height)
    columns = _between(right, (area / ratio).sqrt(), width)
    inside = (rows[:, :, None] & columns[:, None, :]).unsqueeze(1)
    return x.masked_fill(to_device(inside, x.device), BLACK)


def _between(place: Tensor, length: Tensor, side: int) -> Tensor:
    """Return which of `side` pixels lie in a stretch of `length` [N] at `place` [N], [N, side]."""
    length = length.round().clamp(1, side)
    start = (place * (side - length + 1)).floor().unsqueeze(1)
    pixels = torch.arange(side)
    return (pixels >= start) & (pixels < start + length.unsqueeze(1))


def in_order(*changes: Change) -> Change:
    """Return the change that makes all of `changes`, the first first."""

    def change(x: Tensor, generator: Generator) -> Tensor:
        for one in changes:
            x = one(x, generator)
        return x

    return change


def weak(x: Tensor, generator: Generator) -> Tensor:
    """Shift images by up to an eighth; mirror colour images at random (FixMatch's weak change).

    A mirrored digit is not a digit, so that grey images are not mirrored.
    """
    return shift(flip(x, generator) if x.shape[1] == 3 else x, generator, reflect=True)


def strong(x: Tensor, generator: Generator) -> Tensor:
    """Apply the weak change, RandAugment and random erasing (FixMatch's strong change)."""
    return erase(rand_augment(weak(x, generator), generator), generator)


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "crop": shift,
        "flip": flip,
        "crop-flip": in_order(flip, shift),
        "randaugment": in_order(flip, shift, rand_augment),
        "weak": weak,
        "strong": strong,
    }
)
"""The changes of images by name: `training.augment`, and FixMatch's."""
