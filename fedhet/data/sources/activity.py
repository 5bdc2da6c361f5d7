"""Signals of persons who move: `har:DIR` and `pamap2:DIR`; each person is a client.

Anguita et al., A Public Domain Dataset for Human Activity Recognition Using Smartphones, 2013;
Reiss and Stricker, Introducing a New Benchmarked Dataset for Activity Monitoring, 2012.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from fedhet.base.disk import expanded
from fedhet.base.errors import DataError, reason_of
from fedhet.data.sources.base import Source
from fedhet.data.spec import Dataset, DataSpec, Index, Split, numbered, refuse_more
from fedhet.kinds import SIGNAL

Numbers = npt.NDArray[np.float32]
HAR_CHANNELS = tuple(
    f"{what}_{axis}" for what in ("body_acc", "body_gyro", "total_acc") for axis in "xyz"
)
"""Accelerations in g, and angular velocities in rad/s, as the files have them."""
PAMAP2_ACTIVITIES = {
    1: "lying", 2: "sitting", 3: "standing", 4: "walking", 5: "running", 6: "cycling",
    7: "Nordic walking", 12: "ascending stairs", 13: "descending stairs", 16: "vacuum cleaning",
    17: "ironing", 24: "rope jumping",
}  # fmt: skip
"""The activities of the protocol by their numbers; 0 is none of them."""
PAMAP2_COLUMNS = 54
_FIRST = np.array([4, 21, 38]) - 1
"""The columns of the temperature of hand, chest and ankle, from 0."""
_UNITS = {1: 9.81, 7: 1.0, 10: 50.0}
"""Offset from there of the acceleration (16 g), the gyroscope and the magnetometer, with the unit
that their numbers are divided by: g, rad/s, and 50 microtesla."""
WINDOW = 256
"""Samples of a window, of which the sensors make 100 a second."""


def read_har(place: str, spec: DataSpec) -> Dataset:
    """Read DIR/train and DIR/test with their `Inertial Signals`; the persons of test are common.

    Raises DataError for any fault of the files.
    """
    root = expanded(place)
    names = _har_classes(root / "activity_labels.txt")
    train, persons = _har_part(root, "train", len(names), spec)
    test = _har_part(root, "test", len(names), spec)[0] if (root / "test").is_dir() else None
    return Dataset(spec.dataset, train, test, names, groups=numbered(persons))


def _har_classes(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({reason_of(error)})") from error
    if not lines or lines[::2] != [str(n) for n in range(1, len(lines) // 2 + 1)]:
        raise DataError(f"{path}: expected a line for each activity, such as '1 WALKING'")
    return tuple(lines[1::2])


def _har_part(root: Path, part: str, classes: int, spec: DataSpec) -> tuple[Split, Index]:
    """Return the windows of a part, and the person of each."""
    folder = root / part
    labels = _whole(folder / f"y_{part}.txt", spec)
    persons = _whole(folder / f"subject_{part}.txt", spec)
    signals = [
        _table(folder / "Inertial Signals" / f"{name}_{part}.txt", spec) for name in HAR_CHANNELS
    ]
    sizes = {signal.shape for signal in signals}
    if len(sizes) > 1 or {len(labels), len(persons)} != {len(signals[0])}:
        raise DataError(f"{folder}: its files do not have the same windows")
    if not 1 <= labels.min() <= labels.max() <= classes:
        raise DataError(f"{folder}: activities must be from 1 to {classes}")
    x = torch.from_numpy(np.stack(signals, axis=1))
    return Split(x, torch.from_numpy(labels - 1)), persons


def _whole(path: Path, spec: DataSpec) -> Index:
    found = _table(path, spec)
    if found.shape[1:] != (1,) or (found != np.round(found)).any():
        raise DataError(f"{path}: expected a whole number in each line")
    return found[:, 0].astype(np.int64)


def read_pamap2(place: str, spec: DataSpec) -> Dataset:
    """Read DIR/Protocol/subject*.dat, or DIR/subject*.dat: windows of one activity, 2.56 seconds.

    Windows follow each other, and gaps of a sensor are filled along a straight line. Raises
    DataError for any fault of the files.
    """
    root = expanded(place)
    root = root / "Protocol" if (root / "Protocol").is_dir() else root
    files = sorted(root.glob("subject*.dat"))
    if not files:
        raise DataError(f"{root}: has no files subject*.dat of PAMAP2")
    pairs = [_windows(path, spec) for path in files]
    refuse_more(sum(x.nbytes for x, _ in pairs), spec, root)
    persons = np.repeat(np.arange(len(files)), [len(y) for _, y in pairs])
    x, y = (np.concatenate(each) for each in zip(*pairs, strict=True))
    if not len(y):
        raise DataError(f"{root}: has no {WINDOW} samples of one activity in a row")
    split = Split(torch.from_numpy(x), torch.from_numpy(y))
    return Dataset(
        spec.dataset, split, None, tuple(PAMAP2_ACTIVITIES.values()), groups=numbered(persons)
    )


def _windows(path: Path, spec: DataSpec) -> tuple[Numbers, Index]:
    """Return a person's windows [N, 27, 256] and activities [N]."""
    table = _table(path, spec, gaps=True)
    if table.shape[1] != PAMAP2_COLUMNS:
        raise DataError(f"{path}: has {table.shape[1]} columns, PAMAP2 has {PAMAP2_COLUMNS}")
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
            whole = len(rows) // WINDOW * WINDOW
            x.append(channels[rows[:whole]].reshape(-1, WINDOW, channels.shape[1]))
            y += [order.index(int(activities[rows[0]]))] * (whole // WINDOW)
    empty = np.zeros((0, WINDOW, channels.shape[1]), np.float32)
    windows = np.concatenate([empty, *x]).transpose(0, 2, 1)
    return np.ascontiguousarray(windows), np.array(y, dtype=np.int64)


def _table(path: Path, spec: DataSpec, *, gaps: bool = False) -> Numbers:
    """Return a file's numbers, separated by spaces; `gaps` (NaN) may be filled."""
    import pandas as pd

    try:
        refuse_more(path.stat().st_size, spec, path)
        frame = pd.read_csv(path, sep=r"\s+", header=None, dtype=np.float32)
    except DataError:
        raise
    except Exception as error:  # pandas has its own for each fault of a file
        raise DataError(f"{path}: cannot be read ({reason_of(error)})") from error
    if gaps:
        frame = frame.interpolate(limit_direction="both").fillna(0.0)
    found: Numbers = frame.to_numpy(np.float32)
    if not np.isfinite(found).all():
        raise DataError(f"{path}: holds something other than finite numbers")
    return found


SOURCES = (
    Source("har", "UCI's smartphone signals, a client each person", read_har, "DIR", SIGNAL),
    Source("pamap2", "PAMAP2's sensor signals, a client each person", read_pamap2, "DIR", SIGNAL),
)
