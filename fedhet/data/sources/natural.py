"""Published datasets with natural clients: LEAF, WILDS, FLamby, HAR, and PAMAP2.

LEAF (`femnist:DIR`, `shakespeare:DIR`): Caldas et al., LEAF: A Benchmark for Federated Settings.
The files are DIR/train/*.json and optionally DIR/test/*.json (the common test set), or only
DIR/*.json. A file maps `user_data` to `{user: {"x": [...], "y": [...]}}`.

WILDS (`camelyon17:DIR`, `iwildcam:DIR`): Koh et al., WILDS: A Benchmark of in-the-Wild Distribution
Shifts. DIR contains `metadata.csv` and the unpacked images. WILDS' test part is the common test
set.

Fed-ISIC2019 (`fed-isic2019:DIR`): Ogier du Terrail et al., FLamby: Datasets and Benchmarks for
Cross-Silo Federated Learning in Realistic Healthcare Settings. DIR contains FLamby's
`train_test_split` and `ISIC_2019_Training_Input_preprocessed/`. Each of the six centers is a client
with personal test images, as split by FLamby.

Human activity signals (`har:DIR`, `pamap2:DIR`): Anguita et al., A Public Domain Dataset for Human
Activity Recognition Using Smartphones, 2013; Reiss and Stricker, Introducing a New Benchmarked
Dataset for Activity Monitoring, 2012.
"""

from __future__ import annotations

import json
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded, read_text
from fedhet.base.errors import DataError, describe_error, error_reason
from fedhet.base.seeding import numpy_rng
from fedhet.data.dataset import Dataset, Format, Source, Split, encode_labels
from fedhet.data.rows import read_frame
from fedhet.data.sources.arrays import check_no_subset, convert_labels
from fedhet.data.sources.images import decode
from fedhet.data.spec import FIXED_SEED, DataSpec, Index, check_max_bytes, reading, subset_rows
from fedhet.kinds import IMAGE, PADDING, SIGNAL, TEXT, Kind, Shape, text_shape

if TYPE_CHECKING:
    import pandas as pd

SIDE = 28
SIGNS = string.digits + string.ascii_uppercase + string.ascii_lowercase
"""FEMNIST's classes, in order."""
_MARKS = "\n !\"&'(),-.0123456789:;>?"
LETTERS = _MARKS + string.ascii_uppercase + "[]" + string.ascii_lowercase + "}"
"""Shakespeare's letters, in LEAF's order."""
LENGTH = 80
OTHER = len(LETTERS) + 1
"""Token for letters that are not in LETTERS."""


@dataclass(frozen=True)
class LeafForm:
    """Sample format of a LEAF dataset."""

    samples: Callable[[Sequence[Any], str], npt.NDArray[Any]]
    """Function that takes a user's `x` and a prefix for messages, and returns samples [N, ...].
    Raises ValueError or TypeError if `x` is invalid."""
    labels: Callable[[Sequence[Any], str], Index]
    """Function that takes a user's `y` and a prefix for messages, and returns labels [N]."""
    classes: tuple[str, ...]
    kind: Kind = IMAGE
    shape: Shape = ()

    def source(self, name: str, line: str) -> Source:
        """Return the data source with the given name and one-line description."""
        return Source(name, line, partial(read_leaf, form=self), "DIR", self.kind)


def read_leaf(location: str, spec: DataSpec, form: LeafForm) -> Dataset:
    """Read a LEAF dataset from DIR. Raises DataError if its files are invalid."""
    root = expanded(location)
    train = root / "train" if (root / "train").is_dir() else root
    users, split = _read_leaf(train, spec, form)
    test = _read_leaf(root / "test", spec, form)[1] if (root / "test").is_dir() else None
    format = Format.from_samples(split.x, form.classes, form.kind, shape=form.shape)
    return Dataset(spec.dataset, split, test, format, groups=encode_labels(users))


def _read_leaf(directory: Path, spec: DataSpec, form: LeafForm) -> tuple[list[str], Split]:
    """Read the samples, and the user of each sample, in the order of the files and their users."""
    users: list[str] = []
    parts: list[tuple[npt.NDArray[Any], Index]] = []
    size = 0
    files = sorted(directory.glob("*.json"))
    if not files:
        raise DataError(f"{directory}: no .json files found")
    for path in files:
        with reading(path, "LEAF file", describe=describe_error):
            check_max_bytes(path.stat().st_size, spec, path)
            pairs = list(json.loads(read_text(path, spec.max_bytes))["user_data"].items())
        for user, samples in pairs:
            where = f"{path}, user {user!r}"
            try:
                x, y = form.samples(samples["x"], where), form.labels(samples["y"], where)
            except (KeyError, TypeError, ValueError, OverflowError) as error:
                raise DataError(f"{where}: {error_reason(error)}") from error
            if len(x) != len(y):
                raise DataError(
                    f"{where}: x and y must have the same length, got {len(x)} and {len(y)}"
                )
            if len(y) and y.max() >= len(form.classes):
                limit = len(form.classes) - 1
                raise DataError(f"{where}: labels in y must be 0 to {limit}, got {y.max()}")
            size += x.nbytes + y.nbytes
            check_max_bytes(size, spec, directory)
            users += [user] * len(y)
            parts.append((x, y))
    if not users:
        raise DataError(f"{directory}: no samples found")
    arrays = [np.concatenate(each) for each in zip(*parts, strict=True)]
    return users, Split(*map(torch.from_numpy, arrays))


def _leaf_images(x: Sequence[Any], where: str) -> npt.NDArray[np.uint8]:
    """Convert LEAF's 784 numbers in [0, 1] per image to uint8 images [N, 1, 28, 28]."""
    values = np.asarray(x, dtype=np.float64).reshape(len(x), -1)
    if len(x) and values.shape[1] != SIDE * SIDE:
        raise DataError(f"{where}: expected {SIDE * SIDE} numbers per image, got {values.shape[1]}")
    if not ((values >= 0) & (values <= 1)).all():
        raise DataError(f"{where}: x must be in [0, 1]")
    return np.round(255 * values).astype(np.uint8).reshape(-1, 1, SIDE, SIDE)


TOKENS: Mapping[str, int] = {letter: number for number, letter in enumerate(LETTERS, 1)}


def _texts(x: Sequence[Any], where: str) -> Index:
    """Convert texts to tokens [N, 80], with one token per letter, starting at 1."""
    tokens = np.full((len(x), LENGTH), PADDING, np.int64)
    for row, text in enumerate(x):
        if not isinstance(text, str) or not 0 < len(text) <= LENGTH:
            raise DataError(f"{where}: x must be texts of 1 to {LENGTH} letters")
        tokens[row, : len(text)] = [TOKENS.get(letter, OTHER) for letter in text]
    return tokens


def _next_letters(y: Sequence[Any], where: str) -> Index:
    if unknown := [letter for letter in y if letter not in TOKENS]:
        raise DataError(f"{where}: unknown letter in y, got {unknown[0]!r}")
    return np.array([TOKENS[letter] - 1 for letter in y], dtype=np.int64)


FEMNIST = LeafForm(
    _leaf_images,
    lambda y, where: convert_labels(np.asarray(y, dtype=None if y else np.int64), where),
    tuple(SIGNS),
)
SHAKESPEARE = LeafForm(
    _texts, _next_letters, tuple(map(repr, LETTERS)), TEXT, text_shape(LENGTH, OTHER + 1)
)


TEST_CENTER = 2
"""Number of WILDS' test hospital, which is therefore not a client."""


@dataclass(frozen=True)
class SitesForm:
    """Layout of an image directory that has a table with labels and owners."""

    label: str
    """Name of the label column."""
    owner: str
    """Name of the column with the hospital or the camera."""
    needs: tuple[str, ...]
    """Additional required columns."""
    part: Callable[[pd.DataFrame], Any]
    """Function that returns a code for each row of the metadata: 1 = training set, 2 = test set,
    0 = unused."""
    file: Callable[[pd.DataFrame], list[str]]
    """Function that returns the image path of each row of the metadata, relative to DIR."""
    classes: tuple[str, ...] = ()
    """Class names; () = numbers up to the highest label."""
    table: str = "metadata.csv"
    """File name of the CSV table."""
    own_tests: bool = False
    """Whether each client has personal test images, instead of a common test set."""

    def source(self, name: str, line: str) -> Source:
        """Return the data source with the given name and one-line description."""
        read = partial(read_sites, form=self)
        return Source(name, line, read, "DIR", whole_clients=self.own_tests, is_mapped=True)


def read_sites(location: str, spec: DataSpec, form: SitesForm) -> Dataset:
    """Read images and their table from DIR. Raises DataError if they are invalid."""
    if form.own_tests:
        check_no_subset(spec)
    root = expanded(location)
    path = root / form.table
    columns = [form.label, form.owner, *form.needs]
    table = read_frame(
        path, spec, f"; expected columns {', '.join(columns)}", usecols=columns,
        dtype=dict.fromkeys(form.needs, str),
    )  # fmt: skip
    if table.isna().any().any():
        raise DataError(f"{path}: columns {', '.join(columns)} must not have missing values")
    labels = convert_labels(table[form.label].to_numpy(), path)
    if form.classes and labels.max() >= len(form.classes):
        raise DataError(
            f"{path}: {form.label} must be 0 to {len(form.classes) - 1}, got {labels.max()}"
        )
    parts = np.asarray(form.part(table))
    owners = table[form.owner].to_numpy()
    train, test = np.flatnonzero(parts == 1), np.flatnonzero(parts == 2)
    # Draw the subsets first, so that no other images are decoded.
    train = train[spec.draw_samples(labels[train])]
    if not form.own_tests:
        rng = numpy_rng(FIXED_SEED, "max-test-samples")
        test = test[subset_rows(labels[test], spec.max_test_samples, rng)]
    if not len(train):
        raise DataError(f"{path}: no rows of the training set found")
    names = form.file(table)
    for name in names:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{path}: image paths must be below {root}, got {name!r}")
    files = np.array([str(root / name) for name in names])

    def make_split(rows: Any, like: Shape | None = None) -> Split:
        return Split(decode(files[rows].tolist(), spec, like), torch.from_numpy(labels[rows]))

    classes = form.classes or tuple(map(str, range(int(labels.max()) + 1)))
    if form.own_tests:
        rows = [part[owners[part] == k] for k in np.unique(owners) for part in (train, test)]
        sizes = tuple((len(a), len(b)) for a, b in zip(rows[::2], rows[1::2], strict=True))
        for owner, (num_train, num_test) in zip(np.unique(owners), sizes, strict=True):
            if num_train < 2 or not num_test:
                raise DataError(
                    f"{path}: {form.owner} {owner}: expected at least 2 training images and 1 test "
                    f"image, got {num_train} and {num_test}"
                )
        split = make_split(np.concatenate(rows))
        return Dataset(
            spec.dataset, split, None, Format.from_samples(split.x, classes, IMAGE), sizes
        )
    split = make_split(train)
    common = make_split(test, tuple(split.x.shape[1:])) if len(test) else None
    groups, format = encode_labels(owners[train]), Format.from_samples(split.x, classes, IMAGE)
    return Dataset(spec.dataset, split, common, format, groups=groups)


_PATCH = ("patient", "node", "x_coord", "y_coord")
CAMELYON17 = SitesForm(
    "tumor",
    "center",
    _PATCH,
    lambda table: np.where(table["center"] == TEST_CENTER, 2, 1),
    lambda table: [
        f"patches/patient_{p}_node_{n}/patch_patient_{p}_node_{n}_x_{x}_y_{y}.png"
        for p, n, x, y in zip(*(table[name] for name in _PATCH), strict=True)
    ],
    ("normal", "tumor"),
)
IWILDCAM = SitesForm(
    "y",
    "location_remapped",
    ("split", "filename"),
    lambda table: np.select([table["split"] == "train", table["split"] == "test"], [1, 2], 0),
    lambda table: [f"train/{name}" for name in table["filename"]],
)


FED_ISIC2019 = SitesForm(
    "target",
    "center",
    ("image", "fold"),
    lambda table: np.select([table["fold"] == "train", table["fold"] == "test"], [1, 2], 0),
    lambda table: [f"ISIC_2019_Training_Input_preprocessed/{name}.jpg" for name in table["image"]],
    ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC"),
    table="train_test_split",
    own_tests=True,
)


Numbers = npt.NDArray[np.float32]
HAR_CHANNELS = tuple(
    f"{what}_{axis}" for what in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
"""Channels, in the units of the files: accelerations in g, and angular velocities in rad/s."""
PAMAP2_ACTIVITIES = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling",
    7: "Nordic walking", 12: "ascending stairs", 13: "descending stairs", 16: "vacuum cleaning",
    17: "ironing", 24: "rope jumping",
}  # fmt: skip
"""Names of the activities in PAMAP2's protocol, by number."""
PAMAP2_COLUMNS = 54
_FIRST = np.array([4, 21, 38]) - 1
"""Indices of the columns with the temperatures of hand, chest, and ankle."""
_UNITS = {1: 9.81, 7: 1.0, 10: 50.0}
"""Units of the features from the acceleration (16 g), gyroscope, and magnetometer columns: g,
rad/s, and 50 microtesla. The keys are the offsets of these columns from the temperature column."""
WINDOW = 256
"""Number of samples in a window, at 100 Hz."""


def read_har(location: str, spec: DataSpec) -> Dataset:
    """Read the `Inertial Signals` in DIR/train and DIR/test; DIR/test is the common test set.

    Raises DataError if the files are invalid.
    """
    root = expanded(location)
    path = root / "activity_labels.txt"
    with reading(path, "text file"):
        words = read_text(path).split()
    names = tuple(words[1::2])
    if not names or words[::2] != [str(n) for n in range(1, len(names) + 1)]:
        raise DataError(f"{path}: expected one line for each activity, such as '1 WALKING'")
    train, persons = _har_part(root, "train", len(names), spec)
    test = _har_part(root, "test", len(names), spec)[0] if (root / "test").is_dir() else None
    format = Format.from_samples(train.x, names, SIGNAL)
    return Dataset(spec.dataset, train, test, format, groups=encode_labels(persons))


def _har_part(root: Path, part: str, classes: int, spec: DataSpec) -> tuple[Split, Index]:
    """Read the windows of a part, and the person of each window."""
    directory = root / part
    labels = _integers(directory / f"y_{part}.txt", spec)
    persons = _integers(directory / f"subject_{part}.txt", spec)
    signals = [
        _numbers(directory / "Inertial Signals" / f"{name}_{part}.txt", spec)
        for name in HAR_CHANNELS
    ]
    if len({signal.shape[1:] for signal in signals}) > 1:
        raise DataError(f"{directory}: all signals must have the same number of columns")
    files = ["y", "subject", *HAR_CHANNELS]
    counts = [len(labels), len(persons), *map(len, signals)]
    for name, count in zip(files, counts, strict=True):
        if count != counts[0]:
            raise DataError(
                f"{directory}: all files must have the same number of windows, got {counts[0]} in "
                f"y_{part}.txt, and {count} in {name}_{part}.txt"
            )
    if not 1 <= labels.min() <= labels.max() <= classes:
        raise DataError(f"{directory}: activities must be numbered from 1 to {classes}")
    x = torch.from_numpy(np.stack(signals, axis=1))
    return Split(x, torch.from_numpy(labels - 1)), persons


def _integers(path: Path, spec: DataSpec) -> Index:
    numbers = _numbers(path, spec)
    if numbers.shape[1:] != (1,) or (numbers != np.round(numbers)).any():
        raise DataError(f"{path}: expected one integer per line")
    return numbers[:, 0].astype(np.int64)


def read_pamap2(location: str, spec: DataSpec) -> Dataset:
    """Read windows of 2.56 seconds from DIR/Protocol/subject*.dat, or DIR/subject*.dat.

    Windows do not overlap, and each window contains a single activity. Missing values are
    interpolated linearly. Raises DataError if the files are invalid.
    """
    root = expanded(location)
    root = root / "Protocol" if (root / "Protocol").is_dir() else root
    files = sorted(root.glob("subject*.dat"))
    if not files:
        raise DataError(f"{root}: no files subject*.dat found")
    pairs = [_windows(path, spec) for path in files]
    check_max_bytes(sum(x.nbytes for x, _ in pairs), spec, root)
    persons = np.repeat(np.arange(len(files)), [len(y) for _, y in pairs])
    x, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
    if not len(y):
        raise DataError(f"{root}: expected at least {WINDOW} consecutive samples of one activity")
    split = Split(torch.from_numpy(x), torch.from_numpy(y))
    format = Format.from_samples(split.x, tuple(PAMAP2_ACTIVITIES.values()), SIGNAL)
    return Dataset(spec.dataset, split, None, format, groups=encode_labels(persons))


def _windows(path: Path, spec: DataSpec) -> tuple[Numbers, Index]:
    """Read the windows [N, 27, 256] and activities [N] of one person."""
    table = _numbers(path, spec, gaps=True)
    if table.shape[1] != PAMAP2_COLUMNS:
        raise DataError(f"{path}: expected {PAMAP2_COLUMNS} columns, got {table.shape[1]}")
    channels = np.concatenate(
        [
            table[:, first + offset : first + offset + 3] / np.float32(unit)
            for first in _FIRST
            for offset, unit in _UNITS.items()
        ],
        axis=1,
    )
    activities, order = table[:, 1].astype(np.int64), [*PAMAP2_ACTIVITIES]
    x, y = [], []
    changes = np.flatnonzero(np.diff(activities)) + 1
    for rows in np.split(np.arange(len(activities)), changes):
        if len(rows) and activities[rows[0]] in PAMAP2_ACTIVITIES:
            count = len(rows) // WINDOW
            x.append(channels[rows[: count * WINDOW]].reshape(-1, WINDOW, channels.shape[1]))
            y += [order.index(int(activities[rows[0]]))] * count
    empty = np.zeros((0, WINDOW, channels.shape[1]), np.float32)
    windows = np.concatenate([empty, *x]).transpose(0, 2, 1)
    return np.ascontiguousarray(windows), np.array(y, dtype=np.int64)


def _numbers(path: Path, spec: DataSpec, *, gaps: bool = False) -> Numbers:
    """Read numbers separated by spaces. With `gaps`, NaN values are interpolated."""
    frame = read_frame(path, spec, sep=r"\s+", header=None, dtype=np.float32)
    if gaps:
        frame = frame.interpolate(limit_direction="both").fillna(0.0)
    numbers: Numbers = frame.to_numpy(np.float32)
    if not np.isfinite(numbers).all():
        raise DataError(f"{path}: all numbers must be finite")
    return numbers


SOURCES = (
    FEMNIST.source("femnist", "LEAF's handwritten characters, one client per writer"),
    SHAKESPEARE.source("shakespeare", "LEAF's lines, one client per role"),
    CAMELYON17.source("camelyon17", "WILDS' tissue images, one client per hospital"),
    IWILDCAM.source("iwildcam", "WILDS' animal images, one client per camera"),
    FED_ISIC2019.source("fed-isic2019", "FLamby's skin lesions, one client per center"),
    Source("har", "UCI's smartphone signals, one client per person", read_har, "DIR", SIGNAL),
    Source("pamap2", "PAMAP2's sensor signals, one client per person", read_pamap2, "DIR", SIGNAL),
)
