"""MNIST, Fashion-MNIST and CIFAR from torchvision's files in `data.data-dir`."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from types import MappingProxyType

import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Split
from fedhet.settings.data import DataSettings

_CLASSES = MappingProxyType(
    {
        "mnist": ("MNIST", "MNIST/raw"),
        "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw"),
        "cifar10": ("CIFAR10", "cifar-10-batches-py"),
        "cifar100": ("CIFAR100", "cifar-100-python"),
    }
)
"""torchvision's class of each dataset, and where it keeps the files."""


def read_torchvision(place: str, spec: DataSpec) -> Dataset:
    """Read the files, or download them if allowed: [N, C, H, W] uint8. Raises DataError."""
    import torchvision.datasets

    root = os.path.abspath(expanded(spec.data_dir))
    source = getattr(torchvision.datasets, _CLASSES[spec.dataset][0])
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
        f"data.dataset = {spec.dataset!r}: not found or incomplete in data.data-dir = {root}; put "
        "torchvision's files there, or download them with --set download=true, or use "
        "--set dataset=digits, which needs no files"
    )


def _images(source: object) -> Split:
    """Convert torchvision's [N, H, W] tensor or [N, H, W, C] array to [N, C, H, W] uint8."""
    x = torch.as_tensor(source.data)  # type: ignore[attr-defined]
    y = torch.as_tensor(source.targets, dtype=torch.int64)  # type: ignore[attr-defined]
    return Split(x.unsqueeze(1) if x.ndim == 3 else x.permute(0, 3, 1, 2).contiguous(), y)


def _source(name: str) -> Source:
    kept = _CLASSES[name][1]

    def files(path: str, table: DataSettings) -> Path:
        return expanded(table.data_dir) / kept

    return Source(name, "torchvision's images, in data.data-dir", read_torchvision, files=files)


SOURCES = tuple(map(_source, _CLASSES))
