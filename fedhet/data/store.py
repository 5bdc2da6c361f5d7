"""Data of a run: the dataset, its partition among clients, and the public set.

`RunData` reads each part once. `load` reads the dataset, `fedhet.data.partition` partitions it, and
`fedhet.data.public` draws the public set. In a simulation with several processes, the main process
writes the decoded data to a directory, from which the workers map it (`fedhet.data.shared`).
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from fedhet.base.errors import (
    DataError,
    FedhetError,
    SettingsError,
    StateError,
    one_line,
)
from fedhet.base.seeding import numpy_rng
from fedhet.data.dataset import ClientData, Dataset, Split
from fedhet.data.partition import (
    Assignment,
    assign,
    concatenate_splits,
    is_natural,
    merge_classes,
    partition,
    split_labels,
    split_rows,
    with_wrong_labels,
)
from fedhet.data.public import (
    DERIVED,
    GENERATED,
    check_labels,
    check_no_overlap,
    check_samples,
    draw_public,
    public_digest,
    public_source,
)
from fedhet.data.shared import SharedCopy
from fedhet.data.sources import SOURCES, find_source, read_source
from fedhet.data.spec import (
    FIXED_SEED,
    DataSpec,
    Index,
    no_test_error,
    stratified,
)
from fedhet.data.words import plain_form
from fedhet.settings.run import RunSettings
from fedhet.tasks import Classification
from fedhet.wire.identity import ClientInfo, client_name

T = TypeVar("T")
_DATASET, _PUBLIC_SOURCE = 0, 1
"""Numbers of the datasets in a shared copy."""
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
        self.spec, self._digest = spec, digest
        self._copy = SharedCopy(shared) if shared is not None else None
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
        return self.once("dataset", self._read_unchanged)

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

    def common_test_of(self, client: ClientInfo) -> Split | None:
        """Return the common test set, or None if it does not exist or has another kind or shape.

        For tasks other than classification, the digest of the client's format must also match,
        because the scores would otherwise have another unit. A mismatch is logged.
        """
        try:
            dataset = self.dataset
        except FedhetError as error:
            # The data of the sites may be missing on the server, or have another task.
            if not (client.own_data or isinstance(error, DataError)):
                raise
            return None
        form = dataset.format
        if (form.kind, form.shape) != (client.kind, client.shape):
            return None
        is_scaled = not isinstance(form.task, Classification)
        if dataset.test is not None and is_scaled and client.order not in ("", form.digest):
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
        format = self.dataset.format
        return format.task.strata(self.dataset.train.y, format.classes)

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
        parts, name = self.dataset.parts, client_name(index, clients)
        own_tests = parts[index][1] if parts is not None else 0
        return split_rows(self.dataset, self.partition()[index], self.spec, name, own_tests)

    def client(self, index: int) -> ClientData:
        """Return the data of client `index`. Raises DataError if it has no test samples."""
        dataset, space = self.dataset, self.label_space(index)
        train, test, validation = self._splits(index)
        name, common = client_name(index, self.spec.clients), dataset.test
        if common is not None and len(space) < len(dataset.format.classes):
            rows = torch.isin(common.y, torch.tensor(space)).nonzero().flatten()
            common = common.take(rows) if len(rows) else None
        if not len(test) and common is None:
            raise no_test_error(name, self.spec)
        return ClientData(name, dataset.format, train, test, common, space, validation)

    def pooled_parts(self) -> tuple[Split, Split]:
        """Concatenate the labeled and the unlabeled training samples of all training clients."""
        spec, pairs = self.spec, []
        for index in spec.training_clients:
            train = self._splits(index)[0]
            name = client_name(index, spec.clients)
            pairs.append(split_labels(train, spec.labeled_alpha, spec.min_labeled, spec.seed, name))
        labeled, unlabeled = map(concatenate_splits, zip(*pairs, strict=True))
        return labeled, unlabeled

    def public_set(self, client: ClientInfo, *, labeled: bool) -> Split:
        """Return the public samples.

        Args:
            client: Description of a client, whose samples determine the required format.
            labeled: Whether the labels are used.

        Raises:
            DataError: If the public set has another format.
            SettingsError: If the labels are used, but the public set has none.
        """
        if labeled and self.spec.public_dataset == GENERATED:
            raise SettingsError(
                f"data.public-dataset must have labels for this method, got {GENERATED!r}. "
                "Use another dataset, or data.public-fraction."
            )
        check_samples(self._public, client)
        if labeled:
            check_labels(self._public, client)
        return self._public.train

    def public_digest(self, client: ClientInfo) -> str:
        """Return a digest of the public samples and their labels; raises errors as `public_set`."""
        public = self.public_set(client, labeled=False)
        return self.once("public digest", lambda: public_digest(public))

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
        forms: dict[str, str] = {}
        for owner in self.dataset.group_names:
            if (other := forms.setdefault(plain_form(owner), owner)) != owner:
                LOG.warning(
                    "%s: the owners %r and %r are different clients. If they are the same owner, "
                    "correct the data.", spec.dataset, other, owner,
                )  # fmt: skip
                break
        owners = {*self.owners().values()}
        if owners and (unused := [n for n in self.dataset.group_names if n not in owners]):
            more = f", and {len(unused) - MAX_NAMED} more" if len(unused) > MAX_NAMED else ""
            LOG.warning(
                "clients = %d excludes the %d of %d owners with the fewest samples in %s: %s%s",
                spec.clients, len(unused), len(self.dataset.group_names), spec.dataset,
                one_line(", ".join(unused[:MAX_NAMED])), more,
            )  # fmt: skip
        if spec.public_dataset or spec.public_fraction:
            check_samples(self._public, self.dataset.format)
            if spec.public_dataset not in ("", *DERIVED):
                check_no_overlap(self._public.train, self.dataset.train, spec.dataset)

    def share(self, folder: Path) -> None:
        """Write the data to a directory, from which other processes can map it.

        Raises StateError if a file cannot be written.
        """
        datasets = {_DATASET: self.dataset} if _is_copied(self.spec) else {}
        if (source := public_source(self.spec)) and _is_copied(source):
            datasets[_PUBLIC_SOURCE] = self._source
        parts = (part for index in range(self.spec.clients) for part in self.split_rows(index))
        SharedCopy(folder).write(datasets, self.dataset.train.x, self.partition(), parts)

    @property
    def _source(self) -> Dataset:
        """Dataset from which the public samples are drawn, if it differs from `dataset`."""
        spec = public_source(self.spec)
        assert spec is not None
        return self.once("source", lambda: self._read(spec, _PUBLIC_SOURCE, min_classes=1))

    @property
    def _public(self) -> Dataset:
        """Public set, as the training set of a dataset."""
        return self.once(
            "public", lambda: draw_public(self.spec, lambda: self.dataset, lambda: self._source)
        )

    def _read(self, spec: DataSpec, number: int, *, min_classes: int = 2) -> Dataset:
        if self._copy is None or not _is_copied(spec):
            return load(spec, min_classes=min_classes)
        return self._copy.dataset(number)

    def _read_unchanged(self) -> Dataset:
        dataset = self._read(self.spec, _DATASET)
        if self._digest and dataset_digest(dataset) != self._digest:
            raise StateError(
                f"data.dataset = {self.spec.dataset!r}: the data has changed since the run "
                "started, so its clients would get other training and test samples. Restore the "
                "data, or start a new run."
            )
        return dataset

    @property
    def _has_label_spaces(self) -> bool:
        return self.spec.partition == "superclasses" and not is_natural(self.dataset)

    @property
    def _assignment(self) -> Assignment:
        return self.once("assignment", lambda: assign(self.dataset, self.spec))

    def _partition(self) -> tuple[Index, ...]:
        if self._copy is not None:
            return self._copy.partition()
        if self._has_label_spaces:
            return self._assignment.rows
        return partition(self.dataset, self.spec)

    def _splits(self, index: int) -> list[Split]:
        """Return a client's training, test, and validation samples.

        The samples are copies, or views of the shared file. Training labels include those that
        `data.label-noise` makes wrong.
        """
        parts, train, spec = self.split_rows(index), self.dataset.train, self.spec
        if self._copy is None:
            splits = [train.take(part) for part in parts]
        else:
            x = self.once("samples", self._copy.samples)
            counts = map(len, self.partition())
            start = self.once("starts", lambda: (0, *accumulate(counts)))[index]
            ends = list(accumulate(map(len, parts), initial=start))
            splits = [
                Split(x[begin:end], train.y[torch.from_numpy(part)])
                for begin, end, part in zip(ends, ends[1:], parts, strict=False)
            ]
        name, space = client_name(index, spec.clients), self.label_space(index)
        noisy = with_wrong_labels(splits[0], spec.label_noise, space, spec.seed, name)
        return [noisy, *splits[1:]]

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


def load(spec: DataSpec, *, min_classes: int = 2) -> Dataset:
    """Read the dataset of a simulation, select its samples, and set public samples aside.

    Raises DataError if its files are invalid, or if it has fewer than `min_classes` classes.
    """
    dataset, source = read_source(spec), find_source(spec.dataset)[0]
    if spec.by and dataset.groups is None:
        supported = ", ".join(each.owners for each in SOURCES.values() if each.owners)
        raise SettingsError(
            f"data.by is unsupported with data.dataset = {spec.dataset!r}, expected one of "
            f"{supported}"
        )
    y = dataset.train.y
    present = torch.unique(y).tolist() if y.ndim == 1 else []
    if dataset.test is not None and present and source.name != "next-token":
        unseen = sorted({*torch.unique(dataset.test.y).tolist()} - {*present})
        if unseen:
            LOG.warning(
                "%s: %d classes have test samples but no training samples, so no client can learn "
                "them: %s",
                spec.dataset, len(unseen),
                one_line(", ".join(dataset.format.classes[label] for label in unseen))[:200],
            )  # fmt: skip
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
    count = len(present) or len(dataset.format.classes)
    if min(count, len(dataset.format.classes)) < min_classes:
        raise DataError(
            f"{spec.dataset}: expected at least {min_classes} classes, got {count} in the training "
            "samples"
        )
    return dataset


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
