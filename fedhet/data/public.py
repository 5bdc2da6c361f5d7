"""The public set: data that no client owns, available to the server and to every client."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import lru_cache

import numpy as np

from fedhet.data.datasets import LOCK, load
from fedhet.data.spec import Dataset, DataSpec, Split, stratified
from fedhet.data.tabular import generated
from fedhet.data.texts import generated_texts
from fedhet.errors import DataError, SettingsError
from fedhet.kinds import described, kind_of
from fedhet.seeding import numpy_rng

GENERATED = "generated"
"""The `public-dataset` that is generated: the training set's columns, each permuted."""
UNUSED = "unused"
"""The `public-dataset` of the training rows that `data.max-samples` leaves out."""
MADE_HERE = (GENERATED, UNUSED)
"""Values of `public-dataset` that name no other dataset."""


def public_set(spec: DataSpec, shape: tuple[int, ...], classes: int | None) -> Split:
    """Return the public samples: `public-dataset`, or a part of the training set.

    One copy per process. Raises DataError unless its samples have `shape` and, if its labels are
    used, it has `classes` classes (None: labels are not used), and SettingsError if its labels are
    used and it has none.
    """
    if classes is not None and spec.public_dataset == GENERATED:
        raise SettingsError(
            f"setting 'data.public-dataset' = {GENERATED!r} is not allowed: its rows have no "
            "labels, which this method learns from; use another dataset, or 'data.public-fraction'"
        )
    with LOCK:
        dataset = _public(spec)
    if dataset.shape != shape:
        raise DataError(
            f"data.public-dataset {dataset.name!r}: samples have {described(dataset.shape)}, "
            f"the clients' {described(shape)}"
        )
    if classes not in (None, len(dataset.classes)):
        raise DataError(
            f"data.public-dataset {dataset.name!r}: has {len(dataset.classes)} classes, "
            f"the clients' data {classes}"
        )
    return dataset.train


def refuse_overlap(public: Split, own: Split, owner: str) -> None:
    """Raise DataError if the public set contains any sample of `own`, however stored."""
    if public.x.dtype != own.x.dtype:
        public, own = public.scaled(), own.scaled()
    seen = {_digest(public, row) for row in range(len(public))}
    shared = sum(_digest(own, row) in seen for row in range(len(own)))
    if shared:
        raise DataError(
            f"public data: {shared} of {len(own)} samples of {owner} are in it too; "
            "public data must be nobody's: to set a part of the clients' own dataset apart, "
            "use 'data.public-fraction'"
        )


def _digest(split: Split, row: int) -> bytes:
    return hashlib.blake2b(
        split.x[row].cpu().contiguous().numpy().tobytes(), digest_size=16
    ).digest()


@lru_cache(maxsize=2)
def _public(spec: DataSpec) -> Dataset:
    """Return a dataset whose `train` is the public set."""
    if spec.public_dataset == GENERATED:
        dataset = load(spec)
        if spec.public_samples < 1:
            raise SettingsError(
                f"data.public-samples = 0: must be at least 1 with data.public-dataset = "
                f"{GENERATED!r}"
            )
        make = generated_texts if kind_of(dataset.shape) == "text" else generated
        rows = make(dataset, spec.public_samples, spec.seed)
        return replace(dataset, train=rows, test=None, subclasses=None)
    if spec.public_dataset == UNUSED:
        return _unused(spec)
    if spec.public_dataset:
        dataset = load(_of_public(spec), least_classes=1)
        # No effect if the reader has already applied the limit.
        rng = numpy_rng(spec.seed, "public-samples")
        cut = dataset.train.subset(spec.public_samples, rng)
        return replace(dataset, train=cut, test=None)
    kept = load(spec).public
    if kept is None:
        rule = "give 'data.public-dataset' or 'data.public-fraction'"
        raise SettingsError(f"there is no public data: {rule}")
    return replace(load(spec), train=kept, test=None, public=None)


def _unused(spec: DataSpec) -> Dataset:
    """Return the training rows that `max-samples` leaves out, or `public-samples` of them.

    Raises SettingsError if there are none.
    """
    whole = load(spec.but(max_samples=0))
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
    named = spec.public_dataset not in ("", GENERATED)
    return _of_public(spec) if named else None


def _of_public(spec: DataSpec) -> DataSpec:
    """Return a spec of the dataset that `public-dataset` names."""
    # Files are read whole, subsampled later.
    whole = spec.public_dataset.startswith(("npz:", "signal:"))
    return DataSpec(
        dataset=spec.public_dataset,
        sample_kind=spec.sample_kind,
        data_dir=spec.data_dir,
        download=spec.download,
        image_size=spec.image_size,
        text_column=spec.text_column,
        label_column=spec.label_column,
        tokenizer=spec.tokenizer,
        vocabulary=spec.vocabulary,
        max_tokens=spec.max_tokens,
        max_bytes=spec.max_bytes,
        max_samples=0 if whole else spec.public_samples,
        seed=spec.seed,
    )
