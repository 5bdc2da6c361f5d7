"""Tables as text, column by column: CSV, TSV, JSON lines, and Parquet files.

Values are not interpreted here, except that Parquet's types become text: see `fedhet.data.values`.
"""

from __future__ import annotations

import logging
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any

from fedhet.base.errors import DataError, nearest, one_line, reason_of
from fedhet.data.rows import bytes_of, is_json, read_fields, read_objects, refuse_doubled
from fedhet.data.spec import DataSpec, refuse_more

LOG = logging.getLogger("fedhet")
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz", ".jsonl", ".jsonl.gz", ".parquet")
NO_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names of columns without a name: in CSV files, of pandas, and in Parquet files."""
_CHUNK = 4096
"""Rows of a CSV file that are split into columns at once."""
_REFERENCE = 8


@dataclass(frozen=True)
class Cells:
    """A table as text, column by column."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]
    """The line of the file, or the row, of each."""
    spec: DataSpec
    """The settings by which it was read."""
    taken: int = 0
    """The bytes that it takes, with those of the tables read before it."""
    parts: tuple[int, ...] = ()
    """The number of rows of each file that it was joined from; (): it is one file's."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Columns that cannot become features, such as lists, and what they hold."""
    typed: frozenset[str] = frozenset()
    """Columns that are numbers by the type that the file states."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    def column(self, name: str) -> list[str]:
        """Return a column's values. Raises DataError, with the nearest name, if it is absent."""
        if name in self.unusable:
            raise DataError(
                f"{self.path}: column {one_line(name)!r}: holds {self.unusable[name]}, expected "
                "numbers, dates, or words. Name the columns that are features in data.columns"
            )
        if name not in self.columns:
            there = ", ".join(map(repr, islice(self.columns, 50)))[:200]
            close = nearest(name, self.columns)
            raise DataError(f"{self.path}: has no column {one_line(name)!r}, only {there}{close}")
        return self.columns[name]

    def fault_in(self, column: str) -> Callable[[int, str], DataError]:
        """Return what makes the error for a row's value in a column."""
        return lambda row, fault: DataError(
            f"{self.path}: line {self.lines[row]}, column {one_line(column)!r}: {one_line(fault)}"
        )

    @classmethod
    def joined(cls, folder: Path, tables: Sequence[Cells], spec: DataSpec) -> Cells:
        """Join the tables of several files. Raises DataError if one has other columns."""
        first = tables[0]
        names = first.columns.keys() | first.unusable.keys()
        for table in tables[1:]:
            others = table.columns.keys() | table.unusable.keys()
            for name in sorted(names ^ others):
                has, lacks = (first, table) if name in names else (table, first)
                if not NO_NAME.fullmatch(name):
                    raise DataError(
                        f"{lacks.path}: has no column {name!r}, which {has.path.name} has"
                    )
        unusable = {k: v for table in tables for k, v in table.unusable.items()}
        return cls(
            folder,
            {
                name: [v for table in tables for v in table.columns[name]]
                for name in first.columns
                if name not in unusable and all(name in table.columns for table in tables)
            },
            [line for table in tables for line in table.lines],
            spec,
            parts=tuple(map(len, tables)),
            unusable=unusable,
            typed=frozenset.intersection(*(table.typed for table in tables)),
        )


def read_table(path: Path, spec: DataSpec, taken: int = 0) -> Cells:
    """Read a file of rows, after others that have `taken` some bytes.

    Raises DataError for a fault, and if all take more than `data.max-bytes`.
    """
    if not path.name.lower().endswith(ENDINGS):
        raise DataError(f"{path}: must end in one of {', '.join(ENDINGS)}")
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, spec, taken)
    return (_read_objects if is_json(path) else _read_fields)(path, spec, taken)


def _read_fields(path: Path, spec: DataSpec, taken: int) -> Cells:
    """Read a CSV or TSV file.

    Rows without any value are skipped. Columns without a name get one: a header that is one shorter
    than the rows lacks that of the row names, as R writes tables, unless the last column is empty.
    """
    rows = read_fields(path, spec)
    _, header = next(rows, (0, []))
    header = [name.strip() for name in header]
    quoted = path.name.lower().removesuffix(".gz").endswith(".tsv")
    columns: list[list[str]] = []
    lines: list[int] = []
    width = skipped = 0
    while chunk := list(islice(rows, _CHUNK)):
        kept = [(line, row) for line, row in chunk if row[0] or row[-1] or any(map(str.strip, row))]
        skipped += len(chunk) - len(kept)
        if not kept:
            continue
        if not columns:
            width = len(kept[0][1])
            if width != len(header) + 1:
                width = len(header)
            columns = [[] for _ in range(width)]
        for line, row in kept:
            if len(row) != width:
                if len(row) < width or any(map(str.strip, row[width:])):
                    raise DataError(
                        f"{path}: line {line} has {len(row)} columns, the first has {width}"
                    )
                del row[width:]
        for column, fields in zip(
            columns, zip(*(row for _, row in kept), strict=True), strict=True
        ):
            column.extend(map(str.strip, fields))
            taken += bytes_of(column[-len(fields) :])
        refuse_more(taken, spec, path)
        lines += [line for line, _ in kept]
    if not lines:
        raise DataError(f"{path}: holds no rows")
    if skipped:
        LOG.warning("%s: %d rows without any value are skipped", path, skipped)
    if quoted:  # as R writes names and words
        header = [_unquoted(name) for name in header]
        for column in columns:
            if any(value.startswith('"') for value in column):
                column[:] = map(_unquoted, column)
    if width > len(header):
        header = [*header, ""] if not any(columns[-1]) else ["", *header]
    header = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    refuse_doubled(path, header)
    return Cells(path, dict(zip(header, columns, strict=True)), lines, spec, taken)


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1].replace('""', '"').strip()
    return text


def _read_objects(path: Path, spec: DataSpec, taken: int) -> Cells:
    """Read a file of JSON lines; what an object lacks is missing."""
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    unusable: dict[str, str] = {}
    words: set[str] = set()
    for line, row in read_objects(path, spec):
        taken += _REFERENCE * (len(columns) + 1)
        for name, value in row.items():
            name = name.strip()
            if isinstance(value, list | dict):
                unusable[name] = "lists" if isinstance(value, list) else "objects"
                value = None
            elif not isinstance(value, int | float) or isinstance(value, bool):
                words.add(name)
            text = "" if value is None or value != value else str(value).strip()
            column = columns.get(name)
            if column is None:
                column = columns[name] = [""] * len(lines)
                taken += _REFERENCE * len(lines)
            if len(column) > len(lines):
                raise DataError(f"{path}: line {line} has two values in the column {name!r}")
            column.append(text)
            taken += sys.getsizeof(text)
        lines.append(line)
        if len(columns) > len(row):
            for column in columns.values():
                if len(column) < len(lines):
                    column.append("")
        refuse_more(taken, spec, path)
    if not lines:
        raise DataError(f"{path}: holds no rows")
    if "" in columns:
        columns["Unnamed: 0"] = columns.pop("")
    usable = {name: column for name, column in columns.items() if name not in unusable}
    typed = frozenset(usable.keys() - words)
    return Cells(path, usable, lines, spec, taken, unusable=unusable, typed=typed)


def find_table(folder: Path, part: str) -> Path | None:
    """Return the file of a part, train or test, in a folder; None if there is none."""
    found = [path for ending in ENDINGS if (path := folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {found[0].name} and {found[1].name}, one is allowed")
    return found[0] if found else None


def _read_parquet(path: Path, spec: DataSpec, taken: int) -> Cells:
    """Read a Parquet file column by column, and convert the values by their type to text.

    What the file takes once it is decoded is bounded before it is decoded: a dictionary's values
    are not repeated, and pages that repeat prefixes are decoded a few rows at a time.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema = pq.read_schema(path)
        names = schema.names
        types = pa.types
        texts = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
        repeated = [each.name for each in schema if any(is_text(each.type) for is_text in texts)]
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
        chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
        packed = {  # pyarrow cannot read these as dictionaries
            each.path_in_schema for each in chunks if any("DELTA" in e for e in each.encodings)
        }
        repeated = [name for name in repeated if name not in packed]
        file = pq.ParquetFile(path, metadata=metadata, read_dictionary=repeated)
        refuse_doubled(path, [name.strip() for name in names])
        rows = metadata.num_rows
        refuse_more(sum(group.total_byte_size for group in groups), spec, path)
        refuse_more(taken + _REFERENCE * rows * (len(names) + 1), spec, path)
        columns: dict[str, list[str]] = {}
        unusable: dict[str, str] = {}
        typed = set()
        for name in names:
            held = schema.field(name).type
            own = name.strip() or "Unnamed: 0"
            if pa.types.is_dictionary(held):
                held = held.value_type
            if isinstance(held, pa.BaseExtensionType):
                held = held.storage_type
            if pa.types.is_nested(held) or pa.types.is_interval(held):
                unusable[own] = f"values of the type {held}"
                continue
            if pa.types.is_floating(held) or pa.types.is_integer(held) or pa.types.is_decimal(held):
                typed.add(own)
            size = 2**16
            if name in packed:  # of DELTA_BYTE_ARRAY, each row may be as long as all pages
                sizes = [c.total_uncompressed_size for c in chunks if c.path_in_schema == name]
                size = max(1, min(size, spec.max_bytes // max(1, *sizes)))
            column = columns[own] = []
            distinct: dict[str, str] = {}
            for batch in file.iter_batches(batch_size=size, columns=[name]):
                values = batch.column(0)
                taken += _REFERENCE * len(values)
                before = len(distinct)
                try:
                    column.extend(_texts(values, distinct))
                except UnicodeDecodeError:
                    unusable[own] = "bytes that are not text in UTF-8"
                    break
                taken += bytes_of(islice(reversed(distinct.values()), len(distinct) - before))
                refuse_more(taken, spec, path)
            if own in unusable:
                del columns[own]
    except DataError:
        raise
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except Exception as error:  # pyarrow has errors of many kinds
        raise DataError(f"{path}: not a readable Parquet file ({reason_of(error)})") from error
    if not rows:
        raise DataError(f"{path}: holds no rows")
    return Cells(
        path, columns, range(1, rows + 1), spec, taken, unusable=unusable, typed=frozenset(typed)
    )


def _texts(values: Any, distinct: dict[str, str]) -> list[str]:
    """Return the values of an Arrow array as texts, equal ones as the same object of `distinct`.

    Durations and times of day become seconds, timestamps with a zone become UTC, and null and NaN
    become "". Raises UnicodeDecodeError for bytes that are no text.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_null(values.type):
        return [""] * len(values)
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    found, held = values.dictionary, values.dictionary.type
    if pa.types.is_duration(held) or pa.types.is_time(held):
        whole = pa.int32() if pa.types.is_time32(held) else pa.int64()
        per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[held.unit]
        found = pc.divide(found.cast(whole).cast(pa.float64()), float(per_second))
    elif pa.types.is_timestamp(held):
        found = found.cast(pa.timestamp("us", held.tz), safe=False).cast(pa.timestamp("us"))
    texts = [_text(value) for value in found.to_pylist()]
    texts = [distinct.setdefault(text, text) for text in texts]
    texts.append("")
    return [texts[place] for place in pc.fill_null(values.indices, len(texts) - 1).to_pylist()]


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bytes):
        return value.decode("utf-8").strip()
    return value.isoformat() if isinstance(value, date) else str(value).strip()
