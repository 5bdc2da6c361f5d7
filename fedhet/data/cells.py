"""Readers of row files: CSV with or without a header, TSV, JSON lines, and Parquet.

Text files may be compressed (.gz). `read_rows` reads labeled texts row by row; `read_table` reads a
table as text, column by column. This module only converts Parquet types to text;
`fedhet.data.values` interprets the values. Python's csv module is used because pandas and pyarrow
silently truncate long rows, pad short rows, or accept broken quotes. In addition, they do not
report the line of an error.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import json
import logging
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from fedhet.base.disk import parse_json
from fedhet.base.errors import DataError, nearest, one_line
from fedhet.data.spec import DataSpec, check_max_bytes, encode_owners, reading
from fedhet.data.tasks import find_task
from fedhet.data.values import date_order, decimal_separator, is_missing, label_text

LOG = logging.getLogger("fedhet")
_FORMATS = (".csv", ".tsv", ".jsonl")
TEXT_ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""File name extensions of text files."""
ENDINGS = (*TEXT_ENDINGS, ".parquet")
"""File name extensions of tables."""
NO_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Pattern for the placeholder names of unnamed columns in CSV files, pandas, and Parquet files."""
_CHUNK = 4096
"""Number of CSV rows to split into columns at the same time."""
_BUFFER_BYTES = 2**20
_MAX_LINE = 2**24
"""Maximum number of characters in a line of JSON."""
_BYTES_PER_CHARACTER = 24
"""Maximum memory needed to parse a character of JSON, in bytes; e.g. "[]," becomes a list."""
_SEPARATORS = ",;\t|"
"""Possible separators in CSV files, in order of preference."""
_NUM_SAMPLED = 20
"""Number of lines from which a CSV file's separator is detected."""
_REFERENCE = 8
_NO_OWNER = "values of the column data.by must not be missing. Name the owner, or remove the row"
NumberedRows = Iterator[tuple[int, Mapping[str, object]]]
"""Iterator over the rows of a file, each with the number of its first line in the file."""


@dataclass(frozen=True)
class TextRows:
    """Labeled texts, with their owners if `data.by` names a column."""

    texts: list[str]
    labels: list[str]
    groups: list[str] | None
    lines: array[int]
    """First line of each row in the file, starting at 1."""


def read_rows(path: Path, spec: DataSpec) -> TextRows:
    """Read the text and label columns named in the settings.

    Several text columns are joined with spaces. If the settings name columns by number, starting at
    1, the file has no header. Raises DataError if the file is invalid, or if the rows exceed
    `data.max-bytes`.
    """
    texts, label, by = spec.text_column, spec.label_column.strip(), spec.by.strip()
    names = [*texts, label, *([by] if by else [])]
    rows, size = TextRows([], [], [] if by else None, array("Q")), 0
    for line, row in _rows(path, spec, names):
        fields = [_field(row, name, path, line) for name in texts]
        fields += [_field(row, name, path, line, is_label=True) for name in names[len(texts) :]]
        rows.texts.append(" ".join(fields[: len(texts)]))
        rows.labels.append(sys.intern(fields[len(texts)].strip()))
        rows.lines.append(line)
        if not rows.labels[-1]:
            raise DataError(f"{path}: line {line}: label column {label!r} is empty")
        if is_missing(rows.labels[-1], spec.missing):
            fault = f"{rows.labels[-1]!r} marks a missing label. Remove the row."
            raise DataError(f"{path}: line {line}, column {label!r}: {fault}")
        if not rows.texts[-1].strip():
            raise DataError(f"{path}: line {line}: text column {', '.join(texts)!r} is empty")
        if rows.groups is not None:
            rows.groups.append(sys.intern(fields[-1].strip()))
            if is_missing(rows.groups[-1]):
                raise DataError(f"{path}: line {line}, column {by!r}: {_NO_OWNER}")
        size += bytes_of([rows.texts[-1]]) + 3 * _REFERENCE
        check_max_bytes(size, spec, path)
    if not rows.texts:
        raise DataError(f"{path}: no rows found")
    return rows


def bytes_of(texts: Iterable[str]) -> int:
    """Return the memory that a list of texts uses, in bytes."""
    return sum(sys.getsizeof(text) + _REFERENCE for text in texts)


class _BoundedFile(io.RawIOBase):
    """File reader that raises DataError if it has read more than `data.max-bytes`."""

    def __init__(self, file: IO[bytes], spec: DataSpec, path: Path) -> None:
        self._file, self._spec, self._path, self._size = file, spec, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        self._size += len(piece)
        check_max_bytes(self._size, self._spec, self._path)
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path, spec: DataSpec) -> io.RawIOBase:
    """Open a file, and decompress .gz content. `data.max-bytes` limits the decompressed size."""
    file: Any = gzip.GzipFile(path) if path.suffix.lower() == ".gz" else path.open("rb")
    return _BoundedFile(file, spec, path)


def read_bounded(path: Path, spec: DataSpec) -> bytes:
    """Read and decompress a file. Raises DataError if it exceeds `data.max-bytes`."""
    with _open(path, spec) as file:
        return file.readall()


def open_bounded(path: Path, spec: DataSpec, newline: str = "") -> IO[str]:
    """Open a plain or .gz text file. Reading more than `data.max-bytes` raises DataError."""
    buffered: Any = io.BufferedReader(_open(path, spec), _BUFFER_BYTES)
    return io.TextIOWrapper(buffered, encoding="utf-8-sig", newline=newline)


def is_json(path: Path) -> bool:
    """Return whether a file name ends in .jsonl or .jsonl.gz."""
    return path.name.lower().removesuffix(".gz").endswith(".jsonl")


@contextlib.contextmanager
def _opened(path: Path, spec: DataSpec) -> Iterator[IO[str]]:
    """Open a row file, and convert all exceptions raised in the block to DataError."""
    if not path.name.lower().removesuffix(".gz").endswith(_FORMATS):
        raise DataError(f"{path}: unsupported format, expected one of {', '.join(TEXT_ENDINGS)}")
    with (
        reading(path, "table", ""),
        open_bounded(path, spec, newline="\n" if is_json(path) else "") as file,
    ):
        yield file


def read_objects(path: Path, spec: DataSpec) -> NumberedRows:
    """Yield the objects in a JSON lines file. Raises DataError if a line is invalid."""
    most = max(_BUFFER_BYTES // 16, spec.max_bytes // _BYTES_PER_CHARACTER)
    number, most = 0, min(_MAX_LINE, most)
    with _opened(path, spec) as file:
        while line := file.readline(most):
            number += 1
            if len(line) == most:
                raise DataError(f"{path}: line {number} has more than {most - 1:,} characters")
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not valid JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(
                    f"{path}: line {number}: expected a JSON object, got a {type(row).__name__}"
                )
            yield number, row


def read_fields(path: Path, spec: DataSpec) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows in a CSV or TSV file with their line numbers, starting with the header.

    Quotes have no meaning in TSV files. Raises DataError if a row is invalid.
    """
    with _opened(path, spec) as file:
        sample = list(islice(file, _NUM_SAMPLED))
        lines: Any = chain(sample, file)
        separator = sample[0].strip("\r\n").lower().removeprefix("sep=") if sample else ""
        if path.name.lower().removesuffix(".gz").endswith(".tsv"):
            lines = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        elif len(separator) == 1 and "=" in sample[0]:  # Skip Excel's line "sep=;".
            lines = csv.reader(lines, delimiter=separator, strict=True)
            next(lines)
        else:
            lines = csv.reader(lines, delimiter=_separator(sample), strict=True)
        line = lines.line_num + 1
        for row in lines:
            first, line = line, lines.line_num + 1
            if row:
                yield first, row


def _separator(sample: Sequence[str]) -> str:
    """Detect the separator of a CSV file: the separator that yields the most columns.

    Separators that yield the same number of columns in all rows and the header are preferred.
    """

    def fit(separator: str) -> tuple[bool, int]:
        rows = [row for row in csv.reader(sample, delimiter=separator) if row]
        # Skip the last sampled line, which may end within quotes. The header may have one field
        # fewer than the rows, because R writes no column name for row names.
        widths = {len(row) for row in rows[1 : len(rows) - (len(sample) == _NUM_SAMPLED)]}
        first = len(rows[0])
        return first > 1 and widths <= {first, first + 1}, first

    return max(_SEPARATORS, key=fit) if any(map(str.strip, sample)) else ","


def _rows(path: Path, spec: DataSpec, names: Sequence[str]) -> NumberedRows:
    """Yield each row's fields by column name, or by column number if `names` are numbers."""
    if is_json(path):
        yield from read_objects(path, spec)
        return
    by_number = bool(names) and all(name.isascii() and name.isdecimal() for name in names)
    header: list[str] = []
    for line, row in read_fields(path, spec):
        if not header:
            header = [str(place) for place in range(1, len(row) + 1)] if by_number else row
            for name in [each for each in names if each not in header]:
                settings = "data.text-column and data.label-column"
                hint = f". Set {settings}, using column numbers if the file has no header."
                raise missing_column_error(path, name, header, hint)
            check_unique_columns(path, header)
            if not by_number:
                continue
        if len(row) != len(header):
            raise DataError(f"{path}: line {line}: expected {len(header)} columns, got {len(row)}")
        yield line, dict(zip(header, row, strict=True))


def missing_column_error(
    where: object, name: str, columns: Iterable[str], hint: str = ""
) -> DataError:
    """Return the error for a column that does not exist."""
    available = ", ".join(map(repr, islice(columns, 50)))[:200]
    close = nearest(name, columns)
    hint = hint.removeprefix(".") if close else hint  # `close` ends with a question mark.
    return DataError(f"{where}: column {one_line(name)!r} not found, got {available}{close}{hint}")


def check_unique_columns(path: Path, header: Sequence[str]) -> None:
    """Raise DataError if two columns have the same name."""
    for name, count in Counter(header).items():
        if name and count > 1:
            raise DataError(f"{path}: duplicate column {name!r}")


def _field(
    row: Mapping[str, object], name: str, path: Path, line: int, *, is_label: bool = False
) -> str:
    """Return a field as text. Converts JSON integers and, in label columns, all JSON scalars."""
    value = row.get(name)
    text = str(value) if isinstance(value, str) or type(value) is int else None
    if text is None and is_label:
        text = label_text(value)
    if text is not None:
        return text
    if name not in row:
        raise DataError(f"{path}: line {line}: column {name!r} not found{nearest(name, row)}")
    rule = "text, a number, true, or false" if is_label else "text"
    got = type(value).__name__
    raise DataError(f"{path}: line {line}, column {name!r}: expected {rule}, got {got}")


@dataclass(frozen=True)
class Cells:
    """Table of text values, by column."""

    path: Path
    columns: Mapping[str, list[str]]
    lines: Sequence[int]
    """Line number of each row in the file, or its row number in a Parquet file."""
    spec: DataSpec
    """Data settings with which the table was read."""
    size: int = 0
    """Memory used by this table and by the tables that were read before it, in bytes."""
    parts: tuple[int, ...] = ()
    """Number of rows in each concatenated file; () = a single file."""
    files: tuple[Path, ...] = ()
    """Path of each concatenated file; () = a single file."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Columns with unsupported values, such as lists, mapped to a description of these values."""
    typed: frozenset[str] = frozenset()
    """Columns that have a numeric type in the file."""
    noun: str = "line"
    """Noun for a row, used in messages before its number in `lines`."""

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lines)

    @cached_property
    def decimal_separator(self) -> str:
        """Decimal separator in the columns, or "" if neither or both separators are recognized."""
        return self._agreed(decimal_separator)

    @cached_property
    def date_order(self) -> str:
        """Date order in the columns, or "" if no order or both orders are recognized."""
        return self._agreed(date_order)

    def _agreed(self, rule: Callable[[list[str]], str]) -> str:
        results = {result for values in self.columns.values() if (result := rule(values))}
        return results.pop() if len(results) == 1 else ""

    def column(self, name: str) -> list[str]:
        """Return the values of a column. Raises DataError if the column is missing or unusable."""
        if name in self.unusable:
            fix = "Exclude it with data.exclude."
            if name == self.spec.target:
                fix = "Set data.task to multi-label if the column lists the labels of each row."
            raise DataError(
                f"{self.path}: column {one_line(name)!r}: expected numbers, dates, or words, got "
                f"{self.unusable[name]}. {fix}"
            )
        if name not in self.columns:
            raise missing_column_error(self.path, name, self.columns)
        return self.columns[name]

    def owners(self) -> dict[str, Any]:
        """Return the `Dataset` fields for the owners of the rows, from the column `data.by`.

        The fields are `groups` and `group_names`. The result is {} if `data.by` is empty. Raises
        DataError if the owner of a row is missing.
        """
        if not (by := self.spec.by.strip()):
            return {}
        owners = self.column(by)
        if absent := [row for row, owner in enumerate(owners) if is_missing(owner)]:
            raise self.fault(by, absent[0], _NO_OWNER)
        return encode_owners(owners)

    def fault(self, column: str, row: int, fault: str) -> DataError:
        """Return the error for an invalid value."""
        where, path = f"{self.noun} {self.lines[row]}", self.path
        for file, size in zip(self.files, self.parts, strict=True):
            if row < size:
                path = file
                break
            row -= size
        return DataError(f"{path}: {where}, column {one_line(column)!r}: {fault}")

    @classmethod
    def concatenate(cls, directory: Path, tables: Sequence[Cells], spec: DataSpec) -> Cells:
        """Concatenate tables. Raises DataError if their columns differ."""
        first = tables[0]
        names = first.columns.keys() | first.unusable.keys()
        for table in tables[1:]:
            table_names = table.columns.keys() | table.unusable.keys()
            for name in sorted(names ^ table_names):
                has, lacks = (first, table) if name in names else (table, first)
                if not NO_NAME.fullmatch(name):
                    raise DataError(
                        f"{lacks.path}: column {name!r} of {has.path.name} not found; all files "
                        "must have the same columns"
                    )
        unusable = {k: v for table in tables for k, v in table.unusable.items()}
        return cls(
            directory,
            {
                name: [v for table in tables for v in table.columns[name]]
                for name in first.columns
                if name not in unusable and all(name in table.columns for table in tables)
            },
            [line for table in tables for line in table.lines],
            spec,
            parts=tuple(map(len, tables)),
            files=tuple(table.path for table in tables),
            unusable=unusable,
            typed=frozenset.intersection(*(table.typed for table in tables)),
            noun=first.noun,
        )


def find_rows(directory: Path, part: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    """Return the row file of a part ("train" or "test"), or None if it does not exist.

    The case of the name does not matter. Raises DataError if several files match.
    """
    names = {f"{part}{ending}" for ending in endings}
    with reading(directory, "directory"):
        entries = sorted(path for path in directory.iterdir() if path.name.lower() in names)
    paths = [path for path in entries if path.is_file()]
    if len(paths) > 1:
        raise DataError(
            f"{directory}: expected a single {part} file, got {paths[0].name} and {paths[1].name}"
        )
    return paths[0] if paths else None


def read_table(path: Path, spec: DataSpec, size: int = 0) -> Cells:
    """Read a table from a row file.

    Args:
        path: CSV, TSV, JSON lines, or Parquet file.
        spec: Data settings.
        size: Memory used by the tables already read, in bytes.

    Raises:
        DataError: If the file is invalid, or if all tables together exceed `data.max-bytes`.
    """
    if not path.name.lower().endswith(ENDINGS):
        raise DataError(f"{path}: unsupported format, expected one of {', '.join(ENDINGS)}")
    if path.name.lower().endswith(".parquet"):
        return _read_parquet(path, spec, size)
    return (_read_objects if is_json(path) else _read_fields)(path, spec, size)


def _read_fields(path: Path, spec: DataSpec, size: int) -> Cells:
    """Read a CSV or TSV file.

    Empty rows are skipped, and unnamed columns get a name. If the header has one field fewer than
    the rows, the first column contains R's row names, unless the last column is empty.
    """
    rows = read_fields(path, spec)
    _, header = next(rows, (0, []))
    header = [name.strip() for name in header]
    quoted = path.name.lower().removesuffix(".gz").endswith(".tsv")
    columns: list[list[str]] = []
    lines: list[int] = []
    width = skipped = 0
    while chunk := list(islice(rows, _CHUNK)):
        filled = [
            (line, row) for line, row in chunk if row[0] or row[-1] or any(map(str.strip, row))
        ]
        skipped += len(chunk) - len(filled)
        if not filled:
            continue
        if not columns:
            width = len(filled[0][1])
            if width != len(header) + 1:
                width = len(header)
            columns = [[] for _ in range(width)]
        for line, row in filled:
            if len(row) != width:
                if len(row) < width or any(map(str.strip, row[width:])):
                    raise DataError(
                        f"{path}: line {line}: expected {width} columns, got {len(row)}"
                    )
                del row[width:]
        for column, fields in zip(
            columns, zip(*(row for _, row in filled), strict=True), strict=True
        ):
            column.extend(map(str.strip, fields))
            size += bytes_of(column[-len(fields) :])
        check_max_bytes(size, spec, path)
        lines += [line for line, _ in filled]
    if not lines:
        raise DataError(f"{path}: no rows found")
    if skipped:
        LOG.warning("%s: skipped %d empty rows", path, skipped)
    if quoted:  # R quotes names and words in TSV files.
        header = [_unquoted(name) for name in header]
        for column in columns:
            if any(value.startswith('"') for value in column):
                column[:] = map(_unquoted, column)
    if width > len(header):
        if any(columns[-1]) and len({*columns[0]}) < len(columns[0]):
            raise DataError(
                f"{path}: line {lines[0]}: expected {len(header)} columns, got {width}. The first "
                "column has no unique row names, as R writes them. Quote values that contain the "
                "separator, such as decimal commas."
            )
        header = [*header, ""] if not any(columns[-1]) else ["", *header]
    header = [name or f"Unnamed: {place}" for place, name in enumerate(header)]
    check_unique_columns(path, header)
    return Cells(path, dict(zip(header, columns, strict=True)), lines, spec, size)


def _unquoted(text: str) -> str:
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1].replace('""', '"').strip()
    return text


def _read_objects(path: Path, spec: DataSpec, size: int) -> Cells:
    """Read a JSON lines file; absent keys become missing values."""
    columns: dict[str, list[str]] = {}
    lines: list[int] = []
    unusable: dict[str, str] = {}
    words: set[str] = set()
    has_lists = find_task(spec.task).has_lists
    for line, row in read_objects(path, spec):
        size += _REFERENCE * (len(columns) + 1)
        for name, value in row.items():
            name = name.strip()
            if has_lists and name == spec.target and isinstance(value, list):
                words.add(name)
                value = json.dumps(value)
            if isinstance(value, list | dict):
                unusable[name] = "lists" if isinstance(value, list) else "objects"
                value = None
            elif isinstance(value, bool) or not isinstance(value, int | float | None):
                words.add(name)
            text = "" if value is None or value != value else str(value).strip()
            column = columns.get(name)
            if column is None:
                column = columns[name] = [""] * len(lines)
                size += _REFERENCE * len(lines)
            if len(column) > len(lines):
                raise DataError(f"{path}: line {line}: duplicate column {name!r}")
            column.append(text)
            size += sys.getsizeof(text)
        lines.append(line)
        if len(columns) > len(row):
            for column in columns.values():
                if len(column) < len(lines):
                    column.append("")
        check_max_bytes(size, spec, path)
    if not lines:
        raise DataError(f"{path}: no rows found")
    if "" in columns:
        columns["Unnamed: 0"] = columns.pop("")
    usable = {name: column for name, column in columns.items() if name not in unusable}
    typed = frozenset(usable.keys() - words)
    return Cells(path, usable, lines, spec, size, unusable=unusable, typed=typed)


def _read_parquet(path: Path, spec: DataSpec, size: int) -> Cells:
    """Read a Parquet file column by column, and convert the values to text.

    To limit memory use, sizes are checked before and during decoding. Dictionary-encoded values are
    stored only once, and delta-encoded values are decoded a few rows at a time.
    """
    with reading(path, "Parquet file", ""):
        import pyarrow as pa

        file, schema, largest = _open_parquet(path, spec, size)
        rows = file.metadata.num_rows
        columns: dict[str, list[str]] = {}
        unusable: dict[str, str] = {}
        typed = set()
        for name in schema.names:
            value_type = schema.field(name).type
            key = name.strip() or "Unnamed: 0"
            if pa.types.is_dictionary(value_type):
                value_type = value_type.value_type
            if isinstance(value_type, pa.BaseExtensionType):
                value_type = value_type.storage_type
            is_list = pa.types.is_list(value_type) or pa.types.is_large_list(value_type)
            if is_list and key == spec.target.strip() and find_task(spec.task).has_lists:
                columns[key] = []
                for batch in file.iter_batches(batch_size=2**10, columns=[name]):
                    lists = batch.column(0).to_pylist()
                    read = ["" if each is None else json.dumps(each, default=str) for each in lists]
                    columns[key].extend(read)
                    size += bytes_of(read)
                    check_max_bytes(size, spec, path)
                continue
            if pa.types.is_nested(value_type) or pa.types.is_interval(value_type):
                unusable[key] = f"values of type {value_type}"
                continue
            numeric = pa.types.is_floating, pa.types.is_integer, pa.types.is_decimal
            if any(is_numeric(value_type) for is_numeric in numeric):
                typed.add(key)
            # Limit the batch size, because one DELTA_BYTE_ARRAY value may be as large as its chunk.
            batch_size = max(1, min(2**16, spec.max_bytes // largest.get(name, 1)))
            column: list[str] = []
            distinct: dict[str, str] = {}
            for batch in file.iter_batches(batch_size=batch_size, columns=[name]):
                values = batch.column(0)
                size += _REFERENCE * len(values)
                before = len(distinct)
                try:
                    column.extend(_texts(values, distinct))
                except UnicodeDecodeError:
                    unusable[key] = "bytes that are not UTF-8 text"
                    break
                size += bytes_of(islice(reversed(distinct.values()), len(distinct) - before))
                check_max_bytes(size, spec, path)
            else:
                columns[key] = column
    if not rows:
        raise DataError(f"{path}: no rows found")
    return Cells(
        path, columns, range(1, rows + 1), spec, size, unusable=unusable, typed=frozenset(typed)
    )


def _open_parquet(path: Path, spec: DataSpec, size: int) -> tuple[Any, Any, dict[str, int]]:
    """Open a Parquet file, and check its size before any column is read.

    Text columns are read as dictionaries, except delta-encoded columns, for which pyarrow does
    not support this. Returns the file, its schema, and the size in bytes of the largest chunk of
    each delta-encoded column.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema, metadata, types = pq.read_schema(path), pq.read_metadata(path), pa.types
    texts = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
    delta = {c.path_in_schema for c in chunks if any("DELTA" in each for each in c.encodings)}
    largest = dict.fromkeys(delta, 1)
    for chunk in chunks:
        if (name := chunk.path_in_schema) in delta:
            largest[name] = max(largest[name], chunk.total_uncompressed_size)
    repeated = [each.name for each in schema if any(is_text(each.type) for is_text in texts)]
    repeated = [name for name in repeated if name not in delta]
    file = pq.ParquetFile(path, metadata=metadata, read_dictionary=repeated)
    check_unique_columns(path, [name.strip() for name in schema.names])
    check_max_bytes(sum(group.total_byte_size for group in groups), spec, path)
    columns = len(schema.names)
    check_max_bytes(size + _REFERENCE * metadata.num_rows * (columns + 1), spec, path)
    return file, schema, largest


def _texts(values: Any, distinct: dict[str, str]) -> list[str]:
    """Convert an Arrow array to texts; equal texts share one object in `distinct`.

    Durations and times of day are converted to seconds, timestamps to UTC, and null and NaN to "".
    Raises UnicodeDecodeError for bytes that are not UTF-8.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if isinstance(values, pa.ExtensionArray):
        values = values.storage
    if pa.types.is_null(values.type):
        return [""] * len(values)
    if not pa.types.is_dictionary(values.type):
        values = values.dictionary_encode()
    dictionary, value_type = values.dictionary, values.dictionary.type
    if pa.types.is_duration(value_type) or pa.types.is_time(value_type):
        integers = pa.int32() if pa.types.is_time32(value_type) else pa.int64()
        per_second = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}[value_type.unit]
        dictionary = pc.divide(dictionary.cast(integers).cast(pa.float64()), float(per_second))
    elif pa.types.is_timestamp(value_type):
        dictionary = dictionary.cast(pa.timestamp("us", value_type.tz), safe=False).cast(
            pa.timestamp("us")
        )
    texts = []
    for value in dictionary.to_pylist():
        if value is None or (isinstance(value, float) and math.isnan(value)):
            text = ""
        elif isinstance(value, bytes):
            text = value.decode("utf-8").strip()
        else:
            text = value.isoformat() if isinstance(value, date) else str(value).strip()
        texts.append(distinct.setdefault(text, text))
    texts.append("")
    return [texts[place] for place in pc.fill_null(values.indices, len(texts) - 1).to_pylist()]
