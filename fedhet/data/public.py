"""The public set: data that no client owns, available to the server and to every client."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.data.sources import find_source
from fedhet.data.spec import Dataset, DataSpec, Split, stratified
from fedhet.kinds import KINDS, Shape, described, kind_of

GENERATED = "generated"
"""The `public-dataset` that is generated from the training set, as its kind of samples says."""
UNUSED = "unused"
"""The `public-dataset` of the training rows that `data.max-samples` leaves out."""
MADE_HERE = (GENERATED, UNUSED)
"""Values of `public-dataset` that name no other dataset."""


def refuse_unlabelled_public(spec: DataSpec) -> None:
    """Raise SettingsError if the public samples have no labels."""
    if spec.public_dataset == GENERATED:
        raise SettingsError(
            f"setting 'data.public-dataset' = {GENERATED!r} is not allowed: its rows have no "
            "labels, which this method learns from; use another dataset, or 'data.public-fraction'"
        )


def check_public(public: Dataset, shape: Shape, classes: int | None) -> None:
    """Raise DataError unless public samples have `shape` and, unless None, `classes` classes."""
    if public.shape != shape:
        raise DataError(
            f"data.public-dataset {public.name!r}: samples have {described(public.shape)}, "
            f"the clients' {described(shape)}"
        )
    if classes not in (None, len(public.classes)):
        raise DataError(
            f"data.public-dataset {public.name!r}: has {len(public.classes)} classes, "
            f"the clients' data {classes}"
        )


def refuse_overlap(public: Split, own: Split, owner: str) -> None:
    """Raise DataError if the public set contains any sample of `own`, however stored."""
    if public.x.dtype != own.x.dtype:
        public, own = public.scaled(), own.scaled()
    seen = {_digest(public, row) for row in range(len(public))}
    shared = sum(_digest(own, row) in seen for row in range(len(own)))
    if shared:
        raise DataError(
            f"public data: {shared} of {len(own)} samples of {owner} are in it too; "
            "public data must not belong to a client: to set a part of the clients' dataset apart, "
            "use 'data.public-fraction'"
        )


def _digest(split: Split, row: int) -> bytes:
    return hashlib.blake2b(
        split.x[row].cpu().contiguous().numpy().tobytes(), digest_size=16
    ).digest()


def public_dataset(
    spec: DataSpec, own: Callable[[], Dataset], source: Callable[[], Dataset]
) -> Dataset:
    """Return a dataset whose `train` is the public set.

    `own` returns the run's dataset, `source` that of `public_source`. Raises SettingsError if the
    settings name no public data, or none is left.
    """
    if spec.public_dataset == GENERATED:
        return _generated(spec, own())
    if spec.public_dataset == UNUSED:
        return _unused(spec, source())
    if spec.public_dataset:
        # No effect if the reader has already applied the limit.
        rng = numpy_rng(spec.seed, "public-samples")
        found = source()
        return replace(found, train=found.train.subset(spec.public_samples, rng), test=None)
    if (kept := own().public) is None:
        rule = "give 'data.public-dataset' or 'data.public-fraction'"
        raise SettingsError(f"the run has no public data: {rule}")
    return replace(own(), train=kept, test=None, public=None)


def _generated(spec: DataSpec, dataset: Dataset) -> Dataset:
    """Return generated samples like the dataset's; their labels have no meaning."""
    size, kind = spec.public_samples, kind_of(dataset.shape)
    if size < 1:
        raise SettingsError(
            f"data.public-samples = 0: must be at least 1 with data.public-dataset = {GENERATED!r}"
        )
    if kind.generated is None:
        able = " and ".join(each.plural for each in KINDS.values() if each.generated)
        raise SettingsError(
            f"data.public-dataset = {GENERATED!r} is for {able}; samples of {dataset.name!r} have "
            f"{described(dataset.shape)}"
        )
    rng = numpy_rng(spec.seed, "public", "generated")
    x = kind.generated(dataset.train.x.numpy(), dataset.columns, size, rng)
    made = Split(torch.from_numpy(x), torch.zeros(size, dtype=torch.int64))
    return replace(dataset, train=made, test=None, subclasses=None)


def _unused(spec: DataSpec, whole: Dataset) -> Dataset:
    """Return the training rows that `max-samples` leaves out, or `public-samples` of these.

    Raises SettingsError if there are none.
    """
    labels = whole.train.y.numpy() if whole.subclasses is None else whole.subclasses
    # The same draw as that of the rows that are used.
    used = stratified(labels, spec.max_samples, numpy_rng(spec.seed, "max-samples"))
    rows = np.setdiff1d(np.arange(len(labels)), used)
    if not spec.max_samples or not len(rows):
        raise SettingsError(
            f"data.public-dataset = {UNUSED!r}: 'data.max-samples' = {spec.max_samples} leaves out "
            f"none of the {len(labels)} training samples of {spec.dataset}; it must be lower, "
            "and above 0"
        )
    left = whole.train.take(rows).subset(
        spec.public_samples, numpy_rng(spec.seed, "public-samples")
    )
    return replace(whole, train=left, test=None, subclasses=None)


def public_source(spec: DataSpec) -> DataSpec | None:
    """Return the spec of the dataset that public samples are taken from, if it is another one."""
    if spec.public_dataset == UNUSED:
        return spec.but(max_samples=0)
    if spec.public_dataset in ("", GENERATED):
        return None
    # Files that may be whole clients are read whole, and a part of the samples is taken later.
    whole = find_source(spec.public_dataset, "data.public-dataset")[0].whole_clients
    return spec.but(
        dataset=spec.public_dataset,
        max_samples=0 if whole else spec.public_samples,
        by="",
        superclasses=(),
        public_dataset="",
        public_fraction=0.0,
    )
