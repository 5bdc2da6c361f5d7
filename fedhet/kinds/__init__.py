"""Kinds of samples: images, rows of tables, texts and signals, an object each.

| kind | shape | values |
|---|---|---|
| image | [C, H, W] | float32, or bytes |
| table | [F] | float32, or bytes |
| signal | [C, T]: channels and steps of time | float32 |
| text | [0, L, V]: at most L tokens, numbers below V; a text has no channels | int64 [L] |

A sample's shape says of which kind it is. Whatever depends on the kind is asked of its object; a
new kind is a class in this package, its models, and a reader of its data. Nothing here imports
PyTorch before it is called, so that settings and the declarations of methods can use kinds.
"""

from __future__ import annotations

from fedhet.errors import DataError
from fedhet.kinds.base import Change, Kind, Shape
from fedhet.kinds.image import Image
from fedhet.kinds.signal import Signal
from fedhet.kinds.table import Table
from fedhet.kinds.text import PADDING, Text, text_shape

__all__ = [
    "IMAGE", "KINDS", "PADDING", "SIGNAL", "TABLE", "TEXT", "Change", "Kind", "Shape",
    "augmentation", "augmentation_names", "check_changeable", "described", "kind_of", "named",
    "plurals", "text_shape",
]  # fmt: skip

IMAGE, TABLE, TEXT, SIGNAL = Image(), Table(), Text(), Signal()
KINDS: tuple[Kind, ...] = (IMAGE, TABLE, TEXT, SIGNAL)
"""Every kind; images first."""


def kind_of(shape: Shape) -> Kind:
    """Return the kind of samples of `shape`; a shape of no kind counts as an odd image's."""
    return next((kind for kind in KINDS if kind.fits(shape)), IMAGE)


def named(name: str) -> Kind:
    """Return the kind of that name."""
    return next(kind for kind in KINDS if kind.name == name)


def described(shape: Shape) -> str:
    """Return a sample's shape in words, for messages."""
    return kind_of(shape).described(shape)


def plurals(having: str, word: str) -> str:
    """Return the kinds that have a property, such as "tables and texts" for generates, and."""
    return f" {word} ".join(kind.plural for kind in KINDS if getattr(kind, having))


def augmentation_names() -> tuple[str, ...]:
    """Return what `training.augment` may name."""
    return ("none", *(name for kind in KINDS for name in kind.augmentations))


def augmentation(name: str, shape: Shape) -> Change | None:
    """Return the change that `training.augment` names, for samples of `shape`; None for "none".

    Raises DataError if it does not change such samples.
    """
    if name == "none":
        return None
    kind = next(kind for kind in KINDS if name in kind.augmentations)
    check_changeable(kind, shape, f"'training.augment' = {name!r} changes")
    return kind.changes()[name]


def check_changeable(kind: Kind, shape: Shape, what: str) -> None:
    """Raise DataError, beginning with `what`, unless the kind's changes are for such samples."""
    if not kind.is_changeable(shape):
        able = kind.changeable or " or ".join(k.changeable for k in KINDS if k.changeable)
        raise DataError(f"{what} {able}, the samples have {described(shape)}")
