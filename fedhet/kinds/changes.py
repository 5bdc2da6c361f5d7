"""Random augmentation of images and texts, drawn independently for each sample.

Images [N, C, H, W] are float32 in [-1, 1]; texts [N, L] are int64, padded with PADDING. All random
numbers come from a CPU generator seeded by the caller. Only RandAugment imports torchvision,
because importing torchvision takes as long as importing PyTorch.

RandAugment: Cubuk et al., Practical Automated Data Augmentation with a Reduced Search Space, 2020.
Token deletion: Wei and Zou, EDA: Easy Data Augmentation, 2019. Token shuffling: Lample et al.,
Unsupervised Machine Translation Using Monolingual Corpora Only, 2018, Section 2.3.
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
NUM_OPERATIONS = 2
"""Number of RandAugment operations applied to an image."""
STRENGTH = 1 / 3
"""RandAugment's magnitude: 10 on a scale of 30."""
DIRECTED, UNDIRECTED = 9, 5
"""Numbers of RandAugment operations with and without a direction."""
WEAK, STRONG = 0.1, 0.3
"""Fraction of tokens deleted by the weak and the strong augmentation."""
REACH = 3
"""Maximum number of positions by which a token moves."""


def shift(x: Tensor, generator: Generator, *, reflect: bool = False) -> Tensor:
    """Shift each image by up to an eighth of its height, vertically and horizontally.

    New pixels are black or, if `reflect` is set, mirrored at the border.
    """
    count, _, height, width = x.shape
    reach = max(1, height // 8)
    edges = (reach, reach, reach, reach)
    wide = F.pad(x, edges, "reflect") if reflect else F.pad(x, edges, value=BLACK)
    top, left = to_device(torch.randint(2 * reach + 1, (2, count), generator=generator), x.device)
    # The view has the shape [N, C, top, left, H, W].
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(count, device=x.device), :, top, left]


def flip(x: Tensor, generator: Generator) -> Tensor:
    """Flip each image horizontally with probability 1/2."""
    mirrored = torch.rand(len(x), generator=generator) < 0.5
    return torch.where(to_device(mirrored, x.device)[:, None, None, None], x.flip(3), x)


def rand_augment(x: Tensor, generator: Generator) -> Tensor:
    """Apply two RandAugment operations to each image."""
    x = (x + 1) / 2
    for _ in range(NUM_OPERATIONS):
        x = random_operation(x, generator)
    return x * 2 - 1


def erase(x: Tensor, generator: Generator) -> Tensor:
    """Blacken a rectangle in each image, with 2 to 20 % of its area and aspect ratio 0.3 to 3.3.

    Zhong et al., Random Erasing Data Augmentation, 2020. The ranges are from torchvision, except
    for the maximum area, which is a third in torchvision.
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
    """Return a mask [N, side] of intervals of `length` [N] at relative positions `place` [N]."""
    length = length.round().clamp(1, side)
    start = (place * (side - length + 1)).floor().unsqueeze(1)
    pixels = torch.arange(side)
    return (pixels >= start) & (pixels < start + length.unsqueeze(1))


def compose(*changes: Change) -> Change:
    """Compose augmentations, to be applied in the given order."""

    def change(x: Tensor, generator: Generator) -> Tensor:
        for one in changes:
            x = one(x, generator)
        return x

    return change


def weak(x: Tensor, generator: Generator) -> Tensor:
    """Shift images, and flip color images at random (FixMatch's weak augmentation).

    Gray images are not flipped, because a mirrored digit is not a digit.
    """
    return shift(flip(x, generator) if x.shape[1] == 3 else x, generator, reflect=True)


def random_operation(x: Tensor, generator: Generator) -> Tensor:
    """Apply one random RandAugment operation to each image [N, C, H, W] in [0, 1].

    Images with the same operation are processed together, because torchvision's functions accept
    one magnitude per call.
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
    """Return the RandAugment operations on images in [0, 1], with torchvision's ranges.

    The result starts with the directed operations in the positive direction, and ends with these
    operations in the negative direction.
    """
    from torchvision.transforms.v2 import functional as V

    def directed(sign: int) -> list[Callable[[Tensor], Tensor]]:
        part = sign * STRENGTH
        factor, degrees = 1 + 0.9 * part, math.degrees(math.atan(0.3 * part))

        def affine(x: Tensor, move: list[int], shear: list[float]) -> Tensor:
            """Shift images right and down, in pixels, or shear them about the upper left corner."""
            corner = [0.0, 0.0] if any(shear) else None
            transformed: Tensor = V.affine(x, 0.0, move, 1.0, shear, center=corner)
            return transformed

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


def delete_tokens(x: Tensor, generator: Generator, fraction: float) -> Tensor:
    """Delete a random `fraction` of the tokens in each text, but keep at least one token."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device)
    drawn = drawn.masked_fill(x == PADDING, -1.0)
    remains = drawn >= fraction
    remains.scatter_(1, drawn.argmax(1, keepdim=True), value=True)
    order = (~remains).byte().argsort(dim=1, stable=True)
    return (x * remains).gather(1, order)


def shuffle_tokens(x: Tensor, generator: Generator) -> Tensor:
    """Move each token by up to REACH positions at random."""
    drawn = to_device(torch.rand(x.shape, generator=generator), x.device) * (REACH + 1)
    places = torch.arange(x.shape[1], device=x.device) + drawn
    places = places.masked_fill(x == PADDING, float("inf"))
    return x.gather(1, places.argsort(dim=1, stable=True))


CHANGES: Mapping[str, Mapping[str, Change]] = MappingProxyType(
    {
        "image": {
            "crop": shift,
            "flip": flip,
            "crop-flip": compose(flip, shift),
            "randaugment": compose(flip, shift, rand_augment),
            "weak": weak,
            "strong": compose(weak, rand_augment, erase),  # FixMatch uses the same order.
        },
        "text": {
            "tokens": lambda x, generator: shuffle_tokens(
                delete_tokens(x, generator, WEAK), generator
            ),
            "weak": lambda x, generator: delete_tokens(x, generator, WEAK),
            "strong": lambda x, generator: shuffle_tokens(
                delete_tokens(x, generator, STRONG), generator
            ),
        },
    }
)
"""Augmentations by kind and name. The names are values of `training.augment`, and FixMatch's "weak"
and "strong". The FixMatch paper covers only images."""
