"""Random changes to training samples: to images and to texts, a draw of its own for each sample.

Images [N, C, H, W] are float32, scaled to [-1, 1]; texts [N, L] are int64, padded with PADDING. All
draws come from a CPU generator that the caller seeds. torchvision, which takes as long to import as
PyTorch, is imported by RandAugment alone.

RandAugment: Cubuk et al., Practical Automated Data Augmentation with a Reduced Search Space, 2020.
Texts: words are left out as in Wei and Zou, EDA: Easy Data Augmentation, 2019; tokens move as in
Lample et al., Unsupervised Machine Translation Using Monolingual Corpora Only, 2018, Section 2.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from fedhet.base.transfer import to_device
from fedhet.kinds import PADDING, Change

BLACK = -1.0
IN_A_ROW = 2
"""How many operations RandAugment applies to an image."""
STRENGTH = 1 / 3
"""RandAugment's magnitude: 10 of its scale of 30."""
DIRECTED, UNDIRECTED = 9, 5
"""The number of RandAugment's operations that have a direction, and of the others."""
WEAK, STRONG = 0.1, 0.3
"""The share of tokens that a weak and a strong change leave out."""
REACH = 3
"""How many places a token moves at most."""


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
    """Apply two operations of RandAugment to each image, one after the other."""
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
    """Shift images by up to an eighth; mirror color images at random (FixMatch's weak change).

    A mirrored digit is not a digit, so that gray images are not mirrored.
    """
    return shift(flip(x, generator) if x.shape[1] == 3 else x, generator, reflect=True)


def operated(x: Tensor, generator: Generator) -> Tensor:
    """Apply to each image [N, C, H, W], from 0 to 1, an operation that is drawn for it.

    Images that drew the same operation are changed together, as torchvision's functions take one
    magnitude a call.
    """
    kinds = DIRECTED + UNDIRECTED
    drawn = torch.randint(kinds, (len(x),), generator=generator)
    negative = torch.rand(len(x), generator=generator) < 0.5
    drawn = torch.where(negative & (drawn < DIRECTED), drawn + kinds, drawn)
    changed = x.clone()
    for number in sorted(set(drawn.tolist())):
        rows = to_device((drawn == number).nonzero().flatten(), x.device)
        changed[rows] = operations()[number](x[rows])
    return changed


@cache
def operations() -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return RandAugment's operations on images from 0 to 1, with the ranges of torchvision's.

    Those with a direction come first in one direction, and last in the other.
    """
    from torchvision.transforms.v2 import functional as V

    def directed(sign: int) -> list[Callable[[Tensor], Tensor]]:
        part = sign * STRENGTH
        factor, degrees = 1 + 0.9 * part, math.degrees(math.atan(0.3 * part))

        def affine(x: Tensor, move: list[int], shear: list[float]) -> Tensor:
            """Move images by pixels (right, down), or shear them at their upper left corner."""
            corner = [0.0, 0.0] if any(shear) else None
            moved: Tensor = V.affine(x, 0.0, move, 1.0, shear, center=corner)
            return moved

        return [
            lambda x: affine(x, [0, 0], [degrees, 0.0]),
            lambda x: affine(x, [0, 0], [0.0, degrees]),
            lambda x: affine(x, [int(150 / 331 * x.shape[3] * part), 0], [0.0, 0.0]),
            lambda x: affine(x, [0, int(150 / 331 * x.shape[2] * part)], [0.0, 0.0]),
            lambda x: V.rotate(x, 30 * part),
            lambda x: V.adjust_brightness(x, factor),
            lambda x: V.adjust_saturation(x, factor),
            lambda x: V.adjust_contrast(x, factor),
            lambda x: V.adjust_sharpness(x, factor),
        ]

    undirected: list[Callable[[Tensor], Tensor]] = [
        lambda x: x,
        lambda x: V.posterize(x, 7),
        lambda x: V.solarize(x, 1 - STRENGTH),
        V.autocontrast,
        V.equalize,
    ]
    return (*directed(1), *undirected, *directed(-1))


def left_out(x: Tensor, generator: Generator, share: float) -> Tensor:
    """Return texts without a random `share` of their tokens; the others close up, one stays."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device)
    drawn = drawn.masked_fill(x == PADDING, -1.0)
    kept = drawn >= share
    kept.scatter_(1, drawn.argmax(1, keepdim=True), value=True)
    order = (~kept).byte().argsort(dim=1, stable=True)
    return (x * kept).gather(1, order)


def moved(x: Tensor, generator: Generator) -> Tensor:
    """Return texts whose tokens have each moved by up to REACH places, by a random amount."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device) * (REACH + 1)
    places = torch.arange(x.shape[1], device=x.device) + drawn
    places = places.masked_fill(x == PADDING, float("inf"))
    return x.gather(1, places.argsort(dim=1, stable=True))


CHANGES: Mapping[str, Mapping[str, Change]] = MappingProxyType(
    {
        "image": {
            "crop": shift,
            "flip": flip,
            "crop-flip": in_order(flip, shift),
            "randaugment": in_order(flip, shift, rand_augment),
            "weak": weak,
            "strong": in_order(weak, rand_augment, erase),  # FixMatch's
        },
        "text": {
            "tokens": lambda x, generator: moved(left_out(x, generator, WEAK), generator),
            "weak": lambda x, generator: left_out(x, generator, WEAK),
            "strong": lambda x, generator: moved(left_out(x, generator, STRONG), generator),
        },
    }
)
"""The changes of samples by kind and name: `training.augment`, and FixMatch's, which has images
alone in its paper."""
