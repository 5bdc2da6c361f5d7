"""The store of a run's data: each part of it is read once, and handed to whoever needs it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError
from fedhet.data import shared_cache
from fedhet.data.datasets import load
from fedhet.data.labelled import split_labels, stacked
from fedhet.data.partition import hold_out, is_natural, partition
from fedhet.data.public import (
    MADE_HERE,
    check_public,
    public_dataset,
    public_source,
    refuse_overlap,
    refuse_unlabelled_public,
)
from fedhet.data.sources import find_source
from fedhet.data.spec import ClientData, Dataset, DataSpec, Index, Split, no_test
from fedhet.data.superclass import Assignment, assign
from fedhet.kinds import Shape
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import client_name

T = TypeVar("T")


class RunData:
    """The data of one run: its dataset, the clients' parts of it, and its public set.

    The process that runs a federation makes one store and passes it to the server and to all
    clients that it trains. Nothing is read before it is needed.
    """

    def __init__(self, spec: DataSpec, shared: Path | None = None) -> None:
        """Take the data's settings.

        `shared` is a folder to map the data from, into which `share` of another process writes it
        (before this store is used, not necessarily before it is made).
        """
        self.spec = spec
        self._shared = shared
        self._parts: dict[str, Any] = {}
        self._lock = threading.RLock()

    @classmethod
    def of(cls, run: RunSettings, shared: Path | None = None) -> RunData:
        """Return the store of a run with these settings."""
        return cls(DataSpec.of(run), shared)

    def forget(self) -> None:
        """Drop what has been read; it is read again if it is needed."""
        with self._lock:
            self._parts.clear()

    @property
    def dataset(self) -> Dataset:
        """The dataset, decoded. Raises DataError unless it has two classes or more."""
        return self.once("dataset", lambda: self._read(self.spec, "0"))

    def partition(self) -> tuple[Index, ...]:
        """Return each client's row numbers in the training set, sorted and disjoint."""
        return self.once("partition", self._drawn)

    @property
    def common_test(self) -> Split | None:
        """The common test set, or None if there is none."""
        return self.dataset.test

    def common_test_of(self, shape: Shape) -> Split | None:
        """Return the common test set, or None if there is none of samples of that shape."""
        try:
            common = self.common_test
        except DataError:  # the sites' own data; the server lacks 'dataset'
            return None
        return common if common is not None and tuple(common.x.shape[1:]) == shape else None

    def label_space(self, index: int) -> tuple[int, ...]:
        """Return the label space of client `index`, ascending: all classes, or those it drew."""
        if self._has_label_spaces:
            return self._assignment.spaces[index]
        return tuple(range(len(self.dataset.classes)))

    def label_counts(self) -> dict[str, list[int]]:
        """Return, by client name, the number of rows of each class, in the order of classes."""
        labels, classes = self.dataset.train.y.numpy(), len(self.dataset.classes)
        return {
            client_name(k, self.spec.clients): np.bincount(labels[rows], minlength=classes).tolist()
            for k, rows in enumerate(self.partition())
        }

    def split_rows(self, index: int) -> tuple[Index, Index]:
        """Return the rows in the training set on which client `index` trains, and is tested."""
        clients = self.spec.clients
        if not 0 <= index < clients:
            raise SettingsError(f"client index {index}: must be from 0 to {clients - 1}")
        rows, parts = self.partition()[index], self.dataset.parts
        if parts is not None:
            return rows[: parts[index][0]], rows[parts[index][0] :]
        train, test = hold_out(len(rows), self.spec, client_name(index, clients))
        return rows[train], rows[test]

    def client(self, index: int) -> ClientData:
        """Return the data of client `index`. Raises DataError if it has no test samples."""
        dataset, space = self.dataset, self.label_space(index)
        train, test = self._samples(index)
        name = client_name(index, self.spec.clients)
        common = _within_space(dataset.test, space, len(dataset.classes))
        if not len(test) and common is None:
            raise no_test(name, self.spec)
        return ClientData(
            name, train, test, common, dataset.classes, space, dataset.shape,
            stored=dataset.stored, schema=dataset.schema,
        )  # fmt: skip

    def pooled_parts(self) -> tuple[Split, Split]:
        """Return the labelled and the unlabelled training samples of all clients that train.

        They are those that `labelled_parts` gives each client, in the order of the clients.
        """
        spec, pairs = self.spec, []
        for index in spec.seen:
            own = self.dataset.train.take(self.split_rows(index)[0])
            name = client_name(index, spec.clients)
            alpha, least = spec.labelled_alpha, spec.labelled_least
            pairs.append(split_labels(own, alpha, least, spec.seed, name))
        labelled, unlabelled = map(stacked, zip(*pairs, strict=True))
        return labelled, unlabelled

    def public_set(self, shape: tuple[int, ...], classes: int | None) -> Split:
        """Return the public samples: `public-dataset`, or a part of the training set.

        Raises DataError unless its samples have `shape` and, if its labels are used, it has
        `classes` classes (None: labels are not used), and SettingsError if its labels are used and
        it has none.
        """
        if classes is not None:
            refuse_unlabelled_public(self.spec)
        found = self.once(
            "public", lambda: public_dataset(self.spec, lambda: self.dataset, lambda: self._source)
        )
        check_public(found, shape, classes)
        return found.train

    def validate(self) -> None:
        """Raise a one-line error, before a run starts, for any fault of its data."""
        spec, alone = self.spec, self.common_test is None
        for index in range(spec.clients):
            if not len(self.split_rows(index)[1]) and alone:
                raise no_test(spec.dataset, spec)
        if spec.public_dataset or spec.public_fraction:
            public = self.public_set(self.dataset.shape, None)
            if spec.public_dataset not in ("", *MADE_HERE):
                refuse_overlap(public, self.dataset.train, spec.dataset)

    def share(self, folder: Path) -> None:
        """Write the data into a folder, for other processes to map. Raises StateError."""
        with shared_cache.writing(folder) as written:
            for place, source in enumerate((self.spec, public_source(self.spec))):
                if source is not None and _is_copied(source):
                    dataset = self._source if place else self.dataset
                    shared_cache.write_dataset(dataset, written / f"{place}.safetensors")
            shared_cache.write_rows(self.partition(), written)
            count = sum(map(len, self.partition()))
            every = (rows for k in range(self.spec.clients) for rows in self.split_rows(k))
            shared_cache.write_samples(self.dataset.train.x, count, every, written)

    @property
    def _source(self) -> Dataset:
        """The dataset that public samples are taken from, where it is another one."""
        spec = public_source(self.spec)
        assert spec is not None
        return self.once("source", lambda: self._read(spec, "1", least_classes=1))

    def _read(self, spec: DataSpec, name: str, *, least_classes: int = 2) -> Dataset:
        if self._shared is None or not _is_copied(spec):
            return load(spec, least_classes=least_classes)
        return shared_cache.read_dataset(self._shared / f"{name}.safetensors")

    @property
    def _has_label_spaces(self) -> bool:
        return self.spec.partition == "superclasses" and not is_natural(self.dataset)

    @property
    def _assignment(self) -> Assignment:
        return self.once("assignment", lambda: assign(self.dataset, self.spec))

    def _drawn(self) -> tuple[Index, ...]:
        if self._shared is not None:
            return shared_cache.read_rows(self._shared)
        if self._has_label_spaces:
            return self._assignment.rows
        return partition(self.dataset, self.spec)

    def _samples(self, index: int) -> tuple[Split, Split]:
        """Return the training and the test samples of a client: copies, or mapped from a file."""
        train, (own, tests), folder = self.dataset.train, self.split_rows(index), self._shared
        if folder is None:
            return train.take(own), train.take(tests)
        x = self.once("samples", lambda: shared_cache.map_samples(folder))
        counts = map(len, self.partition())
        start = self.once("starts", lambda: (0, *accumulate(counts)))[index]
        middle = start + len(own)
        return (
            Split(x[start:middle], train.y[torch.from_numpy(own)]),
            Split(x[middle : middle + len(tests)], train.y[torch.from_numpy(tests)]),
        )

    def once(self, part: str, make: Callable[[], T]) -> T:
        """Return a part of the data, which `make` makes when it is first needed.

        Other threads that need it wait for it.
        """
        with self._lock:
            if part not in self._parts:
                self._parts[part] = make()
            found: T = self._parts[part]
            return found


def _is_copied(spec: DataSpec) -> bool:
    """Return whether a dataset is shared as a copy, or mapped from a cache of its own."""
    return not find_source(spec.dataset)[0].is_mapped


def _within_space(test: Split | None, space: tuple[int, ...], classes: int) -> Split | None:
    """Return the rows in the label space; the set itself if that is all classes."""
    if test is None or len(space) == classes:
        return test
    rows = torch.isin(test.y, torch.tensor(space)).nonzero().flatten()
    return test.take(rows) if len(rows) else None
