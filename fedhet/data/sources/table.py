"""A table of the user's own: `table:PATH`, with `data.target` as the column of the class.

PATH may be one file, which has no common test set; a folder with train.csv and, if there is one,
test.csv; or a folder with a file for each site, whose rows are one client's.
"""

from __future__ import annotations

from pathlib import Path

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Index, numbered
from fedhet.data.tables import ENDINGS, Cells, find_table, found_schema, owners, read_table
from fedhet.kinds import TABLE


def read_own_table(place: str, spec: DataSpec) -> Dataset:
    """Read PATH. `Dataset.groups` is set if a column or a file says whose a row is.

    Raises DataError for any fault of the files.
    """
    path = expanded(place)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    first = path if path.is_file() else find_table(path, "train")
    if first is None:
        return _read_sites(path, spec)
    cells = read_table(first, spec)
    test = None if path.is_file() else find_table(path, "test")
    groups = numbered(owners(cells, spec.by.strip())) if spec.by else None
    return _dataset(cells, read_table(test, spec) if test else None, groups, spec)


def _read_sites(folder: Path, spec: DataSpec) -> Dataset:
    """Read a folder with a file for each site. Raises DataError if one has other columns."""
    if spec.by:
        raise SettingsError(f"data.by = {spec.by!r}: {folder} holds a file for each client")
    files = sorted(path for path in folder.iterdir() if path.name.lower().endswith(ENDINGS))
    if not files:
        raise DataError(f"{folder}: holds no table; a name ends in one of {', '.join(ENDINGS)}")
    tables: list[Cells] = []
    for file in files:
        tables.append(read_table(file, spec, tables[-1].taken if tables else 0))
    groups = numbered([f"{k:06d}" for k, table in enumerate(tables) for _ in table.lines])
    return _dataset(Cells.joined(folder, tables, spec), None, groups, spec)


def _dataset(train: Cells, test: Cells | None, groups: Index | None, spec: DataSpec) -> Dataset:
    notes: list[str] = []
    schema = found_schema(train, spec, notes.append)
    return Dataset(
        spec.dataset,
        schema.labelled(train),
        schema.labelled(test) if test else None,
        schema.classes,
        columns=schema.widths,
        groups=groups,
        schema=schema,
        notes=tuple(notes),
    )


SOURCES = (
    Source(
        "table",
        "a table: CSV, TSV, JSON lines or Parquet, or a folder with a file for each site",
        read_own_table,
        "PATH",
        TABLE,
        owners="a table:FILE",
    ),
)
