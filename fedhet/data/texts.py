"""Texts with a class each: rows of a file, and .txt files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedhet.data.class_folders import Files
from fedhet.data.rows import ENDINGS, TextRows, read_bounded, read_rows
from fedhet.data.spec import DataSpec, Split, refuse_more
from fedhet.data.tokens import tokenized
from fedhet.errors import DataError, nearest, reason_of
from fedhet.kinds import Shape


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
    names = tuple(names) or (
        numbers if set(rows.labels) <= set(numbers) else class_names(rows.labels, train)
    )
    if len(names) != classes:
        raise DataError(
            f"{train}: has {len(names)} different labels, the run has {classes} classes; name all "
            f"{classes} in the run's order in {train.parent / 'classes.txt'}"
        )
    tests = labelled(read_rows(test, spec), names, spec, test) if test else None
    return labelled(rows, names, spec, train), tests, names


def class_names(labels: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the different labels in order: numbers by their size, others alphabetically."""
    found = set(labels)
    for name in sorted(found):
        if not name.isprintable():
            raise DataError(f"{path}: the label {name!r} is not printable")
    numbers = all(name.isascii() and name.isdecimal() for name in found)
    return tuple(sorted(found, key=lambda name: (int(name), name) if numbers else name))


def labelled(rows: TextRows, classes: Sequence[str], spec: DataSpec, path: Path) -> Split:
    """Return rows as samples, with the places of their labels in `classes`. Raises DataError."""
    places = {name: place for place, name in enumerate(classes)}
    for line, label in zip(rows.lines, rows.labels, strict=True):
        if label not in places:
            close = nearest(label, classes)
            raise DataError(f"{path}: line {line} has the label {label!r}, not a class{close}")
    y = np.array([places[label] for label in rows.labels], np.int64)
    return Split(tokenized(rows.texts, spec, path), torch.from_numpy(y))


def read_files(files: Sequence[str], spec: DataSpec, like: Shape | None = None) -> torch.Tensor:
    """Return the texts of .txt files in UTF-8 as tokens [N, L], whatever `like` says."""
    texts, taken = [], 0
    for path in map(Path, files):
        try:
            content = read_bounded(path, spec)
            texts.append(content.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable text in UTF-8 ({reason_of(error)})") from error
        taken += len(content)
        refuse_more(taken, spec, path.parents[1])
    return tokenized(texts, spec, Path(files[0]).parents[1] if files else "")


TEXTS = Files(".txt files", (".txt",), read_files)
"""Files of texts."""
