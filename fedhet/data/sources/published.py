"""Published datasets by name: those that libraries bring, MedMNIST's files, and UCI's Adult.

scikit-learn has 1,797 handwritten digits and 569 rows on breast cancer; torchvision's MNIST,
Fashion-MNIST and CIFAR are files in `data.data-dir`. `medmnist:FILE` is the .npz file of a 2D
dataset of MedMNIST: `train_images` and `val_images` are the training set, `test_images` is the
common test set. `adult:DIR` is a table, which scikit-learn's encoders encode, fitted on the whole
training set: categorical columns are one-hot, numeric columns centered and scaled;
`Dataset.columns` says which features are of a column.
"""

from __future__ import annotations

import csv
import os
import pickle
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError
from fedhet.base.seeding import numpy_rng
from fedhet.data.cells import bytes_of, open_bounded
from fedhet.data.sources.files import checked_labels, number_names, read_arrays
from fedhet.data.spec import (
    FIXED_SEED,
    Dataset,
    DataSpec,
    Index,
    Source,
    Split,
    check_max_bytes,
    encode_labels,
    no_path,
    reading,
    stratified,
)
from fedhet.data.values import MAX_NUMBER
from fedhet.kinds import IMAGE, TABLE
from fedhet.settings.run import DataSettings

_TEST_FRACTION = 0.2


def held_out(labels: Index, share: float, use: str) -> tuple[Index, Index]:
    """Return the training rows and the rows of a common test set, whatever the run's seed."""
    test = stratified(labels, round(share * len(labels)), numpy_rng(FIXED_SEED, use, "common"))
    return np.setdiff1d(np.arange(len(labels)), test), test


def read_digits(place: str, spec: DataSpec) -> Dataset:
    """Return the digits, [N, 1, 8, 8] float32 in [-1, 1]; a fixed fifth is the test set.

    Raises DataError.
    """
    found = find_spec("sklearn")  # its import takes a second
    file = Path((found and found.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if found is None or not file.is_file():
        raise DataError("the digits come with scikit-learn, which is not installed as a whole")
    rows = np.loadtxt(file, delimiter=",")  # 64 pixels from 0 to 16, and the label
    x = torch.from_numpy(rows[:, :-1]).to(torch.float32).div_(8.0).sub_(1.0).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1]).to(torch.int64)
    train, test = held_out(y.numpy(), _TEST_FRACTION, "digits")
    every, classes = Split(x, y), tuple(map(str, range(10)))
    return Dataset(
        "digits", every.take(train), every.take(test), classes, kind=IMAGE.name, scaled_images=True
    )


def read_breast_cancer(place: str, spec: DataSpec) -> Dataset:
    """Return the rows of 30 numbers, centered and scaled; a fixed fifth is the test set."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    bunch = load_breast_cancer()
    labels = np.asarray(bunch.target, np.int64)
    train, test = held_out(labels, _TEST_FRACTION, "breast-cancer")
    scaler = StandardScaler().fit(bunch.data[train])
    x = torch.from_numpy(scaler.transform(bunch.data).astype(np.float32))
    every, classes = Split(x, torch.from_numpy(labels)), tuple(map(str, bunch.target_names))
    widths = (1,) * x.shape[1]
    return Dataset(
        spec.dataset, every.take(train), every.take(test), classes, kind=TABLE.name, columns=widths
    )


_TORCHVISION = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
"""torchvision's class of each dataset, and where it keeps the files."""


def read_torchvision(place: str, spec: DataSpec) -> Dataset:
    """Read the files, or download them if allowed: [N, C, H, W] uint8. Raises DataError."""
    import torchvision.datasets

    root = os.path.abspath(expanded(spec.data_dir))
    source = getattr(torchvision.datasets, _TORCHVISION[spec.dataset][0])
    unreadable = (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError)
    try:
        found = [source(root, train=part, download=spec.download) for part in (True, False)]
    except unreadable as error:
        fault = f"cannot be downloaded into {root}: {' '.join(str(error).split())}"
        if not spec.download:
            fault = (
                f"not found or incomplete in data.data-dir = {root}; put torchvision's files "
                "there, or download them with --set download=true, or use --set dataset=digits, "
                "which needs no files"
            )
        raise DataError(f"data.dataset = {spec.dataset!r}: {fault}") from error
    splits = []
    for each in found:
        x, y = torch.as_tensor(each.data), torch.as_tensor(each.targets, dtype=torch.int64)
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
        splits.append(Split(x, y))
    train, test = splits
    return Dataset(spec.dataset, train, test, tuple(map(str, found[0].classes)), kind=IMAGE.name)


def read_medmnist(file: str, spec: DataSpec) -> Dataset:
    """Read FILE: images [N, H, W] or [N, H, W, 3], uint8, and labels [N, 1] or [N].

    Raises DataError for any fault of the file, and if it takes more than `data.max-bytes`.
    """
    path, parts = expanded(file), ("train", "val", "test")
    names = [f"{part}_{what}" for part in parts for what in ("images", "labels")]
    hint = f"; a file of MedMNIST has {', '.join(names)}"
    source = "; MedMNIST's are at https://medmnist.com, one for each dataset"
    arrays = read_arrays(path, names, spec, hint=hint, source=source)
    splits: list[Split] = []
    for part in parts:
        x, y = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
            volumes = "; volumes are not supported" if x.ndim == 4 else ""
            raise DataError(
                f"{path}: {part}_images must be uint8 [N, H, W] or [N, H, W, 3], are {x.dtype} "
                f"{list(x.shape)}{volumes}"
            )
        if y.ndim == 2 and y.shape[1] != 1:
            fault = f"{list(y.shape)}: several labels a sample are not supported"
            raise DataError(f"{path}: {part}_labels are {fault}")
        labels = checked_labels(y.reshape(-1), f"{path}: {part}_labels")
        if len(labels) != len(x) or not len(x):
            raise DataError(f"{path}: {part} has {len(x)} images and {len(labels)} labels")
        images = np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))
        splits.append(Split(torch.from_numpy(images), torch.from_numpy(labels)))
        if splits[-1].x.shape[1:] != splits[0].x.shape[1:]:
            raise DataError(f"{path}: {part}_images have another shape than train_images")
    train, val, test = splits
    whole = Split(torch.cat([train.x, val.x]), torch.cat([train.y, val.y]))
    return Dataset(spec.dataset, whole, test, number_names(splits), kind=IMAGE.name)


_OPENML_TEST_FRACTION = 1 / 3
_OPENML_ADULT = 1590
_ADULT_NUMBERS = [0, 2, 4, 10, 11, 12]  # of the 14 columns in adult.names
_ADULT_WORDS = [1, 3, 5, 6, 7, 8, 9, 13]
_ADULT_COLUMNS = 15  # the last is the class
_CHARACTER = 4  # bytes of one in numpy's arrays of text
_MAX_CHARACTERS = 200  # in a field: numpy gives every field the room of the longest

Rows = npt.NDArray[np.str_]


def read_adult(folder: str, spec: DataSpec) -> Dataset:
    """Read UCI's Adult: DIR/adult.data and adult.test, plain or .gz, as published.

    If they are missing and `download` is set, OpenML's copy is used, which scikit-learn keeps in
    DIR; a fixed third of it is the common test set. Features are float32: numeric columns first,
    then one feature per category.
    """
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    root, name = expanded(folder), spec.dataset
    files = [
        next((path for path in (root / each, root / f"{each}.gz") if path.is_file()), None)
        for each in ("adult.data", "adult.test")
    ]
    if files[0] is not None and files[1] is not None:
        train, test = (_read_rows(path, spec) for path in files if path is not None)
    elif spec.download:
        from sklearn.datasets import fetch_openml

        try:
            frame: Any = fetch_openml(
                data_id=_OPENML_ADULT, data_home=str(root), as_frame=True, parser="auto"
            ).frame
        except Exception as error:  # urllib's, openml's own, a broken archive
            raise DataError(f"Adult cannot be downloaded from OpenML: {error}") from error
        if frame.shape[1] != _ADULT_COLUMNS:
            raise DataError(f"OpenML's Adult has {frame.shape[1]} columns, 15 are expected")
        rows = np.array(frame.astype(object).where(frame.notna(), "?").astype(str), dtype=np.str_)
        parts = held_out(encode_labels(rows[:, -1]), _OPENML_TEST_FRACTION, "adult")
        train, test = (rows[part] for part in parts)
    else:
        raise DataError(
            f"data.dataset = {name!r}: adult.data and adult.test (or .gz) are not in "
            f"{root.resolve()}; put UCI's files there, or allow --set download=true"
        )
    scaler = StandardScaler().fit(_floats(name, train))
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32)
    encoder.fit(train[:, _ADULT_WORDS])
    classes = tuple(map(str, np.unique(train[:, -1])))
    if odd := sorted(set(map(str, test[:, -1])) - set(classes)):
        raise DataError(f"{name}: the test set has the class {odd[0]!r}, training has {classes}")

    def encoded(rows: Rows) -> Split:
        values = scaler.transform(_floats(name, rows)).astype(np.float32)
        x = np.concatenate([values, encoder.transform(rows[:, _ADULT_WORDS])], axis=1)
        return Split(torch.from_numpy(x), torch.from_numpy(np.searchsorted(classes, rows[:, -1])))

    widths = (*(1 for _ in _ADULT_NUMBERS), *(len(found) for found in encoder.categories_))
    return Dataset(name, encoded(train), encoded(test), classes, kind=TABLE.name, columns=widths)


def _read_rows(path: Path, spec: DataSpec) -> Rows:
    """Return the rows of one file as text [N, 15]; '?' is treated as a category."""
    rows, taken, longest = [], 0, 1
    with reading(path, "table"), open_bounded(path, spec) as text:
        lines = csv.reader(text, skipinitialspace=True)
        for row in lines:
            if len(row) <= 1:  # adult.test starts with such a line; both files end with one
                continue
            where, most = f"{path}: line {lines.line_num}", max(map(len, row))
            if len(row) != _ADULT_COLUMNS:
                raise DataError(f"{where} has {len(row)} columns, Adult has 15")
            if most > _MAX_CHARACTERS:
                raise DataError(
                    f"{where} has a field of {most} characters, at most {_MAX_CHARACTERS} are "
                    "allowed"
                )
            rows.append(row)
            longest = max(longest, most)
            taken += bytes_of(row) + _CHARACTER * longest * len(row)
            check_max_bytes(taken, spec, path)
    if not rows:
        raise DataError(f"{path}: holds no rows")
    table: Rows = np.array(rows, dtype=np.str_)
    table[:, -1] = np.char.rstrip(table[:, -1], ".")
    return table


def _floats(name: str, rows: Rows) -> npt.NDArray[np.float64]:
    try:
        numbers = rows[:, _ADULT_NUMBERS].astype(np.float64)
    except ValueError as error:
        raise DataError(f"{name}: a column of numbers holds a word ({error})") from error
    odd = numbers[~(np.abs(numbers) <= MAX_NUMBER)]
    if odd.size:
        raise DataError(
            f"{name}: a column of numbers holds {odd[0]}, they must be finite and at most "
            f"{MAX_NUMBER:g} either way"
        )
    return numbers


def _in_data_dir(kept: str) -> Callable[[str, DataSettings], Path]:
    return lambda path, table: expanded(table.data_dir) / kept


SOURCES = (
    Source("digits", "scikit-learn's digits, included", read_digits, files=no_path),
    Source(
        "breast-cancer",
        "scikit-learn's rows on breast cancer, included",
        read_breast_cancer,
        kind=TABLE,
        files=no_path,
    ),
    *(
        Source(
            name,
            "torchvision's images, in data.data-dir",
            read_torchvision,
            files=_in_data_dir(kept),
        )
        for name, (_, kept) in _TORCHVISION.items()
    ),
    Source("medmnist", "a 2D dataset of MedMNIST, its .npz file", read_medmnist, "FILE"),
    Source("adult", "UCI's census income: adult.data and adult.test", read_adult, "DIR", TABLE),
)
