"""The user's own data: images, arrays, signals, tables and texts in files, and Python functions.

`imagefolder:PATH` is a tree of images, one folder for each class; `npz:DIR` one .npz file for each
client, with images or the rows of a table; `signal:DIR` signals [N, channels, time] in .npz files,
a file a client or one for all. `table:PATH`, with `data.target` as the column of the class, and
`text:PATH` may be one file, which has no common test set, or a folder with train.csv and, if there
is one, test.csv; a table also a folder with a file for each site, whose rows are one client's, and
texts a folder with train/<class>/*.txt and test/<class>/*.txt, or <class>/*.txt.

The function of `python:module:function` takes nothing and returns a `Dataset`, a pair (x, y) of
arrays, or a mapping of `train` and, if there are, `test` to such pairs, and `classes` to their
names. Arrays are as in .npz files, which are read without pickle, and bounded before anything is
unpacked.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, SettingsError, describe_error, nearest
from fedhet.data import tables
from fedhet.data.cells import ENDINGS, TEXT_ENDINGS, Cells, find_rows, read_table
from fedhet.data.class_folders import Files, find_tree
from fedhet.data.images import IMAGES
from fedhet.data.spec import (
    Dataset,
    DataSpec,
    Source,
    Split,
    check_max_bytes,
    encode_labels,
    no_path,
    reading,
)
from fedhet.data.texts import TEXTS, read_texts
from fedhet.data.values import is_missing
from fedhet.kinds import IMAGE, KINDS, SIGNAL, TABLE, TEXT, Kind

MAX_CLASSES = 65_536  # the largest label sets this count: a stray one must not cost memory
_READ_AS = {"x": 4, "y": 8}  # bytes a value, as float32 and int64
PYTHON = "python"
Arrays = dict[str, npt.NDArray[Any]]


# --- arrays ---------------------------------------------------------------------------------------


def read_arrays(
    path: Path,
    names: Sequence[str],
    spec: DataSpec,
    *,
    hint: str = "",
    source: str = "",
    scaled: bool = False,
) -> Arrays:
    """Return these arrays of a file unchanged; pickled ones are refused, not loaded.

    Raises DataError for any fault of the file, and if they take more than `data.max-bytes`: as they
    are, or as what they become if that is more; bytes that will be `scaled` count as float32.
    Nothing is unpacked before but headers, which must agree with the sizes in the archive's index.
    `hint` is added to the message if an array is absent, `source` if the file is.
    """
    with reading(path, ".npz file", source, describe_error):
        with zipfile.ZipFile(path) as archive:
            there = [name.removesuffix(".npy") for name in archive.namelist()]
            taken = 0
            for name in names:
                if name not in there:
                    others = ", ".join(there) or "none"
                    raise DataError(f"{path}: has no array {name!r}, only {others}{hint}")
                with archive.open(member := f"{name}.npy") as file:
                    if (version := np.lib.format.read_magic(file)) != (1, 0):
                        fault = f"is an .npy of version {version}, not (1, 0)"
                        raise DataError(f"{path}: {member} {fault}")
                    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                    if dtype.hasobject:
                        rule = "save plain numeric arrays x and y"
                        raise DataError(f"{path}: pickled objects are refused, {rule}")
                    size = math.prod(shape) * dtype.itemsize
                    if file.tell() + size != archive.getinfo(member).file_size:
                        claim = f"claims {dtype} {list(shape)}, which is not what it holds"
                        raise DataError(f"{path}: {member} {claim}")
                are_bytes = name == "x" and dtype == np.uint8 and not scaled
                read = 1 if are_bytes else _READ_AS.get(name, 8)
                taken += max(size, read * math.prod(shape))
            check_max_bytes(taken, spec, path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in names}


def checked_labels(
    y: npt.NDArray[Any], where: Path | str, classes: int = MAX_CLASSES
) -> npt.NDArray[np.int64]:
    """Return labels [N] as int64. Raises DataError, which names `where`, unless they are."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise DataError(f"{where}: y must be whole numbers [N], is {y.dtype} {list(y.shape)}")
    labels = y.astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        odd = labels.min() if labels.min() < 0 else labels.max()
        run = f" (the run has {classes} classes)" if classes < MAX_CLASSES else ""
        raise DataError(f"{where}: y holds the label {odd}, allowed are 0 to {classes - 1}{run}")
    return labels


def split_of(
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    where: Path | str,
    kind: Kind = IMAGE,
    classes: int = MAX_CLASSES,
) -> Split:
    """Return arrays as samples of a kind, with their labels. Raises DataError for a fault."""
    labels, samples = checked_labels(y, where, classes), kind.checked(x, where)
    if len(samples) != len(labels):
        raise DataError(f"{where}: x has {len(samples)} rows and y has {len(labels)}")
    return Split(torch.from_numpy(samples), torch.from_numpy(labels))


def read_npz(path: Path, spec: DataSpec, kind: Kind = IMAGE, classes: int = MAX_CLASSES) -> Split:
    """Read a file's arrays x and y; rows of tables are read as images are.

    Raises DataError for any fault of the file, and if it takes more than `data.max-bytes`.
    """
    arrays = read_arrays(path, ("x", "y"), spec)
    return split_of(arrays["x"], arrays["y"], path, kind, classes)


def read_pair(
    root: Path, spec: DataSpec, kind: Kind, classes: int = MAX_CLASSES
) -> tuple[Split, Split | None]:
    """Read train.npz and, if there is one, test.npz in a folder. Raises DataError."""
    train, path = read_npz(root / "train.npz", spec, kind, classes), root / "test.npz"
    if not path.exists():
        return train, None
    test = read_npz(path, spec, kind, classes)
    check_same_form(train, test, "train.npz", path)
    return train, test


def check_same_form(first: Split, other: Split, where: str, path: Path | str) -> None:
    """Raise DataError unless `path`'s samples have the same shape and type as those of `where`."""
    for what, left, right in (
        ("shape", tuple(first.x.shape[1:]), tuple(other.x.shape[1:])),
        ("type", first.x.dtype, other.x.dtype),
    ):
        if left != right:
            raise DataError(f"{path}: samples have {what} {right}, those of {where} {left}")


def check_no_subset(spec: DataSpec) -> None:
    """Raise SettingsError if a run takes a part of samples that come as whole clients."""
    if spec.max_samples:
        raise SettingsError(
            f"data.max-samples = {spec.max_samples}: must be 0 with data.dataset = "
            f"{spec.dataset!r}, whose files are whole clients"
        )


def read_clients(folder: str, spec: DataSpec, kind: Kind = IMAGE) -> Dataset:
    """Read DIR/train/<k>.npz, DIR/test/<k>.npz and, if present, DIR/common.npz as one dataset.

    Each client's rows are contiguous, training before test; `Dataset.parts` holds the counts.
    """
    check_no_subset(spec)
    root = expanded(folder)
    there = {part: {file.name for file in (root / part).glob("*.npz")} for part in _LEAST}
    for part, found in there.items():
        if not found:
            raise DataError(f"{root}: no .npz files in {root / part} (expected 0.npz, ...)")
    clients = len(there["train"])
    expected = {f"{k}.npz" for k in range(clients)}
    for part, found in there.items():
        if odd := sorted(found ^ expected):
            fault = "is missing" if odd[0] in expected else "is not expected"
            raise DataError(
                f"{root / part / odd[0]}: {fault}; train and test must each hold one file a "
                f"client, 0.npz to {clients - 1}.npz"
            )
    files = [root / part / f"{k}.npz" for k in range(clients) for part in _LEAST]
    splits: list[Split] = []
    for path in files:
        splits.append(read_npz(path, spec, kind))
        check_max_bytes(sum(split.x.nbytes + split.y.nbytes for split in splits), spec, root)
    path = root / "common.npz"
    common = read_npz(path, spec, kind) if path.exists() else None
    every = [*zip(files, splits, strict=True), *([(path, common)] if common is not None else [])]
    for path, split in every:
        check_same_form(splits[0], split, files[0].name, path)
        least = _LEAST.get(path.parent.name, 1)
        if len(split) < least:
            raise DataError(f"{path}: has {len(split)} samples, at least {least} are needed")
    train = Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))
    parts = tuple((len(a), len(b)) for a, b in zip(splits[::2], splits[1::2], strict=True))
    classes = number_names(split for _, split in every)
    stated = "" if kind is IMAGE else kind.name
    return Dataset(spec.dataset, train, common, classes, parts, kind=stated)


_LEAST = {"train": 2, "test": 1}
"""Parts of a client, and the number of samples that each needs."""


def kind_of_clients(folder: str) -> Kind:
    """Return the kind of DIR/train/0.npz, rows x [N, F] or images; only its header is read."""
    path = expanded(folder) / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # headers of later versions may be large
                return IMAGE
            shape, _, _ = np.lib.format.read_array_header_1_0(x)
    except Exception:  # reading the file reports what is wrong with it
        return IMAGE
    return TABLE if len(shape) == 2 else IMAGE


def read_signals(folder: str, spec: DataSpec) -> Dataset:
    """Read DIR/train.npz and, if there is one, DIR/test.npz; or a file a client, as `npz:DIR` has.

    `Dataset.groups` is set if `data.by` names an array of train.npz: a whole number or a word for
    each sample.
    """
    root = expanded(folder)
    path = root / "train.npz"
    if not path.exists():
        if spec.by:
            raise SettingsError(
                f"data.by = {spec.by!r}: takes {path}, and {root} holds a file for each client"
            )
        return read_clients(folder, spec, SIGNAL)
    train, test = read_pair(root, spec, SIGNAL)
    groups = None
    if spec.by:
        owners = read_arrays(path, (spec.by,), spec, hint=" (data.by)")[spec.by]
        if owners.shape != (len(train),) or owners.dtype.kind not in "iuU":
            raise DataError(
                f"{path}: {spec.by} must be whole numbers or words [{len(train)}], is "
                f"{owners.dtype} {list(owners.shape)}"
            )
        groups = encode_labels(owners)
    classes = number_names((train, test))
    return Dataset(spec.dataset, train, test, classes, kind=SIGNAL.name, groups=groups)


def number_names(splits: Iterable[Split | None]) -> tuple[str, ...]:
    """Return the names of classes that have none: the numbers from 0 to the highest label."""
    highest = max(int(split.y.max()) for split in splits if split is not None and len(split))
    return tuple(map(str, range(highest + 1)))


# --- trees, tables, and texts ---------------------------------------------------------------------


def read_tree(place: str, spec: DataSpec, files: Files) -> Dataset:
    """Read a tree as a dataset. Raises DataError for any fault of its directories and files."""
    tree = find_tree(expanded(place), files, level=spec.class_level)
    apart = len(tree.unlabeled or ())
    tree.unused.add(f"{files.noun} without a class", "see data.labeled-alpha", apart)
    return tree.read(spec, most=spec.max_samples)


def _located(place: str, endings: Sequence[str]) -> tuple[Path, Path | None, Path | None]:
    """Return a path, and its files of training and test rows, if there are such."""
    path = expanded(place)
    if not path.exists():
        raise DataError(f"{path}: no such file or folder")
    if path.is_file():
        return path, path, None
    return path, find_rows(path, "train", endings), find_rows(path, "test", endings)


def read_own_table(place: str, spec: DataSpec) -> Dataset:
    """Read PATH. `Dataset.groups` is set if a column or a file says whose a row is.

    Raises DataError for any fault of the files, and if one of several has other columns.
    """
    path, first, test = _located(place, ENDINGS)
    if first is not None:
        train = read_table(first, spec)
        groups, by = None, spec.by.strip()
        if by:
            groups = encode_labels(owners := train.column(by))
            if absent := [row for row, owner in enumerate(owners) if is_missing(owner)]:
                raise train.fault(by, absent[0], "is empty, but data.by names it")
    else:
        test = None
        if spec.by:
            raise SettingsError(f"data.by = {spec.by!r}: {path} holds a file for each client")
        files = sorted(file for file in path.iterdir() if file.name.lower().endswith(ENDINGS))
        if not files:
            raise DataError(f"{path}: holds no table; a name ends in one of {', '.join(ENDINGS)}")
        sites: list[Cells] = []
        for file in files:
            sites.append(read_table(file, spec, sites[-1].taken if sites else 0))
        groups = np.repeat(np.arange(len(sites)), [len(site) for site in sites])
        train = Cells.joined(path, sites, spec)
    notes: list[str] = []
    schema = tables.infer_schema(train, spec, notes.append)
    return Dataset(
        spec.dataset,
        tables.labeled(schema, train),
        tables.labeled(schema, read_table(test, spec)) if test else None,
        schema.classes,
        kind=TABLE.name,
        columns=schema.widths,
        groups=groups,
        schema=schema,
        notes=tuple(notes),
    )


def read_own_texts(place: str, spec: DataSpec) -> Dataset:
    """Read PATH. `Dataset.groups` is set if `data.by` names a column. Raises DataError."""
    _, train, test = _located(place, TEXT_ENDINGS)
    if train is not None:
        return read_texts(train, test, spec)
    if spec.by:
        raise SettingsError(
            f"data.by = {spec.by!r}: a tree of .txt files has no columns; it takes a text:FILE"
        )
    return read_tree(place, spec, TEXTS)


# --- Python ---------------------------------------------------------------------------------------

_ALLOWED = (
    "must be a fedhet.Dataset, a pair (x, y), or a mapping of train and test to such pairs and of "
    "classes to names"
)


@lru_cache(maxsize=4)
def read_user_dataset(path: str) -> Dataset:
    """Import and call the function named by `path`, module:function. Raises DataError; cached."""
    name = f"{PYTHON}:{path}"
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise DataError(f"data.dataset = {name!r}: is not of the form {PYTHON}:module:function")
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a module of the user's may raise anything
        raise DataError(f"data.dataset = {name!r}: cannot import '{module}': {error!r}") from error
    function = getattr(found, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(found))
        raise DataError(f"data.dataset = {name!r}: {module} has no function '{attribute}'{hint}")
    try:
        made = function()
    except Exception as error:
        raise DataError(f"data.dataset = {name!r}: the function failed: {error!r}") from error
    match made:
        case Dataset():
            return made
        case Mapping():
            parts: Mapping[str, Any] = made
        case (x, y):
            parts = {"train": (x, y)}
        case _:
            hint = "; write it by to_csv, and give 'table:FILE'" if hasattr(made, "to_csv") else ""
            raise DataError(f"{name}: {_ALLOWED}; it is a {type(made).__name__}{hint}")
    if "train" not in parts or not parts.keys() <= {"train", "test", "classes"}:
        raise DataError(f"{name}: {_ALLOWED}; it has {', '.join(map(str, parts)) or 'nothing'}")
    splits = {}
    for part in [each for each in ("train", "test") if parts.get(each) is not None]:
        where = f"{name}: {part}"
        try:
            x, y = map(np.asarray, parts[part])
        except Exception as error:
            raise DataError(f"{where}: must be a pair (x, y) of arrays ({error})") from error
        split = split_of(x, y, where)
        if not len(split):
            raise DataError(f"{where}: has no samples")
        splits[part] = Split(split.x.clone(), split.y.clone())  # the user's own may change
    train, test = splits["train"], splits.get("test")
    if test is not None and (test.x.shape[1:], test.x.dtype) != (train.x.shape[1:], train.x.dtype):
        raise DataError(f"{name}: the samples of test have another shape or type than train's")
    numbers = number_names(splits.values())
    classes = tuple(map(str, parts.get("classes") or numbers))
    if len(classes) < len(numbers) or len(set(classes)) < len(classes):
        fault = f"has {len(numbers)} classes in y, but {len(classes)} names: {classes}"
        raise DataError(f"{name}: {fault}")
    return Dataset(name, train, test, classes)


def _kind_of_function(path: str) -> Kind:
    with contextlib.suppress(DataError):  # reading the dataset reports it
        return KINDS[read_user_dataset(path).kind]
    return IMAGE


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
        infer_kind=kind_of_clients,
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
        read_own_texts,
        "PATH",
        TEXT,
        owners="a text:FILE",
    ),
    Source(
        PYTHON,
        "a function of yours that returns arrays",
        lambda path, spec: read_user_dataset(path),
        "module:function",
        infer_kind=_kind_of_function,
        files=no_path,
        imports=True,
    ),
)
