"""LEAF's JSON: `femnist:DIR` and `shakespeare:DIR`; each user is a client.

Caldas et al., LEAF: A Benchmark for Federated Settings. DIR/train/*.json and, if there are any,
DIR/test/*.json, which become the common test set; or DIR/*.json alone. A file maps `user_data` to
`{user: {"x": [...], "y": [...]}}`.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, reason_of
from fedhet.data.npz import checked_labels
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Index, Split, numbered, refuse_more
from fedhet.kinds import IMAGE, PADDING, TEXT, Kind, Shape, text_shape

SIDE = 28
SIGNS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""FEMNIST's classes, in the order of their numbers."""
_MARKS = "\n !\"&'(),-.0123456789:;>?"
LETTERS = _MARKS + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""Shakespeare's letters, in LEAF's order."""
LENGTH = 80
OTHER = len(LETTERS) + 1
"""The token of a letter that LEAF does not know."""


@dataclass(frozen=True)
class Form:
    """How the samples of one of LEAF's data sets are written."""

    samples: Callable[[Sequence[Any], str], Tensor]
    """(a user's `x`, where it stands) -> samples [N, ...]. Raises ValueError or TypeError."""
    labels: Callable[[Sequence[Any], str], Index]
    classes: tuple[str, ...]
    shape: Shape = ()


def read_leaf(place: str, spec: DataSpec, form: Form) -> Dataset:
    """Read DIR. Raises DataError for any fault of its files."""
    root = expanded(place)
    train = root / "train" if (root / "train").is_dir() else root
    users, split = _read(train, spec, form)
    test = _read(root / "test", spec, form)[1] if (root / "test").is_dir() else None
    groups = numbered(users)
    return Dataset(spec.dataset, split, test, form.classes, shape=form.shape, groups=groups)


def _read(folder: Path, spec: DataSpec, form: Form) -> tuple[list[str], Split]:
    """Return the user of each sample, and the samples, in the order of files and users."""
    users: list[str] = []
    parts: list[Split] = []
    size = 0
    for where, user, found in _users(folder, spec):
        part = _samples(found, where, form)
        size += part.x.nbytes + part.y.nbytes
        refuse_more(size, spec, folder)
        users += [user] * len(part)
        parts.append(part)
    if not users:
        raise DataError(f"{folder}: holds no samples")
    x, y = (torch.cat([getattr(part, name) for part in parts]) for name in ("x", "y"))
    return users, Split(x, y)


def _users(folder: Path, spec: DataSpec) -> Iterator[tuple[str, str, Any]]:
    """Yield where each user's samples stand, the user's name, and the samples."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(f"{folder}: has no .json files of LEAF")
    for path in files:
        try:
            refuse_more(path.stat().st_size, spec, path)
            found = json.loads(path.read_text(encoding="utf-8"))["user_data"]
            pairs = list(found.items())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{path}: not a file of LEAF ({reason_of(error)})") from error
        for user, samples in pairs:
            yield f"{path}, user {user!r}", user, samples


def _samples(found: Any, where: str, form: Form) -> Split:
    try:
        x, y = form.samples(found["x"], where), form.labels(found["y"], where)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {reason_of(error)}") from error
    if len(x) != len(y):
        raise DataError(f"{where}: x has {len(x)} samples and y has {len(y)}")
    if len(y) and y.max() >= len(form.classes):
        raise DataError(f"{where}: y holds {y.max()}, allowed are 0 to {len(form.classes) - 1}")
    return Split(x, torch.from_numpy(y))


def _images(x: Sequence[Any], where: str) -> Tensor:
    """Return images [N, 1, 28, 28] of bytes; LEAF writes 784 numbers from 0 to 1."""
    values = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
    if len(x) and values.shape[1] != SIDE * SIDE:
        raise DataError(f"{where}: an image has {values.shape[1]} numbers, not {SIDE * SIDE}")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"{where}: x must be from 0 to 1")
    pixels = np.round(255 * values).astype(np.uint8)
    return torch.from_numpy(pixels.reshape(-1, 1, SIDE, SIDE))


def _numbers(y: Sequence[Any], where: str) -> Index:
    return checked_labels(np.asarray(y, dtype=None if y else np.int64), where)


TOKENS: Mapping[str, int] = {letter: number for number, letter in enumerate(LETTERS, 1)}


def _texts(x: Sequence[Any], where: str) -> Tensor:
    """Return texts as tokens [N, 80]: the number of each letter, from 1."""
    found = np.full((len(x), LENGTH), PADDING, np.int64)
    for row, text in enumerate(x):
        if not isinstance(text, str) or not 0 < len(text) <= LENGTH:
            raise DataError(f"{where}: x must be texts of 1 to {LENGTH} letters")
        found[row, : len(text)] = [TOKENS.get(letter, OTHER) for letter in text]
    return torch.from_numpy(found)


def _next_letters(y: Sequence[Any], where: str) -> Index:
    for letter in y:
        if letter not in TOKENS:
            raise DataError(f"{where}: y holds {letter!r}, which is none of LEAF's letters")
    return np.array([TOKENS[letter] - 1 for letter in y], dtype=np.int64)


FEMNIST = Form(_images, _numbers, tuple(SIGNS))
SHAKESPEARE = Form(_texts, _next_letters, tuple(map(repr, LETTERS)), text_shape(LENGTH, OTHER + 1))


def _source(name: str, line: str, form: Form, kind: Kind) -> Source:
    return Source(name, line, partial(read_leaf, form=form), "DIR", kind)


SOURCES = (
    _source("femnist", "LEAF's handwritten signs, a client each writer", FEMNIST, IMAGE),
    _source("shakespeare", "LEAF's lines, a client each role", SHAKESPEARE, TEXT),
)
