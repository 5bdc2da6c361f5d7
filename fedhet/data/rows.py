"""Rows of text files: CSV with a header or without one, TSV, and JSON lines; plain or .gz.

Python's csv reads them, not pandas, which cuts rows that are too long, fills those that are too
short, and accepts broken quotes: texts would be learned that are not what the file means.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedhet.data.spec import DataSpec, refuse_more
from fedhet.errors import DataError, nearest

_FORMATS = (".csv", ".tsv", ".jsonl")
ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""How a file's name may end."""
_PIECE = 2**20


@dataclass(frozen=True)
class TextRows:
    """N texts, their labels and, if `data.by` names a column, whose they are."""

    texts: list[str]
    labels: list[str]
    groups: list[str] | None


def read_rows(path: Path, spec: DataSpec) -> TextRows:
    """Read the columns that the settings name. Raises DataError for any fault of the file.

    Several columns of text are joined by a space. Columns that are numbers are counted from 1, and
    the file then has no header.
    """
    texts, label, by = spec.text_column, spec.label_column.strip(), spec.by.strip()
    wanted = [*texts, label, *([by] if by else [])]
    found = TextRows([], [], [] if by else None)
    for number, row in enumerate(_rows(path, spec, wanted), 1):
        fields = [_field(row, name, path, number) for name in wanted]
        found.texts.append(" ".join(fields[: len(texts)]))
        found.labels.append(fields[len(texts)].strip())
        if not found.labels[-1]:
            raise DataError(f"{path}: row {number} has no label in the column {label!r}")
        if found.groups is not None:
            found.groups.append(fields[-1].strip())
    if not found.texts:
        raise DataError(f"{path}: holds no rows")
    return found


def read_bounded(path: Path, spec: DataSpec) -> bytes:
    """Return a file's content, unpacked. Raises DataError if it takes more than `data.max-bytes`.

    It is read in small pieces: a small .gz may hold much.
    """
    content = bytearray()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        while piece := file.read(_PIECE):
            content += piece
            refuse_more(len(content), spec, path)
    return bytes(content)


def _rows(path: Path, spec: DataSpec, wanted: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yield each row's fields by the names of the columns, or by their numbers from 1."""
    kind = path.name.lower().removesuffix(".gz")
    if not kind.endswith(_FORMATS):
        raise DataError(f"{path}: must end in one of {', '.join(ENDINGS)}")
    try:
        text = read_bounded(path, spec).decode("utf-8-sig")
        yield from _objects(text, path) if kind.endswith(".jsonl") else _cells(text, path, wanted)
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise DataError(f"{path}: not a readable file of texts ({error})") from error


def _objects(text: str, path: Path) -> Iterator[Mapping[str, object]]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path}: line {number} is not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}: line {number} is not an object with a text and a label")
        yield row


def _cells(text: str, path: Path, wanted: Sequence[str]) -> Iterator[Mapping[str, object]]:
    """Yield the rows of a CSV file, or of a TSV file, in which quotes mean nothing."""
    file = io.StringIO(text, newline="")
    if path.name.lower().removesuffix(".gz").endswith(".tsv"):
        lines = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
    else:
        lines = csv.reader(file, strict=True)
    rows = [line for line in lines if line]
    if not rows:
        return
    numbered = all(name.isascii() and name.isdecimal() for name in wanted)
    header = [str(place) for place in range(1, len(rows[0]) + 1)] if numbered else rows.pop(0)
    _refuse_absent(path, header, wanted)
    for number, row in enumerate(rows, 1):
        if len(row) != len(header):
            raise DataError(
                f"{path}: row {number} has {len(row)} columns, the first has {len(header)}"
            )
        yield dict(zip(header, row, strict=True))


def _refuse_absent(path: Path, header: Sequence[str], wanted: Sequence[str]) -> None:
    for name in wanted:
        if name not in header:
            columns = ", ".join(repr(column) for column in header)[:200]
            raise DataError(
                f"{path}: has no column {name!r}, only {columns}{nearest(name, header)}; name "
                "columns in data.text-column and data.label-column, by number if there is no header"
            )


def _field(row: Mapping[str, object], name: str, path: Path, number: int) -> str:
    """Return a field as text; of JSON, whole numbers too."""
    value = row.get(name)
    if isinstance(value, str) or type(value) is int:
        return str(value)
    what = "no column" if name not in row else f"{type(value).__name__}, not text, in the column"
    raise DataError(f"{path}: row {number} has {what} {name!r}{nearest(name, row)}")
