"""The operations of RandAugment, with the ranges of torchvision's.

Cubuk et al., RandAugment: Practical Automated Data Augmentation with a Reduced Search Space, 2020.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Generator, Tensor
from torchvision.transforms.v2 import functional as V

from fedhet.base.transfer import to_device

Operation = Callable[[Tensor], Tensor]
STRENGTH = 1 / 3
"""RandAugment's magnitude: 10 of its scale of 30."""


def operated(x: Tensor, generator: Generator) -> Tensor:
    """Apply to each image [N, C, H, W], from 0 to 1, an operation that is drawn for it.

    Images that drew the same operation are changed together, as torchvision's functions take one
    magnitude a call.
    """
    drawn = _drawn_operations(len(x), generator)
    changed = x.clone()
    for number in sorted(set(drawn.tolist())):
        rows = to_device((drawn == number).nonzero().flatten(), x.device)
        changed[rows] = OPERATIONS[number](x[rows])
    return changed


def _drawn_operations(count: int, generator: Generator) -> Tensor:
    """Return the place in OPERATIONS of the operation for each of `count` images, [count]."""
    kind = torch.randint(KINDS, (count,), generator=generator)
    negative = torch.rand(count, generator=generator) < 0.5
    return torch.where(negative & (kind < len(WITH_SIGN)), kind + KINDS, kind)


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
