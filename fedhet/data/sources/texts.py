"""Sources of texts.

- `text:PATH`: labeled texts. PATH is a file, a directory with train.csv and optionally test.csv, or
  a directory of .txt files in the layout of `imagefolder:PATH`. For language modeling, the texts
  need no labels (`fedhet.data.sources.language`).
- `next-token:PATH`: windows of a text, labeled with the next token. PATH is a .txt file, or a
  directory with train.txt and optionally test.txt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fedhet.base.disk import expanded, text_in
from fedhet.base.errors import DataError, SettingsError
from fedhet.data.dataset import Dataset, Format, Source, Split
from fedhet.data.folders import Files, read_folder
from fedhet.data.rows import TEXT_ENDINGS, Table, missing_column_error, read_bounded, read_table
from fedhet.data.schemas import SCHEMA, declared_targets
from fedhet.data.sources.language import read_plain_texts
from fedhet.data.sources.tables import find_row_files
from fedhet.data.spec import DataSpec, check_max_bytes, reading
from fedhet.data.targets import infer_targets, read_targets
from fedhet.data.texts import (
    TOKEN_BYTES,
    WORDS,
    text_sample_shape,
    tokenize,
    tokenizer_for,
    vocabulary_size,
)
from fedhet.kinds import TEXT, Shape
from fedhet.tasks import CLASSIFICATION, CausalLanguageModeling, find_task

MAX_NEXT_TOKENS = 4096
"""Maximum number of tokens if each token is a class, because predictions have a score per class."""


def read_texts(location: str, spec: DataSpec) -> Dataset:
    """Read the dataset `text:PATH`.

    `Dataset.groups` is set if `data.by` is set. Raises DataError if a file is invalid.
    """
    if find_task(spec.task) is CausalLanguageModeling:
        return read_plain_texts(location, spec)
    _, train, test = find_row_files(location, TEXT_ENDINGS)
    if train is None:
        return read_folder(location, spec, TEXTS)
    columns = tuple(spec.text_column)
    declared, spec = declared_targets(spec, train)
    spec = spec.replace(target=spec.target or spec.label_column.strip())
    rows = read_table(train, spec, texts=columns)
    for name in columns:
        if name not in rows.columns:
            raise missing_column_error(train, name, rows.columns, " (data.text-column)")
        rows.column(name)
    if declared and declared.task == CLASSIFICATION.name and spec.target not in rows.columns:
        hint = f". It is the target in {train.parent / SCHEMA}, which describes all files there."
        raise missing_column_error(train, spec.target, rows.columns, hint)
    schema = infer_targets(rows, spec, declared=declared)

    def split(table: Table) -> Split:
        texts = joined_texts(table, columns)
        return Split(tokenize(texts, spec, table.path), read_targets(schema, table))

    samples = split(rows)
    format = Format.from_samples(samples.x, kind=TEXT, shape=text_sample_shape(spec), schema=schema)
    common = split(read_table(test, spec, texts=columns)) if test else None
    return Dataset(spec.dataset, samples, common, format, **rows.owners())


def joined_texts(table: Table, columns: Sequence[str]) -> list[str]:
    """Return the text of each row, i.e. the texts of several columns joined by spaces.

    Raises DataError if a column or, with a single column, a text is missing.
    """
    parts = [table.column(name) for name in columns]
    for name, values in zip(columns, parts, strict=True):
        if len(parts) == 1 and "" in values.texts:
            raise table.error(name, values.first_row(values.texts.index("")), "the text is missing")
    return list(map(" ".join, zip(*(each.rows() for each in parts), strict=True)))


def read_windows(location: str, spec: DataSpec) -> Dataset:
    """Read the dataset `next-token:PATH` as windows of `data.max-tokens` tokens.

    The label of a window is the token that follows it. Windows do not overlap, so a training window
    shares no token with a test window. The classes are the tokens of the vocabulary. Raises
    DataError if a file is too short or not valid UTF-8, and SettingsError if the vocabulary is too
    large.
    """
    path = expanded(location)
    train, test = (path / "train.txt", path / "test.txt") if path.is_dir() else (path, None)
    size, length = vocabulary_size(spec), spec.max_tokens
    count = size - (spec.tokenizer != WORDS)  # An encoder's tokens do not include PADDING.
    if count > MAX_NEXT_TOKENS:
        raise SettingsError(
            f"data.dataset = {spec.dataset!r}: each token is a class, so the vocabulary must have "
            f"at most {MAX_NEXT_TOKENS:,} tokens, got {count:,}. With data.tokenizer = "
            "words, lower data.vocabulary; otherwise, choose a tokenizer with fewer tokens."
        )
    encode = tokenizer_for(spec, special=False)

    def split(path: Path) -> Split:
        with reading(path, "text"):
            tokens = encode(text_in(read_bounded(path, spec), path))
        check_max_bytes(TOKEN_BYTES * len(tokens), spec, path)
        if (count := len(tokens) // (length + 1)) < 1:
            raise DataError(
                f"{path}: expected more than data.max-tokens = {length} tokens, got {len(tokens)}"
            )
        windows = torch.tensor(tokens[: count * (length + 1)]).view(count, length + 1)
        return Split(windows[:, :-1].clone(), windows[:, -1].clone())

    samples, names = split(train), tuple(map(str, range(size)))
    format = Format.from_samples(samples.x, names, TEXT, shape=text_sample_shape(spec))
    common = split(test) if test and test.exists() else None
    return Dataset(spec.dataset, samples, common, format)


def read_files(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> torch.Tensor:
    """Read text files as tokens [N, L]. `like` is ignored.

    The encoding must be UTF-8, or UTF-16 or UTF-32 with a byte order mark. Raises DataError
    otherwise.
    """
    texts, size = [], 0
    for path in map(Path, files):
        with reading(path, "text"):
            texts.append(text_in(content := read_bounded(path, spec), path))
        size += len(content)
        check_max_bytes(size, spec, f"{files[0]} and the other texts")
    return tokenize(texts, spec, f"{files[0]} and the other texts" if files else "")


TEXTS = Files(".txt files", (".txt",), read_files, TEXT, text_sample_shape)
"""File type of texts."""


SOURCES = (
    Source(
        "text",
        "texts: CSV, TSV, JSON lines, or .txt files in the layout of imagefolder:PATH",
        read_texts,
        "PATH",
        TEXT,
        text_sample_shape,
        owners="text:PATH",
    ),
    Source(
        "next-token",
        "windows of a text, to predict the next token",
        read_windows,
        "PATH",
        TEXT,
        text_sample_shape,
    ),
)
