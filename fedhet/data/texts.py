"""Texts with a class each: rows of a file, and .txt files."""

from __future__ import annotations

import logging
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE, BOM_UTF32_BE, BOM_UTF32_LE
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedhet.base.errors import DataError, nearest, reason_of
from fedhet.data.class_folders import Files
from fedhet.data.rows import ENDINGS, TextRows, read_bounded, read_rows
from fedhet.data.spec import DataSpec, Split, refuse_more
from fedhet.data.tokens import tokenized
from fedhet.data.values import Words, class_words
from fedhet.kinds import Shape

LOG = logging.getLogger("fedhet")
_MARKS = {  # UTF-32's mark begins with UTF-16's
    BOM_UTF8: "utf-8-sig", BOM_UTF32_LE: "utf-32", BOM_UTF32_BE: "utf-32",
    BOM_UTF16_LE: "utf-16", BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_WESTERN = 0.1
"""Maximum fraction of other bytes than ASCII in a text that is taken for Windows-1252. Alphabets
other than Latin have far more, so that their encodings are refused, not misread."""
_LATIN = {0xDC00 + byte: byte for byte in range(128, 256)}
"""The five bytes that Windows-1252 leaves undefined are those of Latin-1."""


def find_rows(folder: Path, part: str) -> Path | None:
    """Return the file of rows in a folder: train.csv, .tsv or .jsonl, plain or .gz; None if none.

    Raises DataError for more than one.
    """
    found = [folder / f"{part}{ending}" for ending in ENDINGS]
    there = [path for path in found if path.is_file()]
    if len(there) > 1:
        raise DataError(f"{folder}: holds {there[0].name} and {there[1].name}, one is allowed")
    return there[0] if there else None


def site_rows(
    train: Path, names: Sequence[str], classes: int, spec: DataSpec
) -> tuple[Split, Split | None, tuple[str, ...]]:
    """Return a site's training rows, its test rows if there are any, and the run's classes.

    Without `names`, from classes.txt, the classes are the different labels, or 0 to `classes` - 1
    if all labels are such numbers. Raises DataError if the run has another number of classes.
    """
    test = find_rows(train.parent, "test")
    rows, numbers = read_rows(train, spec), tuple(map(str, range(classes)))
    names = tuple(names)
    if not names:
        column = spec.label_column
        names, words = class_words(rows.labels, train, column, max_numbers=classes)
        names = numbers if set(words.values()) <= set(numbers) else names
    if len(names) != classes:
        raise DataError(
            f"{train}: has {len(names)} different labels, the run has {classes} classes; name all "
            f"{classes} in the run's order in {train.parent / 'classes.txt'}"
        )
    tests = labelled(read_rows(test, spec), names, spec, test) if test else None
    return labelled(rows, names, spec, train), tests, names


def labelled(rows: TextRows, classes: Sequence[str], spec: DataSpec, path: Path) -> Split:
    """Return rows as samples, with the places of their labels in `classes`. Raises DataError."""
    words = Words(classes)
    places = {label: words.place(label) for label in dict.fromkeys(rows.labels)}
    for line, label in zip(rows.lines, rows.labels, strict=True):
        if places[label] is None:
            close = nearest(label, classes)
            raise DataError(f"{path}: line {line} has the label {label!r}, not a class{close}")
    y = np.array([places[label] for label in rows.labels], np.int64)
    return Split(tokenized(rows.texts, spec, path), torch.from_numpy(y))


def read_files(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> torch.Tensor:
    """Return the texts of files as tokens [N, L], whatever `like` says.

    They are in UTF-8, or in UTF-16 or UTF-32 with a byte order mark. Other files are read as
    Windows-1252, with one line in the log, if nearly all of their characters are ASCII.
    """
    texts, taken, western = [], 0, []
    for path in map(Path, files):
        try:
            content = read_bounded(path, spec)
        except OSError as error:
            raise DataError(f"{path}: not a readable text ({reason_of(error)})") from error
        text, encoding = _decoded(content, path)
        texts.append(text)
        western += [path] if encoding == "cp1252" else []
        taken += len(content)
        refuse_more(taken, spec, path.parents[1])
    if western:
        LOG.warning(
            "%s: %d of %d texts are not in UTF-8, and are read as Windows-1252 (Latin-1); the "
            "first is %s",
            western[0].parents[1], len(western), len(texts), western[0],
        )  # fmt: skip
    return tokenized(texts, spec, Path(files[0]).parents[1] if files else "")


def _decoded(content: bytes, path: Path) -> tuple[str, str]:
    """Return a text and its encoding. Raises DataError if it is unknown."""
    marked = next((name for mark, name in _MARKS.items() if content.startswith(mark)), "")
    if not marked and content[:4000].count(0) * 10 > len(content[:4000]):
        even = content[:4000:2].count(0)  # a binary file, or UTF-16 without a mark
        odd = content[1:4000:2].count(0)
        marked = "utf-16-be" if even > 4 * odd else "utf-16-le" if odd > 4 * even else "ascii"
    try:
        return content.decode(marked or "utf-8").removeprefix("\ufeff"), marked or "utf-8"
    except UnicodeDecodeError as error:
        if not marked and sum(byte > 127 for byte in content) <= len(content) * _WESTERN:
            return content.decode("cp1252", "surrogateescape").translate(_LATIN), "cp1252"
        raise DataError(
            f"{path}: not a readable text in UTF-8 ({reason_of(error)}). Convert it, for example "
            "with `iconv -f WINDOWS-1251 -t UTF-8`."
        ) from error


TEXTS = Files(".txt files", (".txt",), read_files, bare=True)
"""Files of texts; without an ending only if a tree has no .txt file."""
