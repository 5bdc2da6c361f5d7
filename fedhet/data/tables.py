"""Tables of columns: finds the schema of a table, and encodes its rows by it.

In a simulation the schema is found from the training rows; the sites of a deployment have one in
common. `fedhet.data.values` has the rules by which values are recognized.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError, nearest, one_line
from fedhet.data.cells import NO_NAME, Cells
from fedhet.data.schema import MOST_CATEGORIES, MOST_CLASSES, Column, TableSchema
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

LOG = logging.getLogger("fedhet")
LEAST_ROWS = 10
"""Of fewer rows, no column is taken for their numbers."""
_FLOAT = 4
_ROW_NAME = re.compile(
    r"index|level_\d+|rownames?|row[ _.-]?(names?|ids?|numbers?|nr|no|num|index)?|(.+[ _.-])?id|#",
    re.IGNORECASE,
)
"""Names of columns that identify a row if all their values differ."""


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
            rows = rows[~np.isnan(rows)]
            mean = float(rows[0])
            if rows.min() < rows.max():  # else, rounding would give a huge deviation
                mean, deviation = float(rows.mean()), float(rows.std())
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


def owners(cells: Cells, by: str) -> list[str]:
    """Return whose each row is. Raises DataError for a row that does not say."""
    found = cells.column(by)
    for row, value in enumerate(found):
        if is_missing(value):
            raise cells.fault_in(by)(row, "is empty, but data.by names it")
    return found


def encode(schema: TableSchema, cells: Cells, *, refuse: bool = False) -> torch.Tensor:
    """Return the features [N, F] float32 of a table's rows.

    Logs the values that the schema does not know. Raises DataError for a fault, if the features
    take more than `data.max-bytes`, and, with `refuse`, if more than `max_unknown` of a column's
    values are unknown.
    """
    import torch

    refuse_more(_FLOAT * len(cells) * sum(schema.widths), cells.spec, cells.path)
    encoded = np.empty((len(cells), sum(schema.widths)), np.float32)
    start = 0
    for column in schema.columns:
        values, fault = cells.column(column.name), cells.fault_in(column.name)
        own, unknown, respelled = features(column, values, schema.missing, fault)
        encoded[:, start : start + column.width] = own
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
        if refuse and count > schema.max_unknown * len(cells):
            raise DataError(
                f"{cells.path}: column {one_line(column.name)!r}: {one_line(said)}, expected "
                f"at most a fraction of {schema.max_unknown:g}. Write them as the schema does, "
                "or raise its max_unknown"
            )
        LOG.warning("%s: column %r: %s", cells.path, one_line(column.name), one_line(said))
    return torch.from_numpy(encoded)


def features(
    column: Column,
    values: Sequence[str],
    marks: Sequence[str],
    fault: Callable[[int, str], DataError],
) -> tuple[npt.NDArray[np.float32], dict[str, int], dict[str, str]]:
    """Return the features [N, width] of values, and the values that the schema does not have.

    These are the number of rows of each unknown value, and the category of each word that is
    spelled otherwise. Unknown values are words that are no category, which are none of the
    features, and missing values where the schema has none. `marks` are further marks of missing
    values; `fault` makes the error for a value.
    """
    found = Distinct.of(values)
    absent = np.array([is_missing(text, marks) for text in found.texts], bool)
    unknown = absent & (not column.missing)
    respelled: dict[str, str] = {}
    if column.kind == "category":
        words = Words(column.categories)
        own = np.zeros((len(found.texts), len(column.categories)), np.float32)
        for row, text in enumerate(found.texts):
            place = None if absent[row] else words.place(text)
            if place is not None:
                own[row, place] = 1
                if text != column.categories[place]:
                    respelled[text] = column.categories[place]
            else:
                unknown[row] |= not absent[row]
    else:
        if column.kind == "date":
            numbers = parse_dates(found.texts, column.written)
        else:
            numbers = parse_numbers(found.texts, column.written or "1234.5", column.unit)
        for odd in np.flatnonzero(np.isnan(numbers) & ~absent).tolist():
            text = found.texts[odd]
            if not is_no_number(text):
                form = f" written as {column.written}" if column.written else ""
                form += f" with {column.unit!r}" if column.unit else ""
                noun = f"number up to {MAX_NUMBER:g} either way{form}"
                if column.kind == "date":
                    noun = f"date{form}" if form else "date such as 2026-01-31"
                raise fault(found.row(odd), f"{text!r} is not a {noun}")
            absent[odd] = True
            unknown[odd] = not column.missing
        numbers[absent] = column.mean
        own = ((numbers - column.mean) / column.deviation).astype(np.float32)[:, None]
    if column.missing:
        own = np.hstack([own, absent[:, None].astype(np.float32)])
    counts = found.counts()
    there = {found.texts[place]: int(counts[place]) for place in np.flatnonzero(unknown).tolist()}
    return own[found.codes], there, respelled


def labelled(schema: TableSchema, cells: Cells) -> Split:
    """Return a table's rows with their classes. Raises DataError for a class it does not have.

    Rows without a class are refused, too.
    """
    import torch

    words, found = Words(schema.classes), Distinct.of(cells.column(schema.target))
    places = np.zeros(len(found.texts), np.int64)
    for number, value in enumerate(found.texts):
        place = words.place(value)
        if place is None:
            fault, row = cells.fault_in(schema.target), found.row(number)
            if is_missing(value, schema.missing):
                raise fault(row, "has no class")
            raise fault(row, f"{value!r} is not a class{nearest(value, schema.classes)}")
        places[number] = place
    return Split(encode(schema, cells, refuse=True), torch.from_numpy(places[found.codes]))
