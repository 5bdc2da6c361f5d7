"""Information about registered models, known before they are built, and layers that they share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedhet.base.errors import ModelError
from fedhet.kinds import IMAGE, Kind, Shape


@dataclass(frozen=True)
class ModelInfo:
    """A registered model: `extractor(shape)` builds [N, *shape] -> [N, D], D its native width.

    `min_side` is the minimum side of an image, or steps of time of a signal; None: any shape is
    accepted, also flat vectors. `takes` is the kind of the samples, if they are not images.
    """

    name: str
    family: str
    line: str
    source: str
    min_side: int | None
    extractor: Callable[..., nn.Module] = field(repr=False, compare=False)
    """(shape) -> the extractor; with `narrows`, also (shape, width=...)."""
    narrows: bool = False
    """Whether the model comes in other widths, by names such as cnn2-x0.5 (`narrowed`)."""
    takes: Kind | None = None
    """The one kind of samples that the model takes; None: images or, without `min_side`, any."""

    def check(self, shape: Shape, kind: Kind | None = None) -> None:
        """Raise ModelError, with the allowed shapes, if samples of this shape do not fit.

        `kind` is the kind of the samples; None: the one that the model takes.
        """
        taken = IMAGE if self.takes is None and self.min_side is not None else self.takes
        if kind and taken is not kind and not kind.is_numeric:
            raise ModelError(
                f"model '{self.name}' takes numbers, not {kind.plural}; {kind.model} and others "
                "that `fedhet models` lists do"
            )
        side = self.min_side or 0
        fits = taken.fits(shape) and taken.side(shape) >= side if taken else len(shape) > 0
        other = f"{kind.plural} of " if kind and taken and fits and kind is not taken else ""
        if not fits or other or min(taken.sizes(shape) if taken else shape) < 1:
            allowed = taken.wanted if taken else "samples of any shape"
            allowed += taken.minimum.format(side) if taken and side else ""
            hint = "; 'mlp' takes any shape" if taken and (kind or taken).is_numeric else ""
            raise ModelError(f"model '{self.name}' takes {allowed}, not {other}shape {shape}{hint}")


_NARROW = re.compile(r"(.+)-x(0\.[0-9]{1,6})")


def narrow_name(name: str, width: float) -> str:
    """Return the name of a model with a share `width` of its channels: cnn2-x0.5; `name` for 1."""
    return name if width == 1 else f"{name}-x{width:.6f}".rstrip("0")


def base_and_width(name: str) -> tuple[str, float]:
    """Return the inverse of `narrow_name`: the name of the whole model, and the width in (0, 1]."""
    found = _NARROW.fullmatch(name)
    return (found[1], float(found[2])) if found and float(found[2]) else (name, 1.0)


def share_of(channels: int, width: float) -> int:
    """Return the channels of a layer at a width: rounded up, as in HeteroFL's published code."""
    return math.ceil(channels * width)


def narrowed(info: ModelInfo, width: float) -> ModelInfo:
    """Return the model with a share `width` of the channels of each hidden layer, rounded up."""
    return replace(
        info,
        name=narrow_name(info.name, width),
        line=f"{info.line}; {width:g} of the channels of each layer",
        extractor=partial(info.extractor, width=width),
    )


GROUPED = "-gn"
"""What follows the name of a model whose batch norms are replaced by group norms."""
GROUPS = 8
"""The most groups of a group norm; fewer where the channels cannot be divided by it."""


def grouped_norms(info: ModelInfo) -> ModelInfo:
    """Return the model with group norms (Wu and He 2018) in place of its batch norms.

    No sample then depends on the others of its batch.
    """
    return replace(
        info,
        name=f"{info.name}{GROUPED}",
        line=f"{info.line}; group norms in place of batch norms",
        extractor=partial(_with_group_norms, info.extractor),
    )


def has_batch_norms(module: nn.Module) -> bool:
    """Return whether any layer normalises by the statistics of a batch."""
    return any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in module.modules())


def _with_group_norms(extractor: Callable[..., nn.Module], shape: Shape, **own: Any) -> nn.Module:
    made = extractor(shape, **own)
    for part in list(made.modules()):
        if getattr(part, "inplace", False):
            setattr(part, "inplace", False)  # noqa: B010  hooks need what the layer before has returned
        for name, child in part.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                channels = child.num_features
                norm = nn.GroupNorm(math.gcd(channels, GROUPS), channels)
                setattr(part, name, nn.Sequential(norm, _Copy()))
    return made


class _Copy(nn.Module):
    """x, in memory of its own: torchvision's blocks add to what a norm returns in place."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of a tensor of any shape."""
        return x.clone()


@dataclass(frozen=True)
class DrawnInfo:
    """A name in a pool for which each client draws a model."""

    name: str
    family: str
    line: str
    source: str
    draw: Callable[[int, int], str] = field(repr=False, compare=False)
    """(seed, number of the client) -> the name of its model, one of `models`."""
    models: Mapping[str, ModelInfo] = field(repr=False, compare=False)


def encoder_layers(width: int, layers: int, heads: int = 4) -> nn.TransformerEncoder:
    """Return layers of attention, [N, L, width] -> the same, normalised before each part."""
    layer = nn.TransformerEncoderLayer(
        width, heads, 2 * width, dropout=0.1, batch_first=True, norm_first=True
    )
    return nn.TransformerEncoder(
        layer, layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
    )


LEVELS = 256
"""The number of values of a random byte."""


class Dropout(nn.Dropout):
    """`nn.Dropout`, which on a CPU decides by one random byte for each element.

    torch draws a whole random number for each, which takes several times as long as the layer
    before it. Elsewhere, and for a `p` that is not a multiple of 1/256, it is torch's own.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x with each element zeroed with probability p, the others scaled by 1/(1 - p)."""
        threshold = self.p * LEVELS
        if not self.training or x.device.type != "cpu" or threshold not in range(1, LEVELS):
            return super().forward(x)
        return x * random_bytes(x).ge_(threshold).div_(1 - self.p)


def random_bytes(like: Tensor) -> Tensor:
    """Return integers from 0 to 255 as a tensor of the shape, type and layout of `like`.

    They are drawn from torch's global generator, eight at a time.
    """
    drawn = torch.empty(-(-like.numel() // 8), dtype=torch.int64).random_(-(2**63), None)
    found = torch.empty_like(like, requires_grad=False)
    in_memory = found.as_strided((found.numel(),), (1,))
    in_memory.copy_(drawn.view(torch.uint8)[: found.numel()])
    return found
