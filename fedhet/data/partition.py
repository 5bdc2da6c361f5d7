"""Partitions of a training set among clients, held-out test splits, and hidden labels.

The partition `superclasses` implements the heterogeneous tasks of CoFED (Sections 4.7 and 5.2).
Classes are merged into superclasses, and the label space of a client consists of a few
superclasses. In the IID case, a client has samples of all subclasses of these superclasses. In the
non-IID case, a client has samples of one or two subclasses of each superclass, but is tested on all
subclasses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedhet.base.errors import DataError, SettingsError, nearest
from fedhet.base.seeding import derive, numpy_rng, preserve_global_rng
from fedhet.data.dataset import ClientData, Dataset, Split, concatenate
from fedhet.data.spec import DataSpec, Index, stratified
from fedhet.settings.run import DataSettings
from fedhet.tasks import CLASSIFICATION

_DRAWS = 20
"""Maximum number of draws to find a partition that satisfies the constraints."""
_DIRICHLET_DRAWS = 11
"""Maximum number of Dirichlet draws with one seed, as in flwr-datasets."""
_MIN_TRAIN = 2


@preserve_global_rng()
def partition(dataset: Dataset, spec: DataSpec) -> tuple[Index, ...]:
    """Partition the training set among the clients. For `superclasses`, see `assign`.

    Some rows are not assigned to any client: with `shards`, the remainder of the division into
    equal shards; with `classes`, the rows of classes that no client drew; with natural clients, the
    rows of groups that are not selected.

    Returns:
        The row numbers of each client, sorted and disjoint.

    Raises:
        DataError: If no draw satisfies the constraints.
    """
    if (parts := dataset.parts) is not None:  # Each client has one contiguous range of rows.
        if spec.clients != len(parts):
            raise DataError(
                f"clients must be {len(parts)}, the number of clients in {spec.dataset}, got "
                f"{spec.clients}"
            )
        ends = np.cumsum([sum(part) for part in parts])
        return tuple(np.arange(end - sum(part), end) for part, end in zip(parts, ends, strict=True))
    if (groups := dataset.groups) is None:
        return _drawn(spec, dataset.format.strata(dataset.train.y))
    # Select the groups (people or sites) with the most samples, and sort them by name.
    counts = np.bincount(groups)
    largest = np.argsort(-counts, kind="stable")
    enough = int((counts >= spec.min_samples).sum())
    if spec.clients > enough:
        source = f"data.by = {spec.by!r}" if spec.by else spec.dataset
        reason = f"the number of groups in {source}"
        if enough < len(counts):
            reason = (
                f"because only {enough} of the {len(counts)} groups in {source} have at least "
                f"data.min-samples = {spec.min_samples} samples"
            )
        raise DataError(f"clients = {spec.clients}: must be at most {enough}, {reason}")
    return tuple(np.flatnonzero(groups == group) for group in np.sort(largest[: spec.clients]))


def is_natural(dataset: Dataset) -> bool:
    """Return whether the dataset itself defines the client of each sample."""
    return dataset.parts is not None or dataset.groups is not None


def hold_out(count: int, spec: DataSpec, name: str) -> tuple[Index, Index]:
    """Split the `count` rows of client `name` at random into training and test rows.

    Returns the sorted positions of training and test rows. If `spec.test_fraction` is 0, the test
    split is empty. Raises DataError if too few training samples remain.
    """
    test = max(1, round(spec.test_fraction * count)) if spec.test_fraction else 0
    if count - test < _MIN_TRAIN:
        if not test:
            raise DataError(f"{name}: expected at least {_MIN_TRAIN} training samples, got {count}")
        raise DataError(
            f"{name}: with data.test-fraction = {spec.test_fraction}, expected at least "
            f"{_MIN_TRAIN} training samples and 1 test sample, got {count} samples. Raise "
            "data.min-samples, or lower data.test-fraction."
        )
    places = numpy_rng(spec.seed, "split", name).permutation(count)
    return np.sort(places[test:]), np.sort(places[:test])


def hold_out_validation(strata: Index, spec: DataSpec, name: str) -> tuple[Index, Index]:
    """Split the training rows of client `name` into rows to train on and validation rows.

    The validation rows are a fraction `data.validation-fraction`, rounded to the nearest number of
    rows, and at least two rows remain to train on. A client with too few rows thus has no
    validation rows.

    Args:
        strata: Class, or other stratum, of each training row [N].
        spec: Data settings.
        name: Name of the client, which determines the draw together with the seed.

    Returns:
        The sorted positions of both parts.
    """
    count = min(round(spec.validation * len(strata)), len(strata) - _MIN_TRAIN)
    if count < 1:
        return np.arange(len(strata)), np.arange(0)
    drawn = stratified(strata, count, numpy_rng(spec.seed, "validation", name))
    return np.setdiff1d(np.arange(len(strata)), drawn), drawn


def split_rows(
    dataset: Dataset, rows: Index, spec: DataSpec, name: str, own_tests: int = 0
) -> tuple[Index, Index, Index]:
    """Divide a client's rows in the training set into training, test, and validation rows.

    Args:
        dataset: Dataset of a simulation, or of the site.
        rows: Rows of the client, sorted.
        spec: Data settings.
        name: Name of the client, which determines the draws together with the seed.
        own_tests: Number of rows at the end that are the client's test rows; 0 = hold out a
            fraction `spec.test_fraction`.

    Raises:
        DataError: If too few training samples remain.
    """
    if own_tests:
        train, test = rows[:-own_tests], rows[-own_tests:]
    else:
        train, test = (rows[part] for part in hold_out(len(rows), spec, name))
    if not spec.validation:
        return train, test, rows[:0]
    strata = dataset.format.strata(dataset.train.y[torch.from_numpy(train)])
    kept, validation = hold_out_validation(strata, spec, name)
    return train[kept], test, train[validation]


def _drawn(spec: DataSpec, labels: Index) -> tuple[Index, ...]:
    """Return the first drawn partition that has enough samples per client and contains all classes.

    If no draw covers all classes, returns the draw that covers the most classes. Raises DataError
    if no draw has enough samples per client.
    """
    rows, num_classes = len(labels), len(np.unique(labels))
    needed = {"data.min-samples": (spec.min_samples, "samples")}
    if spec.partition == "shards":
        needed["data.shards"] = (spec.shards, "shards")
    for setting, (count, what) in needed.items():
        if (total := spec.clients * count) > rows:
            raise DataError(
                f"clients = {spec.clients} with {setting} = {count}: expected {total} {what} in "
                f"{spec.dataset}, got {rows} samples. Lower one of the two settings."
            )
    if spec.partition == "classes":
        if spec.classes_per_client > num_classes:
            raise DataError(
                f"data.classes-per-client must be at most {num_classes}, the number of classes of "
                f"{spec.dataset}, got {spec.classes_per_client}"
            )
        num_classes = min(num_classes, spec.clients * spec.classes_per_client)
    draws = {"dirichlet": _dirichlet, "shards": _shards, "classes": _some_classes}
    best: tuple[Index, ...] = ()
    max_covered, fault = 0, ""
    for attempt in range(_DRAWS):
        order = numpy_rng(spec.seed, "partition", attempt, "order").permutation(rows)
        rng = np.random.default_rng(derive(spec.seed, "partition", attempt))
        try:
            if spec.partition == "iid":
                parts: Sequence[Index] = np.array_split(np.arange(rows), spec.clients)
            else:
                parts = draws[spec.partition](labels[order], spec, rng)
        except ValueError as error:
            fault = str(error)
            continue
        drawn = tuple(np.sort(order[part]) for part in parts)
        smallest = min(map(len, drawn))
        if smallest < spec.min_samples:
            fault = f"the smallest client has {smallest} samples"
            continue
        covered = len(np.unique(labels[np.concatenate(drawn)]))
        if covered > max_covered:
            best, max_covered = drawn, covered
        if covered >= num_classes:
            break
    if best:
        return best
    values, change = {
        "iid": ("", "Lower"),
        "dirichlet": (f"data.alpha = {spec.alpha}, ", "Raise data.alpha, or lower"),
        "shards": (f"data.shards = {spec.shards}, ", "Lower data.shards, or lower"),
        "classes": (
            f"data.classes-per-client = {spec.classes_per_client}, ",
            "Raise data.classes-per-client, or lower",
        ),
    }[spec.partition]
    raise DataError(
        f"data.partition = {spec.partition!r} ({values}data.min-samples = {spec.min_samples}, "
        f"clients = {spec.clients}): {_DRAWS} draws from {rows} samples failed ({fault}). "
        f"{change} data.min-samples or clients."
    )


# The following functions draw the same partitions as flwr-datasets 0.6, which is not used because
# its import would take longer than a small run.


def _dirichlet(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Split each class among the clients in proportions from a Dirichlet distribution.

    Yurochkin et al., *Bayesian Nonparametric Federated Learning of Neural Networks*, ICML 2019.
    """
    for _ in range(_DIRICHLET_DRAWS):
        parts: list[list[Index]] = [[] for _ in range(spec.clients)]
        for label in np.unique(labels):
            rows = np.flatnonzero(labels == label)
            fractions = rng.dirichlet(np.full(spec.clients, spec.alpha))
            ends = (np.cumsum(fractions) * len(rows)).astype(int)[:-1]
            for part, piece in zip(parts, np.split(rows, ends), strict=True):
                part.append(piece)
        drawn = [np.concatenate(part) for part in parts]
        if min(map(len, drawn)) >= spec.min_samples:
            return drawn
    raise ValueError("a client has too few samples")


def _shards(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Sort the rows by class, split them into equal shards, and assign the shards at random.

    McMahan et al., *Communication-Efficient Learning of Deep Networks from Decentralized Data*,
    AISTATS 2017.
    """
    count = spec.clients * spec.shards
    size = len(labels) // count
    by_class = np.argsort(labels, kind="stable")
    assigned = rng.permutation(len(labels) // size)[:count].reshape(spec.clients, spec.shards)
    return [
        np.concatenate([by_class[shard * size : (shard + 1) * size] for shard in shards])
        for shards in assigned
    ]


def _some_classes(labels: Index, spec: DataSpec, rng: np.random.Generator) -> list[Index]:
    """Draw `data.classes-per-client` classes for each client.

    Each class is divided evenly among the clients that drew it. Li et al., *Federated Learning on
    Non-IID Data Silos: An Experimental Study*, ICDE 2022.
    """
    classes = np.unique(labels)
    drawn = [
        rng.choice(classes, size=spec.classes_per_client, replace=False)
        for _ in range(spec.clients)
    ]
    parts: list[list[Index]] = [[] for _ in drawn]
    for label in classes:
        owners = [part for part, labels_of in zip(parts, drawn, strict=True) if label in labels_of]
        rows = np.flatnonzero(labels == label)
        if len(owners) > len(rows):
            raise ValueError(
                f"class {label} has {len(rows)} samples, but {len(owners)} clients drew the class"
            )
        if owners:
            for part, piece in zip(owners, np.array_split(rows, len(owners)), strict=True):
                part.append(piece)
    return [np.concatenate(part) for part in parts]


# The 20 superclasses of CIFAR-100 (Krizhevsky 2009), with torchvision's class names.
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
"""Name of a known grouping, or the classes in each superclass."""
_ASSIGNMENTS = 50
_TASKS = 5
"""Maximum number of draws of the label spaces, which are redrawn if a class has too few samples."""


@dataclass(frozen=True, eq=False)
class Assignment:
    """Sorted rows and sorted label space of each client."""

    rows: tuple[Index, ...]
    spaces: tuple[tuple[int, ...], ...]


def classes_by_superclass(superclasses: Superclasses) -> dict[str, tuple[str, ...]]:
    """Return the classes by superclass; a custom superclass with classes a and b is named "a+b"."""
    if isinstance(superclasses, str):
        return GROUPINGS[superclasses]
    return {"+".join(group): group for group in superclasses}


def merge_classes(dataset: Dataset, superclasses: Superclasses) -> Dataset:
    """Replace a dataset's classes with superclasses; `subclasses` stores the original labels.

    Raises SettingsError unless every class is in exactly one superclass.
    """
    format = dataset.format
    if format.task.name != CLASSIFICATION.name:
        raise SettingsError(
            f"data.superclasses: must be empty with data.task = {format.task.name!r}, because "
            f"{dataset.name} has no classes"
        )
    groups = classes_by_superclass(superclasses)
    listed = [name for group in groups.values() for name in group]
    for name in listed:
        if name not in format.classes:
            close = nearest(name, format.classes)
            raise SettingsError(f"data.superclasses: unknown class {name!r}{close}")
        if listed.count(name) > 1:
            raise SettingsError(f"data.superclasses: class {name!r} is in two superclasses")
    if missing := [name for name in format.classes if name not in listed]:
        raise SettingsError(
            f"data.superclasses: every class of {dataset.name} must be in a superclass, "
            f"missing {', '.join(missing[:5])}"
        )
    super_of = torch.zeros(len(format.classes), dtype=torch.int64)
    for number, group in enumerate(groups.values()):
        super_of[[format.classes.index(name) for name in group]] = number

    def relabeled(split: Split) -> Split:
        return Split(split.x, super_of[split.y])

    return replace(
        dataset,
        train=relabeled(dataset.train),
        test=relabeled(dataset.test) if dataset.test is not None else None,
        format=replace(format, classes=tuple(groups)),
        subclasses=dataset.train.y.numpy(),
    )


def assign(dataset: Dataset, spec: DataSpec) -> Assignment:
    """Draw `samples-per-class` rows for each class in each client's label space.

    The rows of different clients are disjoint. Raises DataError if the training set is too small.
    """
    if (task := dataset.format.task.name) != CLASSIFICATION.name:
        raise SettingsError(
            f"data.partition: with data.task = {task!r}, expected dirichlet, iid, "
            "shards, or classes, got 'superclasses'"
        )
    labels = dataset.train.y.numpy()
    subclasses = dataset.subclasses if dataset.subclasses is not None else labels
    for attempt in range(_TASKS):
        try:
            spaces = label_spaces(spec, len(dataset.format.classes), attempt)
            drawn: list[list[Index]] = [[] for _ in spaces]
            for label in range(len(dataset.format.classes)):
                owners = [rows for rows, space in zip(drawn, spaces, strict=True) if label in space]
                rows = np.flatnonzero(labels == label)
                parts = _draw_class(label, rows, subclasses[rows], len(owners), spec)
                for owner, part in zip(owners, parts, strict=True):
                    owner.append(part)
        except DataError:
            if attempt == _TASKS - 1:
                raise
        else:
            break
    return Assignment(tuple(np.sort(np.concatenate(parts)) for parts in drawn), spaces)


def label_spaces(spec: DataSpec, classes: int, attempt: int = 0) -> tuple[tuple[int, ...], ...]:
    """Draw the label space of each client; `data.label-space` sets the number of classes."""
    low, high = spec.label_space
    if high > classes:
        raise DataError(
            f"data.label-space must be at most {classes}, the number of classes of {spec.dataset}"
            f"{'' if spec.superclasses else ' (without data.superclasses)'}, got [{low}, {high}]"
        )
    spaces = []
    for client in range(spec.clients):
        again = (attempt,) if attempt else ()
        rng = numpy_rng(spec.seed, "label-space", client, *again)
        size = int(rng.integers(low, high + 1))
        spaces.append(tuple(sorted(rng.permutation(classes)[:size].tolist())))
    return tuple(spaces)


def _draw_class(
    label: int, rows: Index, subclasses: Index, clients: int, spec: DataSpec
) -> list[Index]:
    """Draw the rows of one class for each client, divided evenly among the class's subclasses.

    A draw is discarded if a subclass has too few rows. If no draw succeeds, for example because the
    clients need almost all rows, only subclasses with enough remaining rows are drawn.
    """
    present = np.unique(subclasses)
    for attempt in range(2 * _ASSIGNMENTS):
        rng = numpy_rng(spec.seed, "superclass", label, attempt)
        remaining = {int(k): rng.permutation(rows[subclasses == k]) for k in present}
        assigned: list[Index] = []
        for _ in range(clients):
            drawn = _draw_subclasses(remaining, spec, rng, only_enough=attempt >= _ASSIGNMENTS)
            parts = np.array_split(np.arange(spec.samples_per_class), max(1, len(drawn)))
            sizes = {k: len(part) for k, part in zip(drawn.tolist(), parts, strict=False)}
            if not sizes or any(len(remaining[k]) < size for k, size in sizes.items()):
                break
            assigned.append(np.concatenate([remaining[k][:size] for k, size in sizes.items()]))
            remaining |= {k: remaining[k][size:] for k, size in sizes.items()}
        if len(assigned) == clients:
            return assigned
    raise DataError(
        f"data.partition = 'superclasses': cannot draw data.samples-per-class = "
        f"{spec.samples_per_class} samples of one class for each of {clients} clients, because "
        f"the class has only {len(rows)}. Lower data.samples-per-class, clients, or "
        "data.label-space."
    )


def _draw_subclasses(
    remaining: dict[int, Index], spec: DataSpec, rng: np.random.Generator, *, only_enough: bool
) -> Index:
    """Draw the subclasses of one client: all subclasses (IID), or a random number of subclasses.

    The number is drawn from the range `data.subclasses`. With `only_enough`, only subclasses with
    enough remaining rows are drawn. If there are too few, the other numbers in the range are tried.
    """
    present = np.array(sorted(remaining))
    if spec.subclasses == "all":
        return rng.permutation(present)
    low, high = spec.subclasses
    size = min(int(rng.integers(low, high + 1)), len(present))
    order = rng.permutation(present)
    if only_enough:
        other_sizes = [n for n in range(low, min(high, len(present)) + 1) if n != size]
        for number in (size, *other_sizes):
            enough = [k for k in order if len(remaining[int(k)]) * number >= spec.samples_per_class]
            if len(enough) >= number:
                return np.array(enough[:number])
    return order[:size]


def labeled_parts(
    data: ClientData, table: DataSettings, seed: int, client: str
) -> tuple[Split, Split]:
    """Return a client's labeled and unlabeled training samples.

    If the client has separate unlabeled samples, all samples are returned unchanged. Otherwise,
    `split_labels` hides the labels of some training samples.
    """
    if data.unlabeled is not None:
        return data.train, data.unlabeled
    return split_labels(data.train, table.labeled_alpha, table.min_labeled, seed, client)


def split_labels(
    train: Split, alpha: float, min_labeled: int, seed: int, client: str
) -> tuple[Split, Split]:
    """Split training samples at random into a labeled and an unlabeled part.

    The labeled fraction is drawn from the Dirichlet distribution Dir_2(`alpha`) (UM-pFSSL, Section
    VI-A), and each part has at least `min_labeled` samples. If `alpha` is 0, all samples are
    labeled. The labels of the unlabeled part are used only for measurements, never for training.
    Raises DataError if there are too few samples.
    """
    if alpha == 0:
        return train, train.take(np.arange(0))
    if len(train) < 2 * min_labeled:
        raise DataError(
            f"{client}: expected at least {2 * min_labeled} training samples with "
            f"data.labeled-alpha = {alpha} and data.min-labeled = {min_labeled}, got {len(train)}"
        )
    # Keep this spelling, because the draws in published tables were seeded with it.
    rng = numpy_rng(seed, "labelled", client)
    fraction = rng.dirichlet([alpha, alpha])[0]
    count = min(max(round(fraction * len(train)), min_labeled), len(train) - min_labeled)
    order = rng.permutation(len(train))
    return train.take(np.sort(order[:count])), train.take(np.sort(order[count:]))


def with_wrong_labels(
    train: Split, probability: float, space: Sequence[int], seed: int, client: str
) -> Split:
    """Replace each label by another class with the given probability.

    All other classes of the client's label space (ascending) are equally probable, which is the
    symmetric noise of RHFL's experiments.
    """
    if probability == 0 or len(space) < 2:
        return train
    rng, classes = numpy_rng(seed, "label-noise", client), np.asarray(space)
    is_wrong = rng.random(len(train)) < probability
    correct = np.searchsorted(classes, train.y.numpy())
    shifted = (correct + rng.integers(1, len(classes), len(train))) % len(classes)
    return replace(train, y=torch.from_numpy(classes[np.where(is_wrong, shifted, correct)]))


def concatenate_splits(parts: Sequence[Split]) -> Split:
    """Concatenate the samples of several splits."""
    return Split(concatenate(*(part.x for part in parts)), torch.cat([part.y for part in parts]))
