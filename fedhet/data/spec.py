"""What the other modules of this package pass around: samples, a dataset, and the settings."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedhet.errors import SettingsError, nearest

Index = npt.NDArray[np.int64]

UNKNOWN = -1
"""The label of a sample whose class nobody knows."""
PARTITIONS = ("iid", "dirichlet", "shards", "classes", "superclasses")


@dataclass(frozen=True, eq=False)
class Split:
    """Labelled samples: `x` [N, *shape] uint8 (images as stored) or float32, `y` [N] int64."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        """Return N."""
        return len(self.y)

    def take(self, index: Index | Tensor) -> Split:
        """Return a copy of the rows that `index` [M] names, in its order."""
        rows = torch.as_tensor(index, dtype=torch.int64)
        return Split(self.x.index_select(0, rows), self.y.index_select(0, rows))

    def scaled(self) -> Split:
        """Return the split with `x` as the models take it (see `scaled`)."""
        return Split(scaled(self.x), self.y)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A training set to divide over clients and, if there is one, the common test set.

    `parts` is there only for data that comes already divided: (training rows, test rows) of
    each client, which lie one after the other in `train`.
    """

    name: str
    train: Split
    test: Split | None
    classes: tuple[str, ...]
    parts: tuple[tuple[int, int], ...] | None = None
    public: Split | None = None
    """The share of the training set that was kept from the clients, if any was."""
    columns: tuple[int, ...] = ()
    """Of a table: how many features each of its columns is, in order; (): one each."""
    subclasses: Index | None = None
    """The training set's own labels [N], where `superclasses` has replaced them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample, [C, H, W] or [F]."""
        return tuple(self.train.x.shape[1:])


@dataclass(frozen=True)
class DataSpec:
    """What data a run uses; the settings of the same (kebab-case) names fill it."""

    dataset: str = "digits"
    data_dir: str = "data"
    download: bool = False
    clients: int = 10
    partition: str = "dirichlet"
    alpha: float = 0.5
    shards: int = 2
    classes_per_client: int = 2
    min_samples: int = 10
    test_fraction: float = 0.2
    seed: int = 0
    image_size: int = 0  # image folders: resize to this side; 0 = as the first image is
    max_samples: int = 0  # a class-stratified subset of the training set; 0 = all
    max_test_samples: int = 0  # the same of the common test set, whatever the seed; 0 = all
    public_dataset: str = ""  # data that no client owns; "" = a share of the training set
    public_fraction: float = 0.0  # that share; it is no longer in the training set
    public_samples: int = 0  # a class-stratified subset of public_dataset; 0 = all
    superclasses: str = ""  # classes joined, as "a+b,c+d", or a known grouping; "" = as they are
    label_space: tuple[int, int] = (6, 8)  # partition = superclasses: a client's classes, from, to
    subclasses: tuple[int, int] = (0, 0)  # and a client's subclasses of each; (0, 0) = all
    samples_per_class: int = 50


def check(spec: DataSpec) -> None:
    """Raise SettingsError for the first value of `spec` that is outside its range."""
    if spec.partition not in PARTITIONS:
        close = nearest(spec.partition, PARTITIONS)
        allowed = ", ".join(PARTITIONS)
        raise SettingsError(f"partition = {spec.partition!r}: must be one of {allowed}{close}")
    rules = (
        ("clients", spec.clients >= 1, "at least 1"),
        ("alpha", spec.alpha > 0 and math.isfinite(spec.alpha), "greater than 0"),
        ("shards", spec.shards >= 1, "at least 1"),
        ("classes_per_client", spec.classes_per_client >= 1, "at least 1"),
        ("min_samples", spec.min_samples >= 1, "at least 1"),
        ("test_fraction", 0 < spec.test_fraction < 1, "between 0 and 1, both excluded"),
        ("image_size", spec.image_size >= 0, "at least 0 (0 = as the images are)"),
        ("max_samples", spec.max_samples >= 0, "at least 0 (0 = all)"),
        ("public_fraction", 0 <= spec.public_fraction < 1, "at least 0 and below 1"),
        ("public_samples", spec.public_samples >= 0, "at least 0 (0 = all)"),
        ("samples_per_class", spec.samples_per_class >= 1, "at least 1"),
        ("max_test_samples", spec.max_test_samples >= 0, "at least 0 (0 = all)"),
    )
    for name, holds, allowed in rules:
        if not holds:
            setting, value = name.replace("_", "-"), getattr(spec, name)
            raise SettingsError(f"{setting} = {value!r}: must be {allowed}")


@contextmanager
def global_random_kept() -> Iterator[None]:
    """Give `random`'s and numpy's global state back as it was: imports alone draw from it."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


def scaled(x: Tensor) -> Tensor:
    """Return `x` as the models take it: uint8 becomes x/127.5 - 1 in float32, float32 is kept."""
    return x.to(torch.float32).div_(127.5).sub_(1.0) if x.dtype == torch.uint8 else x


def stratified(labels: Index, size: int, rng: np.random.Generator) -> Index:
    """Return `size` sorted row numbers, of each class its share of `labels` [N] (to one row).

    Every class's shuffled rows are spread evenly over (0, 1); the `size` lowest places win.
    """
    rows = rng.permutation(len(labels))
    place = np.empty(len(labels))
    for label in np.unique(labels):
        mine = np.flatnonzero(labels[rows] == label)
        place[mine] = (np.arange(len(mine)) + 0.5) / len(mine)
    return np.sort(rows[np.argsort(place, kind="stable")[:size]])
