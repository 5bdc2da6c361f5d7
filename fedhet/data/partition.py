"""Which client holds which rows: partitions of a training set, test splits, and hidden labels.

Heterogeneous tasks are those of CoFED, Sections 4.7 and 5.2: classes are joined into superclasses,
and a participant's label space is a few of these. In the IID case, it holds samples of all their
subclasses; non-IID, of one or two, and is tested on all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError, nearest
from fedhet.base.seeding import derive, numpy_rng
from fedhet.data.spec import (
    ClientData,
    Dataset,
    DataSpec,
    Index,
    Split,
    concatenated,
    preserve_global_rng,
)
from fedhet.settings.run import DataSettings

_DRAWS = 20  # a partition that fails its conditions is redrawn with the next seed
_DIRICHLET_DRAWS = 11
"""Number of Dirichlet draws from one seed, as in flwr-datasets."""
_MIN_TRAIN = 2


@preserve_global_rng()
def partition(dataset: Dataset, spec: DataSpec) -> tuple[Index, ...]:
    """Return each client's row numbers in the training set, sorted and disjoint.

    All rows are assigned, except the remainder of `shards` (fewer rows than there are shards, all
    of one size) and, under `classes`, classes that no client drew; that happens only if clients x
    classes-per-client is barely as large as the number of classes. `superclasses` is drawn by
    `assign`. Raises DataError for conditions that no draw meets.
    """
    if (parts := dataset.parts) is not None:  # clients given as files: one contiguous range each
        if spec.clients != len(parts):
            raise DataError(
                f"clients = {spec.clients}: must be {len(parts)}, as {spec.dataset} holds "
                f"{len(parts)} clients"
            )
        ends = np.cumsum([sum(part) for part in parts])
        return tuple(np.arange(end - sum(part), end) for part, end in zip(parts, ends, strict=True))
    if (groups := dataset.groups) is None:
        return _drawn(spec, dataset.train.y.numpy())
    # The persons or sites with the most samples, in the order of names.
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


def is_natural(dataset: Dataset) -> bool:
    """Return whether the data itself says which client a sample is of."""
    return dataset.parts is not None or dataset.groups is not None


def hold_out(count: int, spec: DataSpec, name: str) -> tuple[Index, Index]:
    """Draw the test split of `count` rows of client `name`: (training, test) positions, sorted.

    It is empty if the run has none (`test_fraction` 0).
    """
    test = max(1, round(spec.test_fraction * count)) if spec.test_fraction else 0
    if count - test < _MIN_TRAIN:
        raise DataError(
            f"{name}: has {count} samples; with data.test-fraction = {spec.test_fraction} at least "
            f"{_MIN_TRAIN} to train and 1 to test on are needed: give it more (data.min-samples) "
            "or lower data.test-fraction"
        )
    places = numpy_rng(spec.seed, "split", name).permutation(count)
    return np.sort(places[test:]), np.sort(places[:test])


def _drawn(spec: DataSpec, labels: Index) -> tuple[Index, ...]:
    """Return the first draw that gives every client enough and, under `classes`, every class.

    If no draw covers every class that the clients could hold, the one with the most classes. Raises
    DataError for conditions that no draw can satisfy, or that none has satisfied.
    """
    rows, wanted = len(labels), len(np.unique(labels))
    needed = {"data.min-samples": (spec.min_samples, "samples")}
    if spec.partition == "shards":
        needed["data.shards"] = (spec.shards, "shards")
    for setting, (count, what) in needed.items():
        if (total := spec.clients * count) > rows:
            raise DataError(
                f"clients = {spec.clients} with {setting} = {count} need {total} {what}, "
                f"{spec.dataset} has {rows} samples; lower either"
            )
    if spec.partition == "classes":
        if spec.classes_per_client > wanted:
            raise DataError(
                f"data.classes-per-client = {spec.classes_per_client}: must be at most {wanted}, "
                f"the number of classes of {spec.dataset}"
            )
        wanted = min(wanted, spec.clients * spec.classes_per_client)
    draws = {"dirichlet": _dirichlet, "shards": _shards, "classes": _some_classes}
    best: tuple[Index, ...] = ()
    most, fault = 0, ""
    for attempt in range(_DRAWS):
        order = numpy_rng(spec.seed, "partition", attempt, "order").permutation(rows)
        rng = np.random.default_rng(derive(spec.seed, "partition", attempt))
        try:
            if spec.partition == "iid":
                dealt: Sequence[Index] = np.array_split(np.arange(rows), spec.clients)
            else:
                dealt = draws[spec.partition](labels[order], spec, rng)
        except ValueError as error:
            fault = str(error)
            continue
        drawn = tuple(np.sort(order[own]) for own in dealt)
        smallest = min(map(len, drawn))
        if smallest < spec.min_samples:
            fault = f"the smallest client has {smallest}"
            continue
        held = len(np.unique(labels[np.concatenate(drawn)]))
        if held > most:
            best, most = drawn, held
        if held >= wanted:
            break
    if best:
        return best
    own, change = {
        "iid": ("", ""),
        "dirichlet": (f"data.alpha = {spec.alpha}, ", "raise data.alpha, or "),
        "shards": (f"data.shards = {spec.shards}, ", "lower data.shards, or "),
        "classes": (
            f"data.classes-per-client = {spec.classes_per_client}, ",
            "raise data.classes-per-client, or ",
        ),
    }[spec.partition]
    raise DataError(
        f"data.partition = {spec.partition!r} ({own}data.min-samples = {spec.min_samples}, "
        f"clients = {spec.clients}): {_DRAWS} draws from {rows} samples failed ({fault}); "
        f"{change}lower data.min-samples or clients"
    )


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


# Krizhevsky 2009, the 20 superclasses of CIFAR-100, in torchvision's names.
CIFAR100 = tuple(
    tuple(line.split())
    for line in """
    beaver dolphin otter seal whale
    aquarium_fish flatfish ray shark trout
    orchid poppy rose sunflower tulip
    bottle bowl can cup plate
    apple mushroom orange pear sweet_pepper
    clock keyboard lamp telephone television
    bed chair couch table wardrobe
    bee beetle butterfly caterpillar cockroach
    bear leopard lion tiger wolf
    bridge castle house road skyscraper
    cloud forest mountain plain sea
    camel cattle chimpanzee elephant kangaroo
    fox porcupine possum raccoon skunk
    crab lobster snail spider worm
    baby boy girl man woman
    crocodile dinosaur lizard snake turtle
    hamster mouse rabbit shrew squirrel
    maple_tree oak_tree palm_tree pine_tree willow_tree
    bicycle bus motorcycle pickup_truck train
    lawn_mower rocket streetcar tank tractor
    """.strip().splitlines()
)
CIFAR100_NAMES = tuple(
    """
    aquatic_mammals fish flowers food_containers fruit_and_vegetables household_electrical_devices
    household_furniture insects large_carnivores large_man-made_outdoor_things
    large_natural_outdoor_scenes large_omnivores_and_herbivores medium_mammals
    non-insect_invertebrates people reptiles small_mammals trees vehicles_1 vehicles_2
    """.split()
)
GROUPINGS = {"cifar100": dict(zip(CIFAR100_NAMES, CIFAR100, strict=True))}
Superclasses = str | tuple[tuple[str, ...], ...]
"""A known grouping's name, or the classes of each superclass."""
_ASSIGNMENTS = 50
_TASKS = 5  # draws of label spaces; those for which there is too little data are redrawn


@dataclass(frozen=True, eq=False)
class Assignment:
    """Each client's rows of the training set, sorted, and its label space, ascending."""

    rows: tuple[Index, ...]
    spaces: tuple[tuple[int, ...], ...]


def named(superclasses: Superclasses) -> dict[str, tuple[str, ...]]:
    """Return each superclass's classes by its name: "a+b" unless it is a known grouping's."""
    if isinstance(superclasses, str):
        return GROUPINGS[superclasses]
    return {"+".join(group): group for group in superclasses}


def merged(dataset: Dataset, superclasses: Superclasses) -> Dataset:
    """Return the dataset with superclasses as its classes; `subclasses` keeps its own labels.

    Raises SettingsError unless every class of the dataset is in exactly one superclass.
    """
    groups = named(superclasses)
    listed = [name for group in groups.values() for name in group]
    for name in listed:
        if name not in dataset.classes:
            close = nearest(name, dataset.classes)
            raise SettingsError(f"data.superclasses: {dataset.name} has no class {name!r}{close}")
        if listed.count(name) > 1:
            raise SettingsError(f"data.superclasses: the class {name!r} is in two of them")
    if left := [name for name in dataset.classes if name not in listed]:
        raise SettingsError(
            f"data.superclasses: {', '.join(left[:5])} of {dataset.name} must be in one of them too"
        )
    super_of = torch.zeros(len(dataset.classes), dtype=torch.int64)
    for number, group in enumerate(groups.values()):
        super_of[[dataset.classes.index(name) for name in group]] = number

    def relabeled(split: Split) -> Split:
        return Split(split.x, super_of[split.y])

    return replace(
        dataset,
        train=relabeled(dataset.train),
        test=relabeled(dataset.test) if dataset.test is not None else None,
        classes=tuple(groups),
        subclasses=dataset.train.y.numpy(),
    )


def assign(dataset: Dataset, spec: DataSpec) -> Assignment:
    """Assign rows: samples-per-class rows of each of a client's classes, disjoint among clients.

    Raises DataError if the training set is too small.
    """
    labels = dataset.train.y.numpy()
    subclasses = dataset.subclasses if dataset.subclasses is not None else labels
    for attempt in range(_TASKS):
        try:
            spaces = label_spaces(spec, len(dataset.classes), attempt)
            owned: list[list[Index]] = [[] for _ in spaces]
            for label in range(len(dataset.classes)):
                holders = [own for own, space in zip(owned, spaces, strict=True) if label in space]
                rows = np.flatnonzero(labels == label)
                parts = _share(label, rows, subclasses[rows], len(holders), spec)
                for own, part in zip(holders, parts, strict=True):
                    own.append(part)
        except DataError:
            if attempt == _TASKS - 1:
                raise
        else:
            break
    return Assignment(tuple(np.sort(np.concatenate(parts)) for parts in owned), spaces)


def label_spaces(spec: DataSpec, classes: int, attempt: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return each client's label space: `label-space` classes, drawn at random."""
    low, high = spec.label_space
    if high > classes:
        raise DataError(
            f"data.label-space = [{low}, {high}]: must be at most the {classes} classes of "
            f"{spec.dataset}{'' if spec.superclasses else ' (no superclasses are given)'}"
        )
    spaces = []
    for client in range(spec.clients):
        again = (attempt,) if attempt else ()
        rng = numpy_rng(spec.seed, "label-space", client, *again)
        size = int(rng.integers(low, high + 1))
        spaces.append(tuple(sorted(rng.permutation(classes)[:size].tolist())))
    return tuple(spaces)


def _share(label: int, rows: Index, subclasses: Index, holders: int, spec: DataSpec) -> list[Index]:
    """Return each holder's rows of one class, divided evenly among the subclasses it is given.

    A draw that runs out of a subclass is discarded. If none succeeds, for example because the
    holders need nearly all rows, later holders get subclasses that still have enough.
    """
    present = np.unique(subclasses)
    for attempt in range(2 * _ASSIGNMENTS):
        rng = numpy_rng(spec.seed, "superclass", label, attempt)
        left = {int(k): rng.permutation(rows[subclasses == k]) for k in present}
        shared: list[Index] = []
        for _ in range(holders):
            drawn = _subclasses(left, spec, rng, with_room=attempt >= _ASSIGNMENTS).tolist()
            parts = np.array_split(np.arange(spec.samples_per_class), max(1, len(drawn)))
            sizes = {k: len(part) for k, part in zip(drawn, parts, strict=False)}
            if not sizes or any(len(left[k]) < size for k, size in sizes.items()):
                break
            shared.append(np.concatenate([left[k][:size] for k, size in sizes.items()]))
            left |= {k: left[k][size:] for k, size in sizes.items()}
        if len(shared) == holders:
            return shared
    raise DataError(
        f"data.partition = 'superclasses': {holders} clients with samples-per-class = "
        f"{spec.samples_per_class} do not find enough of {len(rows)} samples of a class; lower "
        "samples-per-class, clients or label-space"
    )


def _subclasses(
    left: dict[int, Index], spec: DataSpec, rng: np.random.Generator, *, with_room: bool
) -> Index:
    """Return a holder's subclasses of a class: all (IID), or `subclasses` of them.

    `with_room`: only subclasses with enough rows left, if necessary in another number.
    """
    present = np.array(sorted(left))
    if spec.subclasses == "all":
        return rng.permutation(present)
    low, high = spec.subclasses
    size = min(int(rng.integers(low, high + 1)), len(present))
    order = rng.permutation(present)
    if with_room:
        others = [n for n in range(low, min(high, len(present)) + 1) if n != size]
        for number in (size, *others):
            open_ = [k for k in order if len(left[int(k)]) * number >= spec.samples_per_class]
            if len(open_) >= number:
                return np.array(open_[:number])
    return order[:size]


def labeled_parts(
    data: ClientData, table: DataSettings, seed: int, client: str
) -> tuple[Split, Split]:
    """Return the labeled and the unlabeled part of a client's training samples.

    A site with unlabeled samples of its own already has both parts, whatever the settings; for
    other clients, `split_labels` hides labels.
    """
    if data.unlabeled is not None:
        return data.train, data.unlabeled
    return split_labels(data.train, table.labeled_alpha, table.min_labeled, seed, client)


def split_labels(
    train: Split, alpha: float, least: int, seed: int, client: str
) -> tuple[Split, Split]:
    """Return the labeled and the unlabeled part of a client's training samples.

    The labeled share is drawn from Dir_2(`alpha`) by seed and client (UM-pFSSL, section VI-A),
    with at least `least` samples in each part; the samples are drawn too. With `alpha` 0, all are
    labeled. The unlabeled part keeps its labels for measurements only, never for training. Raises
    DataError for a client with too few samples.
    """
    if alpha == 0:
        return train, train.take(np.arange(0))
    if len(train) < 2 * least:
        raise DataError(
            f"{client}: has {len(train)} training samples, at least {2 * least} are needed "
            f"with 'data.labeled-alpha' = {alpha} and 'data.min-labeled' = {least}"
        )
    rng = numpy_rng(seed, "labelled", client)  # the key of draws that published tables used
    share = rng.dirichlet([alpha, alpha])[0]
    count = min(max(round(share * len(train)), least), len(train) - least)
    order = rng.permutation(len(train))
    return train.take(np.sort(order[:count])), train.take(np.sort(order[count:]))


def stacked(parts: Sequence[Split]) -> Split:
    """Return the samples of several splits, one after the other."""
    return Split(concatenated(*(part.x for part in parts)), torch.cat([part.y for part in parts]))
