"""Kinds of samples: images, rows of tables, texts and signals, an object each.

| kind | shape | values |
|---|---|---|
| image | [C, H, W] | float32, or bytes |
| table | [F] | float32, or bytes |
| signal | [C, T]: channels and steps of time | float32 |
| text | [0, L, V]: at most L tokens, numbers below V; a text has no channels | int64 [L] |

Data states its kind by name; no shape tells it. Whatever depends on the kind is asked of its
object. Nothing here imports PyTorch before it is called, so that settings and the declarations of
methods can use kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

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
_ALLOWED_SIGNALS = "of signals x must be [N, channels, time] or [N, time], finite numbers"


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


def signals(x: Array, where: Path | str) -> Array:
    """Return signals [N, C, T] float32, of [N, C, T] or, with a single channel, [N, T]."""
    shape = list(x.shape)
    if x.ndim not in (2, 3) or x.dtype.kind not in "iuf" or min(shape[1:]) < 1:
        raise DataError(f"{where}: {_ALLOWED_SIGNALS}; it is {x.dtype} {shape}")
    samples = finite(x, where, _ALLOWED_SIGNALS)
    return samples[:, None] if samples.ndim == 2 else samples


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

    def blank(self, count: int, shape: Shape) -> Tensor:
        """Return samples of zeros, or texts of one token, on torch's default device."""
        import torch

        if self.is_numeric:
            return torch.zeros(count, *shape)
        return torch.ones(count, 1, dtype=torch.int64)

    def changes(self) -> Mapping[str, Change]:
        """Return what changes samples: `augmentations`, and FixMatch's weak and strong change."""
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
    large_model="gems-resnet56",
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
    side=lambda shape: shape[1],
    minimum=" of {} steps or more",
    checked=signals,
)


def permuted_columns(
    x: Array, columns: Sequence[int], size: int, rng: np.random.Generator
) -> Array:
    """Return rows [size, F] whose columns are those of x [N, F], each permuted.

    CoFED, Section 5.7: "randomly generated with valid values". The rule is that of the authors'
    published script: each column's values are in an order of its own, so that columns are
    independent, and no row's value is drawn twice before all are.
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
    pool_of_any=("sk-tree", "sk-svm", "sk-gam", "sk-mlp"),  # CoFED's four kinds, Section 5.7
    model="mlp",
    large_model="mlp3",
    generated=permuted_columns,
)


def text_shape(tokens: int, vocabulary: int) -> Shape:
    """Return the shape of texts of at most `tokens` tokens, with numbers below `vocabulary`."""
    return (0, tokens, vocabulary)


def shuffled_tokens(x: Array, columns: Sequence[int], size: int, rng: np.random.Generator) -> Array:
    """Return texts [size, L] of the tokens of x [N, L] in a random order.

    As generated rows of tables: each token is as frequent as in x, and its place says nothing.
    Lengths are those of the texts in x, in an order of their own.
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
    is_numeric=False,
    describe=lambda shape: f"texts of up to {shape[1]} tokens below {shape[2]}",
    sizes=lambda shape: shape[1:],
    generated=shuffled_tokens,
    augmentations=("tokens",),
    changeable="texts",
)


KINDS = {kind.name: kind for kind in (IMAGE, TABLE, TEXT, SIGNAL)}
"""Every kind by its name."""
AUGMENTATIONS = {name: kind for kind in KINDS.values() for name in kind.augmentations}
"""The kind that each value of `training.augment` changes."""


def kind_of_arrays(shape: Shape, stated: Kind | None = None) -> Kind:
    """Return the kind of samples from arrays, where images and rows of tables are read alike.

    If neither is stated but another kind, it is that; else [F] is a row, and all else an image.
    """
    if stated in (None, IMAGE, TABLE):
        return TABLE if len(shape) == 1 else IMAGE
    return stated


def augmentation(name: str, kind: Kind, shape: Shape) -> Change | None:
    """Return the change that `training.augment` names, for such samples; None for "none".

    Raises DataError if it does not change such samples.
    """
    if name == "none":
        return None
    changed = AUGMENTATIONS[name]
    if changed is not kind or not kind.is_changeable(shape):
        _refuse_change(f"'training.augment' = {name!r} changes", changed.changeable, kind, shape)
    return kind.changes()[name]


def check_changeable(kind: Kind, shape: Shape, what: str) -> None:
    """Raise DataError, beginning with `what`, unless such samples can be changed."""
    if not (kind.changeable and kind.is_changeable(shape)):
        able = kind.changeable or " or ".join(filter(None, (k.changeable for k in KINDS.values())))
        _refuse_change(what, able, kind, shape)


def _refuse_change(what: str, able: str, kind: Kind, shape: Shape) -> NoReturn:
    raise DataError(f"{what} {able}, the samples have {kind.describe(shape)}")
