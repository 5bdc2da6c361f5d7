"""MedMNIST's files: `medmnist:FILE`, an .npz file with the arrays of one of its 2D datasets.

`train_images` and `val_images` are the training set, `test_images` is the common test set.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError
from fedhet.data.npz import checked_labels, read_arrays
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Split

PARTS = ("train", "val", "test")
ARRAYS = tuple(f"{part}_{what}" for part in PARTS for what in ("images", "labels"))


def read_medmnist(file: str, spec: DataSpec) -> Dataset:
    """Read FILE: images [N, H, W] or [N, H, W, 3], uint8, and labels [N, 1] or [N].

    Raises DataError for any fault of the file, and if it takes more than `data.max-bytes`.
    """
    path = expanded(file)
    hint = f"; a file of MedMNIST has {', '.join(ARRAYS)}"
    source = "; MedMNIST's are at https://medmnist.com, one for each dataset"
    arrays = read_arrays(path, ARRAYS, spec, hint=hint, source=source)
    train, val, test = (_split(path, part, arrays) for part in PARTS)
    for part, split in (("val", val), ("test", test)):
        if split.x.shape[1:] != train.x.shape[1:]:
            raise DataError(f"{path}: {part}_images have another shape than train_images")
    classes = 1 + max(int(split.y.max()) for split in (train, val, test))
    whole = Split(torch.cat([train.x, val.x]), torch.cat([train.y, val.y]))
    return Dataset(spec.dataset, whole, test, tuple(map(str, range(classes))))


def _split(path: Path, part: str, arrays: dict[str, npt.NDArray[Any]]) -> Split:
    x, y = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    shape = list(x.shape)
    grey = x.ndim == 3
    if x.dtype != np.uint8 or not (grey or (x.ndim == 4 and shape[3] == 3)):
        raise DataError(
            f"{path}: {part}_images must be uint8 [N, H, W] or [N, H, W, 3], are {x.dtype} {shape}"
            + ("; volumes are not supported" if x.ndim == 4 else "")
        )
    if y.ndim == 2 and y.shape[1] != 1:
        raise DataError(
            f"{path}: {part}_labels are {list(y.shape)}: several labels a sample are not supported"
        )
    labels = checked_labels(y.reshape(-1), f"{path}: {part}_labels")
    if len(labels) != len(x) or not len(x):
        raise DataError(f"{path}: {part} has {len(x)} images and {len(labels)} labels")
    images = x[:, None] if grey else x.transpose(0, 3, 1, 2)
    return Split(torch.from_numpy(np.ascontiguousarray(images)), torch.from_numpy(labels))


SOURCES = (Source("medmnist", "a 2D dataset of MedMNIST, its .npz file", read_medmnist, "FILE"),)
