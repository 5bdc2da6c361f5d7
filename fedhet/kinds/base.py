"""What a kind of samples declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError

if TYPE_CHECKING:  # a kind is declared without PyTorch, which only its functions need
    from torch import Generator, Tensor

Shape = tuple[int, ...]
"""One sample's shape."""
PADDING = 0
"""The token that fills a text up to L; every text has one token or more that is another."""
Array = npt.NDArray[Any]
Change = Callable[["Tensor", "Generator"], "Tensor"]
"""(samples [N, ...], generator) -> the changed samples, of the same shape."""
Generate = Callable[[Array, Sequence[int], int, np.random.Generator], Array]
"""(samples [N, ...], features of each column of a table, M, generator) -> samples [M, ...]."""
_ALLOWED = (
    "x must be [N, F], [N, H, W] or [N, C, H, W] (channels first), uint8 images or finite numbers"
)


def zeros(count: int, shape: Shape) -> Tensor:
    """Return `count` samples of zeros, on torch's default device."""
    import torch

    return torch.zeros(count, *shape)


def one_token(count: int, shape: Shape) -> Tensor:
    """Return `count` texts of one token, on torch's default device."""
    import torch

    return torch.ones(count, 1, dtype=torch.int64)


def images_or_rows(x: Array, where: Path | str) -> Array:
    """Return samples [N, F] or [N, C, H, W]: bytes as they are, all else as float32.

    [N, H, W] gets a channel. Raises DataError, which names `where`, for anything else.
    """
    shape = list(x.shape)
    last = len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] > 4
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "iuf" or last:
        raise DataError(f"{where}: {_ALLOWED}; it is {x.dtype} {shape}")
    samples = np.ascontiguousarray(x if x.dtype == np.uint8 else finite(x, where, _ALLOWED))
    return samples[:, None] if samples.ndim == 3 else samples


def finite(x: Array, where: Path | str, allowed: str) -> npt.NDArray[np.float32]:
    """Return numbers as float32. Raises DataError, which ends in `allowed`, for NaN or infinity."""
    with np.errstate(over="ignore"):  # overflow is refused below
        samples = np.ascontiguousarray(x.astype(np.float32))
    if not np.isfinite(samples).all():
        raise DataError(f"{where}: x holds NaN or infinite values; {allowed}")
    return samples


@dataclass(frozen=True)
class Kind:
    """A kind of samples. Its functions import PyTorch themselves."""

    name: str
    """As `data.sample-kind` has it, and as data and clients state it."""
    plural: str
    """What several samples are called in messages."""
    wanted: str
    """What a model of the kind takes, in words."""
    fits: Callable[[Shape], bool]
    """(shape) -> whether a sample of the kind may have this shape."""
    example: Shape
    """A shape that all models of the kind take."""
    pool: tuple[str, ...]
    """The default pool of models."""
    model: str
    """The default model of a method whose clients have one architecture, and of small helpers."""
    large_model: str
    """The default of a method's own model that is larger than the clients', such as a server's."""
    pool_of_any: tuple[str, ...] = ()
    """The default pool of a method whose models need no gradients; empty: `pool`."""
    is_numeric: bool = True
    """Whether samples are numbers, which a model of any shape takes, and not tokens."""
    describe: Callable[[Shape], str] = lambda shape: f"shape {list(shape)}"
    """(shape) -> a sample's shape in words."""
    sizes: Callable[[Shape], Shape] = lambda shape: shape
    """(shape) -> the sizes in it that must be 1 or more."""
    side: Callable[[Shape], int] = min
    """(shape) -> the size of which a model may demand a minimum."""
    minimum: str = ""
    """The words for such a minimum, {}."""
    blank: Callable[[int, Shape], Tensor] = zeros
    """(N, shape) -> samples [N, ...] without content, on torch's default device."""
    checked: Callable[[Array, Path | str], Array] = images_or_rows
    """(array, where it is from) -> samples [N, ...]. Raises DataError for another array."""
    generated: Generate | None = None
    """Returns public samples without a meaning (`data.public-dataset` = generated)."""
    augmentations: tuple[str, ...] = ()
    """What `training.augment` may name for such samples, besides none."""
    changeable: str = ""
    """Which samples have a few `changes`, in words; empty: none."""
    is_changeable: Callable[[Shape], bool] = lambda shape: True
    """(shape) -> whether samples of the kind with this shape can be changed."""

    def changes(self) -> Mapping[str, Change]:
        """Return what changes samples: `augmentations`, and FixMatch's weak and strong change."""
        from fedhet.kinds.changes import CHANGES

        return CHANGES[self.name]
