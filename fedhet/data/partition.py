"""Partition a training set among clients, and split off their test sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedhet.base.errors import DataError
from fedhet.base.seeding import derive, numpy_rng
from fedhet.data.spec import Dataset, DataSpec, Index, global_random_kept

_DRAWS = 20  # a partition that fails its conditions is redrawn with the next seed
_DIRICHLET_DRAWS = 11
"""Number of Dirichlet draws from one seed, as in flwr-datasets."""
_LEAST_TRAIN = 2


@global_random_kept()
def partition(dataset: Dataset, spec: DataSpec) -> tuple[Index, ...]:
    """Return each client's row numbers in the training set, sorted and disjoint.

    All rows are assigned, except the remainder of `shards` (fewer rows than there are shards, all
    of one size) and, under `classes`, classes that no client drew; that happens only if clients x
    classes-per-client is barely as large as the number of classes. `superclasses` is drawn by
    `fedhet.data.superclass.assign`. Raises DataError for conditions that no draw meets.
    """
    if dataset.parts is not None:
        return _given(spec, dataset.parts)
    if dataset.groups is not None:
        return _by_group(spec, dataset.groups)
    labels = dataset.train.y.numpy()
    _check_possible(spec, len(labels), len(np.unique(labels)))
    return _best_draw(spec, labels)


def is_natural(dataset: Dataset) -> bool:
    """Return whether the data itself says which client a sample is of."""
    return dataset.parts is not None or dataset.groups is not None


def hold_out(count: int, spec: DataSpec, name: str) -> tuple[Index, Index]:
    """Draw the test split of `count` rows of client `name`: (training, test) positions, sorted.

    It is empty if the run has none (`test_fraction` 0).
    """
    test = max(1, round(spec.test_fraction * count)) if spec.test_fraction else 0
    if count - test < _LEAST_TRAIN:
        raise DataError(
            f"{name}: has {count} samples; with data.test-fraction = {spec.test_fraction} at least "
            f"{_LEAST_TRAIN} to train and 1 to test on are needed: give it more (data.min-samples) "
            "or lower data.test-fraction"
        )
    places = numpy_rng(spec.seed, "split", name).permutation(count)
    return np.sort(places[test:]), np.sort(places[:test])


def _best_draw(spec: DataSpec, labels: Index) -> tuple[Index, ...]:
    """Return the first draw that gives every client enough and, under `classes`, every class.

    If no draw covers every class that the clients could hold, the one with the most classes.
    """
    wanted = len(np.unique(labels))
    if spec.partition == "classes":
        wanted = min(wanted, spec.clients * spec.classes_per_client)
    best: tuple[Index, ...] = ()
    most, fault = 0, ""
    for attempt in range(_DRAWS):
        try:
            drawn = _draw(spec, labels, attempt)
        except ValueError as error:
            fault = str(error)
            continue
        smallest = min(map(len, drawn))
        if smallest < spec.min_samples:
            fault = f"the smallest client has {smallest}"
            continue
        held = len(np.unique(labels[np.concatenate(drawn)]))
        if held > most:
            best, most = drawn, held
        if held >= wanted:
            break
    if not best:
        raise DataError(_impossible(spec, len(labels), fault))
    return best


def _given(spec: DataSpec, parts: tuple[tuple[int, int], ...]) -> tuple[Index, ...]:
    """Return the rows of clients given as files: one contiguous range each."""
    if spec.clients != len(parts):
        raise DataError(
            f"clients = {spec.clients}: must be {len(parts)}, as {spec.dataset} holds "
            f"{len(parts)} clients"
        )
    ends = np.cumsum([sum(part) for part in parts])
    return tuple(np.arange(end - sum(part), end) for part, end in zip(parts, ends, strict=True))


def _by_group(spec: DataSpec, groups: Index) -> tuple[Index, ...]:
    """Return the rows of the persons or sites with the most samples, in the order of names."""
    counts = np.bincount(groups)
    largest = np.argsort(-counts, kind="stable")
    enough = int((counts >= spec.min_samples).sum())
    if spec.clients > enough:
        whose = f"data.by = {spec.by!r}" if spec.by else spec.dataset
        raise DataError(
            f"clients = {spec.clients}: must be at most {enough}; so many of the {len(counts)} "
            f"that {whose} names have data.min-samples = {spec.min_samples} or more"
        )
    return tuple(np.flatnonzero(groups == group) for group in np.sort(largest[: spec.clients]))


def _draw(spec: DataSpec, labels: Index, attempt: int) -> tuple[Index, ...]:
    """Draw each client's rows. Raises ValueError if the draw fails."""
    order = numpy_rng(spec.seed, "partition", attempt, "order").permutation(len(labels))
    rng = np.random.default_rng(derive(spec.seed, "partition", attempt))
    shuffled = labels[order]
    if spec.partition == "iid":
        drawn: Sequence[Index] = np.array_split(np.arange(len(labels)), spec.clients)
    elif spec.partition == "dirichlet":
        drawn = _dirichlet(shuffled, spec, rng)
    elif spec.partition == "shards":
        drawn = _shards(shuffled, spec, rng)
    else:
        drawn = _some_classes(shuffled, spec, rng)
    return tuple(np.sort(order[rows]) for rows in drawn)


# The same draws as flwr-datasets 0.6, on labels alone: its import takes longer than a small run.


def _dirichlet(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Split each class between the clients by fractions from a Dirichlet distribution.

    Yurochkin et al., *Bayesian Nonparametric Federated Learning of Neural Networks*, ICML 2019.
    """
    for _ in range(_DIRICHLET_DRAWS):
        parts: list[list[Index]] = [[] for _ in range(spec.clients)]
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            fractions = rng.dirichlet(np.full(spec.clients, spec.alpha))
            ends = (np.cumsum(fractions) * len(rows)).astype(int)[:-1]
            for part, some in zip(parts, np.split(rows, ends), strict=True):
                part.append(some)
        drawn = [np.concatenate(part) for part in parts]
        if min(map(len, drawn)) >= spec.min_samples:
            return drawn
    raise ValueError("a client has too few samples")


def _shards(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Sort the rows by class, cut them into shards of one size, and deal the shards at random.

    McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
    AISTATS 2017.
    """
    count = spec.clients * spec.shards
    size = len(labels) // count
    by_class = np.argsort(labels, kind="stable")
    dealt = rng.permutation(len(labels) // size)[:count].reshape(spec.clients, spec.shards)
    return [
        np.concatenate([by_class[shard * size : (shard + 1) * size] for shard in own])
        for own in dealt
    ]


def _some_classes(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Draw `data.classes-per-client` classes for each client; a class's clients share its rows.

    Li et al., *Federated Learning on Non-IID Data Silos: An Experimental Study*, ICDE 2022.
    """
    classes = np.unique(labels)
    held = [
        rng.choice(classes, size=spec.classes_per_client, replace=False)
        for _ in range(spec.clients)
    ]
    parts: list[list[Index]] = [[] for _ in held]
    for label in classes:
        owners = [part for part, own in zip(parts, held, strict=True) if label in own]
        rows = np.flatnonzero(labels == label)
        if len(owners) > len(rows):
            raise ValueError(
                f"class {label} has {len(rows)} samples, and {len(owners)} clients drew it"
            )
        if owners:
            for part, some in zip(owners, np.array_split(rows, len(owners)), strict=True):
                part.append(some)
    return [np.concatenate(part) for part in parts]


def _check_possible(spec: DataSpec, rows: int, classes: int) -> None:
    """Raise DataError for conditions that no draw can satisfy."""
    needed = {"data.min-samples": (spec.min_samples, "samples")}
    if spec.partition == "shards":
        needed["data.shards"] = (spec.shards, "shards")
    for setting, (count, what) in needed.items():
        if (total := spec.clients * count) > rows:
            raise DataError(
                f"clients = {spec.clients} with {setting} = {count} need {total} {what}, "
                f"{spec.dataset} has {rows} samples; lower either"
            )
    if spec.partition == "classes" and spec.classes_per_client > classes:
        raise DataError(
            f"data.classes-per-client = {spec.classes_per_client}: must be at most {classes}, the "
            f"number of classes of {spec.dataset}"
        )


def _impossible(spec: DataSpec, rows: int, fault: str) -> str:
    setting, value, verb = {
        "iid": ("", 0, ""),
        "dirichlet": ("data.alpha", spec.alpha, "raise"),
        "shards": ("data.shards", spec.shards, "lower"),
        "classes": ("data.classes-per-client", spec.classes_per_client, "raise"),
    }[spec.partition]
    own, change = (f"{setting} = {value}, ", f"{verb} {setting}, or ") if setting else ("", "")
    return (
        f"data.partition = {spec.partition!r} ({own}data.min-samples = {spec.min_samples}, "
        f"clients = {spec.clients}): {_DRAWS} draws from {rows} samples failed ({fault}); "
        f"{change}lower data.min-samples or clients"
    )
