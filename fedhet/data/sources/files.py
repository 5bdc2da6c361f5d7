"""The user's own files: images, arrays, signals, tables, and texts.

`imagefolder:PATH` is a tree of images, one folder for each class; `npz:DIR` one .npz file for each
client, with images or the rows of a table; `signal:DIR` signals [N, channels, time] in .npz files,
a file a client or one for all. `table:PATH`, with `data.target` as the column of the class, and
`text:PATH` may be one file, which has no common test set, or a folder with train.csv and, if there
is one, test.csv; a table also a folder with a file for each site, whose rows are one client's, and
texts a folder with train/<class>/*.txt and test/<class>/*.txt, or <class>/*.txt.
"""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError
from fedhet.data import tables
from fedhet.data.cells import ENDINGS, Cells, find_table, read_rows, read_table
from fedhet.data.class_folders import read_tree
from fedhet.data.images import IMAGES
from fedhet.data.npz import read_npz, read_owners, same_form
from fedhet.data.spec import Dataset, DataSpec, Index, Source, Split, numbered, refuse_more
from fedhet.data.texts import TEXTS, find_rows, labelled, shape_of_texts
from fedhet.data.values import class_words
from fedhet.kinds import IMAGE, SIGNAL, TABLE, TEXT, Kind

_PARTS = ("train", "test")


def read_clients(folder: str, spec: DataSpec, kind: Kind = IMAGE) -> Dataset:
    """Read DIR/train/<k>.npz, DIR/test/<k>.npz and, if present, DIR/common.npz as one dataset.

    Each client's rows are contiguous, training before test; `Dataset.parts` holds the counts.
    """
    if spec.max_samples:
        raise SettingsError(
            f"data.max-samples = {spec.max_samples}: must be 0 with "
            f"data.dataset = {spec.dataset!r}, whose files are whole clients"
        )
    root = expanded(folder)
    files = [root / part / f"{k}.npz" for k in range(_count(root)) for part in ("train", "test")]
    splits = _read_all(files, spec, kind)
    common = None
    if (root / "common.npz").exists():
        common = read_npz(root / "common.npz", spec, kind)
    every = [*zip(files, splits, strict=True)]
    every += [(root / "common.npz", common)] if common is not None else []
    for path, split in every:
        same_form(splits[0], split, files[0].name, path)
        least = 2 if path.parent.name == "train" else 1
        if len(split) < least:
            raise DataError(f"{path}: has {len(split)} samples, at least {least} are needed")
    train = Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))
    parts = tuple((len(a), len(b)) for a, b in zip(splits[::2], splits[1::2], strict=True))
    classes = 1 + max(int(split.y.max()) for _, split in every)
    names, stated = tuple(map(str, range(classes))), "" if kind is IMAGE else kind.name
    return Dataset(spec.dataset, train, common, names, parts, kind=stated)


def kind_of_clients(folder: str) -> Kind:
    """Return the kind of DIR/train/0.npz, rows x [N, F] or images; only its head is read."""
    path = expanded(folder) / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # heads of later versions may be large
                return IMAGE
            shape, _, _ = np.lib.format.read_array_header_1_0(x)
    except Exception:  # reading the file reports what is wrong with it
        return IMAGE
    return TABLE if len(shape) == 2 else IMAGE


def _count(root: Path) -> int:
    """Return the number K of clients in `root`; both parts must hold 0.npz to K-1.npz."""
    names = {part: {path.name for path in (root / part).glob("*.npz")} for part in _PARTS}
    for part, found in names.items():
        if not found:
            raise DataError(f"{root}: no .npz files in {root / part} (expected 0.npz, ...)")
    clients = len(names["train"])
    expected = {f"{k}.npz" for k in range(clients)}
    for part, found in names.items():
        odd = sorted(found ^ expected)
        if odd:
            fault = "is missing" if odd[0] in expected else "is not expected"
            raise DataError(
                f"{root / part / odd[0]}: {fault}; train and test must each hold one file a "
                f"client, 0.npz to {clients - 1}.npz"
            )
    return clients


def _read_all(files: list[Path], spec: DataSpec, kind: Kind) -> list[Split]:
    """Read files that together may take `data.max-bytes`."""
    splits: list[Split] = []
    for path in files:
        splits.append(read_npz(path, spec, kind))
        refuse_more(sum(split.x.nbytes + split.y.nbytes for split in splits), spec, path.parents[1])
    return splits


def read_signals(folder: str, spec: DataSpec) -> Dataset:
    """Read DIR/train.npz and, if there is one, DIR/test.npz; or a file a client, as `npz:DIR` has.

    `Dataset.groups` is set if `data.by` names an array of train.npz.
    """
    root = expanded(folder)
    path = root / "train.npz"
    if not path.exists():
        if spec.by:
            raise SettingsError(
                f"data.by = {spec.by!r}: takes {path}, and {root} holds a file for each client"
            )
        return read_clients(folder, spec, SIGNAL)
    train = read_npz(path, spec, SIGNAL)
    test = None
    if (root / "test.npz").exists():
        test = read_npz(root / "test.npz", spec, SIGNAL)
        same_form(train, test, "train.npz", root / "test.npz")
    highest = max(int(split.y.max()) for split in (train, test) if split is not None and len(split))
    return Dataset(
        spec.dataset,
        train,
        test,
        tuple(map(str, range(highest + 1))),
        kind=SIGNAL.name,
        groups=read_owners(path, spec.by, spec) if spec.by else None,
    )


def read_own_table(place: str, spec: DataSpec) -> Dataset:
    """Read PATH. `Dataset.groups` is set if a column or a file says whose a row is.

    Raises DataError for any fault of the files.
    """
    path = expanded(place)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    first = path if path.is_file() else find_table(path, "train")
    if first is None:
        return _read_sites(path, spec)
    cells = read_table(first, spec)
    test = None if path.is_file() else find_table(path, "test")
    groups = numbered(tables.owners(cells, spec.by.strip())) if spec.by else None
    return _dataset(cells, read_table(test, spec) if test else None, groups, spec)


def _read_sites(folder: Path, spec: DataSpec) -> Dataset:
    """Read a folder with a file for each site. Raises DataError if one has other columns."""
    if spec.by:
        raise SettingsError(f"data.by = {spec.by!r}: {folder} holds a file for each client")
    files = sorted(path for path in folder.iterdir() if path.name.lower().endswith(ENDINGS))
    if not files:
        raise DataError(f"{folder}: holds no table; a name ends in one of {', '.join(ENDINGS)}")
    tables: list[Cells] = []
    for file in files:
        tables.append(read_table(file, spec, tables[-1].taken if tables else 0))
    groups = numbered([f"{k:06d}" for k, table in enumerate(tables) for _ in table.lines])
    return _dataset(Cells.joined(folder, tables, spec), None, groups, spec)


def _dataset(train: Cells, test: Cells | None, groups: Index | None, spec: DataSpec) -> Dataset:
    notes: list[str] = []
    schema = tables.found_schema(train, spec, notes.append)
    return Dataset(
        spec.dataset,
        tables.labelled(schema, train),
        tables.labelled(schema, test) if test else None,
        schema.classes,
        kind=TABLE.name,
        columns=schema.widths,
        groups=groups,
        schema=schema,
        notes=tuple(notes),
    )


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
    return read_tree(place, spec, TEXTS)


def _read_rows(train: Path, test: Path | None, spec: DataSpec) -> Dataset:
    rows = read_rows(train, spec)
    exact = spec.label_column in spec.categories
    classes, _ = class_words(rows.labels, train, spec.label_column, exact=exact)
    return Dataset(
        spec.dataset,
        labelled(rows, classes, spec, train),
        labelled(read_rows(test, spec), classes, spec, test) if test else None,
        classes,
        kind=TEXT.name,
        shape=shape_of_texts(spec),
        groups=numbered(rows.groups) if rows.groups is not None else None,
    )


SOURCES = (
    Source(
        "imagefolder",
        "a tree of images",
        lambda place, spec: read_tree(place, spec, IMAGES),
        "PATH",
        is_mapped=True,
    ),
    Source(
        "npz",
        "images or rows, one file for each client",
        read_clients,
        "DIR",
        found_kind=kind_of_clients,
        whole_clients=True,
    ),
    Source(
        "signal",
        "signals, one file to partition or one for each client",
        read_signals,
        "DIR",
        SIGNAL,
        whole_clients=True,
        owners="signal:DIR with train.npz",
    ),
    Source(
        "table",
        "a table: CSV, TSV, JSON lines or Parquet, or a folder with a file for each site",
        read_own_table,
        "PATH",
        TABLE,
        owners="a table:FILE",
    ),
    Source(
        "text",
        "texts: CSV, TSV, JSON lines, or a tree of .txt files",
        read_texts,
        "PATH",
        TEXT,
        owners="a text:FILE",
    ),
)
