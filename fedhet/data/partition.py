"""Partitions a training set by flwr-datasets' partitioners, and splits off test splits."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from fedhet.data.spec import Dataset, DataSpec, Index, global_random_kept
from fedhet.errors import DataError
from fedhet.seeding import derive, numpy_rng

_DRAWS = 20  # a partition that fails its conditions is redrawn with the next seed
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
            fault = _first_sentence(error)
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
    """Run the partitioner over shuffled rows (IidPartitioner itself does not shuffle)."""
    order = numpy_rng(spec.seed, "partition", attempt, "order").permutation(len(labels))
    partitioner = _partitioner(spec, derive(spec.seed, "partition", attempt))
    partitioner.dataset = _table(label=labels[order], index=order)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about repeated draws; the conditions are checked here
        drawn = [partitioner.load_partition(k) for k in range(spec.clients)]
    return tuple(np.sort(part.with_format("numpy")["index"][:]) for part in drawn)


def _table(**columns: Index) -> Any:
    """Return an in-memory Hugging Face dataset of these columns."""
    import datasets

    class Table(datasets.Dataset):  # type: ignore[misc]
        """Returns columns as lists, as the partitioners expect: a lazy column costs a second."""

        def __getitem__(self, key: Any) -> Any:
            """Return a column or rows."""
            found = super().__getitem__(key)
            return found[:] if isinstance(key, str) else found

    return Table.from_dict(columns)


def _partitioner(spec: DataSpec, seed: int) -> Any:
    """Return the flwr-datasets partitioner (imported only here, as the import takes a second)."""
    from flwr_datasets import partitioner as flwr

    common: dict[str, Any] = {"partition_by": "label", "shuffle": False, "seed": seed}
    if spec.partition == "iid":
        return flwr.IidPartitioner(spec.clients)
    if spec.partition == "dirichlet":
        return flwr.DirichletPartitioner(
            spec.clients,
            alpha=spec.alpha,
            min_partition_size=spec.min_samples,
            self_balancing=False,
            **common,
        )
    if spec.partition == "shards":
        return flwr.ShardPartitioner(spec.clients, num_shards_per_partition=spec.shards, **common)
    return flwr.PathologicalPartitioner(
        spec.clients,
        num_classes_per_partition=spec.classes_per_client,
        class_assignment_mode="random",
        **common,
    )


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


def _first_sentence(error: Exception) -> str:
    return " ".join(str(error).split()).split(". ")[0].rstrip(".")
