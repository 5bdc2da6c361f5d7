"""Tables of columns: the schema of a table, which is found in its rows, and encodes them.

A schema says what each column becomes, so that the same value is the same features at every
client: a number is centered and scaled, a date is one in days, a word is one of the column's
categories. A missing value is the mean, or no category, and a feature of its own says so. In a
simulation the schema is found from the training rows; the sites of a deployment have one in common,
a file. `fedhet.data.values` has the rules by which values are recognized.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from datetime import date, timedelta
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import DataError, StateError, error_reason, nearest, one_line
from fedhet.data.cells import NO_NAME, Cells
from fedhet.data.spec import DataSpec, Split, check_max_bytes
from fedhet.data.values import (
    MAX_NUMBER,
    Distinct,
    UnclearError,
    Words,
    class_words,
    date_order,
    decimal_sign,
    is_missing,
    is_missing_number,
    parse_dates,
    parse_numbers,
    recognize,
)

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("fedhet")
MAX_CATEGORIES, MAX_CLASSES = 200, 1000
MIN_ROWS = 10
"""Of fewer rows, no column is taken for their numbers."""
_FLOAT = 4
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
    categories: tuple[str, ...] = Field((), max_length=MAX_CATEGORIES)
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


class TableSchema(_Frozen):
    """What is predicted from which columns, and how these become features."""

    target: str
    classes: tuple[str, ...] = Field(min_length=2, max_length=MAX_CLASSES)
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


def read_schema(path: Path) -> TableSchema:
    """Return the schema in a file. Raises DataError."""
    try:
        return TableSchema.model_validate(read_toml_tables(path))
    except (OSError, StateError) as error:
        fault = f"{path}: {error_reason(error)}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"cannot read the schema of the table, which `fedhet schema` writes: {fault}"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise DataError(f"{path}: {where}: {first['msg']}") from None


def infer_schema(
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
    labels = [v for v in cells.column(spec.target) if not is_missing(v, spec.missing)]
    exact = spec.target in spec.categories
    classes, spelled = class_words(labels, cells.path, spec.target, exact=exact)
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise DataError(
            f"{cells.path}: the column {spec.target!r} has {len(classes)} different values, which "
            f"are the classes: 2 to {MAX_CLASSES} are allowed"
        )
    others = [f"{text!r} as {word!r}" for text, word in spelled.items() if text != word]
    if others:
        say(f"{spec.target}: target, read {', '.join(others[:5])}")
    chosen, no_features = list(spec.columns), {spec.target, spec.by.strip()}
    if not chosen:
        for name in [each for each in cells.columns if each not in no_features]:
            if why := _names_rows(name, cells):
                say(f"{name}: left out, {why}")
                LOG.warning("%s: column %r is left out: %s", cells.path, one_line(name), why)
                no_features.add(name)
        chosen = [name for name in (*cells.columns, *cells.unusable) if name not in no_features]
    if spec.target in chosen or not chosen:
        raise DataError(f"{cells.path}: data.columns must name columns besides {spec.target!r}")

    def shown(rule: Callable[[list[str]], str]) -> str:
        found = {each for values in cells.columns.values() if (each := rule(values))}
        return found.pop() if len(found) == 1 else ""

    evidence = cache(lambda: shown(decimal_sign)), cache(lambda: shown(date_order))
    return TableSchema(
        target=spec.target,
        classes=classes,
        missing=spec.missing,
        columns=tuple(_found_column(name, cells, spec, *evidence, say) for name in chosen),
    )


def _found_column(
    name: str,
    cells: Cells,
    spec: DataSpec,
    decimal_evidence: Callable[[], str],
    order_evidence: Callable[[], str],
    say: Callable[[str], object],
) -> Column:
    """Find what a column becomes. Raises DataError if it is in doubt, or cannot be features."""
    values, where = Distinct.of(cells.column(name)), f"{cells.path}: the column {name!r}"
    if all(is_missing(text, spec.missing) for text in values.texts):
        raise DataError(f"{where} is empty; leave it out by data.columns")
    try:
        found = recognize(
            values,
            marks=spec.missing,
            words=name in spec.categories,
            typed=name in cells.typed,
            decimal=spec.decimal,
            order=spec.date_order,
            decimal_evidence=decimal_evidence,
            order_evidence=order_evidence,
        )
    except UnclearError as error:
        if error.place is None:
            raise DataError(f"{cells.path}: column {name!r}: {error.fault}") from None
        raise cells.fault(name, values.row(error.place), error.fault) from None
    if len(found.words) > MAX_CATEGORIES:
        raise DataError(
            f"{where} has {len(found.words)} different words, at most {MAX_CATEGORIES} are "
            "allowed; name the columns that are features in data.columns"
        )
    if len(found.words) == len(cells) > 2 * MIN_ROWS and name not in spec.categories:
        raise DataError(
            f"{where} has another word in each of {len(cells)} rows, expected categories. Name the "
            "columns that are features in data.columns"
        )
    mean, deviation, why = 0.0, 1.0, found.why
    if found.numbers is not None:
        rows = found.numbers[values.codes]
        rows = rows[~np.isnan(rows)]
        mean = float(rows[0])
        if rows.min() < rows.max():  # else, rounding would give a huge deviation
            mean, deviation = float(rows.mean()), float(rows.std())
    column = Column(
        name=name,
        kind=found.kind,
        mean=mean,
        deviation=deviation,
        categories=found.words,
        missing=bool(found.missing.any()),
        written=found.written,
        unit=found.unit,
    )
    if gone := int(values.counts()[found.missing].sum()):
        marks = [repr(text) for text, no in zip(values.texts, found.missing, strict=True) if no]
        why += f"; {gone} of {len(cells)} are missing ({', '.join(marks[:5])})"
    may_miss = ", may be missing" * column.missing
    say(f"{name}: {found.kind}, {column.spread}{may_miss} ({why})")
    return column


def _names_rows(name: str, cells: Cells) -> str:
    """Return why a column only numbers or names the rows; "" if it does not.

    The rule does not look at other columns, so it does not depend on `data.by`.
    """
    if NO_NAME.fullmatch(name):
        return "it has no name"
    values, start = cells.columns[name], 0
    if len(values) < MIN_ROWS:
        return ""
    if _ROW_NAME.fullmatch(name):
        parts = [values[sum(cells.parts[:k]) :][:n] for k, n in enumerate(cells.parts)] or [values]
        if all(len(set(part)) == len(part) for part in parts):
            return "its values differ in all rows"
    for size in cells.parts or (len(values),):
        part, start = values[start : start + size], start + size
        try:
            numbers = np.array([int(text.removesuffix(".0")) for text in part[:MIN_ROWS]])
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
            and len(numbers) >= MIN_ROWS * (len(jumps) + 1)
        )
        if not (in_order or shuffled or restarts):
            return ""
    return "it numbers the rows"


def encode(schema: TableSchema, cells: Cells, *, refuse: bool = False) -> torch.Tensor:
    """Return the features [N, F] float32 of a table's rows.

    Logs the values that the schema does not know. Raises DataError for a fault, if the features
    take more than `data.max-bytes`, and, with `refuse`, if more than `max_unknown` of a column's
    values are unknown.
    """
    import torch

    check_max_bytes(_FLOAT * len(cells) * sum(schema.widths), cells.spec, cells.path)
    encoded = np.empty((len(cells), sum(schema.widths)), np.float32)
    start = 0
    for column in schema.columns:
        own, unknown, respelled = _features(column, cells, schema)
        encoded[:, start : start + column.width] = own
        start += column.width
        where = f"{cells.path}: column {column.name!r}"
        if respelled:
            pairs = [f"{text!r} as {word!r}" for text, word in islice(respelled.items(), 5)]
            LOG.warning("%s", one_line(f"{where}: read {', '.join(pairs)}"))
        if count := sum(unknown.values()):
            few = ", ".join(repr(text) for text in sorted(unknown)[:3])
            said = f"{count} of {len(cells)} values are unknown to the schema, such as {few}"
            if refuse and count > schema.max_unknown * len(cells):
                raise DataError(
                    f"{where}: {said[:200]}, expected at most a fraction of "
                    f"{schema.max_unknown:g}. Write them as the schema does, or raise its "
                    "max_unknown"
                )
            LOG.warning("%s", one_line(f"{where}: {said}"))
    return torch.from_numpy(encoded)


def _features(
    column: Column, cells: Cells, schema: TableSchema
) -> tuple[npt.NDArray[np.float32], dict[str, int], dict[str, str]]:
    """Return the features [N, width] of a column, and the values that the schema does not have.

    These are the number of rows of each unknown value, and the category of each word that is
    spelled otherwise. Unknown values are words that are no category, which are none of the
    features, and missing values where the schema has none. Raises DataError for any other value.
    """
    found = Distinct.of(cells.column(column.name))
    absent = np.array([is_missing(text, schema.missing) for text in found.texts], bool)
    unknown = absent & (not column.missing)
    respelled: dict[str, str] = {}
    if column.kind == "category":
        words = Words(column.categories)
        own = np.zeros((len(found.texts), len(column.categories)), np.float32)
        for row in np.flatnonzero(~absent).tolist():
            text = found.texts[row]
            place = words.place(text)
            if place is None:
                unknown[row] = True
                continue
            own[row, place] = 1
            if text != column.categories[place]:
                respelled[text] = column.categories[place]
    else:
        if column.kind == "date":
            numbers = parse_dates(found.texts, column.written)
        else:
            numbers = parse_numbers(found.texts, column.written or "1234.5", column.unit)
        for odd in np.flatnonzero(np.isnan(numbers) & ~absent).tolist():
            text = found.texts[odd]
            if not is_missing_number(text):
                form = f" written as {column.written}" if column.written else ""
                form += f" with {column.unit!r}" if column.unit else ""
                noun = f"number up to {MAX_NUMBER:g} either way{form}"
                if column.kind == "date":
                    noun = f"date{form}" if form else "date such as 2026-01-31"
                raise cells.fault(column.name, found.row(odd), f"{text!r} is not a {noun}")
            absent[odd] = True
            unknown[odd] = not column.missing
        numbers[absent] = column.mean
        own = ((numbers - column.mean) / column.deviation).astype(np.float32)[:, None]
    if column.missing:
        own = np.hstack([own, absent[:, None].astype(np.float32)])
    counts = found.counts()
    there = {found.texts[place]: int(counts[place]) for place in np.flatnonzero(unknown).tolist()}
    return own[found.codes], there, respelled


def labeled(schema: TableSchema, cells: Cells) -> Split:
    """Return a table's rows with their classes. Raises DataError for a class it does not have.

    Rows without a class are refused, too.
    """
    import torch

    words, found = Words(schema.classes), Distinct.of(cells.column(schema.target))
    places = np.zeros(len(found.texts), np.int64)
    for number, value in enumerate(found.texts):
        place = words.place(value)
        if place is None:
            fault = f"{value!r} is not a class{nearest(value, schema.classes)}"
            fault = "has no class" if is_missing(value, schema.missing) else fault
            raise cells.fault(schema.target, found.row(number), fault)
        places[number] = place
    return Split(encode(schema, cells, refuse=True), torch.from_numpy(places[found.codes]))
