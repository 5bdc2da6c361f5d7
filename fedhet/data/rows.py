"""Rows of text files: CSV with a header or without one, TSV, and JSON lines; plain or .gz.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from fedhet.data.spec import DataSpec, refuse_more
from fedhet.disk.bounded import parsed
from fedhet.errors import DataError, nearest, reason_of

_FORMATS = (".csv", ".tsv", ".jsonl")
ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""How a file's name may end."""
_PIECE = 2**20
_LONGEST = 2**24
"""Characters of a line of JSON, which may take many times as much once it is read."""
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
        fields = [_field(row, name, path, line) for name in wanted]
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


def read_cells(path: Path, spec: DataSpec) -> Numbered:
    """Yield each row of a CSV or TSV file by the names of its columns. Raises DataError."""
    return _rows(path, spec, ())


def _rows(path: Path, spec: DataSpec, wanted: Sequence[str]) -> Numbered:
    """Yield each row's fields by the names of the columns, or by their numbers from 1."""
    kind = path.name.lower().removesuffix(".gz")
    if not kind.endswith(_FORMATS):
        raise DataError(f"{path}: must end in one of {', '.join(ENDINGS)}")
    as_json = kind.endswith(".jsonl")
    try:
        with open_bounded(path, spec, newline="\n" if as_json else "") as file:
            yield from _objects(file, path) if as_json else _cells(file, path, wanted)
    except FileNotFoundError:
        raise DataError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: not a readable file of rows ({reason_of(error)})") from error


def _objects(file: IO[str], path: Path) -> Numbered:
    number = 0
    while line := file.readline(_LONGEST):
        number += 1
        if len(line) == _LONGEST:
            raise DataError(f"{path}: line {number} has more than {_LONGEST - 1:,} characters")
        if not line.strip():
            continue
        try:
            row = parsed(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is not an object with a text and a label")
        yield number, row


def _cells(file: IO[str], path: Path, wanted: Sequence[str]) -> Numbered:
    """Yield the rows of a CSV file, or of a TSV file, in which quotes mean nothing."""
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        lines = csv.reader(file, strict=True)
    numbered = bool(wanted) and all(name.isascii() and name.isdecimal() for name in wanted)
    header: list[str] = []
    line = 1
    for row in lines:
        begins, line = line, lines.line_num + 1
        if not row:
            continue
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
    for place, name in enumerate(header):
        if name and name in header[:place]:
            raise DataError(f"{path}: has two columns {name!r}")


def _refuse_absent(path: Path, header: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in header:
            columns = ", ".join(repr(column) for column in header)[:200]
            raise DataError(
                f"{path}: has no column {name!r}, only {columns}{nearest(name, header)}; name "
                "columns in data.text-column and data.label-column, by number if there is no header"
            )


def _field(row: Mapping[str, object], name: str, path: Path, line: int) -> str:
    """Return a field as text; of JSON, whole numbers too."""
    value = row.get(name)
    if isinstance(value, str) or type(value) is int:
        return str(value)
    what = "no column" if name not in row else f"{type(value).__name__}, not text, in the column"
    raise DataError(f"{path}: line {line} has {what} {name!r}{nearest(name, row)}")
