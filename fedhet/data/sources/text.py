"""Texts with a class each, as rows of a file or as a tree of .txt files: `text:PATH`.

PATH may be one file, which has no common test set; a folder with train.csv and, if there is one,
test.csv; or a folder with train/<class>/*.txt and test/<class>/*.txt, or <class>/*.txt.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError
from fedhet.data.class_folders import read_tree
from fedhet.data.rows import read_rows
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, numbered
from fedhet.data.texts import TEXTS, find_rows, labelled
from fedhet.data.tokens import shape_of_texts
from fedhet.data.values import class_words
from fedhet.kinds import TEXT


def read_texts(place: str, spec: DataSpec) -> Dataset:
    """Read PATH. `Dataset.groups` is set if `data.by` names a column. Raises DataError."""
    path = expanded(place)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    train = path if path.is_file() else find_rows(path, "train")
    if train is not None:
        return _read_rows(train, None if path.is_file() else find_rows(path, "test"), spec)
    if spec.by:
        raise SettingsError(
            f"data.by = {spec.by!r}: a tree of .txt files has no columns; it takes a text:FILE"
        )
    return replace(read_tree(place, spec, TEXTS), shape=shape_of_texts(spec))


def _read_rows(train: Path, test: Path | None, spec: DataSpec) -> Dataset:
    rows = read_rows(train, spec)
    exact = spec.label_column in spec.categories
    classes, _ = class_words(rows.labels, train, spec.label_column, exact=exact)
    return Dataset(
        spec.dataset,
        labelled(rows, classes, spec, train),
        labelled(read_rows(test, spec), classes, spec, test) if test else None,
        classes,
        shape=shape_of_texts(spec),
        groups=numbered(rows.groups) if rows.groups is not None else None,
    )


SOURCES = (
    Source(
        "text",
        "texts: CSV, TSV, JSON lines, or a tree of .txt files",
        read_texts,
        "PATH",
        TEXT,
        owners="a text:FILE",
    ),
)
