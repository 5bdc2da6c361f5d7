"""Datasets by name. Heavy libraries are imported on first use, not with this module."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from fedhet.data.folder import read_tree
from fedhet.data.hub import KIND as HUB
from fedhet.data.hub import PLACE as HUB_NAME
from fedhet.data.hub import read_hub
from fedhet.data.medmnist import read_medmnist
from fedhet.data.npz import has_rows, read_clients
from fedhet.data.signals import read_signals
from fedhet.data.spec import Dataset, DataSpec, Split, global_random_kept, stratified
from fedhet.data.superclass import joined
from fedhet.data.tabular import read_adult, read_breast_cancer
from fedhet.data.texts import read_texts
from fedhet.data.user_dataset import KIND, PLACE, read_own
from fedhet.errors import DataError, SettingsError, nearest
from fedhet.kinds import IMAGE, SIGNAL, TABLE, TEXT, Kind, named
from fedhet.seeding import numpy_rng
from fedhet.settings.run import DataSettings

_FIXED_SEED = 0  # for what must not depend on the run's seed: the common test sets
_DIGITS_TEST_FRACTION = 0.2
_TORCHVISION = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
_TABLES = ("breast-cancer", "adult")


def dataset_names() -> list[str]:
    """Return the allowed values of `dataset`; PATH and DIR stand for a folder of the user's."""
    own = f"{KIND}:{PLACE}"
    return [*_BY_NAME, own, *(f"{kind}:{place}" for kind, (place, _) in _BY_FOLDER.items())]


def is_table(name: str) -> bool:
    """Tell whether the samples of the dataset `name` are rows [F] of a table, not images.

    Of `npz:DIR` the head of the first file says so; a file that cannot be read says nothing.
    """
    kind, _, folder = name.partition(":")
    if kind == KIND and folder:
        with contextlib.suppress(DataError):  # said when it is loaded
            return len(read_own(folder).shape) == 1
    return kind in _TABLES or (kind == "npz" and folder != "" and has_rows(folder))


def sample_kind(table: DataSettings) -> Kind:
    """Return the kind of a run's samples, as `data.sample-kind` or the name of the dataset says."""
    if table.sample_kind != "auto":
        return named(table.sample_kind)
    source = table.dataset.partition(":")[0]
    if source in ("text", "signal"):
        return TEXT if source == "text" else SIGNAL
    return TABLE if is_table(table.dataset) else IMAGE


@global_random_kept()
def load(spec: DataSpec, *, least_classes: int = 2) -> Dataset:
    """Read and decode the dataset that `spec` names.

    Raises DataError for a fault of its files, or if it has fewer classes than `least_classes`.
    """
    dataset = _reader(spec.dataset)(spec)
    if spec.by and dataset.groups is None:
        raise SettingsError(
            f"data.by = {spec.by!r}: {spec.dataset} has no column of that kind; it takes a "
            "text:FILE, or signal:DIR with train.npz"
        )
    if spec.max_samples:
        rng = numpy_rng(spec.seed, "max-samples")
        dataset = dataset.keeping(dataset.train.rows(spec.max_samples, rng))
    if spec.superclasses:
        dataset = joined(dataset, spec.superclasses)
    dataset = _keep_public(dataset, spec)
    if dataset.test is not None:
        rng = numpy_rng(_FIXED_SEED, "max-test-samples")
        dataset = replace(dataset, test=dataset.test.subset(spec.max_test_samples, rng))
    if (count := len(dataset.classes)) < least_classes:
        raise DataError(f"{spec.dataset}: has {count} class, at least {least_classes} are needed")
    return dataset


def _keep_public(dataset: Dataset, spec: DataSpec) -> Dataset:
    """Move the public share out of the training set, stratified by class."""
    if not spec.public_fraction:
        return dataset
    if dataset.parts is not None:
        raise SettingsError(
            f"data.public-fraction = {spec.public_fraction}: must be 0 with data.dataset = "
            f"{spec.dataset!r}, whose files are whole clients; give 'data.public-dataset'"
        )
    labels = dataset.train.y.numpy()
    count = max(1, round(spec.public_fraction * len(labels)))
    public = stratified(labels, count, numpy_rng(spec.seed, "public"))
    owned = np.setdiff1d(np.arange(len(labels)), public)
    return replace(dataset.keeping(owned), public=dataset.train.take(public))


def _reader(name: str) -> Callable[[DataSpec], Dataset]:
    if name in _BY_NAME:
        return _BY_NAME[name]
    kind, _, folder = name.partition(":")
    if kind in _BY_FOLDER:
        place, read = _BY_FOLDER[kind]
        if not folder:
            raise SettingsError(f"data.dataset = {name!r}: give the folder, as in {kind}:{place}")
        return lambda spec: read(folder, spec)
    if kind == KIND:
        return lambda spec: read_own(folder)
    close = nearest(name, [*_BY_NAME, *_BY_FOLDER])
    allowed = ", ".join(dataset_names())
    raise SettingsError(f"data.dataset = {name!r}: must be one of {allowed}{close}")


def _digits(spec: DataSpec) -> Dataset:
    """Load the 1,797 digits that come with scikit-learn: [N, 1, 8, 8] float32 in [-1, 1]."""
    rows = np.loadtxt(_digits_file(), delimiter=",")  # 64 pixels from 0 to 16, and the label
    x = torch.from_numpy(rows[:, :-1]).to(torch.float32).div_(8.0).sub_(1.0).view(-1, 1, 8, 8)
    y = torch.from_numpy(rows[:, -1]).to(torch.int64)
    held_out = round(_DIGITS_TEST_FRACTION * len(y))
    test = stratified(y.numpy(), held_out, numpy_rng(_FIXED_SEED, "digits", "common"))
    train = np.setdiff1d(np.arange(len(y)), test)
    every, classes = Split(x, y), tuple(map(str, range(10)))
    return Dataset("digits", every.take(train), every.take(test), classes, scaled_images=True)


def _digits_file() -> Path:
    """Return scikit-learn's file of the digits, found without its import, which takes a second.

    Raises DataError.
    """
    found = find_spec("sklearn")
    file = (
        Path(found.origin or "").parent / "datasets" / "data" / "digits.csv.gz" if found else None
    )
    if file is None or not file.is_file():
        raise DataError("the digits come with scikit-learn, which is not installed as a whole")
    return file


def _torchvision(spec: DataSpec) -> Dataset:
    """Load MNIST or CIFAR from torchvision's files in `data_dir`: [N, C, H, W] uint8."""
    import torchvision.datasets

    root = os.path.abspath(os.path.expanduser(spec.data_dir))
    source = getattr(torchvision.datasets, _TORCHVISION[spec.dataset])
    unreadable = (RuntimeError, OSError, ValueError, EOFError, KeyError, pickle.UnpicklingError)
    try:
        train, test = (source(root, train=part, download=spec.download) for part in (True, False))
    except unreadable as error:
        raise DataError(_absent(spec, root, error)) from error
    classes = tuple(str(name) for name in train.classes)
    return Dataset(spec.dataset, _images(train), _images(test), classes)


def _absent(spec: DataSpec, root: str, error: Exception) -> str:
    fault = " ".join(str(error).split())
    if spec.download:
        return f"data.dataset = {spec.dataset!r}: cannot be downloaded into {root}: {fault}"
    return (
        f"data.dataset = {spec.dataset!r}: not found, or not whole, in data.data-dir = {root}; put "
        "torchvision's files there, or download them with --set download=true, or use "
        "--set dataset=digits, which needs no files"
    )


def _images(source: object) -> Split:
    """Convert torchvision's [N, H, W] tensor or [N, H, W, C] array to [N, C, H, W] uint8."""
    x = torch.as_tensor(source.data)  # type: ignore[attr-defined]
    y = torch.as_tensor(source.targets, dtype=torch.int64)  # type: ignore[attr-defined]
    return Split(x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous(), y)


_BY_NAME: dict[str, Callable[[DataSpec], Dataset]] = {
    "digits": _digits,
    "breast-cancer": read_breast_cancer,
    **dict.fromkeys(_TORCHVISION, _torchvision),
}
_BY_FOLDER: dict[str, tuple[str, Callable[[str, DataSpec], Dataset]]] = {
    "adult": ("DIR", read_adult),
    "imagefolder": ("PATH", read_tree),
    "npz": ("DIR", read_clients),
    "medmnist": ("FILE", read_medmnist),
    HUB: (HUB_NAME, read_hub),
    "text": ("PATH", read_texts),
    "signal": ("DIR", read_signals),
}
