"""UCI's Adult, a table: `adult:DIR`.

It is encoded by scikit-learn's encoders, fitted on the whole training set: categorical columns are
one-hot, numeric columns centred and scaled. `Dataset.columns` says which features are of a column.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, reason_of
from fedhet.data.rows import bytes_of, open_bounded
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Split, held_out, numbered, refuse_more
from fedhet.kinds import TABLE

_OPENML_TEST_FRACTION = 1 / 3
_OPENML_ADULT = 1590
_ADULT_NUMBERS = (0, 2, 4, 10, 11, 12)  # of the 14 columns in adult.names
_ADULT_COLUMNS = 15  # the last is the class
_CHARACTER = 4  # bytes of one in numpy's arrays of text
_MOST_CHARACTERS = 200  # in a field: numpy gives every field the room of the longest
_MOST_NUMBER = 1e15  # squares of such numbers and their sums are finite

Rows = npt.NDArray[np.str_]


def read_adult(folder: str, spec: DataSpec) -> Dataset:
    """Read UCI's Adult: DIR/adult.data and adult.test, plain or .gz, as published.

    If they are missing and `download` is set, OpenML's copy is used and kept in DIR; a fixed third
    of it is the common test set.
    """
    root = expanded(folder)
    found = [_file(root, name) for name in ("adult.data", "adult.test")]
    if found[0] is not None and found[1] is not None:
        train, test = (_read_rows(path, spec) for path in found if path is not None)
    elif spec.download:
        rows = _openml_rows(root)
        parts = held_out(numbered(rows[:, -1]), _OPENML_TEST_FRACTION, "adult")
        train, test = (rows[part] for part in parts)
    else:
        raise DataError(
            f"data.dataset = {spec.dataset!r}: adult.data and adult.test (or .gz) are not in "
            f"{root.resolve()}; put UCI's files there, or allow --set download=true"
        )
    return _encoded(spec.dataset, train, test)


def _file(root: Path, name: str) -> Path | None:
    found = [path for path in (root / name, root / f"{name}.gz") if path.is_file()]
    return found[0] if found else None


def _read_rows(path: Path, spec: DataSpec) -> Rows:
    """Return the rows of one file as text [N, 15]; '?' is treated as a category."""
    rows, taken, longest = [], 0, 1
    try:
        with open_bounded(path, spec) as text:
            lines = csv.reader(text, skipinitialspace=True)
            for row in lines:
                # adult.test starts with a line of one field; both files end with an empty line.
                if len(row) > 1:
                    _check_row(row, path, lines.line_num)
                    rows.append(row)
                    longest = max(longest, *map(len, row))
                    taken += bytes_of(row) + _CHARACTER * longest * len(row)
                    refuse_more(taken, spec, path)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: not a readable table ({reason_of(error)})") from error
    if not rows:
        raise DataError(f"{path}: holds no rows")
    table: Rows = np.array(rows, dtype=np.str_)
    table[:, -1] = np.char.rstrip(table[:, -1], ".")
    return table


def _check_row(row: Sequence[str], path: Path, line: int) -> None:
    """Raise DataError for a row of another number of columns, or of a long field."""
    if len(row) != _ADULT_COLUMNS:
        raise DataError(f"{path}: line {line} has {len(row)} columns, Adult has 15")
    if max(map(len, row)) > _MOST_CHARACTERS:
        raise DataError(
            f"{path}: line {line} has a field of {max(map(len, row))} characters, at most "
            f"{_MOST_CHARACTERS} are allowed"
        )


def _openml_rows(root: Path) -> Rows:
    """Return all rows of OpenML's copy of Adult as text; scikit-learn caches it in `root`."""
    from sklearn.datasets import fetch_openml

    try:
        frame: Any = fetch_openml(
            data_id=_OPENML_ADULT, data_home=str(root), as_frame=True, parser="auto"
        ).frame
    except Exception as error:  # urllib's, openml's own, a broken archive
        raise DataError(f"Adult cannot be downloaded from OpenML: {error}") from error
    if frame.shape[1] != _ADULT_COLUMNS:
        raise DataError(f"OpenML's Adult has {frame.shape[1]} columns, 15 are expected")
    return np.array(frame.astype(object).where(frame.notna(), "?").astype(str), dtype=np.str_)


def _encoded(name: str, train: Rows, test: Rows) -> Dataset:
    """Return the rows as float32: numeric columns first, then one feature per category."""
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    numbers = list(_ADULT_NUMBERS)
    words = [c for c in range(_ADULT_COLUMNS - 1) if c not in _ADULT_NUMBERS]
    scaler = StandardScaler().fit(_floats(name, train, numbers))
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32)
    encoder.fit(train[:, words])
    classes = tuple(map(str, np.unique(train[:, -1])))
    if odd := sorted(set(map(str, test[:, -1])) - set(classes)):
        raise DataError(f"{name}: the test set has the class {odd[0]!r}, training has {classes}")

    def split(rows: Rows) -> Split:
        values = scaler.transform(_floats(name, rows, numbers)).astype(np.float32)
        x = np.concatenate([values, encoder.transform(rows[:, words])], axis=1)
        return Split(torch.from_numpy(x), torch.from_numpy(np.searchsorted(classes, rows[:, -1])))

    widths = (*(1 for _ in numbers), *(len(found) for found in encoder.categories_))
    return Dataset(name, split(train), split(test), classes, columns=widths)


def _floats(name: str, rows: Rows, columns: Sequence[int]) -> npt.NDArray[np.float64]:
    try:
        numbers = rows[:, columns].astype(np.float64)
    except ValueError as error:
        raise DataError(f"{name}: a column of numbers holds a word ({error})") from error
    odd = numbers[~(np.abs(numbers) <= _MOST_NUMBER)]
    if odd.size:
        raise DataError(
            f"{name}: a column of numbers holds {odd[0]}, they must be finite and at most "
            f"{_MOST_NUMBER:g} either way"
        )
    return numbers


SOURCES = (
    Source("adult", "UCI's census income: adult.data and adult.test", read_adult, "DIR", TABLE),
)
