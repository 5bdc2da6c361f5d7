"""Sample kinds: images, table rows, texts, and signals.

| kind | shape of a sample | values |
|---|---|---|
| image | [C, H, W] | float32 or uint8 |
| table | [F] | float32 or uint8 |
| signal | [C, T]: channels, time steps | float32 |
| text | [0, L, V]: at most L tokens from a vocabulary of size V | int64 [L] |

The kind of a dataset is declared by name, because shapes are ambiguous. Everything that depends on
the kind is an attribute of its `Kind` object. PyTorch is imported lazily, because settings and
method declarations also use kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError

if TYPE_CHECKING:  # Avoid importing PyTorch.
    from torch import Generator, Tensor

Shape = tuple[int, ...]
"""Shape of one sample."""
PADDING = 0
"""Token that pads a text to length L; every text has at least one other token."""
Array = npt.NDArray[Any]
Change = Callable[["Tensor", "Generator"], "Tensor"]
"""Function that takes samples [N, ...] and a random generator, and returns augmented samples."""
DefaultModel = Literal["model", "large_model", "dropout_model"]
"""Attribute of a `Kind` with the name of a default model."""
Generate = Callable[[Array, Sequence[int], int, np.random.Generator], Array]
"""Function that takes samples [N, ...], the number of features per table column, the number M of
samples to generate, and a random generator, and returns samples [M, ...]."""
_EXPECTED = (
    "x must be [N, F], [N, H, W], or [N, C, H, W] (channels first), with uint8 or finite values"
)
_EXPECTED_SIGNALS = "x must be [N, channels, time] or [N, time], with finite values"


def images_or_rows(x: Array, where: Path | str) -> Array:
    """Convert an array to samples [N, F] or [N, C, H, W], in uint8 or float32.

    Images [N, H, W] get a channel axis. Raises DataError, prefixed with `where`, for other arrays.
    """
    shape = list(x.shape)
    channels_last = len(shape) == 4 and shape[3] in (1, 3, 4) and shape[1] > 4
    if x.ndim not in (2, 3, 4) or x.dtype.kind not in "iuf" or channels_last:
        raise DataError(f"{where}: {_EXPECTED}, got {x.dtype} {shape}")
    if len(shape) > 2 and x.dtype.kind in "iu" and x.dtype != np.uint8:
        fix = "Convert the images to uint8, or to floats that you have scaled."
        raise DataError(f"{where}: images of integers must be uint8, got {x.dtype}. {fix}")
    samples = np.ascontiguousarray(x if x.dtype == np.uint8 else finite(x, where, _EXPECTED))
    return samples[:, None] if samples.ndim == 3 else samples


def finite(x: Array, where: Path | str, expected: str) -> npt.NDArray[np.float32]:
    """Convert numbers to float32. Raises DataError with the text `expected` for NaN or infinity."""
    with np.errstate(over="ignore"):  # Overflow is reported below.
        samples = np.ascontiguousarray(x.astype(np.float32))
    if not (valid := np.isfinite(samples)).all():
        row = int(np.argwhere(~valid)[0, 0])
        got = "NaN or infinite values (NaN is also a masked or missing value)"
        raise DataError(f"{where}: {expected}, got {got}, first in sample {row}")
    return samples


def signals(x: Array, where: Path | str) -> Array:
    """Convert an array [N, C, T] or [N, T] to float32 signals [N, C, T]."""
    shape = list(x.shape)
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or min(shape[1:]) < 1:
        raise DataError(f"{where}: {_EXPECTED_SIGNALS}, got {x.dtype} {shape}")
    samples = finite(x, where, _EXPECTED_SIGNALS)
    return samples[:, None] if samples.ndim == 2 else samples


@dataclass(frozen=True)
class Kind:
    """Sample kind, with all attributes and functions that depend on the kind."""

    name: str
    """Name of the kind, a value of `data.sample-kind`."""
    plural: str
    """Plural noun for the samples, for messages."""
    wanted: str
    """Description of a model's input, for messages."""
    fits: Callable[[Shape], bool]
    """Function that returns whether samples of this kind can have a shape."""
    example: Shape
    """Shape that all models of this kind support."""
    pool: tuple[str, ...]
    """Default model pool."""
    model: str
    """Default model for methods with a single client architecture, and for small auxiliary
    models."""
    large_model: str
    """Default for a method's model that is larger than the client models, such as a server
    model."""
    dropout_model: str
    """Default model for methods that need a model with dropout."""
    is_numeric: bool = True
    """Whether samples are numbers, not tokens. Models without a declared kind need numbers."""
    describe: Callable[[Shape], str] = lambda shape: f"shape {list(shape)}"
    """Function that describes a shape, for messages."""
    sizes: Callable[[Shape], Shape] = lambda shape: shape
    """Function that returns the sizes in a shape that must be at least 1."""
    side: Callable[[Shape], int] = min
    """Function that returns the size in a shape, such as the shorter side of an image, to compare
    with a model's minimum size."""
    minimum: str = ""
    """Description of a minimum size for messages, in which `{}` stands for the size."""
    checked: Callable[[Array, Path | str], Array] = images_or_rows
    """Function that takes an array and a prefix for messages, and returns samples [N, ...]. Raises
    DataError if the array is invalid."""
    generated: Generate | None = None
    """Generator of public samples for `data.public-dataset = generated`, or None if unsupported."""
    augmentations: tuple[str, ...] = ()
    """Values of `training.augment` for this kind, in addition to "none"."""
    changeable: str = ""
    """Description of the samples that support `changes`, for messages, or "" if there are none."""
    is_changeable: Callable[[Shape], bool] = lambda shape: True
    """Function that returns whether samples of a shape support `changes`."""

    def blank(self, count: int, shape: Shape) -> Tensor:
        """Return `count` samples of zeros, on torch's default device.

        Texts consist of the single token 1 instead.
        """
        import torch

        if self.is_numeric:
            return torch.zeros(count, *shape)
        return torch.ones(count, 1, dtype=torch.int64)

    def changes(self) -> Mapping[str, Change]:
        """Return the augmentations by name, including FixMatch's "weak" and "strong"."""
        from fedhet.kinds.changes import CHANGES

        return CHANGES[self.name]


IMAGE = Kind(
    name="image",
    plural="images",
    wanted="images [C, H, W]",
    fits=lambda shape: len(shape) == 3,
    example=(3, 64, 64),
    pool=("cnn2", "cnn3", "mlp", "gems-resnet11", "resnet10"),
    model="cnn2",
    large_model="cnn4",
    dropout_model="cnn2-dropout",
    side=lambda shape: min(shape[1:]),
    minimum=" of side {} or more",
    augmentations=("crop", "flip", "crop-flip", "randaugment"),
    changeable="images [1 or 3, H, W]",
    is_changeable=lambda shape: shape[0] in (1, 3),
)


SIGNAL = Kind(
    name="signal",
    plural="signals",
    wanted="signals [C, T] (signal:DIR)",
    fits=lambda shape: len(shape) == 2,
    example=(3, 64),
    pool=("signal-cnn2", "signal-cnn3", "signal-gru", "signal-resnet", "mlp"),
    model="signal-cnn2",
    large_model="signal-resnet",
    dropout_model="signal-cnn2-dropout",
    side=lambda shape: shape[1],
    minimum=" of {} steps or more",
    checked=signals,
)


def permuted_columns(
    x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
) -> Array:
    """Generate rows [size, F] by permuting each column of x [N, F] independently.

    CoFED, Section 5.7: "randomly generated with valid values". As in the authors' published script,
    no value in a column is repeated before all of its values have been used.
    """
    parts = np.split(x, np.cumsum(columns or (1,) * x.shape[1])[:-1], axis=1)
    passes = -(-size // len(x))
    rows = [np.concatenate([rng.permutation(len(x)) for _ in range(passes)]) for _ in parts]
    return np.concatenate([p[row[:size]] for p, row in zip(parts, rows, strict=True)], axis=1)


TABLE = Kind(
    name="table",
    plural="tables",
    wanted="rows [F] of a table",
    fits=lambda shape: len(shape) == 1,
    example=(8,),
    pool=("mlp", "mlp2", "mlp3"),
    model="mlp",
    large_model="mlp3",
    dropout_model="mlp-dropout",
    generated=permuted_columns,
)


def text_shape(tokens: int, vocabulary: int) -> Shape:
    """Return the shape of texts with at most `tokens` tokens and token ids below `vocabulary`."""
    return (0, tokens, vocabulary)


def shuffled_tokens(x: Array, columns: Sequence[int], size: int, rng: np.random.Generator) -> Array:
    """Generate texts [size, L] by sampling tokens and lengths from the texts x [N, L].

    Each token has the same frequency as in x, and its position carries no information.
    """
    lengths = rng.choice((x != PADDING).sum(1), size)
    inside = np.arange(x.shape[1]) < lengths[:, None]
    rows = np.full((size, x.shape[1]), PADDING, np.int64)
    rows[inside] = rng.choice(x[x != PADDING], int(inside.sum()))
    return rows


TEXT = Kind(
    name="text",
    plural="texts",
    wanted="texts (text:PATH)",
    fits=lambda shape: len(shape) == 3 and shape[0] == 0,
    example=(0, 16, 64),
    pool=("text-bag", "text-cnn", "text-gru", "text-lstm", "text-transformer"),
    model="text-cnn",
    large_model="text-transformer",
    dropout_model="text-cnn-dropout",
    is_numeric=False,
    describe=lambda shape: f"texts of up to {shape[1]} tokens with ids below {shape[2]}",
    sizes=lambda shape: shape[1:],
    generated=shuffled_tokens,
    augmentations=("tokens",),
    changeable="texts",
)


KINDS = {kind.name: kind for kind in (IMAGE, TABLE, TEXT, SIGNAL)}
"""All kinds by name."""
AUGMENTATIONS = {name: kind for kind in KINDS.values() for name in kind.augmentations}
"""Sample kind to which each value of `training.augment` applies."""


def kind_of_arrays(shape: Shape, stated: Kind | None = None) -> Kind:
    """Return the kind of samples read from arrays.

    If `stated` is None, IMAGE, or TABLE, samples of shape [F] are table rows, and all other
    samples are images.
    """
    if stated in (None, IMAGE, TABLE):
        return TABLE if len(shape) == 1 else IMAGE
    return stated


def augmentation(name: str, kind: Kind, shape: Shape) -> Change | None:
    """Return the augmentation for a value of `training.augment`, or None for "none".

    Raises DataError if the augmentation does not support samples of this kind and shape.
    """
    if name == "none":
        return None
    supported = AUGMENTATIONS[name]
    if supported is not kind or not kind.is_changeable(shape):
        what = f"training.augment = {name!r} supports"
        _raise_unsupported(what, supported.changeable, kind, shape)
    return kind.changes()[name]


def check_changeable(kind: Kind, shape: Shape, what: str) -> None:
    """Raise DataError, prefixed with `what`, if samples of a kind or shape cannot be augmented."""
    if not (kind.changeable and kind.is_changeable(shape)):
        supported = " or ".join(filter(None, (k.changeable for k in KINDS.values())))
        _raise_unsupported(what, kind.changeable or supported, kind, shape)


def _raise_unsupported(what: str, supported: str, kind: Kind, shape: Shape) -> NoReturn:
    raise DataError(f"{what} {supported}, got {kind.describe(shape)}")
