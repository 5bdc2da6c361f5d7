"""Random changes to training images, an own draw for each image; those to texts by name.

Images [N, C, H, W] are float32, scaled to [-1, 1]. All draws come from a CPU generator that the
caller seeds. RandAugment is Cubuk et al., RandAugment: Practical Automated Data Augmentation with a
Reduced Search Space, 2020; its operations and their ranges are torchvision's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as V

from fedhet.algorithms.token_changes import changed_tokens
from fedhet.errors import DataError
from fedhet.kinds import described, kind_of

Operation = Callable[[Tensor], Tensor]
Change = Callable[[Tensor, Generator], Tensor]
"""(images [N, C, H, W], generator) -> the changed images, of the same shape."""
BLACK = -1.0
STRENGTH = 1 / 3
"""RandAugment's magnitude: 10 of its scale of 30."""
IN_A_ROW = 2
"""How many operations RandAugment applies to an image."""


def augmentation(name: str, shape: tuple[int, ...]) -> Change | None:
    """Return the change that `training.augment` names, for samples of `shape`; None for "none".

    Raises DataError if the samples are not images with one or three channels; of "tokens", texts.
    """
    if name == "none":
        return None
    if name == "tokens":
        if kind_of(shape) != "text":
            raise DataError(
                f"'training.augment' = {name!r} changes texts, the samples have {described(shape)}"
            )
        return changed_tokens
    check_images(shape, f"'training.augment' = {name!r} changes")
    return CHANGES[name]


def check_images(shape: tuple[int, ...], what: str) -> None:
    """Raise DataError, beginning with `what`, unless samples are images [1 or 3, H, W]."""
    if len(shape) != 3 or shape[0] not in (1, 3):
        raise DataError(f"{what} images [1 or 3, H, W], the samples have {described(shape)}")


def shift(x: Tensor, generator: Generator, *, reflect: bool = False) -> Tensor:
    """Move each image by up to an eighth of its height, up or down, left or right.

    What comes in from outside is black or, with `reflect`, the image mirrored at its border.
    """
    count, _, height, width = x.shape
    reach = max(1, height // 8)
    edges = (reach, reach, reach, reach)
    wide = F.pad(x, edges, "reflect") if reflect else F.pad(x, edges, value=BLACK)
    top, left = torch.randint(2 * reach + 1, (2, count), generator=generator).to(x.device)
    places = wide.unfold(2, height, 1).unfold(3, width, 1)  # [N, C, top, left, H, W]; a view
    return places[torch.arange(count, device=x.device), :, top, left]


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Mirror each image, left to right, with probability 1/2."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(mirrored.to(x.device)[:, None, None, None], x.flip(3), x)


def rand_augment(x: Tensor, generator: Generator) -> Tensor:
    """Apply two operations of RandAugment to each image, one after the other.

    Images that drew the same operation are changed together, as torchvision's functions take one
    magnitude a call.
    """
    bright = (x + 1) / 2
    for _ in range(IN_A_ROW):
        drawn = _drawn_operations(len(x), generator)
        changed = bright.clone()
        for number in sorted(set(drawn.tolist())):
            rows = (drawn == number).nonzero().flatten().to(x.device)
            changed[rows] = OPERATIONS[number](bright[rows])
        bright = changed
    return bright * 2 - 1


def _drawn_operations(count: int, generator: Generator) -> Tensor:
    """Return the place in OPERATIONS of the operation for each of `count` images, [count]."""
    kind = torch.randint(KINDS, (count,), generator=generator)
    negative = torch.rand(count, generator=generator) < 0.5
    return torch.where(negative & (kind < len(WITH_SIGN)), kind + KINDS, kind)


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
    return x.masked_fill(inside.to(x.device), BLACK)


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


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "crop": shift,
        "flip": flip,
        "crop-flip": in_order(flip, shift),
        "randaugment": in_order(flip, shift, rand_augment),
    }
)
"""What `training.augment` may name for images, but for none."""


def _with_sign(sign: int) -> list[Operation]:
    """Return the operations that have a direction, in one of both."""
    part = sign * STRENGTH
    factor, degrees = 1 + 0.9 * part, math.degrees(math.atan(0.3 * part))
    return [
        lambda x: _affine(x, shear=(degrees, 0.0)),
        lambda x: _affine(x, shear=(0.0, degrees)),
        lambda x: _affine(x, move=(int(150 / 331 * x.shape[3] * part), 0)),
        lambda x: _affine(x, move=(0, int(150 / 331 * x.shape[2] * part))),
        lambda x: V.rotate(x, 30 * part),
        lambda x: V.adjust_brightness(x, factor),
        lambda x: V.adjust_saturation(x, factor),
        lambda x: V.adjust_contrast(x, factor),
        lambda x: V.adjust_sharpness(x, factor),
    ]


def _affine(
    x: Tensor, move: tuple[int, int] = (0, 0), shear: tuple[float, float] = (0.0, 0.0)
) -> Tensor:
    """Move images by pixels (right, down), or shear them by degrees at their upper left corner."""
    corner = [0.0, 0.0] if any(shear) else None
    moved: Tensor = V.affine(x, 0.0, list(move), 1.0, list(shear), center=corner)
    return moved


WITH_SIGN = tuple(_with_sign(1))
WITHOUT_SIGN: tuple[Operation, ...] = (
    lambda x: x,
    lambda x: V.posterize(x, 7),
    lambda x: V.solarize(x, 1 - STRENGTH),
    V.autocontrast,
    V.equalize,
)
KINDS = len(WITH_SIGN) + len(WITHOUT_SIGN)
OPERATIONS = (*WITH_SIGN, *WITHOUT_SIGN, *_with_sign(-1))
"""RandAugment's operations on images from 0 to 1; those of the other direction last."""
