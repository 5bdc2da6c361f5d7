"""Table schemas, which are inferred from training rows and used to encode rows as features.

A schema defines the features of each column, so that all clients encode a value in the same way.
Numbers and dates (in days) are standardized; words are one-hot encoded. A missing value is encoded
as the mean or as no category, and sets an indicator feature. Simulations infer the schema from the
training rows; the sites of a deployment share a schema file. `fedhet.data.values` recognizes
numbers, dates, and words.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from datetime import date, timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import tomli_w
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from fedhet.base.disk import read_toml_tables
from fedhet.base.errors import DataError, SettingsError, StateError, error_reason, one_line
from fedhet.data.cells import NO_NAME, Cells, missing_column_error
from fedhet.data.spec import DataSpec, Split, check_max_bytes
from fedhet.data.tasks import CLASSIFICATION, MAX_CLASSES, Task, find_task, target_names
from fedhet.data.values import (
    CLOCK,
    MAX_NUMBER,
    MISSING_TARGET,
    Distinct,
    Reading,
    UnclearError,
    Words,
    is_missing,
    is_missing_number,
    parse_dates,
    parse_numbers,
    recognize,
)

if TYPE_CHECKING:
    import torch

LOG = logging.getLogger("fedhet")
T = TypeVar("T")
MAX_CATEGORIES = 200
MIN_ROWS = 10
"""Minimum number of rows needed to conclude that a column only numbers the rows."""
MIN_IDENTIFIERS = 50
"""Minimum number of rows needed to conclude that a column may identify persons or rows."""
_FLOAT = 4
_ROW_NAME = re.compile(
    r"index|level_\d+|rownames?|row[ _.-]?(names?|ids?|numbers?|nr|no|num|index)?|(.+[ _.-])?id|#",
    re.IGNORECASE,
)
"""Pattern for the names of columns that identify a row if all values in the column differ."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Column(_Frozen):
    """Column of a table, with its encoding as features."""

    name: str
    kind: Literal["number", "date", "category"]
    mean: float = Field(0.0, allow_inf_nan=False)
    """Mean of the column, in days since 1970 for dates."""
    deviation: float = Field(1.0, gt=0, allow_inf_nan=False)
    categories: tuple[str, ...] = Field((), max_length=MAX_CATEGORIES)
    missing: bool = False
    """Whether an additional feature indicates missing values."""
    written: str = ""
    """Notation of numbers or dates, such as 1.234,5 or dd/mm/yyyy; "" = 1234.5 or ISO 8601."""
    unit: str = ""
    """Unit before or after each number, such as %."""

    @property
    def width(self) -> int:
        """Number of features."""
        return (len(self.categories) if self.kind == "category" else 1) + self.missing

    @property
    def summary(self) -> str:
        """Mean and standard deviation, or categories, as text."""
        if self.kind == "category":
            return ", ".join(self.categories)
        if self.kind == "date":
            mean = date(1970, 1, 1) + timedelta(days=round(self.mean))
            return f"mean {mean} ± {self.deviation:.4g} days"
        return f"mean {self.mean:.4g} ± {self.deviation:.4g}"


class TableSchema(_Frozen):
    """Task, target, and feature columns of a table."""

    target: str
    """Target column, or several target columns separated by commas."""
    task: str = CLASSIFICATION.name
    classes: tuple[str, ...] = Field((), max_length=MAX_CLASSES, validate_default=True)
    """Classes of the target; empty for other tasks."""
    targets: tuple[Column, ...] = Field((), validate_default=True)
    """Columns of the targets; empty for classification."""
    missing: tuple[str, ...] = ()
    """Custom missing-value markers, in addition to `fedhet.data.values.MISSING`."""
    max_unknown: float = Field(0.2, ge=0, le=1)
    """Maximum fraction of unknown values in a column."""
    columns: tuple[Column, ...] = ()
    """Feature columns; () = the samples are not table rows, so only targets are described."""

    @field_validator("task")
    @classmethod
    def _check_task(cls, name: str) -> str:
        try:
            return find_task(name).name
        except SettingsError as error:
            raise ValueError(str(error)) from None

    @field_validator("classes", "targets")
    @classmethod
    def _check_outputs(cls, outputs: tuple[T, ...], info: ValidationInfo) -> tuple[T, ...]:
        """Check the number of classes or, for tasks other than classification, of targets."""
        task, is_classes = info.data.get("task"), info.field_name == "classes"
        if task is not None and is_classes == (task == CLASSIFICATION.name):
            count = len(outputs) or len(info.data.get("classes", ()))
            if count < (needed := find_task(task).min_outputs):
                raise ValueError(f"expected at least {needed}, got {count}")
        return outputs

    @property
    def task_object(self) -> Task:
        """Task of the table, with the scale of its targets."""
        return find_task(self.task).of_schema(self)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of a model's outputs: the classes, or the target columns."""
        return self.classes or tuple(column.name for column in self.targets)

    @property
    def widths(self) -> tuple[int, ...]:
        """Number of features of each column."""
        return tuple(column.width for column in self.columns)

    @property
    def digest(self) -> str:
        """Hash of all fields that affect the encoding of features and targets."""
        other = {"task", "targets"} if self.task == CLASSIFICATION.name else set()
        text = self.model_dump_json(exclude={"max_unknown", *other})
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_toml(self) -> str:
        """Serialize the schema to TOML, in the format expected by `read_schema`."""
        values = self.model_dump(exclude_defaults=True) | {"max_unknown": self.max_unknown}
        tables: dict[str, Any] = {k: values.pop(k) for k in ("targets", "columns") if k in values}
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        return tomli_w.dumps({**lists, **tables})


def read_schema(path: Path) -> TableSchema:
    """Read a schema file. Raises DataError if it is unreadable or invalid."""
    try:
        return TableSchema.model_validate(read_toml_tables(path))
    except (OSError, StateError) as error:
        fault = f"{path}: {error_reason(error)}" if isinstance(error, OSError) else str(error)
        raise DataError(
            f"cannot read the table schema: {fault}. Create it with `fedhet schema`."
        ) from None
    except ValidationError as error:
        faults = (
            f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
            for each in error.errors()
        )
        raise DataError(f"{path}: {'; '.join(faults)}") from None


def infer_schema(
    cells: Cells, spec: DataSpec, report: Callable[[str], object] = LOG.info
) -> TableSchema:
    """Infer the schema of a table from its training rows.

    The features are the columns in `data.columns`, except the columns in `data.exclude`. If
    `data.columns` is empty, all columns are features, except the target, `data.by`, `data.exclude`,
    and columns that only number or name the rows.

    Args:
        cells: Training rows.
        spec: Data settings.
        report: Function that is called with one line for each column: its type, and the evidence
            for this type.

    Raises:
        DataError: If the target or another column is unsuitable or ambiguous. If there are several
            such columns, the error's notes describe each of them.
    """
    if not spec.target:
        names = ", ".join(cells.columns)
        raise DataError(f"{cells.path}: data.target must name the label column, one of {names}")
    described = find_task(spec.task).infer(cells, spec, report)
    targets = target_names(cells, spec)
    for name in spec.exclude:
        if name not in cells.columns and name not in cells.unusable:
            raise missing_column_error(cells.path, name, cells.columns, " (data.exclude)")
    excluded = {*targets, spec.by.strip(), *spec.exclude}
    features = [name for name in spec.columns if name not in spec.exclude]
    if not spec.columns:
        for name in [each for each in cells.columns if each not in excluded]:
            if reason := _names_rows(name, cells):
                report(f"{name}: excluded, because {reason}")
                LOG.warning(
                    "%s: column %r is excluded, because %s", cells.path, one_line(name), reason
                )
                excluded.add(name)
        features = [name for name in (*cells.columns, *cells.unusable) if name not in excluded]
    if not features or not {*targets}.isdisjoint(features):
        raise DataError(
            f"{cells.path}: data.columns must name feature columns other than the target "
            f"{spec.target!r}"
        )

    columns, faults = [], dict[str, DataError]()
    for name in features:
        try:
            columns.append(infer_column(name, cells, spec, report))
        except DataError as error:
            faults[name] = error
    if len(faults) > 1:
        names = one_line(", ".join(map(repr, faults)))
        several = DataError(f"{cells.path}: {len(faults)} columns are unsuitable: {names}")
        for fault in faults.values():
            several.add_note(str(fault))
        raise several
    for fault in faults.values():
        raise fault
    return TableSchema(
        target=spec.target, missing=spec.missing, columns=tuple(columns), **described
    )


def infer_column(
    name: str,
    cells: Cells,
    spec: DataSpec,
    report: Callable[[str], object],
    *,
    target: bool = False,
) -> Column:
    """Infer the encoding of a feature or, with `target`, of a numeric target.

    Raises DataError if the column is ambiguous or unsuitable.
    """
    values, where = Distinct.of(cells.column(name)), f"{cells.path}: column {name!r}"
    if all(is_missing(text, spec.missing) for text in values.texts):
        advice = "Set data.target to another column" if target else "Exclude it with data.exclude"
        raise DataError(f"{where}: no values found. {advice}.")
    try:
        reading = recognize(
            values,
            marks=spec.missing,
            words=name in spec.categories,
            typed=name in cells.typed,
            target=target,
            decimal=spec.decimal,
            order=spec.date_order,
            decimal_evidence=lambda: cells.decimal_separator,
            order_evidence=lambda: cells.date_order,
        )
    except UnclearError as error:
        if error.place is None:
            raise DataError(f"{cells.path}: column {name!r}: {error.fault}") from None
        raise cells.fault(name, values.row(error.place), error.fault) from None
    if target and reading.kind != "number":
        raise DataError(
            f"{cells.path}: target column {name!r}: expected numbers, got values of type "
            f"{reading.kind}. Set data.task to classification if they are classes."
        )
    # The rows of several files are checked when they are encoded, so that the error names the file.
    if target and not cells.parts and (absent := np.flatnonzero(reading.missing)).size:
        raise cells.fault(name, values.row(int(absent[0])), MISSING_TARGET)
    if len(reading.words) > MAX_CATEGORIES:
        raise DataError(
            f"{where}: expected at most {MAX_CATEGORIES} categories, got {len(reading.words)} "
            "different words. Exclude it with data.exclude."
        )
    if len(reading.words) == len(cells) > 2 * MIN_ROWS and name not in spec.categories:
        raise DataError(
            f"{where}: expected categories, got a different word in each of {len(cells)} rows. "
            "Exclude it with data.exclude."
        )
    if not target and _may_identify(reading, values, cells):
        LOG.warning(
            "%s: all %d values are different integers of equal length. If they identify a person "
            "or a sample, exclude the column with data.exclude.",
            one_line(where), len(cells),
        )  # fmt: skip
    mean, deviation, evidence = 0.0, 1.0, reading.evidence
    if reading.numbers is not None:
        rows = reading.numbers[values.codes]
        rows = rows[~np.isnan(rows)]
        mean = float(rows[0])
        if rows.min() < rows.max():  # Equal values could get a tiny nonzero standard deviation.
            mean, deviation = float(rows.mean()), float(rows.std())
    column = Column(
        name=name,
        kind=reading.kind,
        mean=mean,
        deviation=deviation,
        categories=reading.words,
        missing=bool(reading.missing.any()),
        written=reading.written,
        unit=reading.unit,
    )
    if num_missing := int(values.counts()[reading.missing].sum()):
        markers = [repr(text) for text, no in zip(values.texts, reading.missing, strict=True) if no]
        evidence += f"; {num_missing} of {len(cells)} are missing ({', '.join(markers[:5])})"
    may_miss = ", may be missing" * column.missing
    report(f"{name}: {reading.kind}, {column.summary}{may_miss} ({evidence})")
    return column


def _may_identify(reading: Reading, values: Distinct, cells: Cells) -> bool:
    """Return whether a numeric column may identify persons or rows, based on its values alone.

    Numbers of patients or documents usually have the same number of digits, and are all different.
    Measurements with these properties are rare in tables of `MIN_IDENTIFIERS` rows or more.
    """
    if reading.kind != "number" or not MIN_IDENTIFIERS <= len(values.texts) == len(cells):
        return False
    texts = [text.removesuffix(".0") for text in values.texts]
    return len({len(text) for text in texts}) == 1 and all(map(str.isdecimal, texts))


def _names_rows(name: str, cells: Cells) -> str:
    """Return the reason why a column is considered a row identifier, or "" if it is not.

    The rule does not use other columns, so it does not depend on `data.by`.
    """
    if NO_NAME.fullmatch(name):
        return "the column has no name"
    values, start = cells.columns[name], 0
    if len(values) < MIN_ROWS:
        return ""
    if _ROW_NAME.fullmatch(name):
        parts = [values[sum(cells.parts[:k]) :][:n] for k, n in enumerate(cells.parts)] or [values]
        if all(len(set(part)) == len(part) for part in parts):
            return "all its values are different"
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


def encode(schema: TableSchema, cells: Cells, *, strict: bool = False) -> torch.Tensor:
    """Encode the rows of a table as features.

    Unknown values are logged.

    Args:
        schema: Schema of the table.
        cells: Rows of the table.
        strict: Whether to raise an error if the fraction of unknown values exceeds
            `schema.max_unknown`.

    Returns:
        Features of shape [N, F], float32.

    Raises:
        DataError: If a value is invalid, or if the features exceed `data.max-bytes`.
    """
    import torch

    check_max_bytes(_FLOAT * len(cells) * sum(schema.widths), cells.spec, cells.path)
    encoded = np.empty((len(cells), sum(schema.widths)), np.float32)
    start = 0
    for column in schema.columns:
        features, unknown, respelled = _features(column, cells, schema)
        encoded[:, start : start + column.width] = features
        start += column.width
        where = f"{cells.path}: column {column.name!r}"
        if respelled:
            pairs = [f"{text!r} as {word!r}" for text, word in islice(respelled.items(), 5)]
            LOG.warning("%s", one_line(f"{where}: read {', '.join(pairs)}"))
        if count := sum(unknown.values()):
            few = ", ".join(repr(text) for text in sorted(unknown)[:3])
            fault = f"{count} of {len(cells)} values, such as {few}, are not in the schema"
            if strict and count > schema.max_unknown * len(cells):
                raise DataError(
                    f"{where}: {fault[:200]}, expected a fraction of at "
                    f"most {schema.max_unknown:g}. Use the spelling of the schema, or raise its "
                    "max_unknown."
                )
            LOG.warning("%s", one_line(f"{where}: {fault}"))
    return torch.from_numpy(encoded)


def _features(
    column: Column, cells: Cells, schema: TableSchema
) -> tuple[npt.NDArray[np.float32], dict[str, int], dict[str, str]]:
    """Return the features [N, width], the counts of unknown values, and respelled categories.

    Unknown values are words outside the categories, which set no feature, and missing values in a
    column without a missing-value indicator. Raises DataError for an invalid number or date.
    """
    values = Distinct.of(cells.column(column.name))
    absent = np.array([is_missing(text, schema.missing) for text in values.texts], bool)
    unknown = absent & (not column.missing)
    respelled: dict[str, str] = {}
    if column.kind == "category":
        words = Words(column.categories)
        features = np.zeros((len(values.texts), len(column.categories)), np.float32)
        for row in np.flatnonzero(~absent).tolist():
            text = values.texts[row]
            place = words.place(text)
            if place is None:
                unknown[row] = True
                continue
            features[row, place] = 1
            if text != column.categories[place]:
                respelled[text] = column.categories[place]
    else:
        if column.kind == "date":
            numbers = parse_dates(values.texts, column.written)
        else:
            # Values of a numeric type have no notation: 1.234 is not 1234 in Parquet.
            typed = column.name in cells.typed and column.written != CLOCK
            written = "" if typed else column.written
            numbers = parse_numbers(values.texts, written or "1234.5", column.unit)
        for place in np.flatnonzero(np.isnan(numbers) & ~absent).tolist():
            text = values.texts[place]
            if not is_missing_number(text):
                form = f" written as {column.written}" if column.written else ""
                form += f" with {column.unit!r}" if column.unit else ""
                noun = f"number up to ±{MAX_NUMBER:g}{form}"
                if column.kind == "date":
                    noun = f"date{form}" if form else "date such as 2026-01-31"
                raise cells.fault(column.name, values.row(place), f"{text!r} is not a {noun}")
            absent[place] = True
            unknown[place] = not column.missing
        numbers[absent] = column.mean
        features = ((numbers - column.mean) / column.deviation).astype(np.float32)[:, None]
    if column.missing:
        features = np.hstack([features, absent[:, None].astype(np.float32)])
    counts = values.counts()
    num_unknown = {values.texts[k]: int(counts[k]) for k in np.flatnonzero(unknown).tolist()}
    return features[values.codes], num_unknown, respelled


def labeled_split(schema: TableSchema, cells: Cells) -> Split:
    """Encode the features and the targets of a table's rows.

    Raises DataError for a row without a valid target.
    """
    targets = schema.task_object.encode(schema, cells)
    return Split(encode(schema, cells, strict=True), targets)
