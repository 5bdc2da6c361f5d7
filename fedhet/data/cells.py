"""Rows of files: CSV with a header or without one, TSV, JSON lines, and Parquet; plain or .gz.

`read_rows` reads texts with their labels, row by row; `read_table` a table as text, column by
column. Values are not interpreted here, except that Parquet's types become text: see
`fedhet.data.values`. Python's csv reads rows of text, and neither pandas nor pyarrow: they cut rows
that are too long, fill those that are too short, or accept broken quotes, and texts would be
learned that are not what the file means; nor do they name the line of a fault.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import logging
import math
import re
import sys
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from fedhet.base.disk import parse_json
from fedhet.base.errors import DataError, nearest, one_line
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.data.values import label_of

LOG = logging.getLogger("fedhet")
_FORMATS = (".csv", ".tsv", ".jsonl")
TEXT_ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""How the name of a file of texts may end."""
ENDINGS = (*TEXT_ENDINGS, ".parquet")
"""How the name of a table may end."""
NO_NAME = re.compile(r"|Unnamed: \d+|__index_level_\d+__")
"""Names of columns without a name: in CSV files, of pandas, and in Parquet files."""
_CHUNK = 4096
"""Rows of a CSV file that are split into columns at once."""
_PIECE = 2**20
_LONGEST = 2**24
"""Maximum number of characters in a line of JSON."""
_PARSED = 24
"""Bytes that a character of JSON takes once it is parsed, at most: "[]," becomes a list."""
_SIGNS = ",;\t|"
"""Separators of a CSV file, in the order of preference."""
_SAMPLE = 20
"""Lines of a CSV file that show its separator."""
_REFERENCE = 8
Numbered = Iterator[tuple[int, Mapping[str, object]]]
"""Rows, each with the number of the line on which it begins."""


@dataclass(frozen=True)
class TextRows:
    """N texts, their labels and, if `data.by` names a column, whose they are."""

    texts: list[str]
    labels: list[str]
    groups: list[str] | None
    lines: array[int]
    """The line of the file on which each begins, from 1."""


def read_rows(path: Path, spec: DataSpec) -> TextRows:
    """Read the columns that the settings name. Raises DataError for any fault of the file.

    Several columns of text are joined by a space. Columns that are numbers are counted from 1, and
    the file then has no header. What is kept takes no more than `data.max-bytes`.
    """
    texts, label, by = spec.text_column, spec.label_column.strip(), spec.by.strip()
    wanted = [*texts, label, *([by] if by else [])]
    found, taken = TextRows([], [], [] if by else None, array("Q")), 0
    for line, row in _rows(path, spec, wanted):
        fields = [_field(row, name, path, line) for name in texts]
        fields += [_field(row, name, path, line, is_label=True) for name in wanted[len(texts) :]]
        found.texts.append(" ".join(fields[: len(texts)]))
        found.labels.append(sys.intern(fields[len(texts)].strip()))
        found.lines.append(line)
        if not found.labels[-1]:
            raise DataError(f"{path}: line {line} has no label in the column {label!r}")
        if not found.texts[-1].strip():
            raise DataError(f"{path}: line {line} has no text in the column {', '.join(texts)!r}")
        if found.groups is not None:
            found.groups.append(sys.intern(fields[-1].strip()))
        taken += bytes_of([found.texts[-1]]) + 3 * _REFERENCE
        check_max_bytes(taken, spec, path)
    if not found.texts:
        raise DataError(f"{path}: holds no rows")
    return found


def bytes_of(texts: Iterable[str]) -> int:
    """Return the bytes that texts in a list take in memory."""
    return sum(sys.getsizeof(text) + _REFERENCE for text in texts)


class _Counted(io.RawIOBase):
    """A file of which no more than `data.max-bytes` are read."""

    def __init__(self, file: IO[bytes], spec: DataSpec, path: Path) -> None:
        self._file, self._spec, self._path, self._taken = file, spec, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        self._taken += len(piece)
        check_max_bytes(self._taken, self._spec, self._path)
        buffer[: len(piece)] = piece
        return len(piece)

    def close(self) -> None:
        self._file.close()
        super().close()


def _open(path: Path, spec: DataSpec) -> io.RawIOBase:
    """Open a file, unpacked if it is a .gz; a small one may hold much."""
    file: Any = gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")
    return _Counted(file, spec, path)


def read_bounded(path: Path, spec: DataSpec) -> bytes:
    """Return a file's content, unpacked; raise DataError if it takes more than `data.max-bytes`."""
    with _open(path, spec) as file:
        return file.readall()


def open_bounded(path: Path, spec: DataSpec, newline: str = "") -> IO[str]:
    """Open a file of text, plain or .gz, to be read line by line.

    Raises DataError once more than `data.max-bytes` are read of it.
    """
    pieces: Any = io.BufferedReader(_open(path, spec), _PIECE)
    return io.TextIOWrapper(pieces, encoding="utf-8-sig", newline=newline)


def is_json(path: Path) -> bool:
    """Return whether a file of rows holds JSON lines."""
    return path.name.lower().removesuffix(".gz").endswith(".jsonl")


@contextlib.contextmanager
def _opened(path: Path, spec: DataSpec) -> Iterator[IO[str]]:
    """Open a file of rows. Raises DataError for any fault while it is read."""
    if not path.name.lower().removesuffix(".gz").endswith(_FORMATS):
        raise DataError(f"{path}: must end in one of {', '.join(TEXT_ENDINGS)}")
    with (
        reading(path, "file of rows", ""),
        open_bounded(path, spec, newline="\n" if is_json(path) else "") as file,
    ):
        yield file


def read_objects(path: Path, spec: DataSpec) -> Numbered:
    """Yield the objects of a file of JSON lines. Raises DataError."""
    number, longest = 0, min(_LONGEST, max(_PIECE // 16, spec.max_bytes // _PARSED))
    with _opened(path, spec) as file:
        while line := file.readline(longest):
            number += 1
            if len(line) == longest:
                raise DataError(f"{path}: line {number} has more than {longest - 1:,} characters")
            if not line.strip():
                continue
            try:
                row = parse_json(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}: line {number} is not JSON ({error})") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} is not an object with a text and a label")
            yield number, row


def read_fields(path: Path, spec: DataSpec) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV or TSV file with their lines, the header first. Raises DataError.

    In a TSV file quotes mean nothing.
    """
    with _opened(path, spec) as file:
        head = list(islice(file, _SAMPLE))
        lines: Any = chain(head, file)
        sign = head[0].strip("\r\n").lower().removeprefix("sep=") if head else ""
        if path.name.lower().removesuffix(".gz").endswith(".tsv"):
            lines = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        elif len(sign) == 1 and "=" in head[0]:  # as Excel marks its separator
            lines = csv.reader(lines, delimiter=sign, strict=True)
            next(lines)
        else:
            lines = csv.reader(lines, delimiter=_separator(head), strict=True)
        line = lines.line_num + 1
        for row in lines:
            begins, line = line, lines.line_num + 1
            if row:
                yield begins, row


def _separator(head: Sequence[str]) -> str:
    """Return the separator by which the first lines of a CSV file have the most columns.

    A separator by which all rows have as many columns as the header goes before others.
    """

    def fit(sign: str) -> tuple[bool, int]:
        rows = [row for row in csv.reader(head, delimiter=sign) if row]
        widths = {len(row) for row in rows[1 : len(rows) - (len(head) == _SAMPLE)]}
        first = len(rows[0])  # the last line may end within quotes; a header may lack row names
        return first > 1 and widths <= {first, first + 1}, first

    return max(_SIGNS, key=fit) if any(map(str.strip, head)) else ","


def _rows(path: Path, spec: DataSpec, wanted: Sequence[str]) -> Numbered:
    """Yield each row's fields by the names of the columns, or by their numbers from 1."""
    if is_json(path):
        yield from read_objects(path, spec)
        return
    encode_labels = bool(wanted) and all(name.isascii() and name.isdecimal() for name in wanted)
    header: list[str] = []
    for begins, row in read_fields(path, spec):
        if not header:
            header = [str(place) for place in range(1, len(row) + 1)] if encode_labels else row
            for name in [each for each in wanted if each not in header]:
                settings = "data.text-column and data.label-column"
                hint = f"; name columns in {settings}, by number if there is no header"
                raise no_column(path, name, header, hint)
            refuse_doubled(path, header)
            if not encode_labels:
                continue
        if len(row) != len(header):
            raise DataError(
                f"{path}: line {begins} has {len(row)} columns, the first has {len(header)}"
            )
        yield begins, dict(zip(header, row, strict=True))


def no_column(where: object, name: str, columns: Iterable[str], hint: str = "") -> DataError:
    """Return the error for a column that is absent from a table with other columns."""
    there = ", ".join(map(repr, islice(columns, 50)))[:200]
    close = nearest(name, columns)
    return DataError(f"{where}: has no column {one_line(name)!r}, only {there}{close}{hint}")


def refuse_doubled(path: Path, header: Sequence[str]) -> None:
    """Raise DataError if two columns have one name."""
    for name, count in Counter(header).items():
        if name and count > 1:
            raise DataError(f"{path}: has two columns {name!r}")


def _field(
    row: Mapping[str, object], name: str, path: Path, line: int, *, is_label: bool = False
) -> str:
    """Return a field as text; of JSON, integers too, and labels that are numbers or booleans."""
    value = row.get(name)
    text = str(value) if isinstance(value, str) or type(value) is int else None
    if text is None and is_label:
        text = label_of(value)
    if text is not None:
        return text
    if name not in row:
        raise DataError(f"{path}: line {line} has no column {name!r}{nearest(name, row)}")
    held, rule = type(value).__name__, "a text, a number, true, or false" if is_label else "a text"
    raise DataError(f"{path}: line {line} has {held} in the column {name!r}, expected {rule}")


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
            raise no_column(self.path, name, self.columns)
        return self.columns[name]

    def fault(self, column: str, row: int, fault: str) -> DataError:
        """Return the error for a row's value in a column."""
        line = self.lines[row]
        return DataError(f"{self.path}: line {line}, column {one_line(column)!r}: {fault}")

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


def find_rows(folder: Path, part: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    """Return the file of rows of a part, train or test, in a folder; None if there is none.

    Raises DataError for more than one.
    """
    found = [path for ending in endings if (path := folder / f"{part}{ending}").is_file()]
    if len(found) > 1:
        raise DataError(f"{folder}: holds {found[0].name} and {found[1].name}, one is allowed")
    return found[0] if found else None


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
        check_max_bytes(taken, spec, path)
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
        check_max_bytes(taken, spec, path)
    if not lines:
        raise DataError(f"{path}: holds no rows")
    if "" in columns:
        columns["Unnamed: 0"] = columns.pop("")
    usable = {name: column for name, column in columns.items() if name not in unusable}
    typed = frozenset(usable.keys() - words)
    return Cells(path, usable, lines, spec, taken, unusable=unusable, typed=typed)


def _read_parquet(path: Path, spec: DataSpec, taken: int) -> Cells:
    """Read a Parquet file column by column, and convert the values by their type to text.

    What the file takes once it is decoded is bounded before it is decoded: a dictionary's values
    are not repeated, and pages that repeat prefixes are decoded a few rows at a time.
    """
    with reading(path, "Parquet file", ""):
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
        check_max_bytes(sum(group.total_byte_size for group in groups), spec, path)
        check_max_bytes(taken + _REFERENCE * rows * (len(names) + 1), spec, path)
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
                check_max_bytes(taken, spec, path)
            if own in unusable:
                del columns[own]
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
    texts = []
    for value in found.to_pylist():
        if value is None or (isinstance(value, float) and math.isnan(value)):
            text = ""
        elif isinstance(value, bytes):
            text = value.decode("utf-8").strip()
        else:
            text = value.isoformat() if isinstance(value, date) else str(value).strip()
        texts.append(distinct.setdefault(text, text))
    texts.append("")
    return [texts[place] for place in pc.fill_null(values.indices, len(texts) - 1).to_pylist()]
