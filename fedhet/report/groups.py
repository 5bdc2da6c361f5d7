"""Runs that differ only in their seed form a group; groups are what a comparison compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedhet.errors import SettingsError, StateError
from fedhet.report.run import KINDS, PROTOCOLS, Record, Run, load_run
from fedhet.report.units import setting

PLACES = frozenset({
    "backend", "channels-last", "config", "cpus-per-client", "data-dir", "device", "download",
    "gpus-per-client", "max-payload-mb", "name", "out", "preset", "resume", "round-timeout",
    "run", "state-dir", "tensorboard", "threads", "verbose", "workers",
})  # fmt: skip
"""Settings that say where and on what a run ran, not what it computes."""
NAN = float("nan")
Numbers = NDArray[np.float64]
Column = tuple[str, str]
"""A protocol and a kind of model."""


@dataclass(frozen=True)
class Spread:
    """A mean over the runs of a group; the sample standard deviation is NaN for a single one."""

    mean: float = NAN
    std: float = NAN
    n: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of the finite values."""
        known = [value for value in values if math.isfinite(value)]
        if not known:
            return cls()
        std = float(np.std(known, ddof=1)) if len(known) > 1 else NAN
        return cls(math.fsum(known) / len(known), std, len(known))


@dataclass(frozen=True)
class Curve:
    """A quantity of a group over the rounds in which all of its runs have it."""

    rounds: tuple[int, ...]
    mean: Numbers
    std: Numbers
    sent: Numbers
    """Bytes up and down, cumulated; the mean over the runs."""


@dataclass(frozen=True)
class Group:
    """Runs with the same settings, a seed each."""

    label: str
    settings: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def dataset(self) -> str:
        """The data set's name."""
        return self.runs[0].dataset

    @property
    def finished(self) -> bool:
        """Did all the runs reach their end?"""
        return all(run.finished for run in self.runs)

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """The runs' seeds."""
        return tuple(run.seed for run in self.runs)

    def score(self, column: Column) -> Spread:
        """Return the last round's mean over clients, over the runs."""
        return Spread.of(run.last(*column).mean for run in self.runs)

    def worst(self, column: Column) -> Spread:
        """Return the last round's worst client, over the runs."""
        return Spread.of(run.last(*column).worst for run in self.runs)

    @property
    def bytes_up(self) -> Spread:
        """Payload bytes from clients to server, over the runs."""
        return Spread.of(run.bytes_up for run in self.runs)

    @property
    def bytes_down(self) -> Spread:
        """Payload bytes from server to clients, over the runs."""
        return Spread.of(run.bytes_down for run in self.runs)

    @property
    def seconds(self) -> Spread:
        """Wall-clock seconds, over the runs."""
        return Spread.of(run.seconds.get("total", NAN) for run in self.runs)

    def bytes_to(self, column: Column, target: float) -> Spread:
        """Return the bytes sent until the target was reached, over the runs that reached it."""
        return Spread.of(bytes_to_target(run, column, target) for run in self.runs)

    def curve(self, column: Column) -> Curve:
        """Return the accuracy over the rounds that every run has."""
        return _over_seeds([_accuracy(run, column) for run in self.runs])

    @property
    def own_figures(self) -> set[str]:
        """The names of the method's own figures that every run has."""
        each = [{name for record in run.records for name in record.method} for run in self.runs]
        return set.intersection(*each)

    def own_curve(self, name: str) -> Curve:
        """Return one of the method's own figures over the rounds in which every run has it."""
        return _over_seeds(
            [_points(run, lambda record: record.method.get(name, NAN)) for run in self.runs]
        )


@dataclass(frozen=True)
class Comparison:
    """Groups, best first by the headline column, and what a reader must know about them."""

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    target: float
    notes: tuple[str, ...]
    figures: tuple[str, ...] = ()
    """The methods' own figures that are drawn over rounds too."""

    @property
    def headline(self) -> Column:
        """The protocol and kind by which the groups are ordered."""
        return self.columns[0]


def bytes_to_target(run: Run, column: Column, target: float) -> float:
    """Return the bytes sent up and down until the mean accuracy first reached a target, or NaN."""
    for accuracy, sent in _accuracy(run, column).values():
        if accuracy >= target:
            return sent
    return NAN


Points = dict[int, tuple[float, float]]
"""A quantity, and the bytes sent so far, by round."""


def _over_seeds(each: Sequence[Points]) -> Curve:
    """Return the curve of several runs' points, over the rounds that all of them have."""
    rounds = sorted(set.intersection(*(set(points) for points in each)))
    table = np.array([[points[r] for r in rounds] for points in each]).reshape(-1, 2)
    cube = table.reshape(len(each), len(rounds), 2)
    many = len(each) > 1
    std = cube[:, :, 0].std(axis=0, ddof=1) if many else np.full(len(rounds), NAN)
    return Curve(tuple(rounds), cube[:, :, 0].mean(axis=0), std, cube[:, :, 1].mean(axis=0))


def _points(run: Run, quantity: Callable[[Record], float]) -> Points:
    """Return a quantity and the bytes sent so far, by round, where the round has it."""
    points, sent = {}, 0
    for record in run.records:
        sent += record.bytes_up + record.bytes_down
        value = quantity(record)
        if math.isfinite(value):
            points[record.round] = (value, float(sent))
    return points


def _accuracy(run: Run, column: Column) -> Points:
    def mean(record: Record) -> float:
        scores = record.score(*column)
        return NAN if scores is None else scores.mean

    return _points(run, mean)


def find_runs(folders: Sequence[Path | str]) -> list[Path]:
    """Return the runs' directories: those given, or those one or two levels below."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        runs = _runs_below(folder)
        if not runs:
            raise StateError(f"{folder}: neither a run's directory nor a parent of one")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _runs_below(folder: Path) -> list[Path]:
    if (folder / "config.toml").is_file():
        return [folder]
    near = {path.parent for path in folder.glob("*/config.toml")}
    far = {path.parent for path in folder.glob("*/*/config.toml")}
    return sorted(near | {path for path in far if path.parent not in near})


def load_all(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Return the runs that can be read, and a note for each that cannot."""
    runs, notes = [], []
    for folder in folders:
        try:
            runs.append(load_run(folder))
        except StateError as error:
            notes.append(f"left out: {error}")
    if not runs:
        raise StateError(notes[0].removeprefix("left out: ") if notes else "no run to compare")
    return runs, notes


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Return the runs in groups with labels that tell them apart, and notes on runs left out."""
    by_settings: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        by_settings.setdefault(tuple(sorted(_essence(run).items())), []).append(run)
    notes: list[str] = []
    kept = {key: _one_a_seed(_finished(some, notes), notes) for key, some in by_settings.items()}
    essences = [(some[0].method, dict(key)) for key, some in kept.items()]
    groups = []
    for (method, essence), some in zip(essences, kept.values(), strict=True):
        rivals = [other for name, other in essences if name == method]
        groups.append(Group(label_of(method, essence, rivals), essence, tuple(some)))
    return groups, notes


def _essence(run: Run) -> dict[str, str]:
    settings = {"method": run.method, "dataset": run.dataset, **run.settings}
    return {
        key: setting(value)
        for key, value in settings.items()
        if key not in PLACES and key != "seed"
    }


def label_of(method: str, essence: Mapping[str, str], rivals: Sequence[Mapping[str, str]]) -> str:
    """Return the method and those of its settings in which its groups differ."""
    differing = [
        f"{key.removeprefix(method + '.')}={value}"
        for key, value in essence.items()
        if any(rival.get(key) != value for rival in rivals)
    ]
    return " ".join([method, *differing])


def _finished(runs: list[Run], notes: list[str]) -> list[Run]:
    """Leave unfinished runs out of a group that has finished ones."""
    whole = [run for run in runs if run.finished]
    for run in runs:
        if not run.finished:
            fate = "left out" if whole else "its last round so far is shown, marked *"
            notes.append(f"{run.path}: unfinished, {run.done} of {run.planned} rounds; {fate}")
    return whole or runs


def _one_a_seed(runs: list[Run], notes: list[str]) -> list[Run]:
    """Keep the longest, then latest, of the runs that share a seed: it is one sample, not two."""
    best: dict[int | None, Run] = {}
    for run in sorted(runs, key=lambda run: (run.done, _written(run))):
        if run.seed in best:
            notes.append(f"{best[run.seed].path}: left out, {run.path} has the same seed")
        best[run.seed] = run
    return sorted(best.values(), key=lambda run: -1 if run.seed is None else run.seed)


def _written(run: Run) -> float:
    return (run.path / "metrics.jsonl").stat().st_mtime


def choose_columns(groups: Sequence[Group], wanted: str | None = None) -> tuple[Column, ...]:
    """Return every protocol and kind, the shared headline first.

    That is the protocol that is the headline of most groups; among equals the one that most
    were judged under, then `common`; and of its kinds the one `wanted`, or the first, `private`.
    """
    columns = {column for group in groups for run in group.runs for column in run.columns}
    if not columns:
        raise StateError("none of the runs was evaluated, so there is nothing to compare")
    there = sorted({kind for _, kind in columns})
    if wanted not in (None, *there):
        raise SettingsError(
            f"setting 'kind' = {wanted!r} is not allowed: these runs have {', '.join(there)}"
        )
    order = list(PROTOCOLS)

    def rank(protocol: str) -> tuple[int, int, int]:
        judged = sum(any(run.kinds(protocol) for run in group.runs) for group in groups)
        own = sum(group.runs[0].headline == protocol for group in groups)
        return -own, -judged, order.index(protocol) if protocol in order else len(order)

    def place(column: Column) -> tuple[object, ...]:
        protocol, kind = column
        number = KINDS.index(kind) if kind in KINDS else len(KINDS)
        unwanted = wanted is not None and kind != wanted
        return unwanted, rank(protocol), protocol, number, kind

    return tuple(sorted(columns, key=place))


def default_target(groups: Sequence[Group], column: Column) -> float:
    """Return 90 % of the lowest last accuracy of any run, so that all of them reach it."""
    last = [run.last(*column).mean for group in groups for run in group.runs]
    lowest = 0.9 * min((value for value in last if math.isfinite(value)), default=0.0)
    rounded = math.floor(lowest * 1000) / 1000
    return rounded or lowest


def cautions(groups: Sequence[Group], column: Column) -> list[str]:
    """Return what makes rows hard to compare."""
    notes = _differing(groups)
    unjudged = [group.label for group in groups if group.score(column).n == 0]
    if unjudged:
        notes.append(f"not judged under {' '.join(column)}, so last: {', '.join(unjudged)}")
    other = [group for group in groups if group.runs[0].headline not in ("", column[0])]
    for name in sorted({group.runs[0].headline for group in other}):
        labels = ", ".join(group.label for group in other if group.runs[0].headline == name)
        notes.append(f"headline of their own is {name}, the table's is {column[0]}: {labels}")
    return notes


def _differing(groups: Sequence[Group]) -> list[str]:
    notes = []
    datasets = sorted({group.dataset for group in groups})
    if len(datasets) > 1:
        notes.append(f"rows of different data sets do not compare: {', '.join(datasets)}")
    rounds = sorted({run.done for group in groups for run in group.runs})
    if len(rounds) > 1:
        notes.append(f"the runs differ in their rounds: {', '.join(map(str, rounds))}")
    if len({tuple(map(str, group.seeds)) for group in groups}) > 1:
        notes.append("the groups do not all have the same seeds")
    return notes
