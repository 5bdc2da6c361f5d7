"""Sources for user data: images, arrays, signals, tables, texts, and Python functions.

- `imagefolder:PATH`: images in PATH[/train|/test]/CLASS/FILE, or with a label table.
- `npz:DIR`: one .npz file for each client, with images or table rows.
- `signal:DIR`: signals [N, channels, time] in .npz files, with one file for each client or one file
  for all clients.
- `table:PATH`: a table with the label column `data.target`. PATH is a file, a directory with
  train.csv and optionally test.csv, or a directory with one file for each client.
- `text:PATH`: texts. PATH is a file, a directory with train.csv and optionally test.csv, or a
  directory of .txt files in the layout of `imagefolder:PATH`.
- `next-token:PATH`: windows of a text, labeled with the next token. PATH is a .txt file, or a
  directory with train.txt and optionally test.txt.
- `python:module:function`: a function without arguments. It returns a `Dataset`, a pair (x, y) of
  arrays, or a mapping with such pairs for `train` and optionally `test`, and optionally `classes`.

The size of .npz files is checked before decompression, and pickled arrays are rejected.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.arrays import read_header
from fedhet.base.disk import expanded, load_npz
from fedhet.base.errors import DataError, SettingsError, describe_error, nearest, one_line
from fedhet.data.folders import PARTS, Files, is_ignored, read_folder
from fedhet.data.images import IMAGES
from fedhet.data.rows import ENDINGS, TEXT_ENDINGS, Table, find_rows, read_table
from fedhet.data.schemas import SCHEMA, TableSchema, find_schema
from fedhet.data.spec import (
    Dataset,
    DataSpec,
    Source,
    Split,
    check_max_bytes,
    encode_owners,
    no_path,
    reading,
)
from fedhet.data.tables import infer_schema, labeled_split
from fedhet.data.targets import array_table, infer_targets, read_targets
from fedhet.data.texts import TEXTS, read_texts, read_windows
from fedhet.kinds import IMAGE, KINDS, SIGNAL, TABLE, TEXT, Kind, kind_of_arrays
from fedhet.tasks import Classification, Regression, find_task

LOG = logging.getLogger("fedhet")
# Limit labels, because the largest label determines the number of classes, and thus the memory.
MAX_CLASSES = 65_536
_BYTES_PER_VALUE = {"x": 4, "y": 8}  # float32 and int64
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
    """Read arrays from an .npz file unchanged.

    Before the arrays are decompressed, their sizes are checked using their headers and the
    archive's index. Pickled arrays are rejected.

    Args:
        path: The .npz file.
        names: Names of the arrays to read.
        spec: Data settings.
        hint: Text appended to the message if an array is missing.
        source: Text appended to the message if the file is missing.
        scaled: Whether uint8 values will be scaled to float32. If so, the size limit applies to the
            float32 values.

    Raises:
        DataError: If the file is invalid, or if the arrays exceed `data.max-bytes`, either in the
            file or after conversion.
    """
    with reading(path, ".npz file", source, describe_error):
        with zipfile.ZipFile(path) as archive:
            available = [name.removesuffix(".npy") for name in archive.namelist()]
            total = 0
            for name in names:
                if name not in available:
                    got = ", ".join(available) or "none"
                    raise DataError(f"{path}: array {name!r} not found, got {got}{hint}")
                with archive.open(member := f"{name}.npy") as file:
                    if (version := np.lib.format.read_magic(file)) != (1, 0):
                        fault = f"unsupported .npy version, expected (1, 0), got {version}"
                        raise DataError(f"{path}: {member}: {fault}")
                    shape, _, dtype = read_header(file)
                    if dtype.hasobject:
                        rule = "expected plain numeric arrays x and y"
                        raise DataError(f"{path}: pickled objects are unsupported, {rule}")
                    size = math.prod(shape) * dtype.itemsize
                    if file.tell() + size != archive.getinfo(member).file_size:
                        claim = f"invalid header: {dtype} {list(shape)}"
                        fault = f"{claim} does not match the size of the data"
                        raise DataError(f"{path}: {member}: {fault}")
                are_bytes = name == "x" and dtype == np.uint8 and not scaled
                item_bytes = 1 if are_bytes else _BYTES_PER_VALUE.get(name, 8)
                total += max(size, item_bytes * math.prod(shape))
            check_max_bytes(total, spec, path)
        return load_npz(path, names)


def convert_labels(
    y: npt.NDArray[Any], where: Path | str, classes: int = MAX_CLASSES
) -> npt.NDArray[np.int64]:
    """Convert labels [N] to int64. Raises DataError if they are not class indices."""
    if y.ndim != 1 or y.dtype.kind not in "iu":
        hint = ""
        if y.dtype.kind == "f":
            hint = (
                ". Set data.task to regression to predict numbers, or convert classes to integers."
            )
        elif y.dtype.kind in "US":
            hint = ". Convert the labels, e.g. with numpy.unique(y, return_inverse=True)[1]."
        raise DataError(f"{where}: y must be integers [N], got {y.dtype} {list(y.shape)}{hint}")
    labels = y.astype(np.int64)
    if len(labels) and not 0 <= labels.min() <= labels.max() < classes:
        invalid = labels.min() if labels.min() < 0 else labels.max()
        run = f" (the run has {classes} classes)" if classes < MAX_CLASSES else ""
        raise DataError(f"{where}: labels in y must be 0 to {classes - 1}{run}, got {invalid}")
    return labels


def make_split(
    x: npt.NDArray[Any],
    y: npt.NDArray[Any],
    where: Path | str,
    kind: Kind = IMAGE,
    classes: int = MAX_CLASSES,
    schema: TableSchema | None = None,
) -> Split:
    """Convert arrays to labeled samples of a kind. Raises DataError if they are invalid.

    If there is a schema, it defines the targets in `y`. Otherwise, `y` contains class indices.
    """
    samples = kind.checked(x, where)
    if schema is None:
        labels = torch.from_numpy(convert_labels(y, where, classes))
    else:
        table = array_table(y, where, DataSpec(task=schema.task), schema.target)
        labels = read_targets(schema, table)
    if len(samples) != len(labels):
        raise DataError(
            f"{where}: x and y must have the same length, got {len(samples)} and {len(labels)}"
        )
    return Split(torch.from_numpy(samples), labels)


def infer_array_targets(
    root: Path, arrays: Iterable[tuple[Path | str, npt.NDArray[Any]]], spec: DataSpec
) -> TableSchema | None:
    """Infer the schema of the targets in the training arrays `y`, or return None for classes.

    `arrays` yields the source of each array, for messages, and the array. Raises DataError if an
    array is invalid.
    """
    if find_task(spec.task) is Classification:
        return None
    tables = [array_table(y, where, spec) for where, y in arrays]
    return infer_targets(Table.concatenate(root, tables, spec), tables[0].spec)


def _targets_in(paths: Iterable[Path], spec: DataSpec) -> Iterator[tuple[Path, npt.NDArray[Any]]]:
    """Yield each .npz file with its array `y`, which is read only when it is needed."""
    for path in paths:
        yield path, read_arrays(path, ("y",), spec)["y"]


def target_fields(schema: TableSchema | None) -> dict[str, Any]:
    """Return the fields `classes`, `schema`, and `task` of a dataset, or {} if it has no schema."""
    if schema is None:
        return {}
    return {"classes": schema.outputs, "schema": schema, "task": schema.task_object}


def read_npz(
    path: Path,
    spec: DataSpec,
    kind: Kind = IMAGE,
    classes: int = MAX_CLASSES,
    schema: TableSchema | None = None,
) -> Split:
    """Read labeled samples from the arrays x and y of an .npz file.

    The kind IMAGE also accepts table rows. Raises DataError if the file is invalid or exceeds
    `data.max-bytes`.
    """
    arrays = read_arrays(path, ("x", "y"), spec)
    return make_split(arrays["x"], arrays["y"], path, kind, classes, schema)


def read_pair(
    root: Path,
    spec: DataSpec,
    kind: Kind,
    classes: int = MAX_CLASSES,
    schema: TableSchema | None = None,
) -> tuple[Split, Split | None]:
    """Read train.npz and, if it exists, test.npz. Raises DataError if a file is invalid."""
    train, path = read_npz(root / "train.npz", spec, kind, classes, schema), root / "test.npz"
    if not path.exists():
        return train, None
    test = read_npz(path, spec, kind, classes, schema)
    check_same_form(train, test, "train.npz", path)
    return train, test


def check_same_form(first: Split, other: Split, where: str, path: Path | str) -> None:
    """Raise DataError unless two splits have samples of the same shape and type.

    `where` and `path` are the sources of the first and the second split.
    """
    for what, left, right in (
        ("shape", tuple(first.x.shape[1:]), tuple(other.x.shape[1:])),
        ("type", first.x.dtype, other.x.dtype),
    ):
        if left != right:
            raise DataError(f"{path}: samples must have {what} {left}, as in {where}, got {right}")


def check_no_subset(spec: DataSpec) -> None:
    """Raise SettingsError if `data.max-samples` is set for a dataset with one file per client."""
    if spec.max_samples:
        raise SettingsError(
            f"data.max-samples must be 0 with data.dataset = {spec.dataset!r}, which has one file "
            f"per client, got {spec.max_samples}"
        )


def read_clients(directory: str, spec: DataSpec, kind: Kind = IMAGE) -> Dataset:
    """Read DIR/train/<k>.npz, DIR/test/<k>.npz, and optionally DIR/common.npz as one dataset.

    The rows of each client are contiguous, with training rows before test rows; `Dataset.parts`
    contains the numbers of training and test rows.
    """
    check_no_subset(spec)
    root = expanded(directory)
    names = {part: {file.name for file in (root / part).glob("*.npz")} for part in _MIN_SAMPLES}
    for part, found in names.items():
        if not found:
            raise DataError(f"{root / part}: no .npz files found, expected 0.npz, 1.npz, ...")
    clients = len(names["train"])
    expected = {f"{k}.npz" for k in range(clients)}
    for part, found in names.items():
        if odd := sorted(found ^ expected):
            fault = "file not found" if odd[0] in expected else "unexpected file"
            raise DataError(
                f"{root / part / odd[0]}: {fault}, expected one file per client in both train and "
                f"test, 0.npz to {clients - 1}.npz"
            )
    files = [root / part / f"{k}.npz" for k in range(clients) for part in _MIN_SAMPLES]
    schema = infer_array_targets(root, _targets_in(files[::2], spec), spec)
    splits: list[Split] = []
    for path in files:
        splits.append(read_npz(path, spec, kind, schema=schema))
        check_max_bytes(sum(split.x.nbytes + split.y.nbytes for split in splits), spec, root)
    path = root / "common.npz"
    common = read_npz(path, spec, kind, schema=schema) if path.exists() else None
    pairs = [*zip(files, splits, strict=True), *([(path, common)] if common is not None else [])]
    for path, split in pairs:
        check_same_form(splits[0], split, files[0].name, path)
        min_samples = _MIN_SAMPLES.get(path.parent.name, 1)
        if len(split) < min_samples:
            raise DataError(f"{path}: expected at least {min_samples} samples, got {len(split)}")
    train = Split(torch.cat([s.x for s in splits]), torch.cat([s.y for s in splits]))
    parts = tuple((len(a), len(b)) for a, b in zip(splits[::2], splits[1::2], strict=True))
    stated = "" if kind is IMAGE else kind.name
    described = target_fields(schema)
    if schema is None:
        described = {"classes": numbered_classes(split for _, split in pairs)}
    return Dataset(spec.dataset, train, common, parts=parts, kind=stated, **described)


_MIN_SAMPLES = {"train": 2, "test": 1}
"""Parts of a client's data, and the minimum number of samples in each part."""


def kind_of_clients(directory: str) -> Kind:
    """Return the sample kind of DIR/train/0.npz: TABLE if x has two dimensions, IMAGE otherwise.

    Only the array header is read.
    """
    path = expanded(directory) / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # Headers of later versions may be large.
                return IMAGE
            shape, _, _ = read_header(x)
    except Exception:  # The error is reported when the file is read.
        return IMAGE
    return TABLE if len(shape) == 2 else IMAGE


def read_signals(directory: str, spec: DataSpec) -> Dataset:
    """Read DIR/train.npz and optionally DIR/test.npz, or one file per client as in `npz:DIR`.

    `data.by` may name an array in train.npz with an integer or a word for each sample.
    `Dataset.groups` is then read from this array.
    """
    root = expanded(directory)
    path = root / "train.npz"
    if not path.exists():
        if spec.by:
            raise SettingsError(
                f"data.by must be empty if {root} has one file per client and no {path.name}, got "
                f"{spec.by!r}"
            )
        return read_clients(directory, spec, SIGNAL)
    schema = infer_array_targets(root, _targets_in([path], spec), spec)
    train, test = read_pair(root, spec, SIGNAL, schema=schema)
    owned = {}
    if spec.by:
        owners = read_arrays(path, (spec.by,), spec, hint=" (data.by)")[spec.by]
        if owners.shape != (len(train),) or owners.dtype.kind not in "iuU":
            raise DataError(
                f"{path}: {spec.by} must be integers or words of shape [{len(train)}], got "
                f"{owners.dtype} {list(owners.shape)}"
            )
        owned = encode_owners(owners)
    described = target_fields(schema)
    if schema is None:
        described = {"classes": numbered_classes((train, test))}
    return Dataset(spec.dataset, train, test, kind=SIGNAL.name, **owned, **described)


def numbered_classes(splits: Iterable[Split | None]) -> tuple[str, ...]:
    """Return the class names "0", "1", ..., up to the highest label."""
    highest = max(int(split.y.max()) for split in splits if split is not None and len(split))
    return tuple(map(str, range(highest + 1)))


# --- trees, tables, and texts ---------------------------------------------------------------------


def read_files(place: str, spec: DataSpec, files: Files) -> Dataset:
    """Read a directory of images or texts as a dataset. Raises DataError if it is invalid."""
    dataset, unlabeled = read_folder(expanded(place), files, spec)
    if unlabeled:
        LOG.warning(
            "%s: %d %s without a class are used only at sites. In a simulation, data.labeled-alpha "
            "hides the labels of other samples.",
            place, len(unlabeled), files.noun,
        )  # fmt: skip
    return dataset


def _located(place: str, endings: Sequence[str]) -> tuple[Path, Path | None, Path | None]:
    """Return the path of a location, its file of training rows, and its file of test rows.

    A file is None if it is missing. Raises DataError if the path does not exist.
    """
    path = expanded(place)
    if not path.exists():
        raise DataError(f"{path}: file or directory not found")
    if path.is_file():
        return path, path, None
    train, test = find_rows(path, "train", endings), find_rows(path, "test", endings)
    others = [each.name for each in _row_files(path, endings) if each not in (train, test)]
    if train is not None and others:
        LOG.warning(
            "%s: only %s %s read; not used: %s",
            path, f"{train.name} and {test.name}" if test else train.name, "are" if test else "is",
            one_line(", ".join(others)),
        )  # fmt: skip
    return path, train, test


def _row_files(directory: Path, endings: Sequence[str]) -> list[Path]:
    """Return the sorted row files in a directory, except hidden files."""
    return sorted(
        path
        for path in directory.iterdir()
        if path.name.lower().endswith(tuple(endings)) and not is_ignored(path.name)
    )


def read_own_table(place: str, spec: DataSpec) -> Dataset:
    """Read the dataset `table:PATH`.

    `Dataset.groups` is set if `data.by` is set or if there is one file per client. Raises DataError
    if a file is invalid, or if the columns of several files differ.
    """
    path, first, test = _located(place, ENDINGS)
    if declared := find_schema(path):
        if spec.target not in ("", declared.target):
            raise SettingsError(
                f"data.target: expected {declared.target!r}, the target in "
                f"{(path if path.is_dir() else path.parent) / SCHEMA}, got {spec.target!r}"
            )
        spec = spec.replace(target=declared.target)
    if first is not None:
        train = read_table(first, spec)
        owned = train.owners()
    else:
        test = None
        if spec.by:
            raise SettingsError(
                f"data.by must be empty if {path} has one file per client, got {spec.by!r}"
            )
        files = _row_files(path, ENDINGS)
        if not files:
            raise DataError(
                f"{path}: no table found, expected files ending in one of {', '.join(ENDINGS)}"
            )
        for file in files:
            stem, *_ = file.name.split(".")
            if stem.lower() in PARTS:
                raise DataError(
                    f"{file}: the name of a part of the data, but the file with the training rows "
                    f"is missing, expected a name such as {path / 'train.csv'}. If each file has "
                    "the rows of a client, rename this file."
                )
        sites: list[Table] = []
        for file in files:
            sites.append(read_table(file, spec, sites[-1].size if sites else 0))
        owned = {
            "groups": np.repeat(np.arange(len(sites)), [len(site) for site in sites]),
            "group_names": tuple(file.name for file in files),
        }
        train = Table.concatenate(path, sites, spec)
    notes: list[str] = []
    schema = infer_schema(train, spec, notes.append, declared)
    return Dataset(
        spec.dataset,
        labeled_split(schema, train),
        labeled_split(schema, read_table(test, spec)) if test else None,
        schema.outputs,
        kind=TABLE.name,
        columns=schema.widths,
        **owned,
        schema=schema,
        notes=tuple(notes),
        task=schema.task_object,
    )


def read_own_texts(place: str, spec: DataSpec) -> Dataset:
    """Read the dataset `text:PATH`.

    `Dataset.groups` is set if `data.by` is set. Raises DataError if a file is invalid.
    """
    _, train, test = _located(place, TEXT_ENDINGS)
    if train is not None:
        return read_texts(train, test, spec)
    return read_files(place, spec, TEXTS)


def read_next_tokens(place: str, spec: DataSpec) -> Dataset:
    """Read the dataset `next-token:PATH`. Raises DataError if the directory has no train.txt."""
    path = expanded(place)
    if not path.is_dir():
        return read_windows(path, None, spec)
    test = path / "test.txt"
    return read_windows(path / "train.txt", test if test.exists() else None, spec)


# --- Python ---------------------------------------------------------------------------------------

_EXPECTED = (
    "the function must return a fedhet.Dataset, a pair (x, y), or a mapping with train, test, and "
    "classes"
)


@lru_cache(maxsize=4)
def _call(path: str) -> Dataset | Mapping[str, Any]:
    """Import and call the function `path` ("module:function"), and cache its result.

    Raises DataError if the function cannot be called or returns an invalid result.
    """
    name = f"{PYTHON}:{path}"
    module, _, attribute = path.partition(":")
    if not module or not attribute:
        raise DataError(f"data.dataset: expected {PYTHON}:module:function, got {name!r}")
    try:
        imported = importlib.import_module(module)
    except Exception as error:  # A user's module may raise any exception.
        raise DataError(f"data.dataset = {name!r}: cannot import '{module}': {error!r}") from error
    function = getattr(imported, attribute, None)
    if not callable(function):
        hint = nearest(attribute, vars(imported))
        raise DataError(
            f"data.dataset = {name!r}: function '{attribute}' not found in {module}{hint}"
        )
    try:
        result = function()
    except Exception as error:
        raise DataError(f"data.dataset = {name!r}: the function failed: {error!r}") from error
    match result:
        case Dataset():
            y, count = result.train.y, len(result.classes)
            if isinstance(result.task, Regression) and not (
                y.ndim == 2 and y.shape[1] == count and y.dtype == torch.float32
            ):
                raise DataError(
                    f"{name}: train.y must be float32 [N, {count}], one column for each name in "
                    f"classes, got {y.dtype} {list(y.shape)}"
                )
            return result
        case Mapping():
            parts: Mapping[str, Any] = result
        case (x, y):
            parts = {"train": (x, y)}
        case _:
            got = type(result).__name__
            hint = ""
            if hasattr(result, "to_csv"):
                hint = ". Save it with to_csv, and use data.dataset = 'table:FILE'."
            raise DataError(f"{name}: {_EXPECTED}, got {got}{hint}")
    if "train" not in parts or not parts.keys() <= {"train", "test", "classes"}:
        keys = ", ".join(map(str, parts)) or "an empty mapping"
        raise DataError(f"{name}: {_EXPECTED}, got {keys}")
    pairs = dict(parts)
    for part in [each for each in ("train", "test") if parts.get(each) is not None]:
        try:
            pairs[part] = tuple(map(np.asarray, parts[part]))
            _, _ = pairs[part]
        except Exception as error:
            fault = f"expected a pair (x, y) of arrays ({error})"
            raise DataError(f"{name}: {part}: {fault}") from error
    return pairs


@lru_cache(maxsize=4)
def read_user_dataset(path: str, task: str, target: str) -> Dataset:
    """Read the result of the function `path` as a dataset, and cache the dataset.

    `task` and `target` are settings in `[data]`. Raises DataError if the function cannot be called
    or returns an invalid result.
    """
    parts, name = _call(path), f"{PYTHON}:{path}"
    if isinstance(parts, Dataset):
        return parts
    names = tuple(map(str, parts.get("classes") or ()))
    spec = DataSpec(task=task, target=target or ",".join(names))
    schema = infer_array_targets(Path(name), [(f"{name}: train", parts["train"][1])], spec)
    splits = {}
    for part in [each for each in ("train", "test") if parts.get(each) is not None]:
        where = f"{name}: {part}"
        x, y = parts[part]
        split = make_split(x, y, where, schema=schema)
        if not len(split):
            raise DataError(f"{where}: no samples found")
        # Copy the arrays, because the user may modify them.
        splits[part] = Split(split.x.clone(), split.y.clone())
    train, test = splits["train"], splits.get("test")
    if test is not None:
        check_same_form(train, test, "train", f"{name}: test")
    if schema is not None:
        return Dataset(name, train, test, **target_fields(schema))
    numbers = numbered_classes(splits.values())
    classes = names or numbers
    if len(classes) < len(numbers) or len(set(classes)) < len(classes):
        raise DataError(
            f"{name}: expected {len(numbers)} different class names, one for each label in y, got "
            f"{classes}"
        )
    return Dataset(name, train, test, classes)


def _kind_of_function(path: str) -> Kind:
    with contextlib.suppress(DataError):  # The error is reported when the dataset is read.
        result = _call(path)
        if isinstance(result, Dataset):
            return KINDS[result.kind]
        return kind_of_arrays(tuple(result["train"][0].shape[1:]))
    return IMAGE


SOURCES = (
    Source(
        "imagefolder",
        "images: PATH[/train|/test]/CLASS/FILE, or with a label table (labels.csv)",
        lambda place, spec: read_files(place, spec, IMAGES),
        "PATH",
        is_mapped=True,
        owners="imagefolder:PATH",
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
        "a table: CSV, TSV, JSON lines, or Parquet, or a directory with one file for each client",
        read_own_table,
        "PATH",
        TABLE,
        owners="table:FILE",
    ),
    Source(
        "text",
        "texts: CSV, TSV, JSON lines, or .txt files in the layout of imagefolder:PATH",
        read_own_texts,
        "PATH",
        TEXT,
        owners="text:PATH",
    ),
    Source(
        "next-token", "windows of a text, to predict the next token", read_next_tokens, "PATH", TEXT
    ),
    Source(
        PYTHON,
        "a Python function that returns arrays",
        lambda path, spec: read_user_dataset(path, spec.task, spec.target),
        "module:function",
        infer_kind=_kind_of_function,
        files=no_path,
        imports=True,
    ),
)
