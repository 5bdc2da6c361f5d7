"""Runs on disk, in groups that differ only in their seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedhet.base.errors import StateError
from fedhet.report.run import Run, load_run
from fedhet.runs.records import NAN
from fedhet.runs.units import path_text
from fedhet.settings.run import where_it_ran
from fedhet.settings.text import as_text

Column = tuple[str, str]
"""A protocol and a kind of model."""


@dataclass(frozen=True)
class Spread:
    """A mean over the runs of a group; the sample standard deviation is NaN for a single run."""

    mean: float = NAN
    std: float = NAN
    n: int = 0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of the values that are not NaN."""
        known = pd.Series([*values], dtype=float)
        return cls(float(known.mean()), float(known.std()), int(known.count()))


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds."""

    label: str
    settings: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """The method's name."""
        return self.runs[0].method

    @property
    def dataset(self) -> str:
        """The dataset's name."""
        return self.runs[0].dataset

    @property
    def headline(self) -> str:
        """The protocol of the runs' headline number."""
        return self.runs[0].headline

    @property
    def finished(self) -> bool:
        """Whether all runs are finished."""
        return all(run.finished for run in self.runs)

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """The runs' seeds."""
        return tuple(run.seed for run in self.runs)

    def score(self, column: Column) -> Spread:
        """Return the last round's mean over clients, as a spread over the runs."""
        return Spread.of(run.last(*column).mean for run in self.runs)

    def tail(self, column: Column) -> Spread:
        """Return the mean accuracy of the last fifth of the rounds, as a spread over the runs."""
        return Spread.of(run.tail(*column).mean for run in self.runs)

    def worst(self, column: Column) -> Spread:
        """Return the last round's worst client accuracy, as a spread over the runs."""
        return Spread.of(run.last(*column).worst for run in self.runs)

    def total(self, cost: str) -> Spread:
        """Return one of `Run.totals`, such as `bytes_up` or `seconds`, over the runs."""
        return Spread.of(run.totals[cost] for run in self.runs)

    def spent(self) -> Spread:
        """Return the largest epsilon of any client, over the runs."""
        return Spread.of(run.spent for run in self.runs)

    def seconds_a_round(self) -> Spread:
        """Return the mean wall-clock seconds of a round, over the runs."""
        return Spread.of(float(run.costs["seconds"].mean()) for run in self.runs)

    def clock(self) -> Spread:
        """Return the simulated seconds of the whole run, over the runs that have such a clock."""
        return Spread.of(float(run.costs["clock"].iloc[-1]) for run in self.runs)

    def curve(self, column: Column) -> pd.DataFrame:
        """Return mean and std of the accuracy by round, and its mean costs so far."""
        curve = over_seeds([run.curve(*column)["mean"] for run in self.runs])
        for cost in ("bytes", "epsilon", "clock"):
            mean = over_seeds([run.costs[cost] for run in self.runs])["mean"]
            curve = curve.join(mean.rename(cost))
        return curve

    @property
    def figures(self) -> set[str]:
        """The names of the method's own metrics that every run has."""
        return set.intersection(*(set(run.figures) for run in self.runs))

    def figure(self, name: str) -> pd.DataFrame:
        """Return mean and std of one of the method's own metrics by round."""
        return over_seeds([run.figures.get(name, pd.Series(dtype=float)) for run in self.runs])


def over_seeds(each: Sequence[pd.Series]) -> pd.DataFrame:
    """Return mean and sample standard deviation of several runs' curves, NaN for a single run.

    Only rounds for which every run has a value are kept.
    """
    table = pd.concat([curve.dropna() for curve in each], axis=1, join="inner").sort_index()
    return pd.DataFrame({"mean": table.mean(axis=1), "std": table.std(axis=1)})


def find_runs(folders: Sequence[Path | str]) -> list[Path]:
    """Return the runs' directories: those given, or those one or two levels below."""
    found: dict[Path, Path] = {}
    for folder in map(Path, folders):
        runs = runs_below(folder)
        if not runs:
            raise StateError(f"{folder}: neither a run's directory nor a parent of one")
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def runs_below(folder: Path) -> list[Path]:
    """Return the run's directory that a folder is, or those one or two levels below it."""
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
    """Return the runs in groups with distinct labels, and notes on runs left out.

    The unfinished runs of a group that has finished ones are left out. Of a seed, the longest run
    is kept, then the latest: runs of the same seed are one sample.
    """
    place = where_it_ran() | {"seed"}
    found: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        named = {key: as_text(value) for key, value in run.settings.items() if key not in place}
        found.setdefault(tuple(sorted(named.items())), []).append(run)
    notes: list[str] = []
    kept: list[tuple[Run, ...]] = []
    for some in found.values():
        whole = [run for run in some if run.finished]
        for run in some:
            if not run.finished:
                fate = "left out" if whole else "its last round so far is shown, marked *"
                notes.append(
                    f"{path_text(run.path)}: unfinished, {run.done} of {run.planned} rounds; {fate}"
                )
        best: dict[int | None, Run] = {}
        for run in sorted(whole or some, key=_length_and_time):
            if run.seed in best:
                shorter, longer = path_text(best[run.seed].path), path_text(run.path)
                notes.append(f"{shorter}: left out, {longer} has the same seed")
            best[run.seed] = run
        by_seed = sorted(best.values(), key=lambda run: -1 if run.seed is None else run.seed)
        kept.append(tuple(by_seed))
    each = pd.DataFrame([dict(key) for key in found])
    labels = _labels(each, [some[0].method for some in kept])
    settings = [dict(key) for key in found]
    return [Group(*parts) for parts in zip(labels, settings, kept, strict=True)], notes


def _length_and_time(run: Run) -> tuple[int, float]:
    return run.done, (run.path / "metrics.jsonl").stat().st_mtime


def _labels(settings: pd.DataFrame, methods: Sequence[str]) -> list[str]:
    """Return, for each row, the method and the settings in which that method's rows differ.

    A setting is named by its last part where that is unique, as on the command line, and a file by
    its name alone if the names still differ.
    """

    def file_names(values: pd.Series[str]) -> pd.Series[str]:
        names = values.where(~values.str.startswith("/", na=False), values.str.rpartition("/")[2])
        return names if names.nunique() == values.nunique() else values

    settings = settings.sort_index(axis="columns").apply(file_names)
    varies = settings.groupby(pd.Series(methods)).nunique(dropna=False) > 1
    ends = Counter(key.rpartition(".")[2] for key in settings)

    def short(key: str, method: str) -> str:
        end = key.rpartition(".")[2]
        return end if ends[end] == 1 else key.removeprefix(method + ".")

    return [
        " ".join([method, *(f"{short(key, method)}={row[key]}" for key in row.index)])
        for method, (_, every) in zip(methods, settings.iterrows(), strict=True)
        for row in [every[varies.loc[method]].dropna()]
    ]
