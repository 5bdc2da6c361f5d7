"""Label tables: the targets of images or texts in a directory.

The column `file` of a label table, such as labels.csv, contains the path of a file relative to the
table's directory; its other columns are targets or owners.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fedhet.base.errors import DataError, nearest
from fedhet.base.seeding import numpy_rng
from fedhet.data.class_folders import TEST, TRAIN, UNLABELED, VALIDATION, Files, Scan
from fedhet.data.rows import Table, find_rows, missing_column_error, read_table
from fedhet.data.schemas import TableSchema, find_schema
from fedhet.data.spec import Dataset, DataSpec, Split, subset_rows
from fedhet.data.targets import infer_targets, read_targets
from fedhet.kinds import Shape
from fedhet.tasks import Classification, find_task

LABELS = "labels"
"""Name of a label table, without its extension."""
FILE = "file"
"""Column of a label table with the path of each file."""


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
    declared = schema or find_schema(path)
    spec = spec.replace(target=declared.target) if declared else spec
    paths, table = _read_part(path, files, spec)
    if schema is None:
        others = [name for name in table.columns if name not in (FILE, by)]
        if not spec.target and len(others) != 1:
            raise DataError(
                f"{path}: data.target must name target columns, one or more of {', '.join(others)}"
            )
        target = spec.target or others[0]
        if names:
            schema = TableSchema(target=target, classes=tuple(names))
        else:
            schema = infer_targets(table, spec.replace(target=target), declared=declared)
    task, targets = schema.task_object, read_targets(schema, table)
    # Draw the subset first, so that no other files are read.
    groups = task.strata(targets, schema.outputs)[1]
    rows = subset_rows(groups, spec.max_samples, numpy_rng(spec.seed, "max-samples"))
    if owned := table.owners():
        owned["groups"] = owned["groups"][rows]
    x = files.read([paths[row] for row in rows], spec, like)
    train, test = Split(x, targets[rows]), None
    if TEST in tables:
        test_paths, test_table = _read_part(tables[TEST], files, spec)
        test_x = files.read(test_paths, spec, tuple(x.shape[1:]))
        test = Split(test_x, read_targets(schema, test_table))
    kind, shape = files.kind, files.shape(spec)
    is_classification = isinstance(task, Classification)
    return Dataset(
        spec.dataset, train, test, schema.outputs, kind=kind, shape=shape, **owned,
        schema=None if is_classification else schema, task=task,
    )  # fmt: skip


def _read_part(path: Path, files: Files, spec: DataSpec) -> tuple[list[str], Table]:
    """Read a label table, and return the file path of each row and the table."""
    table, root, scan = read_table(path, spec), path.parent, Scan(files)
    if FILE not in table.columns:
        raise missing_column_error(path, FILE, table.columns)
    folder = scan.read(root)
    folder.others = [name for name in folder.others if name != path.name]
    for name in [each for each in folder.folders if each.lower() in UNLABELED]:
        scan.unused.add(f"{files.noun} in {name}", count=len(folder.folders.pop(name).samples()))
    present = {os.path.relpath(each, root): each for each in scan.samples_of([folder])}
    scan.unused.report(root, files)
    rows: dict[str, int] = {}
    for row, name in enumerate(table.columns[FILE].rows()):
        key = os.path.normpath(name)
        if key in rows:
            raise table.error(FILE, row, f"{name!r} is already in row {rows[key] + 1}. Remove one.")
        if key not in present:
            close = nearest(key, present)
            raise table.error(FILE, row, f"{name!r} not found among the {files.noun}{close}")
        rows[key] = row
    if absent := sorted(present.keys() - rows.keys()):
        raise DataError(
            f"{path}: expected a row for each of the {len(present)} {files.noun} in {root}, got "
            f"none for {absent[0]!r}. Add the row, or remove the file."
        )
    return [present[key] for key in rows], table
