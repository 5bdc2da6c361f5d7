"""Heterogeneous tasks: classes joined into superclasses, and clients that hold some of them.

CoFED, Sections 4.7 and 5.2: a participant's label space is a few superclasses. In the IID case, it
holds samples of all their subclasses; non-IID, of one or two, and is tested on all.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError, nearest
from fedhet.base.seeding import numpy_rng
from fedhet.data.spec import Dataset, DataSpec, Index, Split

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
_DRAWS = 50
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

    def relabelled(split: Split) -> Split:
        return Split(split.x, super_of[split.y])

    return replace(
        dataset,
        train=relabelled(dataset.train),
        test=relabelled(dataset.test) if dataset.test is not None else None,
        classes=tuple(groups),
        subclasses=dataset.train.y.numpy(),
    )


def assign(dataset: Dataset, spec: DataSpec) -> Assignment:
    """Assign rows: samples-per-class rows of each of a client's classes, disjoint among clients.

    Raises DataError if the training set is too small.
    """
    for attempt in range(_TASKS - 1):
        with contextlib.suppress(DataError):
            return _assigned(dataset, spec, label_spaces(spec, len(dataset.classes), attempt))
    return _assigned(dataset, spec, label_spaces(spec, len(dataset.classes), _TASKS - 1))


def _assigned(dataset: Dataset, spec: DataSpec, spaces: tuple[tuple[int, ...], ...]) -> Assignment:
    """Return the assignment for these label spaces. Raises DataError if there are too few rows."""
    labels = dataset.train.y.numpy()
    subclasses = dataset.subclasses if dataset.subclasses is not None else labels
    owned: list[list[Index]] = [[] for _ in spaces]
    for label in range(len(dataset.classes)):
        holders = [client for client, space in enumerate(spaces) if label in space]
        rows = np.flatnonzero(labels == label)
        parts = _share(label, rows, subclasses[rows], len(holders), spec)
        for client, part in zip(holders, parts, strict=True):
            owned[client].append(part)
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
    for attempt in range(2 * _DRAWS):
        rng = numpy_rng(spec.seed, "superclass", label, attempt)
        left = {int(k): rng.permutation(rows[subclasses == k]) for k in present}
        shared: list[Index] = []
        for _ in range(holders):
            drawn = _subclasses(left, spec, rng, with_room=attempt >= _DRAWS)
            taken = _take(left, drawn, spec.samples_per_class)
            if taken is None:
                break
            shared.append(taken)
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


def _take(left: dict[int, Index], subclasses: Index, count: int) -> Index | None:
    """Take `count` of the remaining rows, evenly among `subclasses`; None if there are too few."""
    if not len(subclasses):
        return None
    parts = np.array_split(np.arange(count), len(subclasses))
    sizes = {int(k): len(part) for k, part in zip(subclasses, parts, strict=True)}
    if any(len(left[k]) < size for k, size in sizes.items()):
        return None
    taken = [left[k][:size] for k, size in sizes.items()]
    left |= {k: left[k][size:] for k, size in sizes.items()}
    return np.concatenate(taken)
