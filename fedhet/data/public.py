"""Public set of a run, i.e. samples that belong to no client.

They are a fraction of the training set, the rows that `data.max-samples` excludes, another dataset,
or generated samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.data.dataset import Dataset, Format, Split
from fedhet.data.sources import find_source
from fedhet.data.spec import DataSpec
from fedhet.kinds import KINDS
from fedhet.tasks import Classification
from fedhet.wire.identity import ClientInfo

GENERATED = "generated"
"""Value of `public-dataset` for samples generated from the training set (see `Kind.generated`)."""
UNUSED = "unused"
"""Value of `public-dataset` for the training rows that `data.max-samples` excludes."""
DERIVED = (GENERATED, UNUSED)
"""Values of `public-dataset` for samples from the training set instead of another dataset."""


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


def draw_public(
    spec: DataSpec, dataset: Callable[[], Dataset], source: Callable[[], Dataset]
) -> Dataset:
    """Return the public set as the training set of a dataset.

    Args:
        spec: Data settings of the run.
        dataset: Function that returns the run's dataset.
        source: Function that returns the dataset of `public_source`.

    Raises:
        SettingsError: If no public data is configured or available.
    """
    if spec.public_dataset == GENERATED:
        return _generate(spec, dataset())
    if not spec.public_dataset:
        if (public := dataset().public) is None:
            raise SettingsError(
                "public data not found. Set data.public-dataset or data.public-fraction."
            )
        return replace(dataset(), train=public, test=None, public=None)
    whole, rng = source(), numpy_rng(spec.seed, "public-samples")
    if spec.public_dataset != UNUSED:
        # Sampling has no effect if the reader has already applied the limit.
        train = whole.subset(whole.train, spec.public_samples, rng)
        return replace(whole, train=train, test=None)
    labels = whole.subclasses
    labels = whole.format.strata(whole.train.y) if labels is None else labels
    # Repeat the draw that selects the training rows, to find the rows that it leaves unused.
    rows = np.setdiff1d(np.arange(len(labels)), spec.draw_samples(labels))
    if not spec.max_samples or not len(rows):
        raise SettingsError(
            f"data.public-dataset = {UNUSED!r}: data.max-samples must be above 0 and below "
            f"{len(labels)}, the number of training samples of {spec.dataset}, got "
            f"{spec.max_samples}"
        )
    unused = whole.subset(whole.train.take(rows), spec.public_samples, rng)
    return replace(whole, train=unused, test=None, subclasses=None)


def _generate(spec: DataSpec, dataset: Dataset) -> Dataset:
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


def check_samples(public: Dataset, client: Format | ClientInfo) -> None:
    """Raise DataError unless the public samples have the kind and the shape of a client's data."""
    form = public.format
    if (form.kind, form.shape) != (client.kind, client.shape):
        got = KINDS[form.kind].describe(form.shape)
        rule = KINDS[client.kind].describe(client.shape)
        raise DataError(
            f"data.public-dataset {public.name!r}: samples must have {rule} as in the clients' "
            f"data, got {got}"
        )


def check_labels(public: Dataset, client: ClientInfo) -> None:
    """Compare the labels of the public set with the labels of a client.

    For tasks other than classification, the digests of the formats must also match, because the
    schema scales the targets.

    Raises:
        DataError: If the number of outputs or the scale differs.
    """
    form, where = public.format, f"data.public-dataset {public.name!r}"
    if client.classes != form.outputs:
        raise DataError(
            f"{where}: expected {client.classes} {form.task.noun} as in the clients' data, got "
            f"{form.outputs}"
        )
    is_scaled = not isinstance(form.task, Classification)
    if is_scaled and client.order not in ("", form.digest):
        raise DataError(
            f"{where}: targets must have the same names and scale as the clients' targets, got "
            "different names or scales. Set data.public-fraction to use samples of the same "
            "dataset."
        )


def public_digest(public: Split) -> str:
    """Return a digest of the public samples and their labels.

    If the digests of two sites differ, the rows of their predictions belong to other samples.
    """
    digest = hashlib.blake2b(digest_size=8)
    for values in (public.x, public.y):
        array = values.contiguous().numpy()
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


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
