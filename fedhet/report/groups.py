"""Groups of runs that differ only in their seed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fedhet.base.errors import SettingsError, StateError, nearest
from fedhet.report.frames import over_seeds
from fedhet.report.run import TEST_SETS, Run, load_run
from fedhet.runs.records import KINDS, NAN
from fedhet.runs.units import path_text, position
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

    def cost_to(
        self, cost: str, column: Column, target: float, *, lower_is_better: bool = False
    ) -> Spread:
        """Return what a cost was when the target was reached, over the runs that reached it.

        `cost` is cumulative, one of `frames.costs`: `bytes` or `clock`.
        """
        sign = -1 if lower_is_better else 1
        return Spread.of(cost_to_target(run, cost, column, target, sign) for run in self.runs)

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


def cost_to_target(run: Run, cost: str, column: Column, target: float, sign: int = 1) -> float:
    """Return a cumulative cost when the mean value reached a target first, or NaN.

    `sign` is -1 for a metric of which lower values are better.
    """
    means = run.curve(*column)["mean"]
    reached = means.index[sign * means >= sign * target]
    return float(run.costs[cost][reached[0]]) if len(reached) else NAN


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
    """Return the runs in groups with distinct labels, and notes on runs left out."""
    place = where_it_ran() | {"seed"}
    found: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        named = {key: as_text(value) for key, value in run.settings.items() if key not in place}
        found.setdefault(tuple(sorted(named.items())), []).append(run)
    notes: list[str] = []
    kept = [tuple(_one_a_seed(_finished(some, notes), notes)) for some in found.values()]
    each = pd.DataFrame([dict(key) for key in found])
    labels = _labels(each, [some[0].method for some in kept])
    settings = [dict(key) for key in found]
    return [Group(*parts) for parts in zip(labels, settings, kept, strict=True)], notes


def _labels(settings: pd.DataFrame, methods: Sequence[str]) -> list[str]:
    """Return, for each row, the method and the settings in which that method's rows differ.

    A setting is named by its last part where that is unique, as on the command line.
    """
    settings = settings.sort_index(axis="columns").apply(_file_names)
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


def _file_names(values: pd.Series[str]) -> pd.Series[str]:
    """Return the values of a setting with files by their names alone, if these still differ."""
    names = values.where(~values.str.startswith("/", na=False), values.str.rpartition("/")[2])
    return names if names.nunique() == values.nunique() else values


def _finished(runs: list[Run], notes: list[str]) -> list[Run]:
    """Leave out the unfinished runs of a group that has finished ones."""
    whole = [run for run in runs if run.finished]
    for run in runs:
        if not run.finished:
            fate = "left out" if whole else "its last round so far is shown, marked *"
            notes.append(
                f"{path_text(run.path)}: unfinished, {run.done} of {run.planned} rounds; {fate}"
            )
    return whole or runs


def _one_a_seed(runs: list[Run], notes: list[str]) -> list[Run]:
    """Keep one run per seed, the longest, then the latest: same-seed runs are one sample."""
    best: dict[int | None, Run] = {}
    for run in sorted(runs, key=lambda run: (run.done, _written(run))):
        if run.seed in best:
            shorter, kept = path_text(best[run.seed].path), path_text(run.path)
            notes.append(f"{shorter}: left out, {kept} has the same seed")
        best[run.seed] = run
    return sorted(best.values(), key=lambda run: -1 if run.seed is None else run.seed)


def _written(run: Run) -> float:
    return (run.path / "metrics.jsonl").stat().st_mtime


def choose_columns(
    groups: Sequence[Group], kind: str | None = None, protocol: str | None = None
) -> tuple[Column, ...]:
    """Return every protocol and kind, the shared headline first.

    That is `protocol`, or the one that is the headline of most groups; among ties, the one under
    which most were evaluated, then `common`; and of its kinds `kind`, or the first one, `private`.
    Raises SettingsError for a kind or protocol under which none of the groups was evaluated.
    """
    columns = {column for group in groups for run in group.runs for column in run.columns}
    if not columns:
        raise StateError("none of the runs was evaluated, so there is nothing to compare")
    _check("protocol", protocol, {under for under, _ in columns})
    wanted = {column for column in columns if protocol in (None, column[0])}
    _check("kind", kind, {each for _, each in wanted}, f" under {protocol}" if protocol else "")
    wanted = {column for column in wanted if kind in (None, column[1])}

    def place(column: Column) -> tuple[object, ...]:
        under, each = column
        return column not in wanted, _preference(groups, under), position(each, KINDS)

    return tuple(sorted(columns, key=place))


def _check(name: str, value: str | None, there: set[str], where: str = "") -> None:
    if value not in (None, *there):
        known = ", ".join(sorted(there)) + where
        raise SettingsError(f"setting '{name}' = {value!r} is not allowed: these runs have {known}")


def _preference(groups: Sequence[Group], protocol: str) -> tuple[object, ...]:
    """Return a sort key: the protocol of most groups comes first."""
    headline = sum(group.headline == protocol for group in groups)
    evaluated = sum(any(run.kinds(protocol) for run in group.runs) for group in groups)
    return -headline, -evaluated, position(protocol, list(TEST_SETS))


def chosen_figures(names: str, known: Sequence[str]) -> tuple[str, ...]:
    """Split a comma-separated text of names. Raises SettingsError for one not in `known`."""
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in wanted:
        if name not in known:
            raise SettingsError(
                f"'--figures {name}' is not a figure of these runs: {', '.join(known) or 'none'}"
                f"{nearest(name, known)}"
            )
    return wanted


def default_target(
    groups: Sequence[Group], column: Column, *, lower_is_better: bool = False
) -> float:
    """Return 90 % of the lowest last value of any run, so that all of them reach it.

    Of a metric of which lower values are better, it is 110 % of the highest.
    """
    last = pd.Series([run.last(*column).mean for group in groups for run in group.runs])
    if lower_is_better:
        return math.ceil(1.1 * last.max() * 1000) / 1000 if last.count() else 0.0
    target = 0.9 * last.min() if last.count() else 0.0
    return math.floor(target * 1000) / 1000 or float(target)


def cautions(groups: Sequence[Group], column: Column) -> list[str]:
    """Return notes on what makes rows hard to compare."""
    notes = _differing(groups)
    unjudged = [group.label for group in groups if group.score(column).n == 0]
    if unjudged:
        notes.append(
            f"Not evaluated under {' '.join(column)}, and therefore last: {', '.join(unjudged)}."
        )
    for name in sorted({group.headline for group in groups} - {"", column[0]}):
        labels = ", ".join(group.label for group in groups if group.headline == name)
        used, usual = (TEST_SETS.get(each, each) for each in (column[0], name))
        notes.append(
            f"Rows are ordered by the scores on the {used}. The pages of {labels} show the scores "
            f"on the {usual} first; here, they are in the columns '{name} …'."
        )
    return notes


def _differing(groups: Sequence[Group]) -> list[str]:
    notes = []
    datasets = sorted({group.dataset for group in groups})
    if len(datasets) > 1:
        notes.append(f"Rows of different data sets cannot be compared: {', '.join(datasets)}.")
    rounds = sorted({run.done for group in groups for run in group.runs})
    if len(rounds) > 1:
        notes.append(f"The runs have different numbers of rounds: {', '.join(map(str, rounds))}.")
    if len({tuple(map(str, group.seeds)) for group in groups}) > 1:
        notes.append("The groups do not all have the same seeds.")
    return notes
