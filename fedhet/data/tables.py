"""Tables of columns: numbers, dates and words, and the features that they become.

A schema says what each column becomes, so that the same value is the same features at every
client: a number is centred and scaled, a date is one in days, a word is one of the column's
categories. A missing value is the mean, or no category, and a feature of its own says so. In a
simulation the schema is found from the training rows; the sites of a deployment have one in common.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tomli_w
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedhet.data.rows import bytes_of, read_cells, refuse_doubled
from fedhet.data.spec import DataSpec, Split, refuse_more
from fedhet.data.texts import class_names
from fedhet.disk.bounded import read_tables
from fedhet.errors import DataError, StateError, nearest, one_line, reason_of

MISSING = frozenset({"", "?", "na", "n/a", "nan", "null"})
"""What stands for a missing value, in small letters."""
MOST_CATEGORIES, MOST_CLASSES = 200, 1000
MOST_NUMBER = 1e15
"""Squares of such numbers and their sums are finite."""
DAY = 86_400.0
MOST_ODD = 0.1
"""A smaller share of values that are no numbers, in a column of numbers, is taken for mistakes."""
_FLOAT = 4
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".parquet")
Features = npt.NDArray[np.float32]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Frozen):
    """A column, and the features that its values become."""

    name: str
    kind: Literal["number", "date", "category"]
    mean: float = Field(0.0, allow_inf_nan=False)
    """Of a number; of a date, in days since 1970."""
    deviation: float = Field(1.0, gt=0, allow_inf_nan=False)
    categories: tuple[str, ...] = Field((), max_length=MOST_CATEGORIES)
    missing: bool = False
    """Whether a feature of its own says that a value is missing."""

    @property
    def width(self) -> int:
        """The number of features."""
        own = len(self.categories) if self.kind == "category" else 1
        return own + self.missing

    def features(self, values: Sequence[str], fault: Callable[[int, str], DataError]) -> Features:
        """Return the features [N, width] of values; `fault` makes the error for one of them.

        A word that is no category is none of the features.
        """
        absent = np.array([is_missing(value) for value in values], bool)
        if self.kind == "category":
            places = {name: place for place, name in enumerate(self.categories)}
            own = np.zeros((len(values), len(places)), np.float32)
            for row, value in enumerate(values):
                if value in places and not absent[row]:
                    own[row, places[value]] = 1
        else:
            parse = PARSERS[self.kind]
            numbers = np.array(
                [
                    self.mean if gone else _parsed(parse, value, row, fault)
                    for row, (value, gone) in enumerate(zip(values, absent, strict=True))
                ]
            )
            own = ((numbers - self.mean) / self.deviation).astype(np.float32)[:, None]
        return np.hstack([own, absent[:, None].astype(np.float32)]) if self.missing else own


class TableSchema(_Frozen):
    """What is predicted from which columns, and how these become features."""

    target: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=MOST_CLASSES)
    columns: tuple[Column, ...] = Field(min_length=1)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features of each column."""
        return tuple(column.width for column in self.columns)

    @property
    def digest(self) -> str:
        """A text that two schemas share only if they are the same."""
        return hashlib.blake2b(self.model_dump_json().encode(), digest_size=16).hexdigest()

    def to_toml(self) -> str:
        """Return the schema as a file of `read_schema` has it."""
        kept = self.model_dump(exclude_defaults=True)
        return tomli_w.dumps({k: list(v) if k == "classes" else v for k, v in kept.items()})

    def encode(self, cells: Cells) -> torch.Tensor:
        """Return the features [N, F] float32 of a table's rows.

        Raises DataError for a fault, and if they take more than `data.max-bytes`.
        """
        refuse_more(_FLOAT * len(cells) * sum(self.widths), cells.spec, cells.path)
        parts = [
            column.features(cells.column(column.name), cells.fault_in(column.name))
            for column in self.columns
        ]
        return torch.from_numpy(np.ascontiguousarray(np.hstack(parts)))

    def labelled(self, cells: Cells) -> Split:
        """Return a table's rows with their classes. Raises DataError for a class it does not have.

        Rows without a class are refused, too.
        """
        places = {name: place for place, name in enumerate(self.classes)}
        labels = []
        for row, value in enumerate(cells.column(self.target)):
            if value not in places:
                fault = cells.fault_in(self.target)
                if is_missing(value):
                    raise fault(row, "has no class")
                raise fault(row, f"{value!r} is not a class{nearest(value, self.classes)}")
            labels.append(places[value])
        return Split(self.encode(cells), torch.tensor(labels, dtype=torch.int64))


@dataclass(frozen=True)
class Cells:
    """A table as text, column by column."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]
    """The line of the file, or the row, of each."""
    spec: DataSpec
    """The settings by which it was read."""
    taken: int = 0
    """The bytes that it takes, with those of the tables read before it."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """Return a column's values. Raises DataError, with the nearest name, if it is absent."""
        if name not in self.columns:
            there = ", ".join(map(repr, self.columns))[:200]
            close = nearest(name, self.columns)
            raise DataError(f"{self.path}: has no column {one_line(name)!r}, only {there}{close}")
        return self.columns[name]

    def fault_in(self, column: str) -> Callable[[int, str], DataError]:
        """Return what makes the error for a row's value in a column."""
        return lambda row, fault: DataError(
            f"{self.path}: line {self.lines[row]}, column {one_line(column)!r}: {one_line(fault)}"
        )


def is_missing(value: str) -> bool:
    """Return whether a value stands for none."""
    return value.lower() in MISSING


def read_table(path: Path, spec: DataSpec, taken: int = 0) -> Cells:
    """Read a file of rows, after others that have `taken` some bytes.

    Raises DataError for a fault, and if all take more than `data.max-bytes`.
    """
    if not path.name.lower().endswith(ENDINGS):
        raise DataError(f"{path}: must end in one of {', '.join(ENDINGS)}")
    parquet = path.name.lower().endswith(".parquet")
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    for line, row in _parquet_rows(path, spec) if parquet else read_cells(path, spec):
        if not lines:
            refuse_doubled(path, [name.strip() for name in row])
        for name, value in {name.strip(): value for name, value in row.items()}.items():
            columns.setdefault(name, []).append(str(value).strip())
        taken += bytes_of(map(str, row.values()))
        refuse_more(taken, spec, path)
        lines.append(line)
    if not lines:
        raise DataError(f"{path}: holds no rows")
    return Cells(path, columns, lines, spec, taken)


def find_table(folder: Path, part: str) -> Path | None:
    """Return the file of a part, train or test, in a folder; None if there is none."""
    found = [path for ending in ENDINGS if (path := folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {found[0].name} and {found[1].name}, one is allowed")
    return found[0] if found else None


def found_schema(cells: Cells, spec: DataSpec) -> TableSchema:
    """Return the schema of training rows. Raises DataError if they do not make one.

    All columns are features but the target and the one of `data.by`, or those in `data.columns`.
    """
    if not spec.target:
        names = ", ".join(cells.columns)
        raise DataError(f"{cells.path}: data.target must name the column of the class, of {names}")
    classes = class_names([v for v in cells.column(spec.target) if not is_missing(v)], cells.path)
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise DataError(
            f"{cells.path}: the column {spec.target!r} has {len(classes)} different values, which "
            f"are the classes: 2 to {MOST_CLASSES} are allowed"
        )
    rest = [name for name in cells.columns if name not in (spec.target, spec.by.strip())]
    chosen = list(spec.columns) or rest
    if spec.target in chosen or not chosen:
        raise DataError(f"{cells.path}: data.columns must name columns besides {spec.target!r}")
    columns = tuple(_found_column(name, cells, name in spec.categories) for name in chosen)
    return TableSchema(target=spec.target, classes=classes, columns=columns)


def _found_column(name: str, cells: Cells, has_words: bool) -> Column:
    """Return what a column's values become: numbers if all are, or dates, or else categories.

    A column that `has_words` is of categories even if all of them are numbers.
    """
    values = cells.column(name)
    there = [value for value in values if not is_missing(value)]
    missing = len(there) < len(values)
    if not there:
        raise DataError(f"{cells.path}: the column {name!r} is empty; leave it out by data.columns")
    for kind, parse in ({} if has_words else PARSERS).items():
        if odd := list(_odd(parse, there)):
            if len(odd) < MOST_ODD * len(there):
                raise cells.fault_in(name)(values.index(odd[0]), _odd_fault(parse, odd[0]))
            continue
        numbers = np.array([parse(value) for value in there])
        mean, deviation = _moments(numbers)
        return Column(name=name, kind=kind, mean=mean, deviation=deviation, missing=missing)
    categories = tuple(sorted(set(there)))
    if len(categories) > MOST_CATEGORIES:
        raise DataError(
            f"{cells.path}: the column {name!r} has {len(categories)} different words, at most "
            f"{MOST_CATEGORIES} are allowed; name the columns that are features in data.columns"
        )
    return Column(name=name, kind="category", categories=categories, missing=missing)


def _moments(numbers: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the deviation of a column [N]; of equal numbers, their value and 1.

    Rounding would give those a mean beside the value, and a deviation that makes others huge.
    """
    if numbers.min() == numbers.max():
        return float(numbers[0]), 1.0
    return float(numbers.mean()), float(numbers.std())


def _odd(parse: Callable[[str], float], values: Sequence[str]) -> Iterator[str]:
    """Return the values that cannot be parsed, or that are too large to compute with."""
    return (value for value in values if not abs(_tried(parse, value)) <= MOST_NUMBER)


def _tried(parse: Callable[[str], float], value: str) -> float:
    """Return a value as a number, NaN if it is none."""
    try:
        return parse(value)
    except ValueError:
        return math.nan


def _odd_fault(parse: Callable[[str], float], value: str) -> str:
    fault = f"{value!r} is not a {_NOUNS[parse]}, as nearly all others are"
    return f"{fault}: correct it, leave it empty, or name the column in data.categories"


def owners(cells: Cells, by: str) -> list[str]:
    """Return whose each row is. Raises DataError for a row that does not say."""
    found = cells.column(by)
    for row, value in enumerate(found):
        if is_missing(value):
            raise cells.fault_in(by)(row, "is empty, but data.by names it")
    return found


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a file. Raises DataError."""
    try:
        return TableSchema.model_validate(read_tables(path))
    except (OSError, StateError) as error:
        fault = f"{path}: {reason_of(error)}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"cannot read the schema of the table, which `fedhet schema` writes: {fault}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {where}: {first['msg']}") from None


def _parsed(
    parse: Callable[[str], float], value: str, row: int, fault: Callable[[int, str], DataError]
) -> float:
    found = _tried(parse, value)
    if not abs(found) <= MOST_NUMBER:
        raise fault(row, f"{value!r} is not a {_NOUNS[parse]}")
    return found


def _number(text: str) -> float:
    if "_" in text:  # Python's own way to write a number
        raise ValueError(text)
    return float(text)


def _days(text: str) -> float:
    """Return the days since 1970 of a date, or of a date with a time, as ISO 8601 has it.

    A time without a zone is taken as UTC.
    """
    found = datetime.fromisoformat(text)
    if found.tzinfo is None:
        found = found.replace(tzinfo=UTC)
    return (found - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() / DAY


PARSERS: dict[Any, Callable[[str], float]] = {"number": _number, "date": _days}
"""How the text of a value becomes a number, by the kind of column, in the order of trying."""
_NOUNS: dict[Any, str] = {
    _number: f"number up to {MOST_NUMBER:g} either way",
    _days: "date such as 2026-01-31",
}


def _parquet_rows(path: Path, spec: DataSpec) -> Iterator[tuple[int, Mapping[str, object]]]:
    """Yield a Parquet file's rows with their numbers from 1; what is absent is ""."""
    try:
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(path)
        refuse_more(sum(_group_bytes(file)), spec, path)
        number = 0
        for batch in file.iter_batches(batch_size=1024):
            for row in batch.to_pylist():
                number += 1
                yield number, {str(k): _as_text(v) for k, v in row.items()}
    except DataError:
        raise
    except Exception as error:  # pyarrow has errors of many kinds
        raise DataError(f"{path}: not a readable Parquet file ({reason_of(error)})") from error


def _group_bytes(file: Any) -> Iterator[int]:
    metadata = file.metadata
    yield from (metadata.row_group(k).total_byte_size for k in range(metadata.num_row_groups))


def _as_text(value: object) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return value.isoformat() if isinstance(value, datetime) else str(value)
