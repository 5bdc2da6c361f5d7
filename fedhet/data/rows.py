"""Rows of files: CSV with a header or without one, TSV, and JSON lines; plain or .gz.

Python's csv reads them, not pandas, which cuts rows that are too long, fills those that are too
short, and accepts broken quotes: texts would be learned that are not what the file means.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import io
import sys
import zlib
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

from fedhet.base.disk import parsed
from fedhet.base.errors import DataError, nearest, reason_of
from fedhet.data.spec import DataSpec, refuse_more
from fedhet.data.values import label_of

_FORMATS = (".csv", ".tsv", ".jsonl")
ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""How a file's name may end."""
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
        refuse_more(taken, spec, path)
    if not found.texts:
        raise DataError(f"{path}: holds no rows")
    return found


def bytes_of(texts: Iterable[str]) -> int:
    """Return the bytes that texts in a list take in memory."""
    return sum(sys.getsizeof(text) + _REFERENCE for text in texts)


def read_bounded(path: Path, spec: DataSpec) -> bytes:
    """Return a file's content, unpacked. Raises DataError if it takes more than `data.max-bytes`.

    It is read in small pieces: a small .gz may hold much.
    """
    content = bytearray()
    with _unpacked(path) as file:
        while piece := file.read(_PIECE):
            content += piece
            refuse_more(len(content), spec, path)
    return bytes(content)


@contextlib.contextmanager
def open_bounded(path: Path, spec: DataSpec, newline: str = "") -> Iterator[IO[str]]:
    """Open a file of text, plain or .gz, to be read line by line.

    Raises DataError once more than `data.max-bytes` are read of it.
    """
    with _unpacked(path) as file:
        counted: Any = _Counted(file, spec, path)
        pieces = io.BufferedReader(counted, _PIECE)
        yield io.TextIOWrapper(pieces, encoding="utf-8-sig", newline=newline)


class _Counted(io.RawIOBase):
    """A file of which no more than `data.max-bytes` are read."""

    def __init__(self, file: IO[bytes], spec: DataSpec, path: Path) -> None:
        self._file, self._spec, self._path, self._taken = file, spec, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        piece = self._file.read(len(buffer))
        self._taken += len(piece)
        refuse_more(self._taken, self._spec, self._path)
        buffer[: len(piece)] = piece
        return len(piece)


def _unpacked(path: Path) -> IO[bytes]:
    file: Any = gzip.GzipFile(path) if path.suffix == ".gz" else path.open("rb")
    return file  # type: ignore[no-any-return]


def is_json(path: Path) -> bool:
    """Return whether a file of rows holds JSON lines."""
    return path.name.lower().removesuffix(".gz").endswith(".jsonl")


@contextlib.contextmanager
def _opened(path: Path, spec: DataSpec) -> Iterator[IO[str]]:
    """Open a file of rows. Raises DataError for any fault while it is read."""
    if not path.name.lower().removesuffix(".gz").endswith(_FORMATS):
        raise DataError(f"{path}: must end in one of {', '.join(ENDINGS)}")
    try:
        with open_bounded(path, spec, newline="\n" if is_json(path) else "") as file:
            yield file
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except UnicodeDecodeError as error:
        fault = f"({reason_of(error)}). Save it in UTF-8"
        raise DataError(f"{path}: not a readable file of rows {fault}") from error
    except (OSError, EOFError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: not a readable file of rows ({reason_of(error)})") from error


def read_fields(path: Path, spec: DataSpec) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV or TSV file with their lines, the header first. Raises DataError."""
    with _opened(path, spec) as file:
        yield from _fields(file, path)


def read_objects(path: Path, spec: DataSpec) -> Numbered:
    """Yield the objects of a file of JSON lines. Raises DataError."""
    with _opened(path, spec) as file:
        yield from _objects(file, path, spec)


def _rows(path: Path, spec: DataSpec, wanted: Sequence[str]) -> Numbered:
    """Yield each row's fields by the names of the columns, or by their numbers from 1."""
    with _opened(path, spec) as file:
        yield from _objects(file, path, spec) if is_json(path) else _cells(file, path, wanted)


def _objects(file: IO[str], path: Path, spec: DataSpec) -> Numbered:
    number, longest = 0, min(_LONGEST, max(_PIECE // 16, spec.max_bytes // _PARSED))
    while line := file.readline(longest):
        number += 1
        if len(line) == longest:
            raise DataError(f"{path}: line {number} has more than {longest - 1:,} characters")
        if not line.strip():
            continue
        try:
            row = parsed(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is not an object with a text and a label")
        yield number, row


def _fields(file: IO[str], path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows of a CSV file, or of a TSV file, in which quotes mean nothing."""
    head = list(islice(file, _SAMPLE))
    lines: Any = chain(head, file)
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        lines = csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    elif (
        head
        and len(sign := head[0].strip("\r\n").lower().removeprefix("sep=")) == 1
        and "=" in head[0]
    ):
        lines = csv.reader(lines, delimiter=sign, strict=True)  # as Excel marks its separator
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


def _cells(file: IO[str], path: Path, wanted: Sequence[str]) -> Numbered:
    """Yield the rows of a CSV or TSV file by the names of the columns."""
    numbered = bool(wanted) and all(name.isascii() and name.isdecimal() for name in wanted)
    header: list[str] = []
    for begins, row in _fields(file, path):
        if not header:
            header = [str(place) for place in range(1, len(row) + 1)] if numbered else row
            _refuse_absent(path, header, wanted)
            refuse_doubled(path, header)
            if not numbered:
                continue
        if len(row) != len(header):
            raise DataError(
                f"{path}: line {begins} has {len(row)} columns, the first has {len(header)}"
            )
        yield begins, dict(zip(header, row, strict=True))


def refuse_doubled(path: Path, header: Sequence[str]) -> None:
    """Raise DataError if two columns have one name."""
    for name, count in Counter(header).items():
        if name and count > 1:
            raise DataError(f"{path}: has two columns {name!r}")


def _refuse_absent(path: Path, header: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in header:
            columns = ", ".join(repr(column) for column in header)[:200]
            raise DataError(
                f"{path}: has no column {name!r}, only {columns}{nearest(name, header)}; name "
                "columns in data.text-column and data.label-column, by number if there is no header"
            )


def _field(
    row: Mapping[str, object], name: str, path: Path, line: int, *, is_label: bool = False
) -> str:
    """Return a field as text; of JSON, integers too, and labels that are numbers or booleans."""
    value = row.get(name)
    if isinstance(value, str) or type(value) is int:
        return str(value)
    if name not in row:
        raise DataError(f"{path}: line {line} has no column {name!r}{nearest(name, row)}")
    if is_label and (label := label_of(value)) is not None:
        return label
    rule = "a text, a number, true, or false" if is_label else "a text"
    raise DataError(
        f"{path}: line {line} has {type(value).__name__} in the column {name!r}, expected {rule}"
    )
