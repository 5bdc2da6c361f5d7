"""Reads a dataset, and cuts it down to what a run uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fedhet.base.errors import DataError, SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.data.sources import SOURCES, find_source
from fedhet.data.spec import FIXED_SEED, Dataset, DataSpec, global_random_kept, stratified
from fedhet.data.superclass import merged


@global_random_kept()
def load(spec: DataSpec, *, least_classes: int = 2) -> Dataset:
    """Read and decode the dataset that `spec` names.

    Raises DataError for a fault of its files, or if it has fewer classes than `least_classes`.
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
        dataset = dataset.keeping(dataset.train.rows(spec.max_samples, rng))
    if spec.superclasses:
        dataset = merged(dataset, spec.superclasses)
    dataset = _keep_public(dataset, spec)
    if dataset.test is not None:
        rng = numpy_rng(FIXED_SEED, "max-test-samples")
        dataset = replace(dataset, test=dataset.test.subset(spec.max_test_samples, rng))
    if (count := len(dataset.classes)) < least_classes:
        raise DataError(f"{spec.dataset}: has {count} class, at least {least_classes} are needed")
    return dataset


def _keep_public(dataset: Dataset, spec: DataSpec) -> Dataset:
    """Move the public share out of the training set, stratified by class."""
    if not spec.public_fraction:
        return dataset
    if dataset.parts is not None:
        raise SettingsError(
            f"data.public-fraction = {spec.public_fraction}: must be 0 with data.dataset = "
            f"{spec.dataset!r}, whose files are whole clients; give 'data.public-dataset'"
        )
    labels = dataset.train.y.numpy()
    count = max(1, round(spec.public_fraction * len(labels)))
    public = stratified(labels, count, numpy_rng(spec.seed, "public"))
    owned = np.setdiff1d(np.arange(len(labels)), public)
    return replace(dataset.keeping(owned), public=dataset.train.take(public))
