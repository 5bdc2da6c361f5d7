"""Readers of targets for samples that are not table rows: label tables, and arrays `y`.

A label table, such as labels.csv, is in a directory of images or texts. Its column `file` contains
the path of a file relative to this directory; its other columns are targets or owners. `Task.infer`
and `Task.encode` read the targets of all sources, so all values follow the rules for tables.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedhet.base.errors import DataError, nearest
from fedhet.base.seeding import numpy_rng
from fedhet.data.cells import Cells, find_rows, missing_column_error, read_table
from fedhet.data.class_folders import TEST, TRAIN, UNLABELED, VALIDATION, Files, Scan
from fedhet.data.spec import Dataset, DataSpec, Split, subset_rows
from fedhet.data.tables import TableSchema
from fedhet.data.tasks import Classification, find_task
from fedhet.data.values import MAX_NUMBER
from fedhet.kinds import Shape

LOG = logging.getLogger("fedhet")
LABELS = "labels"
"""Name of a label table, without its extension."""
FILE = "file"
"""Column of a label table with the path of each file."""


def infer_targets(
    cells: Cells, spec: DataSpec, report: Callable[[str], object] = LOG.info
) -> TableSchema:
    """Infer a schema that describes only the targets `data.target`, from all training rows.

    `report` is called with log lines about the targets. Raises DataError if a target is invalid.
    """
    described = find_task(spec.task).infer(cells, spec, report)
    return TableSchema(target=spec.target, missing=spec.missing, **described)


def array_cells(y: npt.NDArray[Any], where: Path | str, spec: DataSpec, target: str = "") -> Cells:
    """Convert targets [N] or [N, K] to a table with a column for each target.

    Args:
        y: Numbers, in which NaN marks a missing target.
        where: Source of the array, for messages.
        spec: Data settings. `data.target` names the columns.
        target: Comma-separated names, such as the names in a schema, that replace `data.target`.

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
    target = target or spec.target or ",".join(f"y{k}" for k in range(count) if count > 1) or "y"
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

    columns = {name: list(map(text, numbers[:, k].tolist())) for k, name in enumerate(names)}
    return Cells(
        Path(where), columns, range(len(y)), spec.replace(target=target),
        typed=frozenset(names), noun="sample",
    )  # fmt: skip


def find_label_tables(root: Path, files: Files, spec: DataSpec) -> dict[str, Path]:
    """Find the label tables of the parts TRAIN and TEST of a directory tree.

    The result is empty if directories name the classes. For classification, this is the case if the
    training part has no label table, or if it has directories and `data.target` is not set.

    Raises:
        DataError: If the label table of a part is missing, or if there are several tables.
    """
    if not root.is_dir():
        return {}
    scan = Scan(files)
    parts = scan.find_parts(root)
    folders = {TRAIN: (parts[TRAIN] or [root])[0]}
    if parts[TRAIN] and (tests := parts[TEST] or parts[VALIDATION]):
        folders[TEST] = tests[0]
    tables = {part: find_rows(folder, LABELS) for part, folder in folders.items()}
    is_classification = find_task(spec.task) is Classification
    has_classes = not spec.target and bool(scan.listed(folders[TRAIN]).folders)
    if is_classification and (not tables[TRAIN] or has_classes):
        return {}
    for part, folder in folders.items():
        if tables[part] is None:
            raise DataError(
                f"{folder / LABELS}.csv: file not found, expected a table with the column {FILE!r} "
                f"and the targets of the {files.noun} in {folder} (data.task = {spec.task!r})"
            )
    return {part: path for part, path in tables.items() if path is not None}


def read_label_tables(
    tables: dict[str, Path],
    files: Files,
    spec: DataSpec,
    schema: TableSchema | None = None,
    names: Sequence[str] = (),
    like: Shape | None = None,
) -> Dataset:
    """Read the samples that label tables list.

    Args:
        tables: Label tables by part, from `find_label_tables`.
        files: Type of the files.
        spec: Data settings.
        schema: Schema of the targets, shared by all sites; None = infer it from the training part.
        names: Classes in order, if there is no schema; () = the labels in the training part.
        like: Required shape of the samples, if any.

    Raises:
        DataError: If a table is invalid, lists a missing file, lists a file twice, or has no row
            for an existing file.
    """
    path, by = tables[TRAIN], spec.by.strip()
    spec = spec.replace(target=schema.target) if schema else spec
    paths, cells = _read_part(path, files, spec)
    if schema is None:
        others = [name for name in (*cells.columns, *cells.unusable) if name not in (FILE, by)]
        if not spec.target and len(others) != 1:
            raise DataError(
                f"{path}: data.target must name target columns, one or more of {', '.join(others)}"
            )
        target = spec.target or others[0]
        if names:
            schema = TableSchema(target=target, classes=tuple(names))
        else:
            schema = infer_targets(cells, spec.replace(target=target))
    task = schema.task_object
    targets = task.encode(schema, cells)
    # Draw the subset first, so that no other files are read.
    groups = task.strata(targets, schema.outputs)[1]
    rows = subset_rows(groups, spec.max_samples, numpy_rng(spec.seed, "max-samples"))
    if owned := cells.owners():
        owned["groups"] = owned["groups"][rows]
    x = files.read([paths[row] for row in rows], spec, like)
    train, test = Split(x, targets[rows]), None
    if TEST in tables:
        test_paths, test_cells = _read_part(tables[TEST], files, spec)
        test_x = files.read(test_paths, spec, tuple(x.shape[1:]))
        test = Split(test_x, task.encode(schema, test_cells))
    kind, shape = files.kind, files.shape(spec)
    is_classification = isinstance(task, Classification)
    return Dataset(
        spec.dataset, train, test, schema.outputs, kind=kind, shape=shape, **owned,
        schema=None if is_classification else schema, task=task,
    )  # fmt: skip


def _read_part(path: Path, files: Files, spec: DataSpec) -> tuple[list[str], Cells]:
    """Read a label table, and return the file path of each row and the table."""
    cells, root, scan = read_table(path, spec), path.parent, Scan(files)
    if FILE not in cells.columns:
        raise missing_column_error(path, FILE, cells.columns)
    folder = scan.read(root)
    folder.others = [name for name in folder.others if name != path.name]
    for name in [each for each in folder.folders if each.lower() in UNLABELED]:
        scan.unused.add(f"{files.noun} in {name}", count=len(folder.folders.pop(name).samples()))
    present = {os.path.relpath(each, root): each for each in scan.samples_of([folder])}
    scan.unused.report(root, files)
    rows: dict[str, int] = {}
    for row, name in enumerate(cells.columns[FILE]):
        key = os.path.normpath(name)
        if key in rows:
            line = cells.lines[rows[key]]
            raise cells.fault(FILE, row, f"{name!r} is already in line {line}. Remove one row.")
        if key not in present:
            close = nearest(key, present)
            raise cells.fault(FILE, row, f"{name!r} not found among the {files.noun}{close}")
        rows[key] = row
    if absent := sorted(present.keys() - rows.keys()):
        raise DataError(
            f"{path}: expected a row for each of the {len(present)} {files.noun} in {root}, got "
            f"none for {absent[0]!r}. Add the row, or remove the file."
        )
    return [present[os.path.normpath(name)] for name in cells.columns[FILE]], cells
