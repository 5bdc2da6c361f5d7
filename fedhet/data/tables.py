"""Tables of columns: numbers, dates and words, and the features that they become.

A schema says what each column becomes, so that the same value is the same features at every
client: a number is centred and scaled, a date is one in days, a word is one of the column's
categories. A missing value is the mean, or no category, and a feature of its own says so. In a
simulation the schema is found from the training rows; the sites of a deployment have one in common.
`fedhet.data.values` has the rules by which values are recognized.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from datetime import date, timedelta
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedhet.base.disk import read_tables
from fedhet.base.errors import DataError, StateError, nearest, one_line, reason_of
from fedhet.data.cells import ENDINGS, NO_NAME, Cells, find_table, read_table
from fedhet.data.spec import DataSpec, Split, refuse_more
from fedhet.data.values import (
    MAX_NUMBER,
    Distinct,
    UnclearError,
    Words,
    class_words,
    date_order,
    decimal_sign,
    is_missing,
    is_no_number,
    parse_dates,
    parse_numbers,
    recognize,
)

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENDINGS", "Cells", "Column", "TableSchema", "find_table", "found_schema", "owners",
    "read_schema", "read_table",
]  # fmt: skip
LOG = logging.getLogger("fedhet")
MOST_CATEGORIES, MOST_CLASSES = 200, 1000
LEAST_ROWS = 10
"""Of fewer rows, no column is taken for their numbers."""
_FLOAT = 4
Features = npt.NDArray[np.float32]
_ROW_NAME = re.compile(
    r"index|level_\d+|rownames?|row[ _.-]?(names?|ids?|numbers?|nr|no|num|index)?|(.+[ _.-])?id|#",
    re.IGNORECASE,
)
"""Names of columns that identify a row if all their values differ."""


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
    written: str = ""
    """How numbers or dates are written, such as 1.234,5 or dd/mm/yyyy; "": 1234.5, and ISO 8601."""
    unit: str = ""
    """What each number is written with, such as %."""

    @property
    def width(self) -> int:
        """The number of features."""
        own = len(self.categories) if self.kind == "category" else 1
        return own + self.missing

    @property
    def spread(self) -> str:
        """The mean and the standard deviation of a number or a date, or the categories."""
        if self.kind == "category":
            return ", ".join(self.categories)
        if self.kind == "date":
            mean = date(1970, 1, 1) + timedelta(days=round(self.mean))
            return f"mean {mean} ± {self.deviation:.4g} days"
        return f"mean {self.mean:.4g} ± {self.deviation:.4g}"

    def features(
        self,
        values: Sequence[str],
        marks: Sequence[str],
        fault: Callable[[int, str], DataError],
    ) -> tuple[Features, dict[str, int], dict[str, str]]:
        """Return the features [N, width] of values, and the values that the schema does not have.

        These are the number of rows of each unknown value, and the category of each word that is
        spelled otherwise. Unknown values are words that are no category, which are none of the
        features, and missing values where the schema has none. `marks` are further marks of missing
        values; `fault` makes the error for a value.
        """
        found = Distinct.of(values)
        absent = np.array([is_missing(text, marks) for text in found.texts], bool)
        unknown = absent & (not self.missing)
        respelled: dict[str, str] = {}
        if self.kind == "category":
            words = Words(self.categories)
            places = [
                None if gone else words.place(text)
                for text, gone in zip(found.texts, absent, strict=True)
            ]
            own = np.zeros((len(places), len(self.categories)), np.float32)
            for row, place in enumerate(places):
                if place is not None:
                    own[row, place] = 1
                    if found.texts[row] != self.categories[place]:
                        respelled[found.texts[row]] = self.categories[place]
                else:
                    unknown[row] |= not absent[row]
        else:
            if self.kind == "date":
                numbers = parse_dates(found.texts, self.written)
            else:
                numbers = parse_numbers(found.texts, self.written or "1234.5", self.unit)
            for odd in np.flatnonzero(np.isnan(numbers) & ~absent).tolist():
                text = found.texts[odd]
                if not is_no_number(text):
                    raise fault(found.row(odd), f"{text!r} is not a {self._noun}")
                absent[odd] = True
                unknown[odd] = not self.missing
            numbers[absent] = self.mean
            own = ((numbers - self.mean) / self.deviation).astype(np.float32)[:, None]
        if self.missing:
            own = np.hstack([own, absent[:, None].astype(np.float32)])
        counts = found.counts()
        there = {
            found.texts[place]: int(counts[place]) for place in np.flatnonzero(unknown).tolist()
        }
        return own[found.codes], there, respelled

    @property
    def _noun(self) -> str:
        form = f" written as {self.written}" if self.written else ""
        form += f" with {self.unit!r}" if self.unit else ""
        if self.kind == "date":
            return f"date{form}" if form else "date such as 2026-01-31"
        return f"number up to {MAX_NUMBER:g} either way{form}"


class TableSchema(_Frozen):
    """What is predicted from which columns, and how these become features."""

    target: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=MOST_CLASSES)
    missing: tuple[str, ...] = ()
    """Marks of missing values, in addition to those of `fedhet.data.values`."""
    max_unknown: float = Field(0.2, ge=0, le=1)
    """Maximum fraction of a column's values that may be unknown to the schema."""
    columns: tuple[Column, ...] = Field(min_length=1)

    @property
    def widths(self) -> tuple[int, ...]:
        """The number of features of each column."""
        return tuple(column.width for column in self.columns)

    @property
    def digest(self) -> str:
        """A text that two schemas share only if they give the same features and classes."""
        text = self.model_dump_json(exclude={"max_unknown"})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_toml(self) -> str:
        """Serialize the schema to TOML, in the format expected by `read_schema`."""
        kept = self.model_dump(exclude_defaults=True) | {"max_unknown": self.max_unknown}
        columns = kept.pop("columns")
        texts = {k: list(v) if isinstance(v, tuple) else v for k, v in kept.items()}
        return tomli_w.dumps({**texts, "columns": columns})

    def encode(self, cells: Cells, *, refuse: bool = False) -> torch.Tensor:
        """Return the features [N, F] float32 of a table's rows.

        Logs the values that the schema does not know. Raises DataError for a fault, if the features
        take more than `data.max-bytes`, and, with `refuse`, if more than `max_unknown` of a
        column's values are unknown.
        """
        import torch

        refuse_more(_FLOAT * len(cells) * sum(self.widths), cells.spec, cells.path)
        found = np.empty((len(cells), sum(self.widths)), np.float32)
        start = 0
        for column in self.columns:
            values, fault = cells.column(column.name), cells.fault_in(column.name)
            own, unknown, respelled = column.features(values, self.missing, fault)
            found[:, start : start + column.width] = own
            start += column.width
            if respelled:
                pairs = [f"{text!r} as {word!r}" for text, word in islice(respelled.items(), 5)]
                read = one_line(", ".join(pairs))
                LOG.warning("%s: column %r: read %s", cells.path, one_line(column.name), read)
            count = sum(unknown.values())
            if not count:
                continue
            few = ", ".join(repr(text) for text in sorted(unknown)[:3])
            said = f"{count} of {len(cells)} values are unknown to the schema, such as {few}"
            if refuse and count > self.max_unknown * len(cells):
                raise DataError(
                    f"{cells.path}: column {one_line(column.name)!r}: {one_line(said)}, expected "
                    f"at most a fraction of {self.max_unknown:g}. Write them as the schema does, "
                    "or raise its max_unknown"
                )
            LOG.warning("%s: column %r: %s", cells.path, one_line(column.name), one_line(said))
        return torch.from_numpy(found)

    def labelled(self, cells: Cells) -> Split:
        """Return a table's rows with their classes. Raises DataError for a class it does not have.

        Rows without a class are refused, too.
        """
        import torch

        words, found = Words(self.classes), Distinct.of(cells.column(self.target))
        places = np.zeros(len(found.texts), np.int64)
        for number, value in enumerate(found.texts):
            place = words.place(value)
            if place is None:
                fault, row = cells.fault_in(self.target), found.row(number)
                if is_missing(value, self.missing):
                    raise fault(row, "has no class")
                raise fault(row, f"{value!r} is not a class{nearest(value, self.classes)}")
            places[number] = place
        return Split(self.encode(cells, refuse=True), torch.from_numpy(places[found.codes]))


def found_schema(
    cells: Cells, spec: DataSpec, say: Callable[[str], object] = LOG.info
) -> TableSchema:
    """Find the schema of training rows. Raises DataError if they do not make one.

    All columns are features except the target, the one of `data.by`, and those that only number or
    name the rows; or those in `data.columns`. `say` is called with a line for each column: what it
    was taken for, and why.
    """
    if not spec.target:
        names = ", ".join(cells.columns)
        raise DataError(f"{cells.path}: data.target must name the column of the class, of {names}")
    target, words = cells.column(spec.target), frozenset(spec.categories)
    absent = {text for text in set(target) if is_missing(text, spec.missing)}
    labels = [value for value in target if value not in absent]
    exact = spec.target in words
    classes, spelled = class_words(labels, cells.path, spec.target, exact=exact)
    if not 2 <= len(classes) <= MOST_CLASSES:
        raise DataError(
            f"{cells.path}: the column {spec.target!r} has {len(classes)} different values, which "
            f"are the classes: 2 to {MOST_CLASSES} are allowed"
        )
    others = [f"{text!r} as {word!r}" for text, word in spelled.items() if text != word]
    if others:
        say(f"{spec.target}: target, read {', '.join(others[:5])}")
    left_out = {name: why for name in cells.columns if (why := _names_rows(name, cells))}
    chosen = list(spec.columns)
    if not chosen:
        for name, why in left_out.items():
            if name not in (spec.target, spec.by.strip()):
                say(f"{name}: left out, {why}")
                LOG.warning("%s: column %r is left out: %s", cells.path, one_line(name), why)
        rest = [*cells.columns, *cells.unusable]
        skip = {spec.target, spec.by.strip(), *left_out}
        chosen = [name for name in rest if name not in skip]
    if spec.target in chosen or not chosen:
        raise DataError(f"{cells.path}: data.columns must name columns besides {spec.target!r}")

    @cache
    def decimal() -> str:
        signs = {sign for values in cells.columns.values() if (sign := decimal_sign(values))}
        return signs.pop() if len(signs) == 1 else ""

    @cache
    def order() -> str:
        shown = (date_order(values[:4096]) for values in cells.columns.values())
        orders = {each for each in shown if each}
        return orders.pop() if len(orders) == 1 else ""

    columns = []
    for name in chosen:
        values = Distinct.of(cells.column(name))
        if all(is_missing(text, spec.missing) for text in values.texts):
            raise DataError(
                f"{cells.path}: the column {name!r} is empty; leave it out by data.columns"
            )
        try:
            found = recognize(
                values,
                marks=spec.missing,
                words=name in words,
                typed=name in cells.typed,
                decimal=spec.decimal,
                order=spec.date_order,
                decimal_evidence=decimal,
                order_evidence=order,
            )
        except UnclearError as error:
            if error.place is None:
                raise DataError(f"{cells.path}: column {name!r}: {one_line(error.fault)}") from None
            raise cells.fault_in(name)(values.row(error.place), error.fault) from None
        if len(found.words) > MOST_CATEGORIES:
            raise DataError(
                f"{cells.path}: the column {name!r} has {len(found.words)} different words, at "
                f"most {MOST_CATEGORIES} are allowed; name the columns that are features in "
                "data.columns"
            )
        if len(found.words) == len(cells) > 2 * LEAST_ROWS and name not in words:
            raise DataError(
                f"{cells.path}: the column {name!r} has another word in each of {len(cells)} rows, "
                "expected categories. Name the columns that are features in data.columns"
            )
        counts, mean, deviation = values.counts(), 0.0, 1.0
        if found.numbers is not None:
            rows = found.numbers[values.codes]
            mean, deviation = _moments(rows[~np.isnan(rows)])
        columns.append(
            Column(
                name=name,
                kind=found.kind,
                mean=mean,
                deviation=deviation,
                categories=found.words,
                missing=bool(found.missing.any()),
                written=found.written,
                unit=found.unit,
            )
        )
        why, gone = found.why, int(counts[found.missing].sum())
        if gone:
            marks = [repr(text) for text, no in zip(values.texts, found.missing, strict=True) if no]
            why += f"; {gone} of {len(cells)} are missing ({', '.join(marks[:5])})"
        may_miss = ", may be missing" * columns[-1].missing
        say(f"{name}: {found.kind}, {columns[-1].spread}{may_miss} ({why})")
    return TableSchema(
        target=spec.target, classes=classes, missing=spec.missing, columns=tuple(columns)
    )


def _names_rows(name: str, cells: Cells) -> str:
    """Return why a column only numbers or names the rows; "" if it does not.

    The rule does not look at other columns, so it does not depend on `data.by`.
    """
    if NO_NAME.fullmatch(name):
        return "it has no name"
    values, start = cells.columns[name], 0
    if len(values) < LEAST_ROWS:
        return ""
    if _ROW_NAME.fullmatch(name):
        parts = [values[sum(cells.parts[:k]) :][:n] for k, n in enumerate(cells.parts)] or [values]
        if all(len(set(part)) == len(part) for part in parts):
            return "its values differ in all rows"
    for size in cells.parts or (len(values),):
        part, start = values[start : start + size], start + size
        try:
            numbers = np.array([int(text.removesuffix(".0")) for text in part[:LEAST_ROWS]])
            if len(np.unique(numbers)) < len(numbers):
                return ""
            numbers = np.array([int(text.removesuffix(".0")) for text in part], np.int64)
        except (ValueError, OverflowError):
            return ""
        low, steps = int(numbers.min()), np.diff(numbers)
        jumps = np.flatnonzero(steps != 1)
        in_order = not len(jumps) or bool((steps == -1).all())
        shuffled = low in (0, 1) and len(np.unique(numbers)) == len(numbers) == np.ptp(numbers) + 1
        restarts = (
            low in (0, 1)
            and numbers[0] == low
            and bool((numbers[jumps + 1] == low).all())
            and len(numbers) >= LEAST_ROWS * (len(jumps) + 1)
        )
        if not (in_order or shuffled or restarts):
            return ""
    return "it numbers the rows"


def _moments(numbers: npt.NDArray[np.float64]) -> tuple[float, float]:
    """Return the mean and the deviation of a column [N]; of equal numbers, their value and 1.

    Rounding would give those a mean beside the value, and a deviation that makes others huge.
    """
    if numbers.min() == numbers.max():
        return float(numbers[0]), 1.0
    return float(numbers.mean()), float(numbers.std())


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
