"""Targets of all sources: classes, numbers, or labels in the columns of a table or in an array.

The task of a run determines the form of its targets (`Task.targets`).
"""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedhet.base.disk import parse_json
from fedhet.base.errors import DataError, nearest, one_line
from fedhet.base.metrics import MAX_LABELS
from fedhet.data.columns import Column, describe_unclear, suggest
from fedhet.data.rows import Table, Values
from fedhet.data.schemas import SCHEMA, TableSchema, toml_key
from fedhet.data.spec import DataSpec, check_max_bytes
from fedhet.data.words import MAX_NUMBER, MISSING, find_categories, find_words
from fedhet.tasks import AUTO, MAX_CLASSES, Regression, find_task

if TYPE_CHECKING:
    import torch

    from fedhet.data.dataset import Dataset

LOG = logging.getLogger("fedhet")
MANY_CLASSES = 20
"""Maximum number of distinct numbers in a target that are treated as classes. Targets with more
distinct numbers are treated as measurements."""
_FLOAT = 4


def target_names(columns: Mapping[str, Values], target: str) -> tuple[str, ...]:
    """Return the target columns: `target`, split at commas unless a column has this name."""
    if target in columns:
        return (target,)
    return tuple(name.strip() for name in target.split(","))


def infer_targets(
    table: Table,
    spec: DataSpec,
    report: Callable[[str], object] = LOG.info,
    declared: TableSchema | None = None,
    *,
    draft: bool = False,
    targets_only: bool = True,
) -> TableSchema:
    """Infer a schema that describes only the targets `data.target`, from all training rows.

    The classes that a site states replace the labels in its rows. If all labels of a site are
    numbers below its number of classes, the classes are these numbers.

    Args:
        table: Training rows.
        spec: Data settings.
        report: Function that is called with log lines about the targets.
        declared: Schema whose classes, scale, and notation take precedence.
        draft: Whether to return numeric targets in another notation, with the type "?".
        targets_only: Whether the schema of the data describes only the targets.

    Raises:
        DataError: If a target is invalid. If its numbers have another notation, the error's note
            shows a declaration.
    """
    if declared is not None and declared.outputs and all(c.is_fitted for c in declared.targets):
        return declared.model_copy(update={"columns": ()})
    task, expected = find_task(declared.task if declared else spec.task), spec.expected
    names = target_names(table.columns, spec.target)
    if task.targets == "class" and declared is None and expected and expected.classes:
        return TableSchema(target=spec.target, task=task.name, classes=expected.classes)
    if task.targets == "class":
        values = table.column(spec.target)
        for place, text in enumerate(values.texts):
            if text in MISSING:
                raise table.error(spec.target, values.first_row(place), _MISSING_LABEL)
        where = f"{table.path}: column {spec.target!r}"
        if expected and expected.outputs:
            words, numbers = find_categories(values.texts)[0], map(str, range(expected.outputs))
            if {*words} <= {*(classes := tuple(numbers))}:
                return TableSchema(target=spec.target, task=task.name, classes=classes)
            expected.check_outputs(len(words), where, table.path.parent)
        classes = find_classes(values.texts, where, spec.task)
        return TableSchema(target=spec.target, task=task.name, classes=classes)
    if task.targets == "labels":
        marks = declared.missing if declared else ()
        names = _label_names(table, spec, marks, report)
        counted = _read_labels(table, names, spec.target, marks)
        for place, name in enumerate(names):
            present = counted[~np.isnan(counted[:, place]), place]
            note = "" if len({*present.tolist()}) > 1 else ", so it never varies"
            report(f"{name}: label, {int(present.sum())} of {len(present)} rows{note}")
        return TableSchema(target=spec.target, task=task.name, classes=names, missing=marks)
    targets = []
    for name in names:
        column = next((c for c in declared.targets if c.name == name), None) if declared else None
        declared_scale = column is not None and column.deviation is not None
        if is_undeclared := column is None:
            column = Column(name=name, type="number")
        values = table.column(name)
        absent = column.absent(values.texts)
        if absent.any():
            raise table.error(name, values.first_row(int(absent.argmax())), _MISSING_TARGET)
        try:
            column = column.fit(table).model_copy(update={"optional": False})
        except DataError as error:
            if is_undeclared and _has_notation(name, table):
                if draft:
                    report(f"{name}: target, no clear type")
                    targets.append(column.model_copy(update={"type": "?"}))
                    continue
                fault = str(error).partition(" Correct the value")[0]
                error = DataError(
                    f"{fault} Run `{schema_command(table, spec, targets_only=targets_only)}`, "
                    f"and replace the '?' of [targets.{toml_key(name)}] in {SCHEMA}."
                )
                error.add_note(describe_unclear(table, [name])[name])
            error.add_note("If the values are classes, set data.task to classification.")
            raise error from None
        parsed = column.numbers(values)
        if not declared_scale and parsed.min() == parsed.max():
            raise DataError(
                f"{table.path}: column {name!r}: the target is {parsed[0]:g} in all {len(table)} "
                "rows, so there is nothing to learn. Choose another target, or set mean and "
                f"deviation in [targets.{toml_key(name)}] of {SCHEMA} if other sites have more "
                "values."
            )
        report(f"{name}: target, {column.summary}")
        targets.append(column)
    return TableSchema(target=spec.target, task=task.name, targets=tuple(targets))


def _has_notation(name: str, table: Table) -> bool:
    """Return whether a declaration other than missing values makes a column's values numbers."""
    return any(
        fields["type"] == "number" and fields.keys() - {"type", "missing"}
        for fields in suggest(name, table)[1]
    )


def schema_command(table: Table, spec: DataSpec, *, targets_only: bool = False) -> str:
    """Return the command that writes the schema of a table, with the options of a run."""
    words = ["fedhet", "schema", str(table.path), "--target", spec.target]
    words += ["--task", spec.task] if spec.task != AUTO else []
    excluded = [name for name in (spec.by.strip(), *spec.exclude) if name in table.columns]
    words += ["--exclude", ",".join(excluded)] if excluded else []
    words += ["--targets-only"] if targets_only else []
    return shlex.join(words)


_MISSING_TARGET = "the target is missing. Remove the row."
_MISSING_LABEL = "the label is missing. Remove the row."


def read_targets(schema: TableSchema, table: Table) -> torch.Tensor:
    """Return the targets of a table's rows.

    Returns:
        Class indices [N] int64; standardized numbers [N, K] float32; or labels [N, L] float32,
        which are 1, 0, or NaN if the label is missing.

    Raises:
        DataError: If a target is invalid.
    """
    import torch

    task = schema.task_object
    if task.targets == "labels":
        labels = _read_labels(table, schema.classes, schema.target, schema.missing)
        return torch.from_numpy(labels)
    if task.targets == "class":
        values = table.column(schema.target)
        places = find_words(values.texts, schema.classes)
        if (places < 0).any():
            first = int((places < 0).argmax())
            text = values.texts[first]
            fault = (
                f"unknown class {text!r}{nearest(text, schema.classes) or '.'} {SCHEMA} or the "
                "training rows define the classes. Correct the value, or remove the row."
            )
            fault = _MISSING_LABEL if text in MISSING else fault
            raise table.error(schema.target, values.first_row(first), fault)
        return torch.from_numpy(places[values.codes])
    numbers = np.empty((len(table), len(schema.targets)))
    for place, column in enumerate(schema.targets):
        values = table.column(column.name)
        absent = column.absent(values.texts)
        if absent.any():
            row = values.first_row(int(absent.argmax()))
            raise table.error(column.name, row, _MISSING_TARGET)
        numbers[:, place] = column.checked(table, values, absent)[values.codes]
    try:
        return torch.from_numpy(task.standardize(numbers))
    except ValueError as error:
        raise DataError(f"{table.path}: column {schema.target!r}: {error}") from None


def find_classes(texts: Sequence[str], where: str, task: str) -> tuple[str, ...]:
    """Return the sorted classes among the distinct texts of a target.

    Args:
        texts: Distinct texts.
        where: File and column, for messages.
        task: Setting `data.task`. With "auto", many numbers and lists of labels are errors, because
            they are probably the targets of another task.

    Raises:
        DataError: If the texts are unsuitable as classes.
    """
    labels = [text for text in texts if text not in MISSING]
    classes, fault = find_categories(labels, "classes")
    if fault:
        raise DataError(f"{where}: {fault}")
    if task == AUTO:
        if lists := [label for label in labels if _LISTED.search(label)] or joined_labels(labels):
            raise DataError(
                f"{where}: expected one class in each row, got {max(lists, key=len)!r:.80}. Set "
                "data.task to multi-label if the values are lists of labels, to regression if they "
                "are numbers, or to classification if each value is a class."
            )
        numbers = Column(name="", type="number").numbers(Values.from_texts(classes))
        known = numbers[~np.isnan(numbers)]
        if len(known) > max(MANY_CLASSES, 0.9 * len(classes)):
            raise DataError(
                f"{where}: expected classes, got {len(known)} different numbers from "
                f"{known.min():g} to {known.max():g}. Set data.task to regression to predict "
                "numbers, or to classification if each number is a class."
            )
    for name in classes:
        if not name.isprintable():
            raise DataError(f"{where}: label {name!r} must be printable text")
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise DataError(
            f"{where}: expected 2 to {MAX_CLASSES} classes, got {len(classes)} distinct values"
        )
    return classes


FLAGS = {"0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0, "false": 0.0, "true": 1.0}
"""Supported texts in the column of a label, in lower case, with their values."""
_BRACKETED = re.compile(r"(?:set|frozenset|list|tuple|array|Index|c)?[\[({<].*[\])}>]", re.DOTALL)
"""Pattern of lists as Python, pandas, R, and databases write them, such as {'a', 'b'}."""
_LISTED = re.compile(rf"[,;|\t\n]|^{_BRACKETED.pattern}$", re.DOTALL)
"""Pattern of a text that is probably a list of labels."""


def joined_labels(labels: Sequence[str]) -> list[str]:
    """Return the labels that consist of several other labels, such as "a b" or "a/b"."""
    known = {*labels}
    split = {label: {*re.split(r"[\s,|+&/]+", label)} - {""} for label in labels}
    return [label for label, parts in split.items() if len(parts) > 1 and parts <= known]


def _label_names(
    table: Table, spec: DataSpec, marks: Sequence[str], report: Callable[[str], object]
) -> tuple[str, ...]:
    """Return the labels: the target columns, or the sorted labels in the lists of one column."""
    names = target_names(table.columns, spec.target)
    where = f"{table.path}: data.target = {spec.target!r}"
    if len(names) == 1:
        values = table.column(spec.target, lists=True)
        lists = _label_lists(table, spec.target, values, marks)
        names, fault = find_categories((word for row in lists for word in row or ()), "classes")
        if fault:
            raise DataError(f"{where}: {fault}")
        present = (text for text, row in zip(values.texts, lists, strict=True) if row is not None)
        _check_separator([*present], f"{table.path}: column {spec.target!r}")
        if {*names} <= FLAGS.keys():
            raise DataError(
                f"{where}: expected lists of labels, got only 0 and 1. For several labels, list "
                "their columns in data.target. For one label, set data.task to classification."
            )
        absent = np.array([row is None for row in lists], bool)[values.codes].sum()
        advice = "; write [] for a row without labels" if absent else ""
        report(f"{spec.target}: lists of {len(names)} labels; {absent} missing{advice}")
    if not 1 <= len(names) <= MAX_LABELS or len({*names}) < len(names):
        raise DataError(
            f"{where}: expected 1 to {MAX_LABELS} different labels, got {len(names)} "
            f"({len({*names})} different)"
        )
    return names


def _check_separator(texts: Sequence[str], where: str) -> None:
    """Raise DataError if the labels in lists are separated by another character than `;`."""
    plain = [text for text in texts if not text.startswith("[")]
    labels = sorted({part.strip() for text in plain for part in text.split(";")} - {""})
    odd = joined_labels(labels)
    if not any(";" in text for text in plain):  # A label may contain commas if `;` separates it.
        odd += [label for label in labels if _LISTED.search(label)]
        words = {word for label in labels for word in label.split()}
        odd += [each for each in labels if " " in each] if len(words) < len(labels) else []
    if odd:
        raise DataError(
            f"{where}: labels in a list must be separated by ';', got {odd[0]!r:.80}. Write the "
            'list as a;b or ["a", "b"], or list the labels in a schema (classes).'
        )


def _read_labels(
    table: Table, labels: Sequence[str], target: str, marks: Sequence[str]
) -> npt.NDArray[np.float32]:
    """Return the labels [N, L]: 1, 0, or NaN if the label is missing."""
    check_max_bytes(_FLOAT * len(table) * len(labels), table.spec, table.path)
    targets = np.full((len(table), len(labels)), np.nan, np.float32)
    names = target_names(table.columns, target)
    if len(names) > 1 and names == tuple(labels):
        for place, name in enumerate(labels):
            values = table.column(name)
            flags = np.full(len(values.texts), np.nan, np.float32)
            for number, text in enumerate(values.texts):
                flag = FLAGS.get(text.lower())
                if flag is None and text not in MISSING and text not in marks:
                    fault = (
                        f"expected 0, 1, or a missing value, got {text!r}. If the value means that "
                        "the label is missing, add it to missing in a schema (`fedhet schema`)."
                    )
                    raise table.error(name, values.first_row(number), fault)
                flags[number] = np.nan if flag is None else flag
            targets[:, place] = flags[values.codes]
        return targets
    values = table.column(target, lists=True)
    rows = np.full((len(values.texts), len(labels)), np.nan, np.float32)
    for number, row in enumerate(_label_lists(table, target, values, marks, labels)):
        if row is None:
            continue
        rows[number] = 0
        places = find_words(row, labels)
        for word, place in zip(row, places.tolist(), strict=True):
            if place < 0:
                fault = f"unknown label {word!r}{nearest(word, labels) or '.'} Correct the value."
                raise table.error(target, values.first_row(number), fault)
            rows[number, place] = 1
    return rows[values.codes]


def _label_lists(
    table: Table, column: str, values: Values, marks: Sequence[str], known: Sequence[str] = ()
) -> list[list[str] | None]:
    """Return the labels in each distinct text of a column, or None if the value is missing.

    A list has the form `a;b` or `["a", "b"]`. A text in `known` is a single label. Raises DataError
    if a value is invalid.
    """
    lists: list[list[str] | None] = []
    for number, text in enumerate(values.texts):
        try:
            if text in MISSING or text in marks:
                lists.append(None)
            elif text in known:
                lists.append([text])
            elif _BRACKETED.fullmatch(text) or text.startswith("["):
                content = parse_json(text)
                is_list = isinstance(content, list)
                labels = [label_text(each) for each in content] if is_list else [None]
                if None in labels:
                    raise ValueError("expected a list of labels, got a list, an object, or null")
                lists.append([label.strip() for label in labels if label is not None])
            else:
                lists.append([label for each in text.split(";") if (label := each.strip())])
        except (ValueError, RecursionError) as error:
            fault = (
                f'expected labels such as a;b or ["a", "b"], got {text!r:.80} ({error}). Convert '
                "the column, for example with json.dumps or ';'.join."
            )
            raise table.error(column, values.first_row(number), fault) from None
    return lists


def warn_of_constant_targets(dataset: Dataset) -> None:
    """Log the numeric targets and labels that have one value in all training samples.

    At a site, this is no error, because other sites may have other values.
    """
    task, y, names = dataset.format.task, dataset.train.y, dataset.format.classes
    if task.targets in ("class", "tokens") or y.ndim != 2 or not len(y):
        return
    values = task.in_units(y) if isinstance(task, Regression) else y.numpy()
    absent = np.isnan(values)
    low = np.where(absent, np.inf, values).min(0).tolist()
    high = np.where(absent, -np.inf, values).max(0).tolist()
    same = [
        f"{name} (always {'missing' if least > most else format(least, '.4g')})"
        for name, least, most in zip(names, low, high, strict=True)
        if least >= most
    ]
    if same:
        LOG.warning(
            "%s: %d of %d targets have one value in all %d training samples, so a model cannot "
            "learn them: %s",
            dataset.name, len(same), len(names), len(y), one_line(", ".join(same))[:500],
        )  # fmt: skip


def label_text(value: object) -> str | None:
    """Convert a label from JSON or a data frame to text, or return None if its type is invalid."""
    if isinstance(value, bool | np.bool_):
        return str(bool(value)).lower()
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str | int) or (isinstance(value, float) and np.isfinite(value)):
        return str(value)
    return None


def array_table(y: npt.NDArray[Any], where: Path | str, spec: DataSpec) -> Table:
    """Convert targets [N] or [N, K] to a table with a column for each target.

    Args:
        y: Numbers, in which NaN marks a missing target.
        where: Source of the array, for messages.
        spec: Data settings. `data.target` names the columns.

    Raises:
        DataError: If the array is not numeric, if a number is infinite or too large, or if the
            number of columns differs from the number of names.
    """
    if y.ndim not in (1, 2) or y.dtype.kind not in "biuf" or 0 in y.shape[1:]:
        hint = ". Convert the texts to numbers." if y.dtype.kind in "US" else ""
        raise DataError(
            f"{where}: with data.task = {spec.task!r}, y must be numbers [N] or [N, K], got "
            f"{y.dtype} {list(y.shape)}{hint}"
        )
    numbers = y.reshape(len(y), -1).astype(np.float64)
    count = numbers.shape[1]
    target = spec.target or ",".join(f"y{k}" for k in range(count) if count > 1) or "y"
    names = [name.strip() for name in target.split(",")] if count > 1 else [target]
    if len(set(names)) != count:
        raise DataError(
            f"{where}: y must have one column for each of the {len(set(names))} names in "
            f"data.target = {target!r}, got {count} columns"
        )
    if (invalid := np.argwhere(np.abs(numbers) > MAX_NUMBER)).size:
        row, column = invalid[0].tolist()
        raise DataError(
            f"{where}: sample {row}, column {names[column]!r}: expected a number up to "
            f"±{MAX_NUMBER:g}, got {numbers[row, column]:g}"
        )

    def text(number: float) -> str:
        if number != number:
            return ""
        return str(int(number)) if number.is_integer() else repr(number)

    columns = {
        name: Values.from_texts(map(text, numbers[:, k].tolist()), is_number=True)
        for k, name in enumerate(names)
    }
    path = Path(where)
    return Table(path, columns, ((path, len(y)),), spec.replace(target=target), noun="sample")
