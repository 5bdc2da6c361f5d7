"""What a kind of samples is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedhet.errors import DataError

if TYPE_CHECKING:  # a kind is declared without PyTorch, which only its functions need
    from torch import Generator, Tensor

Shape = tuple[int, ...]
"""One sample's shape."""
Array = npt.NDArray[Any]
Change = Callable[["Tensor", "Generator"], "Tensor"]
"""(samples [N, ...], generator) -> the changed samples, of the same shape."""
_ALLOWED = (
    "x must be [N, F], [N, H, W] or [N, C, H, W] (channels first), uint8 images or finite numbers"
)


class Kind:
    """A kind of samples; a subclass sets and implements what is special about it."""

    name: ClassVar[str]
    """As `data.sample-kind` has it."""
    plural: ClassVar[str]
    """What several samples are called in messages."""
    data: ClassVar[str]
    """What the data is then said to be: "where the data is ..."."""
    wanted: ClassVar[str]
    """What a model of the kind takes, in words."""
    pool: ClassVar[str]
    """The default pool of models."""
    pool_of_any: ClassVar[str] = ""
    """The same for a method whose models need no gradients; empty: as `pool`."""
    model: ClassVar[str]
    """The default model of a method whose clients have one architecture, and of small helpers."""
    large_model: ClassVar[str]
    """The default of a method's own model that is larger than the clients', such as a server's."""
    is_numeric: ClassVar[bool] = True
    """Whether samples are numbers, which models of any shape take, and not numbers of words."""
    augmentations: ClassVar[tuple[str, ...]] = ()
    """What `training.augment` may name for such samples, besides none."""
    changeable: ClassVar[str] = ""
    """Which samples can be changed, in words."""
    semi: ClassVar[bool] = False
    """Whether `training.semi` is for such samples, which takes the changes `weak` and `strong`."""
    generates: ClassVar[bool] = False
    """Whether public samples can be generated (`data.public-dataset` = generated)."""

    def fits(self, shape: Shape) -> bool:
        """Tell whether a sample of `shape` is of this kind."""
        raise NotImplementedError

    def described(self, shape: Shape) -> str:
        """Return a sample's shape in words, for messages."""
        return f"shape {list(shape)}"

    def sizes(self, shape: Shape) -> Shape:
        """Return the sizes in a shape that must be 1 or more."""
        return shape

    def side(self, shape: Shape) -> int:
        """Return the size for which a model may have a minimum."""
        return min(self.sizes(shape))

    def minimum(self, side: int) -> str:
        """Return what a model with such a minimum takes, in words."""
        return self.wanted

    def blank(self, count: int, shape: Shape) -> Tensor:
        """Return `count` samples without content, on torch's default device."""
        import torch

        return torch.zeros(count, *shape)

    def checked(self, x: Array, where: Path | str) -> Array:
        """Return samples from an array as the kind has them: bytes as they are, else float32.

        Here [N, F] or [N, C, H, W]; [N, H, W] gets a channel. Raises DataError, which names
        `where`, for anything else.
        """
        shape = list(x.shape)
        if x.ndim not in (2, 3, 4) or x.dtype.kind not in "iuf" or _channels_last(shape):
            raise DataError(f"{where}: {_ALLOWED}; it is {x.dtype} {shape}")
        samples = np.ascontiguousarray(x if x.dtype == np.uint8 else finite(x, where, _ALLOWED))
        return samples[:, None] if samples.ndim == 3 else samples

    def generated(
        self, x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
    ) -> Array:
        """Return `size` samples like those in x [N, ...], without a meaning.

        `columns` has the number of features of each column of a table.
        """
        raise NotImplementedError

    def is_changeable(self, shape: Shape) -> bool:
        """Tell whether samples of `shape` can be changed."""
        return bool(self.changeable) and self.fits(shape)

    def changes(self) -> Mapping[str, Change]:
        """Return what changes samples: `augmentations`, and FixMatch's `weak` and `strong`."""
        raise NotImplementedError


def finite(x: Array, where: Path | str, allowed: str) -> npt.NDArray[np.float32]:
    """Return numbers as float32. Raises DataError, which ends in `allowed`, for NaN or infinity."""
    with np.errstate(over="ignore"):  # overflow is refused below
        samples = np.ascontiguousarray(x.astype(np.float32))
    if not np.isfinite(samples).all():
        raise DataError(f"{where}: x holds NaN or infinite values; {allowed}")
    return samples


def _channels_last(shape: list[int]) -> bool:
    return len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] > 4
