"""Sources of samples in arrays.

- `npz:DIR`: images or table rows in .npz files, with one file for each client or for all clients.
- `signal:DIR`: signals [N, channels, time] in such files.

The size of .npz files is checked before decompression, and pickled arrays are rejected.
"""

from __future__ import annotations

import logging
import math
import zipfile
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.arrays import read_header
from fedhet.base.disk import expanded, load_npz
from fedhet.base.errors import DataError, SettingsError, describe_error
from fedhet.data.dataset import Dataset, Format, Source, Split
from fedhet.data.folders import TEST, TRAIN
from fedhet.data.rows import Table
from fedhet.data.schemas import TableSchema, declared_targets
from fedhet.data.spec import DataSpec, Expected, check_max_bytes, reading
from fedhet.data.targets import array_table, infer_targets, read_targets
from fedhet.data.words import encode_owners
from fedhet.kinds import IMAGE, KINDS, SIGNAL, TABLE, Kind, kind_of_arrays
from fedhet.tasks import Classification, find_task

LOG = logging.getLogger("fedhet")
# Limit labels, because the largest label determines the number of classes, and thus the memory.
MAX_CLASSES = 65_536
BYTES_PER_VALUE = {"x": 4, "y": 8}  # float32 and int64
Arrays = dict[str, npt.NDArray[Any]]
_MIN_TRAIN = 2
"""Minimum number of training samples of a client."""


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
                    if got == "data":
                        hint = ". Use pfllib:DIR for the files of PFLlib and HtFLlib."
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
                item_bytes = 1 if are_bytes else BYTES_PER_VALUE.get(name, 8)
                total += max(size, item_bytes * math.prod(shape))
            check_max_bytes(total, spec, path)
        return load_npz(path, names)


def convert_labels(
    y: npt.NDArray[Any], where: Path | str, classes: int = MAX_CLASSES
) -> npt.NDArray[np.int64]:
    """Convert labels [N] to int64. Raises DataError if they are not class indices."""
    if y.dtype.kind == "f" and (missing := np.flatnonzero(np.isnan(y))).size:
        fault = f"the label of sample {missing[0]} is missing (NaN). Remove the sample."
        raise DataError(f"{where}: {fault}")
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
        row = int((labels == invalid).argmax())
        hint = ". Remove samples without a label." if invalid < 0 else ""
        rule = f"labels in y must be 0 to {classes - 1}{run}"
        raise DataError(f"{where}: {rule}, got {invalid} in sample {row}{hint}")
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

    If there is a schema, it defines the targets in `y`. Otherwise, `y` contains class indices. The
    kind IMAGE also accepts table rows.
    """
    samples = kind.checked(x, where)
    if schema is None:
        labels = torch.from_numpy(convert_labels(y, where, classes))
    else:
        table = array_table(y, where, DataSpec(task=schema.task, target=schema.target))
        labels = read_targets(schema, table)
    if len(samples) != len(labels):
        raise DataError(
            f"{where}: x and y must have the same length, got {len(samples)} and {len(labels)}"
        )
    return Split(torch.from_numpy(samples), labels)


def infer_array_targets(
    root: Path,
    arrays: Iterable[tuple[Path | str, npt.NDArray[Any]]],
    spec: DataSpec,
    declared: TableSchema | None = None,
) -> TableSchema | None:
    """Infer the schema of the targets in the training arrays `y`, or return None for classes.

    `arrays` yields the source of each array, for messages, and the array. Raises DataError if an
    array is invalid.
    """
    if find_task(spec.task) is Classification:
        return None
    tables = [array_table(y, where, spec) for where, y in arrays]
    return infer_targets(Table.concatenate(root, tables, spec), tables[0].spec, declared=declared)


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


def read_npz(
    location: str,
    spec: DataSpec,
    kind: Kind = IMAGE,
    read: Callable[[Path, Sequence[str], DataSpec], Arrays] = read_arrays,
) -> Dataset:
    """Read arrays x and y from .npz files.

    The files are DIR/train.npz and optionally DIR/test.npz, or one file for each client:
    DIR/train/<k>.npz, DIR/test/<k>.npz, and optionally DIR/common.npz. In the second form, the rows
    of each client are contiguous, with training rows before test rows; `Dataset.parts` contains
    their numbers.

    Args:
        location: The directory DIR.
        spec: Data settings. `data.by` may name an array in train.npz with an integer or a word for
            each sample.
        kind: Kind of the samples. IMAGE stands for images or table rows.
        read: Function that reads the named arrays from a file.

    Raises:
        DataError: If a file is missing or invalid, or exceeds `data.max-bytes`.
        SettingsError: If a setting needs another form of the files.
    """
    root = expanded(location)
    kind = KINDS[spec.sample_kind] if kind is IMAGE and spec.sample_kind != "auto" else kind
    files, is_single = _npz_files(root, spec)
    first, expected = files[TRAIN][0], spec.expected or Expected()
    targets = ((path, read(path, ("y",), spec)["y"]) for path in files[TRAIN])
    declared, spec = declared_targets(spec, root)
    schema = infer_array_targets(root, targets, spec, declared)
    splits: dict[Path, Split] = {}
    for part, path in [(part, path) for part, paths in files.items() for path in paths]:
        arrays = read(path, ("x", "y"), spec)
        classes = expected.outputs or MAX_CLASSES
        splits[path] = split = make_split(arrays["x"], arrays["y"], path, kind, classes, schema)
        check_max_bytes(sum(each.x.nbytes + each.y.nbytes for each in splits.values()), spec, root)
        check_same_form(splits[first], split, first.name, path)
        min_samples = _MIN_TRAIN if part == TRAIN and not is_single else 1
        if len(split) < min_samples:
            raise DataError(f"{path}: expected at least {min_samples} samples, got {len(split)}")
    names: tuple[str, ...] = ()
    if schema is None:
        names = expected.classes or tuple(map(str, range(expected.outputs)))
        own = [splits[path] for path in files[TRAIN]]
        tests = ((path, split) for path, split in splits.items() if path not in files[TRAIN])
        names = names or numbered_classes(own, tests, root)
    x = splits[first].x
    form = kind_of_arrays(tuple(x.shape[1:]), kind)
    format = Format.from_samples(x, names, form, schema=schema)
    train, test = ([splits[path] for path in files[part]] for part in (TRAIN, TEST))
    if is_single:
        owned, common = _owners(first, len(train[0]), spec), next(iter(test), None)
        return Dataset(spec.dataset, train[0], common, format, **owned)
    common = splits.get(root / "common.npz")
    return concatenate_clients(spec.dataset, list(zip(train, test, strict=True)), common, format)


def _npz_files(root: Path, spec: DataSpec) -> tuple[dict[str, list[Path]], bool]:
    """Return the files of each part, and whether a single file has all training samples."""
    single, test, common = root / "train.npz", root / "test.npz", root / "common.npz"
    if single.exists():
        return {TRAIN: [single], TEST: [test] if test.exists() else []}, True
    if not (root / TRAIN).is_dir():
        raise DataError(
            f"{single}: file not found, expected this file, or one file for each client, such as "
            f"{root / TRAIN / '0.npz'}"
        )
    check_no_subset(spec)
    if spec.by:
        raise SettingsError(
            f"data.by must be empty if {root} has one file per client and no {single.name}, got "
            f"{spec.by!r}"
        )
    return {**client_files(root), "common": [common] if common.exists() else []}, False


def client_files(root: Path) -> dict[str, list[Path]]:
    """Return the training and test files of the clients, in order."""
    names = {part: {file.name for file in (root / part).glob("*.npz")} for part in (TRAIN, TEST)}
    for part, present in names.items():
        if not present:
            raise DataError(f"{root / part}: no .npz files found, expected 0.npz, 1.npz, ...")
    clients = len(names[TRAIN])
    needed = {f"{k}.npz" for k in range(clients)}
    for part, present in names.items():
        if odd := sorted(present ^ needed):
            fault = "file not found" if odd[0] in needed else "unexpected file"
            raise DataError(
                f"{root / part / odd[0]}: {fault}, expected one file per client in both train and "
                f"test, 0.npz to {clients - 1}.npz"
            )
    return {part: [root / part / f"{k}.npz" for k in range(clients)] for part in (TRAIN, TEST)}


def _owners(path: Path, samples: int, spec: DataSpec) -> dict[str, Any]:
    """Read the owner of each sample from the array `data.by` of a file, if it is set."""
    if not spec.by:
        return {}
    owners = read_arrays(path, (spec.by,), spec, hint=" (data.by)")[spec.by]
    if owners.shape != (samples,) or owners.dtype.kind not in "iuU":
        raise DataError(
            f"{path}: {spec.by} must be integers or words of shape [{samples}], got "
            f"{owners.dtype} {list(owners.shape)}"
        )
    return encode_owners(owners, f"{path}: {spec.by}")


def concatenate_clients(
    name: str,
    clients: Sequence[tuple[Split, Split | None]],
    test: Split | None,
    format: Format,
) -> Dataset:
    """Return a dataset that is already partitioned.

    Args:
        name: Name of the dataset.
        clients: Training and test samples of each client. Without test samples, the run holds out a
            fraction of the training samples.
        test: Common test set.
        format: Format of the samples.
    """
    ordered = [split for pair in clients for split in pair if split is not None]
    train = Split(torch.cat([s.x for s in ordered]), torch.cat([s.y for s in ordered]))
    parts = tuple((len(own), len(other) if other else 0) for own, other in clients)
    return Dataset(name, train, test, format, parts)


def kind_of_arrays_in(directory: str) -> Kind:
    """Return the sample kind of `npz:DIR`: TABLE if x has two dimensions, IMAGE otherwise.

    Only the array header is read.
    """
    root = expanded(directory)
    path = root / "train.npz"
    path = path if path.exists() else root / "train" / "0.npz"
    try:
        with zipfile.ZipFile(path) as file, file.open("x.npy") as x:
            if np.lib.format.read_magic(x) != (1, 0):  # Headers of later versions may be large.
                return IMAGE
            shape, _, _ = read_header(x)
    except Exception:  # The error is reported when the file is read.
        return IMAGE
    return TABLE if len(shape) == 2 else IMAGE


def numbered_classes(
    train: Sequence[Split], tests: Iterable[tuple[object, Split | None]], dataset: object
) -> tuple[str, ...]:
    """Return the class names "0", "1", ..., up to the highest label of the training samples.

    `tests` contains test samples and their sources, for messages. Raises DataError if a test sample
    has a class without a training sample. Classes without samples are logged with the name of
    `dataset`.
    """
    labels = torch.unique(torch.cat([split.y for split in train]))
    for where, split in tests:
        if split is not None and (unknown := ~torch.isin(split.y, labels)).any():
            row = int(unknown.nonzero()[0])
            fault = f"label {int(split.y[row])} has test samples, but no training samples"
            raise DataError(f"{where}: sample {row}: {fault}. Remove or correct these samples.")
    if len(labels) < (count := int(labels.max()) + 1):
        LOG.warning(
            "%s: %d of the classes 0 to %d have no samples. If y does not start at 0 or has gaps, "
            "convert it, e.g. with numpy.unique(y, return_inverse=True)[1].",
            dataset, count - len(labels), count - 1,
        )  # fmt: skip
    return tuple(map(str, range(count)))


SOURCES = (
    Source(
        "npz",
        "images or rows in arrays, one file to partition or one for each client",
        read_npz,
        "DIR",
        infer_kind=kind_of_arrays_in,
        whole_clients=True,
        owners="npz:DIR with train.npz",
    ),
    Source(
        "signal",
        "signals in arrays, in the files of npz:DIR",
        partial(read_npz, kind=SIGNAL),
        "DIR",
        SIGNAL,
        whole_clients=True,
        owners="signal:DIR with train.npz",
    ),
)
