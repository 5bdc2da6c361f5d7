"""Information about a registered model, known before it is built."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from fedhet.errors import ModelError

Shape = tuple[int, ...]
"""One sample's shape: an image [C, H, W] or a flat vector [F]."""


@dataclass(frozen=True)
class ModelInfo:
    """A registered model: `extractor(shape)` builds [N, *shape] -> [N, D], D its native width.

    `min_side` is the minimum image side; None: any shape is accepted, also flat vectors.
    """

    name: str
    family: str
    line: str
    source: str
    min_side: int | None
    extractor: Callable[[Shape], nn.Module] = field(repr=False, compare=False)

    def check(self, shape: Shape) -> None:
        """Raise ModelError, with the allowed shapes, if samples of this shape do not fit."""
        if self.min_side is None:
            fits, allowed = len(shape) > 0, "samples of any shape"
        else:
            fits = len(shape) == 3 and min(shape[1:]) >= self.min_side
            allowed = f"images [C, H, W] of side {self.min_side} or more"
        if not fits or min(shape) < 1:
            hint = "" if self.min_side is None else "; 'mlp' takes any shape"
            raise ModelError(f"model '{self.name}' takes {allowed}, not shape {shape}{hint}")


@dataclass(frozen=True)
class DrawnInfo:
    """A name in a pool that stands for a model of each client's own."""

    name: str
    family: str
    line: str
    source: str
    draw: Callable[[int, int], str] = field(repr=False, compare=False)
    """(seed, number of the client) -> the name of its model, one of `models`."""
    models: Mapping[str, ModelInfo] = field(repr=False, compare=False)
