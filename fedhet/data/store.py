"""The store of a run's data: each part of it is read once, and handed to whoever needs it.

`RunData` reads the run's dataset (`load`), deals it to the clients (`fedhet.data.partition`), and
has the public set: data that no client owns, available to the server and to every client. In a
simulation, the process that runs the federation writes what it has decoded into a folder, and its
workers map it into memory: they share one copy, and none of them decodes anything again.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedhet.base.disk import Folder
from fedhet.base.errors import DataError, SettingsError, StateError, error_reason
from fedhet.base.seeding import numpy_rng
from fedhet.data.partition import (
    Assignment,
    assign,
    hold_out,
    is_natural,
    merged,
    partition,
    split_labels,
    stacked,
)
from fedhet.data.sources import SOURCES, find_source
from fedhet.data.spec import (
    FIXED_SEED,
    ClientData,
    Dataset,
    DataSpec,
    Index,
    Split,
    no_test_error,
    preserve_global_rng,
    stratified,
    subset_rows,
)
from fedhet.data.tables import TableSchema
from fedhet.kinds import KINDS, Shape
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

    def common_test_of(self, kind: str, shape: Shape) -> Split | None:
        """Return the common test set, or None if no test samples have that kind and shape."""
        try:
            dataset = self.dataset
        except DataError:  # the sites' own data; the server lacks 'dataset'
            return None
        return dataset.test if (dataset.kind, dataset.shape) == (kind, shape) else None

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
        common = dataset.test
        if common is not None and len(space) < len(dataset.classes):
            rows = torch.isin(common.y, torch.tensor(space)).nonzero().flatten()
            common = common.take(rows) if len(rows) else None
        if not len(test) and common is None:
            raise no_test_error(name, self.spec)
        return ClientData(
            name, train, test, common, dataset.classes, space, dataset.kind, dataset.shape,
            stored=dataset.stored, schema=dataset.schema,
        )  # fmt: skip

    def pooled_parts(self) -> tuple[Split, Split]:
        """Return the labeled and the unlabeled training samples of all clients that train.

        They are those that `labeled_parts` gives each client, in the order of the clients.
        """
        spec, pairs = self.spec, []
        for index in spec.training_clients:
            own = self.dataset.train.take(self.split_rows(index)[0])
            name = client_name(index, spec.clients)
            alpha, least = spec.labeled_alpha, spec.min_labeled
            pairs.append(split_labels(own, alpha, least, spec.seed, name))
        labeled, unlabeled = map(stacked, zip(*pairs, strict=True))
        return labeled, unlabeled

    def public_set(self, kind: str, shape: Shape, classes: int | None) -> Split:
        """Return the public samples: `public-dataset`, or a part of the training set.

        Raises DataError unless its samples are of the kind, have `shape` and, if its labels are
        used, it has `classes` classes (None: labels are not used), and SettingsError if its labels
        are used and it has none.
        """
        if classes is not None and self.spec.public_dataset == GENERATED:
            raise SettingsError(
                f"setting 'data.public-dataset' = {GENERATED!r} is not allowed: its rows have no "
                "labels, which this method learns from; use another dataset, or "
                "'data.public-fraction'"
            )
        found = self.once("public", self._read_public)
        where = f"data.public-dataset {found.name!r}"
        if (found.kind, found.shape) != (kind, shape):
            held, own = KINDS[found.kind].describe(found.shape), KINDS[kind].describe(shape)
            raise DataError(f"{where}: samples have {held}, the clients' {own}")
        if classes not in (None, len(found.classes)):
            has = f"has {len(found.classes)} classes, the clients' data {classes}"
            raise DataError(f"{where}: {has}")
        return found.train

    def validate(self) -> None:
        """Raise a one-line error, before a run starts, for any fault of its data."""
        spec, alone = self.spec, self.common_test is None
        for index in range(spec.clients):
            if not len(self.split_rows(index)[1]) and alone:
                raise no_test_error(spec.dataset, spec)
        if spec.public_dataset or spec.public_fraction:
            public = self.public_set(self.dataset.kind, self.dataset.shape, None)
            if spec.public_dataset not in ("", *NO_DATASET):
                check_no_overlap(public, self.dataset.train, spec.dataset)

    def share(self, folder: Path) -> None:
        """Write the data into a folder, for other processes to map. Raises StateError."""
        try:
            with Folder(folder, folder.parent).writing() as written:
                for place, source in enumerate((self.spec, public_source(self.spec))):
                    if source is not None and _is_copied(source):
                        dataset = self._source if place else self.dataset
                        write_dataset(dataset, written / f"{place}.safetensors")
                parts = self.partition()
                ends = torch.tensor([len(part) for part in parts]).cumsum(0)
                rows = {"rows": torch.from_numpy(np.concatenate(parts)), "ends": ends}
                save_file(rows, written / _PARTITION)
                x = self.dataset.train.x
                header = {
                    "descr": np.lib.format.dtype_to_descr(x[:0].numpy().dtype),
                    "fortran_order": False,
                    "shape": (sum(map(len, parts)), *x.shape[1:]),
                }
                with (written / _SAMPLES).open("wb") as file:  # those of one client after another
                    np.lib.format.write_array_header_1_0(file, header)
                    for index in range(self.spec.clients):
                        for part in self.split_rows(index):
                            file.write(x[torch.from_numpy(part)].numpy().tobytes())
        except OSError as error:
            fault = f"cannot write the decoded data into {folder}: {error_reason(error)}"
            raise StateError(fault) from None

    @property
    def _source(self) -> Dataset:
        """The dataset that public samples are taken from, where it is another one."""
        spec = public_source(self.spec)
        assert spec is not None
        return self.once("source", lambda: self._read(spec, "1", min_classes=1))

    def _read(self, spec: DataSpec, name: str, *, min_classes: int = 2) -> Dataset:
        if self._shared is None or not _is_copied(spec):
            return load(spec, min_classes=min_classes)
        return read_dataset(self._shared / f"{name}.safetensors")

    def _read_public(self) -> Dataset:
        """Return a dataset whose `train` is the public set.

        Raises SettingsError if the settings name no public data, or none is left.
        """
        spec, own = self.spec, self.dataset if self.spec.public_dataset in ("", GENERATED) else None
        if own is not None and spec.public_dataset:
            return generated(spec, own)
        if own is not None:
            if own.public is None:
                rule = "give 'data.public-dataset' or 'data.public-fraction'"
                raise SettingsError(f"the run has no public data: {rule}")
            return replace(own, train=own.public, test=None, public=None)
        found, rng = self._source, numpy_rng(spec.seed, "public-samples")
        if spec.public_dataset != UNUSED:
            # No effect if the reader has already applied the limit.
            return replace(found, train=found.train.subset(spec.public_samples, rng), test=None)
        labels = found.train.y.numpy() if found.subclasses is None else found.subclasses
        # The same draw as that of the rows that are used.
        used = stratified(labels, spec.max_samples, numpy_rng(spec.seed, "max-samples"))
        rows = np.setdiff1d(np.arange(len(labels)), used)
        if not spec.max_samples or not len(rows):
            raise SettingsError(
                f"data.public-dataset = {UNUSED!r}: 'data.max-samples' = {spec.max_samples} leaves "
                f"out none of the {len(labels)} training samples of {spec.dataset}; it must be "
                "lower, and above 0"
            )
        left = found.train.take(rows).subset(spec.public_samples, rng)
        return replace(found, train=left, test=None, subclasses=None)

    @property
    def _has_label_spaces(self) -> bool:
        return self.spec.partition == "superclasses" and not is_natural(self.dataset)

    @property
    def _assignment(self) -> Assignment:
        return self.once("assignment", lambda: assign(self.dataset, self.spec))

    def _drawn(self) -> tuple[Index, ...]:
        if self._shared is not None:
            path = self._shared / _PARTITION
            with _mapping("clients' rows", path):
                found = load_file(path)
            return tuple(np.split(found["rows"].numpy(), found["ends"].numpy()[:-1]))
        if self._has_label_spaces:
            return self._assignment.rows
        return partition(self.dataset, self.spec)

    def _samples(self, index: int) -> tuple[Split, Split]:
        """Return the training and the test samples of a client: copies, or mapped from a file."""
        train, (own, tests), folder = self.dataset.train, self.split_rows(index), self._shared
        if folder is None:
            return train.take(own), train.take(tests)
        with _mapping("clients' samples", path := folder / _SAMPLES):
            # "c": a change would stay in this process, and torch takes no read-only arrays.
            x = self.once("samples", lambda: torch.from_numpy(np.load(path, mmap_mode="c")))
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


@preserve_global_rng()
def load(spec: DataSpec, *, min_classes: int = 2) -> Dataset:
    """Read and decode the dataset that `spec` names.

    Raises DataError for a fault of its files, or if it has fewer classes than `min_classes`.
    """
    source, place = find_source(spec.dataset)
    dataset = source.read(place, spec)
    if spec.by and dataset.groups is None:
        able = ", or ".join(each.owners for each in SOURCES.values() if each.owners)
        raise SettingsError(
            f"data.by = {spec.by!r}: {spec.dataset} has no column of that kind; it takes {able}"
        )
    if spec.max_samples:
        rng = numpy_rng(spec.seed, "max-samples")
        dataset = dataset.with_train_rows(
            subset_rows(dataset.train.y.numpy(), spec.max_samples, rng)
        )
    if spec.superclasses:
        dataset = merged(dataset, spec.superclasses)
    if spec.public_fraction:
        if dataset.parts is not None:
            raise SettingsError(
                f"data.public-fraction = {spec.public_fraction}: must be 0 with data.dataset = "
                f"{spec.dataset!r}, whose files are whole clients; give 'data.public-dataset'"
            )
        labels = dataset.train.y.numpy()
        count = max(1, round(spec.public_fraction * len(labels)))
        public = stratified(labels, count, numpy_rng(spec.seed, "public"))
        owned = np.setdiff1d(np.arange(len(labels)), public)
        dataset = replace(dataset.with_train_rows(owned), public=dataset.train.take(public))
    if dataset.test is not None:
        rng = numpy_rng(FIXED_SEED, "max-test-samples")
        dataset = replace(dataset, test=dataset.test.subset(spec.max_test_samples, rng))
    if (count := len(dataset.classes)) < min_classes:
        raise DataError(f"{spec.dataset}: has {count} class, at least {min_classes} are needed")
    return dataset


GENERATED = "generated"
"""The `public-dataset` that is generated from the training set, as its kind of samples says."""
UNUSED = "unused"
"""The `public-dataset` of the training rows that `data.max-samples` leaves out."""
NO_DATASET = (GENERATED, UNUSED)
"""Values of `public-dataset` that name no other dataset."""


def check_no_overlap(public: Split, own: Split, owner: str) -> None:
    """Raise DataError if the public set contains any sample of `own`, however stored."""
    if public.x.dtype != own.x.dtype:
        public, own = public.scaled(), own.scaled()

    def digests(split: Split) -> Iterator[bytes]:
        for row in split.x:
            content = row.cpu().contiguous().numpy().tobytes()
            yield hashlib.blake2b(content, digest_size=16).digest()

    seen = set(digests(public))
    shared = sum(digest in seen for digest in digests(own))
    if shared:
        raise DataError(
            f"public data: {shared} of {len(own)} samples of {owner} are in it too; "
            "public data must not belong to a client: to set a part of the clients' dataset apart, "
            "use 'data.public-fraction'"
        )


def generated(spec: DataSpec, dataset: Dataset) -> Dataset:
    """Return generated samples like the dataset's; their labels have no meaning."""
    size, kind = spec.public_samples, KINDS[dataset.kind]
    if size < 1:
        raise SettingsError(
            f"data.public-samples = 0: must be at least 1 with data.public-dataset = {GENERATED!r}"
        )
    if kind.generated is None:
        able = " and ".join(each.plural for each in KINDS.values() if each.generated)
        raise SettingsError(
            f"data.public-dataset = {GENERATED!r} is for {able}; samples of {dataset.name!r} have "
            f"{kind.describe(dataset.shape)}"
        )
    rng = numpy_rng(spec.seed, "public", "generated")
    x = kind.generated(dataset.train.x.numpy(), dataset.columns, size, rng)
    made = Split(torch.from_numpy(x), torch.zeros(size, dtype=torch.int64))
    return replace(dataset, train=made, test=None, subclasses=None)


def public_source(spec: DataSpec) -> DataSpec | None:
    """Return the spec of the dataset that public samples are taken from, if it is another one."""
    if spec.public_dataset == UNUSED:
        return spec.replace(max_samples=0)
    if spec.public_dataset in ("", GENERATED):
        return None
    # Files that may be whole clients are read whole, and a part of the samples is taken later.
    whole = find_source(spec.public_dataset, "data.public-dataset")[0].whole_clients
    return spec.replace(
        dataset=spec.public_dataset,
        max_samples=0 if whole else spec.public_samples,
        by="",
        superclasses=(),
        public_dataset="",
        public_fraction=0.0,
    )


_PARTITION, _SAMPLES = "partition.safetensors", "samples.npy"
_PARTS = ("train", "test", "public")


@dataclass(frozen=True)
class _Metadata:
    """Fields of a `Dataset` other than its arrays."""

    name: str
    classes: tuple[str, ...]
    parts: tuple[tuple[int, int], ...] | None
    columns: tuple[int, ...]
    kind: str
    shape: tuple[int, ...]
    scaled_images: bool
    schema: TableSchema | None


_METADATA = TypeAdapter(_Metadata)


@contextlib.contextmanager
def _mapping(what: str, path: Path) -> Iterator[None]:
    """Raise StateError for any fault of a shared file that is read in the block."""
    try:
        yield
    except Exception as error:  # safetensors has an error type of its own
        raise StateError(f"cannot read the {what} in {path}: {error_reason(error)}") from None


def write_dataset(dataset: Dataset, path: Path) -> None:
    """Write a dataset's arrays and metadata to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    for part in _PARTS:
        split: Split | None = getattr(dataset, part)
        if split is not None:
            tensors |= {f"{part}.x": split.x.contiguous(), f"{part}.y": split.y.contiguous()}
    for name in ("subclasses", "groups"):
        if (rows := getattr(dataset, name)) is not None:
            tensors[name] = torch.from_numpy(rows).contiguous()
    metadata = _Metadata(**{each.name: getattr(dataset, each.name) for each in fields(_Metadata)})
    save_file(tensors, path, {"dataset": _METADATA.dump_json(metadata).decode()})


def read_dataset(path: Path) -> Dataset:
    """Map a dataset written by `write_dataset` into memory. Raises StateError."""
    with _mapping("decoded data", path), safe_open(path, framework="pt") as file:
        metadata = _METADATA.validate_json(file.metadata()["dataset"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    train, test, public = (
        Split(tensors[f"{part}.x"], tensors[f"{part}.y"]) if f"{part}.x" in tensors else None
        for part in _PARTS
    )
    assert train is not None
    subclasses, groups = (
        tensors[name].numpy() if name in tensors else None for name in ("subclasses", "groups")
    )
    return Dataset(
        **vars(metadata),
        train=train,
        test=test,
        public=public,
        subclasses=subclasses,
        groups=groups,
    )
