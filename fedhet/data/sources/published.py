"""Published datasets: datasets included in libraries, MedMNIST, and UCI Adult.

- `digits`, `breast-cancer`: scikit-learn's 1,797 digit images, and its 569 breast cancer records.
- `mnist`, `fashion-mnist`, `cifar10`, `cifar100`: torchvision's files in `data.data-dir`.
- `medmnist:FILE`: the .npz file of a 2D dataset from MedMNIST. `train_images` and `val_images` are
  the training set, and `test_images` is the common test set.
- `adult:DIR`: a table, encoded with scikit-learn encoders fitted on the full training set.
  Categorical columns are one-hot encoded, and numeric columns are standardized.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, describe_error
from fedhet.base.seeding import numpy_rng
from fedhet.data.dataset import Dataset, Format, Source, Split, encode_labels, no_path
from fedhet.data.rows import read_frame
from fedhet.data.sources.arrays import (
    check_same_form,
    convert_labels,
    numbered_classes,
    read_arrays,
)
from fedhet.data.spec import FIXED_SEED, DataSpec, Index, stratified
from fedhet.data.words import MAX_NUMBER, find_words
from fedhet.kinds import IMAGE, TABLE
from fedhet.settings.run import DataSettings

_TEST_FRACTION = 0.2


def held_out(labels: Index, fraction: float, use: str) -> tuple[Index, Index]:
    """Return the training rows and the common test rows, independent of the run's seed."""
    test = stratified(labels, round(fraction * len(labels)), numpy_rng(FIXED_SEED, use, "common"))
    return np.setdiff1d(np.arange(len(labels)), test), test


def read_digits(location: str, spec: DataSpec) -> Dataset:
    """Read the digit images [N, 1, 8, 8] float32, with values in [-1, 1].

    The common test set is a fixed fifth of the images. Raises DataError if the file is missing.
    """
    module = find_spec("sklearn")  # Avoid importing scikit-learn, which takes a second.
    file = Path((module and module.origin) or "").parent / "datasets" / "data" / "digits.csv.gz"
    if module is None or not file.is_file():
        raise DataError("data.dataset = 'digits': file digits.csv.gz of scikit-learn not found")
    # Each row has 64 pixels from 0 to 16, and then the label.
    rows = np.loadtxt(file, delimiter=",")
    x = torch.from_numpy(rows[:, :-1]).to(torch.float32).div_(8.0).sub_(1.0).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1]).to(torch.int64)
    train, test = held_out(y.numpy(), _TEST_FRACTION, "digits")
    samples, format = (
        Split(x, y),
        Format.from_samples(x, tuple("0123456789"), IMAGE, scaled=True),
    )
    return Dataset("digits", samples.take(train), samples.take(test), format)


def read_breast_cancer(location: str, spec: DataSpec) -> Dataset:
    """Read the table with 30 standardized features; a fixed fifth of it is the common test set."""
    from sklearn.datasets import load_breast_cancer
    from sklearn.preprocessing import StandardScaler

    bunch = load_breast_cancer()
    labels = np.asarray(bunch.target, np.int64)
    train, test = held_out(labels, _TEST_FRACTION, "breast-cancer")
    scaler = StandardScaler().fit(bunch.data[train])
    x = torch.from_numpy(scaler.transform(bunch.data).astype(np.float32))
    samples = Split(x, torch.from_numpy(labels))
    return Dataset(
        spec.dataset,
        samples.take(train),
        samples.take(test),
        Format.from_samples(x, tuple(map(str, bunch.target_names)), TABLE),
        columns=(1,) * x.shape[1],
    )


_TORCHVISION = {
    "mnist": ("MNIST", "MNIST/raw"),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw"),
    "cifar10": ("CIFAR10", "cifar-10-batches-py"),
    "cifar100": ("CIFAR100", "cifar-100-python"),
}
"""torchvision's class of each dataset, and the directory of its files."""


def read_torchvision(location: str, spec: DataSpec) -> Dataset:
    """Read images [N, C, H, W] uint8, and download them if `data.download` is set.

    Raises DataError if the files are missing or invalid.
    """
    import torchvision.datasets

    root = os.path.abspath(expanded(spec.data_dir))
    source = getattr(torchvision.datasets, _TORCHVISION[spec.dataset][0])
    try:
        parts = [source(root, train=part, download=spec.download) for part in (True, False)]
    except Exception as error:  # torchvision, pickle, and urllib raise many exception types.
        fault = f"cannot be downloaded to {root}: {' '.join(str(error).split())}"
        if not spec.download:
            folder = Path(root, _TORCHVISION[spec.dataset][1])
            fault = (
                f"not found or incomplete in data.data-dir = {root}. Download the files with "
                "--set download=true, copy torchvision's files there, or use --set dataset=digits, "
                "which needs no files."
            )
            if "not found" not in str(error):  # torchvision found the files, but cannot read them.
                fault = f"damaged file in {folder} ({describe_error(error)}). Copy the files again."
            if any(folder.glob("*-ubyte.gz")):
                fault = f"compressed files in {folder}. Unpack them with `gunzip {folder}/*.gz`."
        raise DataError(f"data.dataset = {spec.dataset!r}: {fault}") from error
    splits = []
    for each in parts:
        x, y = torch.as_tensor(each.data), torch.as_tensor(each.targets, dtype=torch.int64)
        x = x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous()
        splits.append(Split(x, y))
    train, test = splits
    format = Format.from_samples(train.x, tuple(map(str, parts[0].classes)), IMAGE)
    return Dataset(spec.dataset, train, test, format)


def read_medmnist(file: str, spec: DataSpec) -> Dataset:
    """Read images [N, H, W] or [N, H, W, 3], uint8, and labels [N, 1] or [N] from a MedMNIST file.

    Raises DataError if the file is invalid or exceeds `data.max-bytes`.
    """
    path, parts = expanded(file), ("train", "val", "test")
    names = [f"{part}_{what}" for part in parts for what in ("images", "labels")]
    hint = f"; MedMNIST files contain {', '.join(names)}"
    source = ". Download it from https://medmnist.com."
    arrays = read_arrays(path, names, spec, hint=hint, source=source)
    splits: list[Split] = []
    for part in parts:
        x, y = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        if x.dtype != np.uint8 or not (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)):
            volumes = "; volumes are unsupported" if x.ndim == 4 else ""
            raise DataError(
                f"{path}: {part}_images must be uint8 [N, H, W] or [N, H, W, 3], got {x.dtype} "
                f"{list(x.shape)}{volumes}"
            )
        if y.ndim == 2 and y.shape[1] != 1:
            got = f"got {list(y.shape)}; multi-label datasets are unsupported"
            raise DataError(f"{path}: {part}_labels must be [N] or [N, 1], {got}")
        labels = convert_labels(y.reshape(-1), f"{path}: {part}_labels")
        if len(labels) != len(x) or not len(x):
            raise DataError(
                f"{path}: expected at least one image, and as many labels as images, in {part}, "
                f"got {len(x)} images and {len(labels)} labels"
            )
        images = np.ascontiguousarray(x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2))
        splits.append(Split(torch.from_numpy(images), torch.from_numpy(labels)))
        check_same_form(splits[0], splits[-1], "train_images", f"{path}: {part}_images")
    train, val, test = splits
    training = Split(torch.cat([train.x, val.x]), torch.cat([train.y, val.y]))
    classes = numbered_classes([training], [(f"{path}: test_labels", test)], path)
    format = Format.from_samples(training.x, classes, IMAGE)
    return Dataset(spec.dataset, training, test, format)


_OPENML_TEST_FRACTION = 1 / 3
_OPENML_ADULT = 1590
_ADULT_NUMBERS = [0, 2, 4, 10, 11, 12]  # These are indices into the 14 columns in adult.names.
_ADULT_WORDS = [1, 3, 5, 6, 7, 8, 9, 13]
_ADULT_COLUMNS = 15  # The last column is the class.
Rows = npt.NDArray[np.object_]


def read_adult(folder: str, spec: DataSpec) -> Dataset:
    """Read UCI Adult from DIR/adult.data and DIR/adult.test, plain or .gz.

    If the files are missing and `data.download` is set, scikit-learn downloads OpenML's copy to
    DIR; a fixed third of the copy is the common test set. The float32 features are the numeric
    columns, followed by one feature per category.
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
        except Exception as error:  # urllib and openml raise many exception types.
            raise DataError(
                f"data.dataset = {name!r}: cannot be downloaded from OpenML ({error})"
            ) from error
        if frame.shape[1] != _ADULT_COLUMNS:
            raise DataError(
                f"data.dataset = {name!r}: expected {_ADULT_COLUMNS} columns from OpenML, got "
                f"{frame.shape[1]}"
            )
        rows = frame.astype(object).where(frame.notna(), "?").astype(str).to_numpy(object)
        parts = held_out(encode_labels(rows[:, -1]), _OPENML_TEST_FRACTION, "adult")
        train, test = (rows[part] for part in parts)
    else:
        raise DataError(
            f"data.dataset = {name!r}: adult.data and adult.test (or .gz) not found in "
            f"{root.resolve()}. Copy UCI's files there, or use --set download=true."
        )
    where = f"{files[0]} and {files[1]}" if files[0] and files[1] else name
    scaler = StandardScaler().fit(_floats(where, train))
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float32)
    encoder.fit(train[:, _ADULT_WORDS])
    classes = tuple(map(str, np.unique(train[:, -1])))
    if odd := sorted(set(map(str, test[:, -1])) - set(classes)):
        raise DataError(
            f"{name}: unknown class in the test set, expected one of {classes} as in the training "
            f"set, got {odd[0]!r}"
        )

    def encoded(rows: Rows) -> Split:
        values = scaler.transform(_floats(where, rows)).astype(np.float32)
        x = np.concatenate([values, encoder.transform(rows[:, _ADULT_WORDS])], axis=1)
        return Split(torch.from_numpy(x), torch.from_numpy(find_words(rows[:, -1], classes)))

    widths = (*(1 for _ in _ADULT_NUMBERS), *map(len, encoder.categories_))
    training = encoded(train)
    format = Format.from_samples(training.x, classes, TABLE)
    return Dataset(name, training, encoded(test), format, columns=widths)


def _read_rows(path: Path, spec: DataSpec) -> Rows:
    """Read the rows of one file as text [N, 15]; '?' is treated as a category."""
    frame = read_frame(
        path, spec, header=None, dtype=str, keep_default_na=False, skipinitialspace=True,
        comment="|",  # adult.test starts with a comment.
    )  # fmt: skip
    if frame.shape[1] != _ADULT_COLUMNS or frame.isna().any(axis=None):
        rule = f"expected {_ADULT_COLUMNS} columns in each row"
        raise DataError(f"{path}: {rule}, got at most {frame.shape[1]}")
    rows: Rows = frame.to_numpy(object)
    rows[:, -1] = [label.rstrip(".") for label in rows[:, -1]]
    return rows


def _floats(name: str, rows: Rows) -> npt.NDArray[np.float64]:
    try:
        numbers = rows[:, _ADULT_NUMBERS].astype(np.float64)
    except ValueError as error:
        raise DataError(f"{name}: a numeric column contains a word ({error!s:.80})") from error
    invalid = numbers[~(np.abs(numbers) <= MAX_NUMBER)]
    if invalid.size:
        raise DataError(
            f"{name}: numbers must be finite and up to ±{MAX_NUMBER:g}, got {invalid[0]}"
        )
    return numbers


def _in_data_dir(directory: str) -> Callable[[str, DataSettings], Path]:
    return lambda path, settings: expanded(settings.data_dir) / directory


SOURCES = (
    Source("digits", "scikit-learn's handwritten digits, included", read_digits, files=no_path),
    Source(
        "breast-cancer",
        "scikit-learn's breast cancer table, included",
        read_breast_cancer,
        kind=TABLE,
        files=no_path,
    ),
    *(
        Source(
            name,
            "torchvision's images, in data.data-dir",
            read_torchvision,
            files=_in_data_dir(directory),
        )
        for name, (_, directory) in _TORCHVISION.items()
    ),
    Source("medmnist", "the .npz file of a 2D dataset of MedMNIST", read_medmnist, "FILE"),
    Source(
        "adult", "UCI Adult (census income): adult.data and adult.test", read_adult, "DIR", TABLE
    ),
)
