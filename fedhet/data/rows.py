"""Reader of row files: CSV, TSV, JSON lines, and Parquet.

pyarrow reads the files, because it rejects rows with too few or too many fields, which pandas pads
or truncates. Text files may be compressed (.gz). All values become text without surrounding
whitespace, so that `fedhet.data.columns` interprets the values of all formats in the same way.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from fedhet.base.disk import encoding_of, text_in
from fedhet.base.errors import DataError, error_reason, nearest, one_line
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.data.words import MISSING, encode_owners

if TYPE_CHECKING:
    import pandas as pd

_FORMATS = (".csv", ".tsv", ".jsonl")
TEXT_ENDINGS = tuple(f"{kind}{packed}" for kind in _FORMATS for packed in ("", ".gz"))
"""File name extensions of text files."""
ENDINGS = (*TEXT_ENDINGS, ".parquet")
"""File name extensions of row files."""
UNNAMED = re.compile(r"Unnamed: \d+|__index_level_\d+__")
"""Pattern for the names of columns without a name, as in pandas and in its Parquet files."""
_SEPARATORS = ",;\t|"
"""Possible separators of CSV files. The separator is the most frequent one in the header."""
_BLOCK_BYTES = 2**24
"""Maximum size of a row in a text file, in bytes."""
_CHUNK_BYTES = 2**20
"""Number of bytes that are read at a time, and maximum size of the header of a text file."""
_BATCH_ROWS = 2**14
_REFERENCE = 8


@dataclass(frozen=True)
class Values:
    """Values of a column: the distinct texts, and the index of each row's text."""

    texts: Sequence[str]
    """Distinct texts, in order of first appearance."""
    codes: npt.NDArray[np.int32]
    """Index in `texts` of each row's text, of shape [N]."""
    is_number: bool = False
    """Whether the column has a numeric type in the file, so that its texts have no notation."""

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, is_number: bool = False) -> Values:
        """Build a column from the text of each row."""
        places: dict[str, int] = {}
        codes = np.fromiter((places.setdefault(t, len(places)) for t in texts), np.int32)
        return cls(list(places), codes, is_number)

    def __len__(self) -> int:
        """Return the number N of rows."""
        return len(self.codes)

    def rows(self) -> list[str]:
        """Return the text of each row."""
        return [self.texts[code] for code in self.codes.tolist()]

    def counts(self) -> npt.NDArray[np.int64]:
        """Return the number of rows [D] with each distinct text."""
        return np.bincount(self.codes, minlength=len(self.texts))

    def first_row(self, place: int) -> int:
        """Return the index of the first row whose text is `texts[place]`."""
        return int((self.codes == place).argmax())

    @staticmethod
    def concatenate(parts: Sequence[Values]) -> Values:
        """Concatenate the rows of several columns."""
        places: dict[str, int] = {}
        codes = []
        for part in parts:
            own = [places.setdefault(text, len(places)) for text in part.texts]
            codes.append(np.array(own, np.int32)[part.codes])
        is_number = all(part.is_number for part in parts)
        return Values(list(places), np.concatenate(codes), is_number)


@dataclass(frozen=True)
class Table:
    """Rows of one or several files."""

    path: Path
    """File, or directory of several files."""
    columns: Mapping[str, Values]
    files: tuple[tuple[Path, int], ...]
    """Path and number of rows of each file."""
    spec: DataSpec
    """Data settings with which the table was read."""
    size: int = 0
    """Memory used by this table and by the tables that were read before it, in bytes."""
    unusable: Mapping[str, str] = field(default_factory=dict)
    """Columns with unsupported values, such as lists, mapped to a description of these values."""
    noun: str = "row"

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(count for _, count in self.files)

    def column(self, name: str, *, lists: bool = False) -> Values:
        """Return the values of a column, in which a list is JSON if `lists` is set.

        Raises DataError if the column is missing or has unsupported values.
        """
        if name in self.unusable and not (lists and name in self.columns):
            fix = "Convert the column, or add it to data.exclude."
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
        for place, owner in enumerate(owners.texts):
            if owner in MISSING:
                fault = "values of the column data.by must not be missing. Name the owner"
                raise self.error(by, owners.first_row(place), fault)
        return encode_owners(owners.rows(), f"{self.path}: column {one_line(by)!r}")

    def error(self, column: str, row: int, fault: str) -> DataError:
        """Return the error for an invalid value in a row, counted from 0."""
        path = self.path
        for path, count in self.files:  # noqa: B007
            if row < count:
                break
            row -= count
        number = row + 1 if self.noun == "row" else row  # Samples of arrays are counted from 0.
        return DataError(f"{path}: {self.noun} {number}, column {one_line(column)!r}: {fault}")

    @classmethod
    def concatenate(cls, directory: Path, tables: Sequence[Table], spec: DataSpec) -> Table:
        """Concatenate the rows of several files. Raises DataError if their columns differ."""
        first = tables[0]
        for table in tables[1:]:
            for name in sorted(first.columns.keys() ^ table.columns.keys()):
                has, lacks = (first, table) if name in first.columns else (table, first)
                raise DataError(
                    f"{lacks.path}: column {name!r} of {has.path.name} not found; all files must "
                    "have the same columns"
                )
        return cls(
            directory,
            {n: Values.concatenate([t.columns[n] for t in tables]) for n in first.columns},
            tuple(file for table in tables for file in table.files),
            spec,
            unusable={k: v for table in tables for k, v in table.unusable.items()},
            noun=first.noun,
        )


def missing_column_error(
    where: object, name: str, columns: Iterable[str], hint: str = ""
) -> DataError:
    """Return the error for a column that does not exist."""
    available = ", ".join(map(repr, islice(columns, 50)))[:200]
    close = nearest(name, columns)
    hint = hint.removeprefix(".") if close else hint  # `close` ends with a question mark.
    return DataError(f"{where}: column {one_line(name)!r} not found, got {available}{close}{hint}")


def find_rows(directory: Path, part: str, endings: Sequence[str] = ENDINGS) -> Path | None:
    """Return the row file of a part ("train" or "test"), or None if it does not exist.

    The case of the name does not matter. Raises DataError if several files match.
    """
    names = {f"{part}{ending}" for ending in endings}
    with reading(directory, "directory"):
        entries = sorted(path for path in directory.iterdir() if path.name.lower() in names)
    paths = [path for path in entries if not path.is_dir()]
    if len(paths) > 1:
        raise DataError(
            f"{directory}: expected a single {part} file, got {paths[0].name} and {paths[1].name}"
        )
    return paths[0] if paths else None


def read_table(path: Path, spec: DataSpec, size: int = 0, *, texts: Sequence[str] = ()) -> Table:
    """Read a row file.

    Args:
        path: CSV, TSV, JSON lines, or Parquet file.
        spec: Data settings.
        size: Memory used by the tables already read, in bytes.
        texts: Columns of texts. If all names are numbers, starting at 1, a CSV or TSV file has no
            header, and its columns are numbered.

    Raises:
        DataError: If the file is invalid, or if all tables together exceed `data.max-bytes`.
    """
    name = path.name.lower().removesuffix(".gz")
    if not path.name.lower().endswith(ENDINGS):
        raise DataError(f"{path}: unsupported format, expected one of {', '.join(ENDINGS)}")
    with reading(path, "table", "", _described):
        if name.endswith(".parquet"):
            names, batches = _parquet(path, spec, size)
        elif name.endswith(".jsonl"):
            names, batches = _json_lines(path, spec, texts)
        else:
            names, batches = _csv(path, spec, name.endswith(".tsv"), texts)
        columns = [_Column() for _ in names]
        for batch in batches:
            for column, values in zip(columns, batch, strict=True):
                size += column.add(values)
            check_max_bytes(size, spec, path)
    if not sum(map(len, columns[0].codes if columns else ())):
        raise DataError(f"{path}: no rows found")
    names = [each or f"Unnamed: {place}" for place, each in enumerate(map(str.strip, names))]
    for each, count in Counter(names).items():
        if count > 1:
            raise DataError(f"{path}: duplicate column {each!r}")
    read = dict(zip(names, columns, strict=True))
    values = {each: column.values() for each, column in read.items()}
    unusable = {each: column.fault for each, column in read.items() if column.fault}
    return Table(path, values, ((path, len(values[names[0]])),), spec, size, unusable)


def read_frame(path: Path, spec: DataSpec, hint: str = "", **options: Any) -> pd.DataFrame:
    """Read a file of a published dataset, plain or .gz, with options of `pandas.read_csv`.

    Raises DataError, with `hint`, if the file is unreadable or exceeds `data.max-bytes`.
    """
    import pandas as pd

    with reading(path, "table", describe=lambda error: f"{error_reason(error)}{hint}"):
        return pd.read_csv(StringIO(text_in(read_bounded(path, spec), path)), **options)


def _described(error: Exception) -> str:
    text = one_line(str(error))[:300]
    return f"{text}. Save the file in UTF-8" if "UTF8" in text else text


class _Column:
    """Values of a column that is read in batches."""

    def __init__(self) -> None:
        self.codes: list[npt.NDArray[np.int32]] = []
        self.fault = ""
        self._places: dict[str, int] = {}
        self._is_number = True

    def add(self, values: Any) -> int:
        """Append an Arrow array, and return the additional memory in bytes."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if isinstance(values, pa.ExtensionArray):
            values = values.storage
        types, kind = pa.types, values.type
        if types.is_list(kind) or types.is_large_list(kind):
            self.fault = "lists"
            lists = values.to_pylist()
            values = pa.array(
                [None if each is None else json.dumps(each, default=str) for each in lists],
                pa.string(),
            )
        elif types.is_nested(kind):
            self.fault = f"values of type {kind}"
            values = pa.nulls(len(values), pa.string())
        if not types.is_dictionary(values.type):
            values = values.dictionary_encode()
        distinct = values.dictionary
        is_number = types.is_integer, types.is_floating, types.is_decimal, types.is_null
        self._is_number &= any(test(distinct.type) for test in is_number)
        try:
            if types.is_duration(distinct.type):  # Its text is a number in the file's unit.
                raise pa.ArrowNotImplementedError("duration")
            texts = pc.utf8_trim_whitespace(distinct.cast(pa.string())).to_pylist()
        except pa.ArrowException:
            self.fault = f"values of type {distinct.type}"
            if types.is_binary(distinct.type) or types.is_large_binary(distinct.type):
                self.fault = "bytes that are not UTF-8 text"
            texts = [""] * len(distinct)
        before = len(self._places)
        own = [self._places.setdefault(text or "", len(self._places)) for text in [*texts, ""]]
        rows = pc.fill_null(values.indices, len(texts)).to_numpy(zero_copy_only=False)
        self.codes.append(np.array(own, np.int32)[rows])
        new = islice(reversed(self._places), len(self._places) - before)
        return self.codes[-1].nbytes + sum(sys.getsizeof(text) + _REFERENCE for text in new)

    def values(self) -> Values:
        """Return the values of all batches."""
        codes = np.concatenate(self.codes)
        used, own = np.unique(codes, return_inverse=True)  # "" may be unused.
        texts = list(self._places)
        return Values([texts[k] for k in used], own.astype(np.int32), self._is_number)


Batches = Iterator[Sequence[Any]]
"""Iterator over batches of rows, each with one Arrow array for each column."""


def _csv(
    path: Path, spec: DataSpec, is_tsv: bool, texts: Sequence[str]
) -> tuple[list[str], Batches]:
    """Return the column names of a CSV or TSV file, and its rows in batches.

    Quotes have no meaning in TSV files.
    """
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    start = next(chunks := _chunks(path, spec), b"")
    # Check the size before a row is decoded. Only the size of a .gz file must be counted.
    if path.suffix.lower() == ".gz":
        for _ in chunks:
            pass
    check_max_bytes(path.stat().st_size, spec, path)
    encoding = encoding_of(start)
    if "\0" in (text := start.decode(encoding, "ignore")):
        text_in(start, path)  # This raises the error for null characters.
    head = text.splitlines(keepends=True) or [""]
    separator = "\t" if is_tsv else max(_SEPARATORS, key=head[0].count)
    quoted = csv.reader(head, delimiter=separator)
    names = head[0].rstrip("\r\n").split("\t") if is_tsv else next(quoted, [])
    has_header = not (texts and all(name.isascii() and name.isdecimal() for name in texts))
    keys = [str(place) for place in range(1, len(names) + 1)]
    read = arrow_csv.open_csv(
        _open(path),
        arrow_csv.ReadOptions(
            column_names=keys,
            use_threads=False,
            block_size=_BLOCK_BYTES,
            encoding="utf8" if encoding.startswith("utf-8") else encoding,
        ),
        arrow_csv.ParseOptions(
            delimiter=separator, newlines_in_values=not is_tsv, quote_char=False if is_tsv else '"'
        ),
        arrow_csv.ConvertOptions(column_types=dict.fromkeys(keys, pa.string())),
    )

    def batches() -> Batches:
        is_header = has_header
        for batch in read:
            yield [values[is_header:] for values in batch.columns]
            is_header = False

    return names if has_header else keys, batches()


def _json_lines(path: Path, spec: DataSpec, texts: Sequence[str]) -> tuple[list[str], Batches]:
    """Return the column names of a JSON lines file, and its rows in batches."""
    import pyarrow as pa
    from pyarrow import json as arrow_json

    content = read_bounded(path, spec)
    if encoding_of(content) != "utf-8" or b"\0" in content:
        content = text_in(content, path).encode()
    # Without a type, a text such as 2026-01-31 would become a date.
    parsing = arrow_json.ParseOptions(explicit_schema=pa.schema([(n, pa.string()) for n in texts]))
    options = arrow_json.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES)
    try:
        table = arrow_json.read_json(pa.BufferReader(content), options, parsing)
    except pa.ArrowInvalid:
        text_in(content, path)  # If the encoding is unsupported, this raises a clearer error.
        raise
    # A column of texts that does not exist is empty.
    empty = [name for name in texts if table[name].null_count == len(table)]
    table = table.drop_columns(empty)
    return table.column_names, (batch.columns for batch in table.to_batches(_BATCH_ROWS))


def _parquet(path: Path, spec: DataSpec, size: int) -> tuple[list[str], Batches]:
    """Return the column names of a Parquet file, and its rows in batches.

    To limit memory, the sizes in the file are checked first. Text columns are read as dictionaries,
    because a small file can repeat a long text in many rows. pyarrow does not support this for
    delta-encoded columns, which are read a few rows at a time.
    """
    import pyarrow as pa
    from pyarrow import parquet

    schema, metadata, types = parquet.read_schema(path), parquet.read_metadata(path), pa.types
    is_text = types.is_string, types.is_large_string, types.is_binary, types.is_large_binary
    groups = [metadata.row_group(k) for k in range(metadata.num_row_groups)]
    chunks = [group.column(k) for group in groups for k in range(group.num_columns)]
    delta = [each for each in chunks if any("DELTA" in name for name in each.encodings)]
    repeated = {each.name for each in schema if any(test(each.type) for test in is_text)}
    repeated -= {each.path_in_schema for each in delta}
    check_max_bytes(sum(group.total_byte_size for group in groups), spec, path)
    check_max_bytes(size + 4 * metadata.num_rows * (len(schema.names) + 1), spec, path)
    largest = max((each.total_uncompressed_size for each in delta), default=1)
    rows = max(1, min(_BATCH_ROWS, spec.max_bytes // max(1, largest)))
    file = parquet.ParquetFile(path, metadata=metadata, read_dictionary=sorted(repeated))
    return schema.names, (batch.columns for batch in file.iter_batches(batch_size=rows))


def _open(path: Path) -> Any:
    """Open a file as an Arrow stream, and decompress .gz content."""
    import pyarrow as pa

    packed = path.suffix.lower() == ".gz"
    return pa.input_stream(str(path), compression="gzip" if packed else None)


def _chunks(path: Path, spec: DataSpec) -> Iterator[bytes]:
    """Yield the content of a file. Raises DataError if it exceeds `data.max-bytes`."""
    size = 0
    with _open(path) as file:
        while chunk := file.read(_CHUNK_BYTES):
            size += len(chunk)
            check_max_bytes(size, spec, path)
            yield chunk


def read_bounded(path: Path, spec: DataSpec) -> bytes:
    """Read and decompress a file. Raises DataError if it exceeds `data.max-bytes`."""
    return b"".join(_chunks(path, spec))
