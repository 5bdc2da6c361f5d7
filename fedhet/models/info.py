"""What the registry knows of a model before it builds one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from fedhet.errors import ModelError

Shape = tuple[int, ...]
"""One sample's shape: an image [C, H, W] or a flat vector [F]."""


@dataclass(frozen=True)
class ModelInfo:
    """A registered model: `extractor(shape)` builds [N, *shape] -> [N, D], of its native width D.

    `min_side` is the smallest image side it takes; None: it takes any shape, flat vectors too.
    """

    name: str
    family: str
    line: str
    source: str
    min_side: int | None
    extractor: Callable[[Shape], nn.Module] = field(repr=False, compare=False)

    def check(self, shape: Shape) -> None:
        """Raise ModelError, with what is allowed, where a sample of this shape does not fit."""
        if self.min_side is None:
            fits, allowed = len(shape) > 0, "samples of any shape"
        else:
            fits = len(shape) == 3 and min(shape[1:]) >= self.min_side
            allowed = f"images [C, H, W] of side {self.min_side} or more"
        if not fits or min(shape) < 1:
            hint = "" if self.min_side is None else "; 'mlp' takes any shape"
            raise ModelError(f"model '{self.name}' takes {allowed}, not shape {shape}{hint}")
