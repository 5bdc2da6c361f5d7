"""Source of tables.

`table:PATH` is a file, a directory with train.csv and optionally test.csv, or a directory with one
file for each client. The label column is `data.target`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError, one_line
from fedhet.data.dataset import Dataset, Format, Source
from fedhet.data.folders import PARTS, is_ignored
from fedhet.data.rows import ENDINGS, Table, find_rows, read_table
from fedhet.data.schemas import SCHEMA, declared_targets
from fedhet.data.spec import DataSpec
from fedhet.data.tables import infer_schema, labeled_split
from fedhet.kinds import TABLE

LOG = logging.getLogger("fedhet")


def find_row_files(location: str, endings: Sequence[str]) -> tuple[Path, Path | None, Path | None]:
    """Return the path of a location, its file of training rows, and its file of test rows.

    A file is None if it is missing. Raises DataError if the path does not exist.
    """
    path = expanded(location)
    if not path.exists():
        raise DataError(f"{path}: file or directory not found")
    if path.is_file():
        return path, path, None
    train, test = find_rows(path, "train", endings), find_rows(path, "test", endings)
    others = [each.name for each in _row_files(path, endings) if each not in (train, test)]
    if train is not None and others:
        LOG.warning(
            "%s: only %s %s read; not used: %s",
            path, f"{train.name} and {test.name}" if test else train.name, "are" if test else "is",
            one_line(", ".join(others)),
        )  # fmt: skip
    return path, train, test


def _row_files(directory: Path, endings: Sequence[str]) -> list[Path]:
    """Return the sorted row files in a directory, except hidden files."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.lower().endswith(tuple(endings)) and not is_ignored(path.name)
    )


def read_tables(location: str, spec: DataSpec) -> Dataset:
    """Read the dataset `table:PATH`.

    `Dataset.groups` is set if `data.by` is set or if there is one file per client. Raises DataError
    if a file is invalid, or if the columns of several files differ.
    """
    path, first, test = find_row_files(location, ENDINGS)
    is_site, file = spec.expected is not None, (path if path.is_dir() else path.parent) / SCHEMA
    stated = spec.target
    declared, spec = declared_targets(spec, path)
    if is_site and not (declared and declared.columns):
        fault = "columns: expected the columns of a table" if declared else "file not found"
        rule = "because all sites encode values in the same way"
        raise DataError(f"{file}: {fault}, {rule}. Create the file with `fedhet schema`.")
    if declared and not is_site and stated not in ("", declared.target):
        raise SettingsError(
            f"data.target: expected {declared.target!r}, the target in {file}, got {stated!r}"
        )
    if first is not None:
        train = read_table(first, spec)
        owned = train.owners()
    else:
        test = None
        if spec.by:
            raise SettingsError(
                f"data.by must be empty if {path} has one file per client, got {spec.by!r}"
            )
        files = _row_files(path, ENDINGS)
        if not files:
            raise DataError(
                f"{path}: no table found, expected files ending in one of {', '.join(ENDINGS)}"
            )
        for file in files:
            stem, *_ = file.name.split(".")
            if stem.lower() in PARTS:
                raise DataError(
                    f"{file}: the name of a part of the data, but the file with the training rows "
                    f"is missing, expected a name such as {path / 'train.csv'}. If each file has "
                    "the rows of a client, rename this file."
                )
        sites: list[Table] = []
        for file in files:
            sites.append(read_table(file, spec, sites[-1].size if sites else 0))
        owned = {
            "groups": np.repeat(np.arange(len(sites)), [len(site) for site in sites]),
            "group_names": tuple(file.name for file in files),
        }
        train = Table.concatenate(path, sites, spec)
    notes: list[str] = []
    schema = declared
    if schema is None or not is_site:
        schema = infer_schema(train, spec, notes.append, declared)
    samples = labeled_split(schema, train)
    return Dataset(
        spec.dataset,
        samples,
        labeled_split(schema, read_table(test, spec)) if test else None,
        Format.from_samples(samples.x, kind=TABLE, schema=schema),
        columns=schema.widths,
        **owned,
        notes=tuple(notes),
    )


SOURCES = (
    Source(
        "table",
        "a table: CSV, TSV, JSON lines, or Parquet, or a directory with one file for each client",
        read_tables,
        "PATH",
        TABLE,
        owners="table:FILE",
    ),
)
