"""Kinds of samples: images, rows of tables, texts and signals, an object each.

| kind | shape | values |
|---|---|---|
| image | [C, H, W] | float32, or bytes |
| table | [F] | float32, or bytes |
| signal | [C, T]: channels and steps of time | float32 |
| text | [0, L, V]: at most L tokens, numbers below V; a text has no channels | int64 [L] |

A sample's shape says of which kind it is. Whatever depends on the kind is asked of its object; a
new kind is a module of this package, its models, and a reader of its data. Nothing here imports
PyTorch before it is called, so that settings and the declarations of methods can use kinds.
"""

from __future__ import annotations

from fedhet.base.errors import DataError
from fedhet.kinds.base import Change, Kind, Shape
from fedhet.kinds.image import IMAGE
from fedhet.kinds.signal import SIGNAL
from fedhet.kinds.table import TABLE
from fedhet.kinds.text import PADDING, TEXT, text_shape

__all__ = [
    "AUGMENTATIONS", "IMAGE", "KINDS", "PADDING", "SIGNAL", "TABLE", "TEXT", "Change", "Kind",
    "Shape", "augmentation", "check_changeable", "described", "kind_of", "text_shape",
]  # fmt: skip

KINDS = {kind.name: kind for kind in (IMAGE, TABLE, TEXT, SIGNAL)}
"""Every kind by its name."""
AUGMENTATIONS = {name: kind for kind in KINDS.values() for name in kind.augmentations}
"""The kind that each value of `training.augment` changes."""


def kind_of(shape: Shape) -> Kind:
    """Return the kind of samples of `shape`; a shape of no kind counts as an odd image's."""
    return next((kind for kind in KINDS.values() if kind.fits(shape)), IMAGE)


def described(shape: Shape) -> str:
    """Return a sample's shape in words, for messages."""
    return kind_of(shape).describe(shape)


def augmentation(name: str, shape: Shape) -> Change | None:
    """Return the change that `training.augment` names, for samples of `shape`; None for "none".

    Raises DataError if it does not change such samples.
    """
    if name == "none":
        return None
    kind = AUGMENTATIONS[name]
    check_changeable(kind, shape, f"'training.augment' = {name!r} changes")
    return kind.changes()[name]


def check_changeable(kind: Kind, shape: Shape, what: str) -> None:
    """Raise DataError, beginning with `what`, unless the kind's changes are for such samples."""
    if not (kind.changeable and kind.fits(shape) and kind.is_changeable(shape)):
        able = kind.changeable or " or ".join(filter(None, (k.changeable for k in KINDS.values())))
        raise DataError(f"{what} {able}, the samples have {described(shape)}")
