"""Data of a run: the dataset, its partition among clients, and the public set.

`RunData` reads each part once. `load` reads the dataset, and `fedhet.data.partition` partitions it.
The public set belongs to no client and is available to the server and all clients. In a simulation,
the main process writes the decoded data to a directory. The workers map it into memory, so they
share one copy and do not decode it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
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

from fedhet.base.disk import Folder, map_npy
from fedhet.base.errors import (
    DataError,
    SettingsError,
    StateError,
    error_reason,
    one_line,
)
from fedhet.base.seeding import numpy_rng
from fedhet.data.dataset import ClientData, Dataset, Format, Split
from fedhet.data.partition import (
    Assignment,
    assign,
    concatenate_splits,
    hold_out,
    hold_out_validation,
    is_natural,
    merge_classes,
    partition,
    split_labels,
)
from fedhet.data.sources import SOURCES, find_source
from fedhet.data.spec import (
    FIXED_SEED,
    DataSpec,
    Index,
    no_test_error,
    preserve_global_rng,
    stratified,
)
from fedhet.kinds import KINDS, Shape
from fedhet.settings.run import RunSettings
from fedhet.tasks import Classification, find_task
from fedhet.wire.identity import client_name

T = TypeVar("T")
LOG = logging.getLogger("fedhet")
MAX_DIGESTED = 2**28
"""Maximum number of bytes of samples in the digest of a dataset."""
MAX_NAMED = 10
"""Maximum number of owners named in a message."""


class RunData:
    """Lazily loaded data of one run: the dataset, the clients' parts, and the public set.

    The process that runs a federation creates one instance and passes it to the server and to all
    clients that it trains.
    """

    def __init__(self, spec: DataSpec, shared: Path | None = None, digest: str = "") -> None:
        """Create the store without reading any data.

        Args:
            spec: Data settings of the run.
            shared: Directory from which to map the data. Another process must write the data there
                with `share` before the first access.
            digest: Digest of the dataset with which the run started, or "" if it is unknown.
        """
        self.spec = spec
        self._shared, self._digest = shared, digest
        self._parts: dict[str, Any] = {}
        self._lock = threading.RLock()

    @classmethod
    def for_run(cls, run: RunSettings, shared: Path | None = None, digest: str = "") -> RunData:
        """Create the store for a run."""
        return cls(DataSpec.for_run(run), shared, digest)

    def forget(self) -> None:
        """Free all data; it is read again on the next access."""
        with self._lock:
            self._parts.clear()

    @property
    def dataset(self) -> Dataset:
        """Decoded dataset.

        Raises DataError if it has fewer than two classes, and StateError if it has changed since
        the run started, because training samples could then become test samples.
        """
        return self.once("dataset", self._read)

    @property
    def digest(self) -> str:
        """Digest of the dataset, which determines the samples of each client."""
        return self._digest or dataset_digest(self.dataset)

    def partition(self) -> tuple[Index, ...]:
        """Return each client's row numbers in `dataset.train`, sorted and disjoint."""
        return self.once("partition", self._partition)

    @property
    def common_test(self) -> Split | None:
        """Common test set, or None if it does not exist."""
        return self.dataset.test

    def common_test_of(self, kind: str, shape: Shape, order: str = "") -> Split | None:
        """Return the common test set, or None if it does not exist or has another kind or shape.

        For tasks other than classification, the clients' digest `order` (see `Format.digest`) must
        also match, because the scores would otherwise have another unit. A mismatch is logged.
        """
        try:
            dataset = self.dataset
        except DataError:  # The sites have their own data, so the server may lack the dataset.
            return None
        described = dataset.format
        if (described.kind, described.shape) != (kind, shape):
            return None
        is_scaled = not isinstance(described.task, Classification)
        if dataset.test is not None and is_scaled and order not in ("", described.digest):
            LOG.warning(
                "data.dataset = %s: the schema of the targets differs from the clients' schema, so "
                "the server does not use its test set",
                self.spec.dataset,
            )
            return None
        return dataset.test

    def label_space(self, index: int) -> tuple[int, ...]:
        """Return the label space of client `index`, ascending.

        By default, the label space contains all outputs.
        """
        if self._has_label_spaces:
            return self._assignment.spaces[index]
        return tuple(range(self.dataset.format.outputs))

    def label_counts(self) -> dict[str, list[int]]:
        """Return the number of rows per class, or per group of targets, by client name."""
        names, groups = self.strata()
        return {
            client_name(k, self.spec.clients): np.bincount(
                groups[rows], minlength=len(names)
            ).tolist()
            for k, rows in enumerate(self.partition())
        }

    def test_samples(self) -> dict[str, int]:
        """Return the number of test samples by protocol, without protocols that have none.

        The numbers for "personal" and "validation" are sums over all clients.
        """
        rows = [self.split_rows(index) for index in range(self.spec.clients)]
        common = self.common_test
        counts = {
            "personal": sum(len(test) for _, test, _ in rows),
            "common": 0 if common is None else len(common),
            "validation": sum(len(validation) for *_, validation in rows),
        }
        return {protocol: count for protocol, count in counts.items() if count}

    def strata(self) -> tuple[tuple[str, ...], Index]:
        """Return the names of the classes (or target groups), and the group [N] of each sample."""
        described = self.dataset.format
        return described.task.strata(self.dataset.train.y, described.classes)

    def owners(self) -> dict[str, str]:
        """Return the owner (person or site) of each client, by client name, or {} if unknown."""
        groups, names = self.dataset.groups, self.dataset.group_names
        if groups is None or not names:
            return {}
        return {
            client_name(k, self.spec.clients): names[groups[rows[0]]]
            for k, rows in enumerate(self.partition())
        }

    def split_rows(self, index: int) -> tuple[Index, Index, Index]:
        """Return client `index`'s training, test, and validation rows in `dataset.train`."""
        clients = self.spec.clients
        if not 0 <= index < clients:
            raise SettingsError(f"client index must be from 0 to {clients - 1}, got {index}")
        rows, parts = self.partition()[index], self.dataset.parts
        name = client_name(index, clients)
        if parts is not None and parts[index][1]:
            train, test = rows[: parts[index][0]], rows[parts[index][0] :]
        else:
            train, test = (rows[part] for part in hold_out(len(rows), self.spec, name))
        if not self.spec.validation:
            return train, test, rows[:0]
        strata = self.dataset.format.strata(self.dataset.train.y[torch.from_numpy(train)])
        own, validation = hold_out_validation(strata, self.spec, name)
        return train[own], test, train[validation]

    def client(self, index: int) -> ClientData:
        """Return the data of client `index`. Raises DataError if it has no test samples."""
        dataset, space = self.dataset, self.label_space(index)
        train, test, validation = self._samples(index)
        name = client_name(index, self.spec.clients)
        common = dataset.test
        if common is not None and len(space) < len(dataset.format.classes):
            rows = torch.isin(common.y, torch.tensor(space)).nonzero().flatten()
            common = common.take(rows) if len(rows) else None
        if not len(test) and common is None:
            raise no_test_error(name, self.spec)
        held_out = validation if len(validation) else None
        return ClientData(name, dataset.format, train, test, common, space, held_out)

    def pooled_parts(self) -> tuple[Split, Split]:
        """Concatenate the labeled and the unlabeled training samples of all training clients."""
        spec, pairs = self.spec, []
        for index in spec.training_clients:
            train = self.dataset.train.take(self.split_rows(index)[0])
            name = client_name(index, spec.clients)
            pairs.append(split_labels(train, spec.labeled_alpha, spec.min_labeled, spec.seed, name))
        labeled, unlabeled = map(concatenate_splits, zip(*pairs, strict=True))
        return labeled, unlabeled

    def public_set(self, kind: str, shape: Shape, classes: int | None, order: str = "") -> Split:
        """Return the public samples.

        Args:
            kind: Required sample kind.
            shape: Required sample shape.
            classes: Required number of classes or outputs; None = the labels are not used.
            order: Required digest of the classes and the schema; see `Format.digest`. It is
                checked only for tasks other than classification, because the schema scales their
                targets.

        Raises:
            DataError: If the public set has another kind, shape, or number of classes.
            SettingsError: If the labels are used, but the public set has none.
        """
        if classes is not None and self.spec.public_dataset == GENERATED:
            raise SettingsError(
                f"data.public-dataset must have labels for this method, got {GENERATED!r}. "
                "Use another dataset, or data.public-fraction."
            )
        public = self.once("public", self._read_public)
        described, where = public.format, f"data.public-dataset {public.name!r}"
        if (described.kind, described.shape) != (kind, shape):
            got = KINDS[described.kind].describe(described.shape)
            rule = KINDS[kind].describe(shape)
            raise DataError(f"{where}: samples must have {rule} as in the clients' data, got {got}")
        if classes not in (None, described.outputs):
            got = f"got {described.outputs}"
            raise DataError(
                f"{where}: expected {classes} {described.task.noun} as in the clients' data, {got}"
            )
        is_scaled = classes is not None and not isinstance(described.task, Classification)
        if is_scaled and order not in ("", described.digest):
            raise DataError(
                f"{where}: targets must have the same names and scale as the clients' targets, got "
                "different names or scales. Set data.public-fraction to use samples of the same "
                "dataset."
            )
        return public.train

    def public_digest(self, kind: str, shape: Shape) -> str:
        """Return a digest of the public samples and their labels; raises errors as `public_set`.

        If the digests of two sites differ, the rows of their predictions belong to other samples.
        """

        def digest() -> str:
            split, found = self.public_set(kind, shape, None), hashlib.blake2b(digest_size=8)
            for values in (split.x, split.y):
                array = values.contiguous().numpy()
                found.update(f"{array.dtype} {array.shape}".encode())
                found.update(array.reshape(-1).view(np.uint8).data)
            return found.hexdigest()

        return self.once("public digest", digest)

    def validate(self) -> None:
        """Check all data before a run starts.

        Raises DataError if data is missing or invalid, and SettingsError if a setting does not
        match the data.
        """
        spec, no_common_test = self.spec, self.common_test is None
        without: list[str] = []
        for index in range(spec.clients):
            _, test, validation = self.split_rows(index)
            if not len(test) and no_common_test:
                raise no_test_error(spec.dataset, spec)
            without += [] if len(validation) else [client_name(index, spec.clients)]
        if spec.validation and len(without) == spec.clients:
            raise DataError(
                f"data.validation-fraction = {spec.validation:g}: no client has enough training "
                "samples for a validation sample. Raise the fraction, or set it to 0."
            )
        if spec.validation and without:
            more = f", and {len(without) - MAX_NAMED} more" if len(without) > MAX_NAMED else ""
            LOG.warning(
                "data.validation-fraction = %g: %d of %d clients have no validation samples, "
                "because they have too few training samples: %s%s",
                spec.validation, len(without), spec.clients, ", ".join(without[:MAX_NAMED]), more,
            )  # fmt: skip
        owners = {*self.owners().values()}
        if owners and (unused := [n for n in self.dataset.group_names if n not in owners]):
            more = f", and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            LOG.warning(
                "clients = %d excludes the %d of %d owners with the fewest samples in %s: %s%s",
                spec.clients, len(unused), len(self.dataset.group_names), spec.dataset,
                one_line(", ".join(unused[:MAX_NAMED])), more,
            )  # fmt: skip
        if spec.public_dataset or spec.public_fraction:
            described = self.dataset.format
            public = self.public_set(described.kind, described.shape, None)
            if spec.public_dataset not in ("", *DERIVED):
                check_no_overlap(public, self.dataset.train, spec.dataset)

    def share(self, folder: Path) -> None:
        """Write the data to a directory, from which other processes can map it.

        Raises StateError if a file cannot be written.
        """
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
                with (written / _SAMPLES).open("wb") as file:  # The samples are ordered by client.
                    np.lib.format.write_array_header_1_0(file, header)
                    for index in range(self.spec.clients):
                        for part in self.split_rows(index):
                            file.write(x[torch.from_numpy(part)].numpy().tobytes())
        except OSError as error:
            fault = f"cannot write the decoded data to {folder}: {error_reason(error)}"
            raise StateError(fault) from None

    @property
    def _source(self) -> Dataset:
        """Dataset from which the public samples are drawn, if it differs from `dataset`."""
        spec = public_source(self.spec)
        assert spec is not None
        return self.once("source", lambda: self._read_or_map(spec, "1", min_classes=1))

    def _read(self) -> Dataset:
        dataset = self._read_or_map(self.spec, "0")
        if self._digest and dataset_digest(dataset) != self._digest:
            raise StateError(
                f"data.dataset = {self.spec.dataset!r}: the data has changed since the run "
                "started, so its clients would get other training and test samples. Restore the "
                "data, or start a new run."
            )
        return dataset

    def _read_or_map(self, spec: DataSpec, name: str, *, min_classes: int = 2) -> Dataset:
        if self._shared is None or not _is_copied(spec):
            return load(spec, min_classes=min_classes)
        return read_dataset(self._shared / f"{name}.safetensors")

    def _read_public(self) -> Dataset:
        """Read the public set as the `train` split of a dataset.

        Raises SettingsError if no public data is configured or available.
        """
        spec = self.spec
        if spec.public_dataset == GENERATED:
            return generate_public(spec, self.dataset)
        if not spec.public_dataset:
            dataset = self.dataset
            if dataset.public is None:
                raise SettingsError(
                    "public data not found. Set data.public-dataset or data.public-fraction."
                )
            return replace(dataset, train=dataset.public, test=None, public=None)
        source, rng = self._source, numpy_rng(spec.seed, "public-samples")
        if spec.public_dataset != UNUSED:
            # Sampling has no effect if the reader has already applied the limit.
            train = source.subset(source.train, spec.public_samples, rng)
            return replace(source, train=train, test=None)
        groups = source.subclasses
        labels = source.format.strata(source.train.y) if groups is None else groups
        # Repeat the draw that selects the training rows, to find the rows that it leaves unused.
        rows = np.setdiff1d(np.arange(len(labels)), spec.draw_samples(labels))
        if not spec.max_samples or not len(rows):
            raise SettingsError(
                f"data.public-dataset = {UNUSED!r}: data.max-samples must be above 0 and below "
                f"{len(labels)}, the number of training samples of {spec.dataset}, got "
                f"{spec.max_samples}"
            )
        unused = source.subset(source.train.take(rows), spec.public_samples, rng)
        return replace(source, train=unused, test=None, subclasses=None)

    @property
    def _has_label_spaces(self) -> bool:
        return self.spec.partition == "superclasses" and not is_natural(self.dataset)

    @property
    def _assignment(self) -> Assignment:
        return self.once("assignment", lambda: assign(self.dataset, self.spec))

    def _partition(self) -> tuple[Index, ...]:
        if self._shared is not None:
            path = self._shared / _PARTITION
            with _mapping("rows of the clients", path):
                tensors = load_file(path)
            return tuple(np.split(tensors["rows"].numpy(), tensors["ends"].numpy()[:-1]))
        if self._has_label_spaces:
            return self._assignment.rows
        return partition(self.dataset, self.spec)

    def _samples(self, index: int) -> list[Split]:
        """Return a client's training, test, and validation samples.

        The samples are copies, or views of the shared file.
        """
        dataset, parts, shared = self.dataset.train, self.split_rows(index), self._shared
        if shared is None:
            return [dataset.take(part) for part in parts]
        with _mapping("samples of the clients", path := shared / _SAMPLES):
            x = self.once("samples", lambda: torch.from_numpy(map_npy(path)))
        counts = map(len, self.partition())
        start = self.once("starts", lambda: (0, *accumulate(counts)))[index]
        ends = list(accumulate(map(len, parts), initial=start))
        return [
            Split(x[begin:end], dataset.y[torch.from_numpy(part)])
            for begin, end, part in zip(ends, ends[1:], parts, strict=False)
        ]

    def once(self, part: str, make: Callable[[], T]) -> T:
        """Return a cached part of the data, created by `make` on the first access. Thread-safe."""
        with self._lock:
            if part not in self._parts:
                self._parts[part] = make()
            value: T = self._parts[part]
            return value


def _is_copied(spec: DataSpec) -> bool:
    """Return whether a dataset has no cache file, so that sharing the dataset requires a copy."""
    return not find_source(spec.dataset)[0].is_mapped


@preserve_global_rng()
def read_source(spec: DataSpec) -> Dataset:
    """Read and decode the dataset `spec.dataset`. All data of simulations and sites is read here.

    Raises DataError if its files are invalid, and SettingsError if the task differs.
    """
    source, place = find_source(spec.dataset)
    dataset = source.read(place, spec)
    if (task := find_task(spec.task)) is not type(dataset.format.task):
        name = dataset.format.task.name
        raise SettingsError(
            f"data.task: expected {name!r}, the task of data.dataset = {spec.dataset!r}, got "
            f"{spec.task!r}. Set data.task to {name}"
            + (f", or use {_OTHER_TASKS}." if task is not Classification else ".")
        )
    return replace(dataset, format=dataset.format.for_run(spec))


def load(spec: DataSpec, *, min_classes: int = 2) -> Dataset:
    """Read the dataset of a simulation, select its samples, and set public samples aside.

    Raises DataError if its files are invalid, or if it has fewer than `min_classes` classes.
    """
    dataset = read_source(spec)
    if spec.by and dataset.groups is None:
        supported = ", ".join(each.owners for each in SOURCES.values() if each.owners)
        raise SettingsError(
            f"data.by is unsupported with data.dataset = {spec.dataset!r}, expected one of "
            f"{supported}"
        )
    if 0 < spec.max_samples < len(dataset.train):  # Some readers have already drawn the samples.
        rows = spec.draw_samples(dataset.format.strata(dataset.train.y))
        dataset = dataset.with_train_rows(rows)
    if spec.superclasses:
        dataset = merge_classes(dataset, spec.superclasses)
    if spec.public_fraction:
        if dataset.parts is not None:
            raise SettingsError(
                f"data.public-fraction must be 0 with data.dataset = {spec.dataset!r}, which has "
                f"one file per client, got {spec.public_fraction}. Set data.public-dataset instead."
            )
        labels = dataset.format.strata(dataset.train.y)
        count = max(1, round(spec.public_fraction * len(labels)))
        public = stratified(labels, count, numpy_rng(spec.seed, "public"))
        owned = np.setdiff1d(np.arange(len(labels)), public)
        dataset = replace(dataset.with_train_rows(owned), public=dataset.train.take(public))
    if dataset.test is not None:
        rng = numpy_rng(FIXED_SEED, "max-test-samples")
        test = dataset.subset(dataset.test, spec.max_test_samples, rng)
        dataset = replace(dataset, test=test)
    min_classes = min(min_classes, dataset.format.task.min_outputs)
    if (count := len(dataset.format.classes)) < min_classes:
        raise DataError(f"{spec.dataset}: expected at least {min_classes} classes, got {count}")
    return dataset


_OTHER_TASKS = (
    "table:PATH, imagefolder:PATH with labels.csv, text:PATH, signal:DIR, npz:DIR, or a Python "
    "function"
)
"""Sources whose targets may be numbers."""
GENERATED = "generated"
"""Value of `public-dataset` for samples generated from the training set (see `Kind.generated`)."""
UNUSED = "unused"
"""Value of `public-dataset` for the training rows that `data.max-samples` excludes."""
DERIVED = (GENERATED, UNUSED)
"""Values of `public-dataset` for samples from the training set instead of another dataset."""


def check_no_overlap(public: Split, private: Split, owner: str) -> None:
    """Raise DataError if the public set contains a sample from `private`."""
    if public.x.dtype != private.x.dtype:
        public, private = public.scaled(), private.scaled()

    def digests(split: Split) -> Iterator[bytes]:
        for row in split.x:
            content = row.cpu().contiguous().numpy().tobytes()
            yield hashlib.blake2b(content, digest_size=16).digest()

    public_digests = set(digests(public))
    shared = sum(digest in public_digests for digest in digests(private))
    if shared:
        raise DataError(
            f"public data must not contain samples of clients, got {shared} of {len(private)} "
            f"samples of {owner}. Use data.public-fraction to reserve a part of the clients' "
            "dataset."
        )


def dataset_digest(dataset: Dataset) -> str:
    """Return a digest of the samples, labels, and owners of a dataset, in order.

    To bound its time, the digest includes only evenly spaced rows of an array above `MAX_DIGESTED`
    bytes. The shapes of all arrays are always included.
    """
    digest = hashlib.blake2b(digest_size=16)

    def add(array: np.ndarray[Any, Any]) -> None:
        step = max(1, -(-array.nbytes // MAX_DIGESTED))
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array[::step]).reshape(-1).view(np.uint8).data)

    for split in (dataset.train, dataset.test, dataset.public):
        digest.update(b"none" if split is None else b"split")
        if split is not None:
            add(split.x.numpy())
            add(split.y.numpy())
    for rows in (dataset.groups, dataset.subclasses):
        digest.update(b"none" if rows is None else b"rows")
        if rows is not None:
            add(rows)
    digest.update(repr((dataset.parts, dataset.group_names, dataset.format.classes)).encode())
    return digest.hexdigest()


def generate_public(spec: DataSpec, dataset: Dataset) -> Dataset:
    """Generate public samples that resemble a dataset; their labels are meaningless."""
    size, kind = spec.public_samples, KINDS[dataset.format.kind]
    if size < 1:
        raise SettingsError(
            f"data.public-samples must be at least 1 with data.public-dataset = {GENERATED!r}, "
            f"got {size}"
        )
    if kind.generated is None:
        supported = " and ".join(each.plural for each in KINDS.values() if each.generated)
        raise SettingsError(
            f"data.public-dataset = {GENERATED!r} supports only {supported}; samples of "
            f"{dataset.name!r} have {kind.describe(dataset.format.shape)}"
        )
    rng = numpy_rng(spec.seed, "public", "generated")
    x = kind.generated(dataset.train.x.numpy(), dataset.columns, size, rng)
    train = Split(torch.from_numpy(x), torch.zeros(size, dtype=torch.int64))
    return replace(dataset, train=train, test=None, subclasses=None)


def public_source(spec: DataSpec) -> DataSpec | None:
    """Return the spec of the dataset from which public samples are drawn, or None.

    The result is None if the samples are a fraction of the training set, or are generated.
    """
    if spec.public_dataset == UNUSED:
        return spec.replace(max_samples=0)
    if spec.public_dataset in ("", GENERATED):
        return None
    # A file may contain all samples of a client, so it is read completely before samples are drawn.
    whole_clients = find_source(spec.public_dataset, "data.public-dataset")[0].whole_clients
    return spec.replace(
        dataset=spec.public_dataset,
        max_samples=0 if whole_clients else spec.public_samples,
        by="",
        superclasses=(),
        public_dataset="",
        public_fraction=0.0,
    )


_PARTITION, _SAMPLES = "partition.safetensors", "samples.npy"
_PARTS = ("train", "test", "public")


@dataclass(frozen=True)
class _Metadata:
    """Fields of a `Dataset`, except its arrays."""

    name: str
    format: Format
    parts: tuple[tuple[int, int], ...] | None
    columns: tuple[int, ...]
    group_names: tuple[str, ...]


_METADATA = TypeAdapter(_Metadata)


@contextlib.contextmanager
def _mapping(what: str, path: Path) -> Iterator[None]:
    """Convert exceptions raised in the block to StateError."""
    try:
        yield
    except Exception as error:  # safetensors raises its own exception type.
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
    """Map a dataset written by `write_dataset` into memory.

    Raises StateError if the file is unreadable or invalid.
    """
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
