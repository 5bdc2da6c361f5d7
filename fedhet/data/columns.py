"""Columns of tables: their types, their notation, and their encoding as features.

`infer_column` has one short rule, which docs/data.md states. A column that it cannot type gets the
type "?", and the user writes the type and the notation in a schema. pandas parses numbers and
dates. A schema is read strictly: a value that does not have the declared form is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import date, timedelta
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedhet.base.errors import DataError, one_line
from fedhet.data.rows import UNNAMED, Table, Values
from fedhet.data.words import (
    MAX_NUMBER,
    MISSING,
    find_categories,
    find_words,
    integer_form,
    to_number,
)

Numbers = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Type = Literal["number", "date", "category", "ignore", "?"]
MAX_CATEGORIES = 200
_DAY = 86_400_000_000
"""Microseconds of a day."""
MIN_ROWS = 10
"""Minimum number of rows needed to conclude that a column only counts the rows."""
MIN_IDENTIFIERS = 50
"""Minimum number of rows needed to conclude that a column may identify persons or rows."""
NOTATION = ("missing", "decimal", "thousands", "format")
"""Fields that describe how a file writes values. Sites may differ in them."""
_OF_TYPE = {
    "decimal": "number", "thousands": "number", "unit": "number", "format": "date",
    "values": "category",
}  # fmt: skip
"""Type of the columns for which a field can be set."""


class Column(BaseModel):
    """Column of a table: its type, its notation, and its encoding as features.

    Numbers and dates (in days) are standardized; words are one-hot encoded. A missing value is
    encoded as the mean or as no category, and sets an additional feature if `optional` is true.
    `fit` determines the fields that are None, or `values` if it is empty, from training rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    type: Type
    missing: tuple[str, ...] = ()
    """Markers of missing values, in addition to `MISSING`."""
    decimal: Literal[".", ","] = "."
    thousands: Literal["", ".", ",", " ", "'"] = ""
    """Separator between thousands."""
    unit: str = ""
    """Unit before or after each number, such as %, with or without a space."""
    format: str = ""
    """Format of dates as in Python's `strptime`, such as %d.%m.%Y; "" = ISO 8601."""
    values: tuple[str, ...] = Field((), max_length=MAX_CATEGORIES)
    """Categories."""
    mean: float | None = Field(None, allow_inf_nan=False)
    """Mean of the column, in days since 1970 for dates."""
    deviation: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Standard deviation."""
    optional: bool | None = None
    """Whether values may be missing, so that an additional feature indicates missing values."""

    @model_validator(mode="after")
    def _check_fields(self) -> Column:
        for name, needed in _OF_TYPE.items():
            if getattr(self, name) not in ("", ".", ()) and self.type not in (needed, "?"):
                raise ValueError(f"{name}: expected only with type = {needed!r}, got {self.type!r}")
        if self.decimal == self.thousands:
            raise ValueError(f"thousands: expected another separator than {self.decimal!r}")
        return self

    @property
    def is_fitted(self) -> bool:
        """Whether all fields are known that the encoding needs."""
        known = bool(self.values) if self.type == "category" else self.deviation is not None
        return self.optional is not None and known and (self.mean is not None or bool(self.values))

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and standard deviation, or (0, 1) if they are unknown."""
        return self.mean or 0.0, self.deviation or 1.0

    @property
    def width(self) -> int:
        """Number of features."""
        return (len(self.values) if self.type == "category" else 1) + bool(self.optional)

    @property
    def summary(self) -> str:
        """Type with mean and standard deviation, or with the categories, as text."""
        if self.type == "category":
            text = ", ".join(self.values)
        elif self.type == "date":
            mean = date(1970, 1, 1) + timedelta(days=round(self.scale[0]))
            text = f"mean {mean} ± {self.scale[1]:.4g} days"
        else:
            text = "mean {:.4g} ± {:.4g}".format(*self.scale)
        return f"{self.type}, {text}" + ", may be missing" * bool(self.optional)

    def absent(self, texts: Sequence[str]) -> Mask:
        """Return a mask of the texts [D] that mark missing values.

        A marker that is a number, such as -999, also has the form -999.0.
        """
        marks = MISSING | {*self.missing}
        numbers = {number for mark in self.missing if not math.isnan(number := to_number(mark))}
        return np.array([t in marks or (numbers and to_number(t) in numbers) for t in texts], bool)

    def numbers(self, values: Values) -> Numbers:
        """Parse the distinct texts [D] of a column of numbers or dates; invalid texts become NaN.

        Dates are converted to days since 1970; without a time zone, they are UTC.
        """
        import pandas as pd

        texts = pd.Series(list(values.texts), dtype=object)
        if self.type == "date":
            # pandas reads these words as the current time, whatever the format.
            texts = texts.where(~texts.str.lower().isin(["now", "today"]))
            form = self.format or "ISO8601"
            dates = pd.to_datetime(texts, format=form, errors="coerce", utc=True)
            moments = dates.dt.tz_localize(None).to_numpy().astype("datetime64[us]")
            days = moments.astype(np.int64) / _DAY
            years = dates.dt.year
            days[~years.between(1, 9999).to_numpy()] = np.nan  # NaT, and years such as -1
            return np.asarray(days, np.float64)
        if not values.is_number and (self.unit or self.thousands or self.decimal != "."):
            texts = texts.map(self._plain)
        parsed = np.array(pd.to_numeric(texts, errors="coerce"), np.float64)
        parsed[~(np.abs(parsed) <= MAX_NUMBER)] = np.nan
        return parsed

    def _plain(self, text: str) -> str:
        """Return a number in Python's notation, or "" if it does not have the declared form."""
        if self.unit:
            bare = text.removesuffix(self.unit)
            bare = bare if bare != text else text.removeprefix(self.unit)
            if bare == text:
                return ""
            text = bare.strip()
        groups = rf"\d{{1,3}}(?:{re.escape(self.thousands)}\d{{3}})+|" if self.thousands else ""
        form = rf"[+-]?(?:{groups}\d*)(?:{re.escape(self.decimal)}\d*)?(?:[eE][+-]?\d+)?"
        if not re.fullmatch(form, text):
            return ""
        return text.replace(self.thousands or "\0", "").replace(self.decimal, ".")

    def fit(self, table: Table) -> Column:
        """Determine the unknown fields from training rows. Raises DataError if one is invalid."""
        values = table.column(self.name)
        absent = self.absent(values.texts)
        known: dict[str, object] = {"optional": bool(absent.any())}
        if absent.all():
            raise DataError(
                f"{table.path}: column {self.name!r}: no values found. Add it to data.exclude, or "
                'set its type to "ignore" in a schema.'
            )
        if self.type == "category":
            present = [text for text, no in zip(values.texts, absent, strict=True) if not no]
            words, fault = find_categories(present)
            if not self.values and (fault or len(words) > MAX_CATEGORIES):
                fault = fault or f"expected at most {MAX_CATEGORIES} categories, got {len(words)}"
                raise DataError(f"{table.path}: column {self.name!r}: {fault}")
            known["values"] = words
        else:
            rows = self.checked(table, values, absent)[values.codes]
            rows = rows[~np.isnan(rows)]
            known |= {"mean": float(rows[0]), "deviation": 1.0}
            if rows.min() < rows.max():  # Equal values could get a tiny nonzero deviation.
                known |= {"mean": float(rows.mean()), "deviation": float(rows.std())}
        unset = {k: v for k, v in known.items() if getattr(self, k) in (None, ())}
        return self.model_copy(update=unset)

    def checked(self, table: Table, values: Values, absent: Mask) -> Numbers:
        """Return the numbers [D] of a column, or NaN if they are missing.

        Raises DataError for a value that does not have the declared form.
        """
        numbers = self.numbers(values)
        numbers[absent] = np.nan
        invalid = np.flatnonzero(np.isnan(numbers) & ~absent)
        if len(invalid):
            text, row = values.texts[invalid[0]], values.first_row(int(invalid[0]))
            raise table.error(self.name, row, f"{text!r:.80} is not {self._form}. {self._advice}")
        return numbers

    @property
    def _form(self) -> str:
        if self.type == "date":
            return f"a date such as {date(2026, 1, 31).strftime(self.format or '%Y-%m-%d')}"
        example = f"1234{self.decimal}5"
        if self.thousands:
            example = f"1{self.thousands}234{self.decimal}5"
        return f"a number up to ±{MAX_NUMBER:g} such as {example}{self.unit and ' ' + self.unit}"

    @property
    def _advice(self) -> str:
        fields = "missing or format" if self.type == "date" else "missing, decimal, or unit"
        return f"Correct the value, or set {fields} of the column in a schema (`fedhet schema`)."

    def encode(self, table: Table) -> tuple[npt.NDArray[np.float32], dict[str, int]]:
        """Return the features [N, width] of a table's rows, and the counts of unknown values.

        Unknown values are words outside the categories, which set no feature, and missing values of
        a column that is not optional. Raises DataError for an invalid number or date.
        """
        values = table.column(self.name)
        absent = self.absent(values.texts)
        unknown = absent & (not self.optional)
        if self.type == "category":
            places = np.where(absent, -1, find_words(values.texts, self.values))
            unknown |= (places < 0) & ~absent
            features = (places[:, None] == np.arange(len(self.values))).astype(np.float32)
        else:
            mean, deviation = self.scale
            numbers = self.checked(table, values, absent)
            numbers[absent] = mean
            features = ((numbers - mean) / deviation).astype(np.float32)[:, None]
        if self.optional:
            features = np.hstack([features, absent[:, None].astype(np.float32)])
        counts = values.counts()
        return features[values.codes], {
            values.texts[k]: int(counts[k]) for k in np.flatnonzero(unknown).tolist()
        }


# --- inference ------------------------------------------------------------------------------------


def infer_column(name: str, table: Table) -> Column:
    """Infer the type of a column.

    A column in which pandas parses every value is a number. If all values are ISO 8601 dates, it is
    a date. With at most `MAX_CATEGORIES` words, it is a category, unless a word is a number or more
    than half of the words contain a digit: nothing becomes a category that could be a number in
    another notation. A column that counts the rows is ignored if it has no name. All other columns
    get the type "?".
    """
    column = Column(name=name, type="?")
    if name in table.unusable:
        return column
    values = table.column(name)
    present = ~column.absent(values.texts)
    words = [text for text, is_present in zip(values.texts, present, strict=True) if is_present]
    for kind in ("number", "date"):
        typed = column.model_copy(update={"type": kind})
        numbers = typed.numbers(values)
        if words and not np.isnan(numbers[present]).any():
            if kind == "number" and _is_index(name, numbers[values.codes], table):
                return column.model_copy(update={"type": "ignore"})
            # Dates may be consecutive: a series with a row for each day.
            is_date = kind == "date"
            return typed if is_date or not _counts_rows(numbers[values.codes], table) else column
    with_digits = sum(any(map(str.isdigit, word)) for word in words)
    is_category = (
        0 < len(words) <= MAX_CATEGORIES
        and 2 * with_digits <= len(words)
        and all(math.isnan(to_number(word)) for word in words)
        and not find_categories(words)[1]
    )
    return column.model_copy(update={"type": "category"}) if is_category else column


def _by_file(rows: Numbers, table: Table) -> list[Numbers]:
    return np.split(rows, np.cumsum([count for _, count in table.files])[:-1])


def _counts_rows(rows: Numbers, table: Table) -> bool:
    """Return whether a column counts the rows of each file, in ascending order."""
    is_counted = all((np.diff(part) == 1).all() for part in _by_file(rows, table))
    return len(rows) >= MIN_ROWS and is_counted


def _is_index(name: str, rows: Numbers, table: Table) -> bool:
    """Return whether a column is the index of a data frame, from which rows may be selected."""
    if not UNNAMED.fullmatch(name) or len(rows) < MIN_ROWS or (np.floor(rows) != rows).any():
        return False
    return all(len(np.unique(part)) == len(part) for part in _by_file(rows, table))


_EXAMPLES: tuple[dict[str, Any], ...] = (
    {"type": "number", "decimal": ","},
    {"type": "number", "thousands": ","},
    {"type": "number", "decimal": ",", "thousands": "."},
    {"type": "date", "format": "%d.%m.%Y"},
    {"type": "date", "format": "%d/%m/%Y"},
    {"type": "date", "format": "%m/%d/%Y"},
    {"type": "date", "format": "%d.%m.%Y %H:%M"},
    {"type": "date", "format": "%m/%d/%Y %H:%M"},
    {"type": "date", "format": "%H:%M"},
    {"type": "date", "format": "%H:%M:%S"},
)
"""Declarations that `suggest` tries."""


def suggest(name: str, table: Table) -> tuple[str, list[dict[str, Any]]]:
    """Return examples of a column's values, and declarations that fit all of its values.

    The column has the type "?". The declarations are suggestions, which only the user applies.
    """
    values = table.columns[name]
    present = [text for text in values.texts if text not in MISSING]
    if name in table.unusable or not present:
        return table.unusable.get(name, "no values"), [{"type": "ignore"}]
    examples = ", ".join(repr(text[:40]) for text in present[:3])
    given = Values.from_texts(present)
    if _counts_rows(Column(name=name, type="number").numbers(values)[values.codes], table):
        return f"{examples}, which count the rows", [{"type": "ignore"}, {"type": "number"}]
    unit = re.search(r"[^\d\s.,]+$", present[0])
    tried = (*_EXAMPLES, *([{"type": "number", "unit": unit[0]}] if unit else []))
    fits = [
        fields for fields in tried if not np.isnan(Column(name=name, **fields).numbers(given)).any()
    ]
    if fits:
        return examples, fits
    for fields in ({"type": "number"}, *tried):  # A few values may mark missing values.
        numbers = Column(name=name, **fields).numbers(given)
        odd = [text for text, number in zip(present, numbers, strict=True) if math.isnan(number)]
        if len(odd) <= 5 and 2 * len(odd) < len(present):
            first = next(text for text in present if text not in odd)
            examples = ", ".join(repr(text[:40]) for text in [*odd, first])
            return examples, [{**fields, "missing": odd}]
    words, fault = find_categories(present)
    if len(words) > MAX_CATEGORIES:
        return examples, [{"type": "ignore"}]
    if fault:
        return f"{examples}; {fault}", [{"type": "category", "values": list(words)}]
    return examples, [{"type": "category"}]


def describe_unclear(table: Table, names: Iterable[str]) -> dict[str, str]:
    """Return a line for each column of an unclear type: its values, and types that may be right."""
    lines = {}
    for name in names:
        examples, fits = suggest(name, table)
        types = " or ".join(
            ", ".join(f"{k} = {json.dumps(v, ensure_ascii=False)}" for k, v in each.items())
            for each in fits
        )
        lines[name] = one_line(f"{name!r} contains {examples}. For example: {types}")
    return lines


def may_identify(column: Column, values: Values) -> bool:
    """Return whether a column of numbers may identify persons or rows, based on its values alone.

    Numbers of patients or documents usually have the same number of digits, and are all different.
    Measurements with these properties are rare in tables of `MIN_IDENTIFIERS` rows or more.
    """
    if column.type != "number" or not MIN_IDENTIFIERS <= len(values.texts) == len(values):
        return False
    texts = [integer_form(text) for text in values.texts]
    return all(texts) and len({len(text) for text in texts}) == 1
