"""Texts with a class each: CSV, TSV or JSON lines, plain or .gz, or a tree of .txt files by class.

PATH may be one file, which has no common test set; a folder with train.csv and, if there is one,
test.csv; or a folder with train/<class>/*.txt and test/<class>/*.txt, or <class>/*.txt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from fedhet.data.folder import class_folders, listing, parts, refuse_unlabelled
from fedhet.data.rows import ENDINGS, TextRows, read_bounded, read_rows
from fedhet.data.spec import Dataset, DataSpec, Index, Split, refuse_more
from fedhet.data.tokens import tokenized, vocabulary_of
from fedhet.errors import DataError, SettingsError, nearest

TXT = (".txt",)


def read_texts(place: str, spec: DataSpec) -> Dataset:
    """Read PATH, as above. `Dataset.groups` is set if `data.by` names a column."""
    path = Path(place).expanduser()
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    train = path if path.is_file() else find_rows(path, "train")
    if train is None:
        return _read_tree(path, spec)
    rows = read_rows(train, spec)
    classes = class_names(rows.labels, train)
    test = None if path.is_file() else find_rows(path, "test")
    return Dataset(
        spec.dataset,
        labelled(rows, classes, spec, train),
        labelled(read_rows(test, spec), classes, spec, test) if test else None,
        classes,
        vocabulary=vocabulary_of(spec),
        groups=group_numbers(rows.groups) if rows.groups is not None else None,
    )


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
    """Return a site's training and test rows, if there are test rows, and the run's classes.

    Without `names`, from classes.txt, the classes are the different labels; or 0 to `classes` - 1
    if all labels are such numbers. Raises DataError if they are others than the run's in number.
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
    for number, label in enumerate(rows.labels, 1):
        if label not in places:
            close = nearest(label, classes)
            raise DataError(f"{path}: row {number} has the label {label!r}, not a class{close}")
    y = np.array([places[label] for label in rows.labels], np.int64)
    return Split(tokenized(rows.texts, spec, path), torch.from_numpy(y))


def group_numbers(groups: Sequence[str]) -> Index:
    """Return each group's place among the sorted names, [N]."""
    return np.unique(np.array(groups), return_inverse=True)[1].astype(np.int64)


def read_files(files: Sequence[str], spec: DataSpec) -> torch.Tensor:
    """Return the texts of .txt files in UTF-8 as tokens [N, L]."""
    texts, taken = [], 0
    for path in map(Path, files):
        try:
            content = read_bounded(path, spec)
            texts.append(content.decode("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: not a readable text in UTF-8 ({error})") from error
        taken += len(content)
        refuse_more(taken, spec, path.parents[1])
    return tokenized(texts, spec, Path(files[0]).parents[1] if files else "")


def read_folder(root: Path, classes: Sequence[str], spec: DataSpec) -> Split:
    """Return the texts <class>/*.txt below `root`."""
    files, labels = listing(root, classes, TXT)
    return Split(read_files(files, spec), torch.from_numpy(labels))


def _read_tree(path: Path, spec: DataSpec) -> Dataset:
    if spec.by:
        raise SettingsError(
            f"data.by = {spec.by!r}: a tree of .txt files has no columns; it takes a text:FILE"
        )
    train_root, test_root = parts(path)
    for root in filter(None, (train_root, test_root)):
        refuse_unlabelled(root, "only a site's own training texts may lack a class")
    classes = class_folders(train_root)
    train = read_folder(train_root, classes, spec)
    test = read_folder(test_root, classes, spec) if test_root is not None else None
    return Dataset(spec.dataset, train, test, classes, vocabulary=vocabulary_of(spec))
