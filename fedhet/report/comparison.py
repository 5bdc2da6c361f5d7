"""Comparison of runs: groups that differ only in their seed, their order, and their differences.

Runs of one seed share data, split and initial weights wherever their settings allow it, so that the
difference of two methods varies less over seeds than either accuracy. Tests of the differences have
Holm's correction for their number; SciPy is imported when a test is asked for.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pandas as pd

from fedhet.base.errors import SettingsError, StateError, nearest
from fedhet.base.metrics import ACCURACY, Metric, in_order, metric_of
from fedhet.report.run import TEST_SETS, Run, load_run
from fedhet.runs.measures import Tail
from fedhet.runs.records import KINDS, NAN, Score
from fedhet.runs.units import path_text, percent, position, score
from fedhet.settings.run import where_it_ran
from fedhet.settings.text import as_text

Column = tuple[str, str]
"""A protocol and a kind of model."""
BASELINE = "local"
"""The method that is the baseline by default, if it is among the runs."""
CLEAR = 2.0
"""A difference is marked if it is more than this many standard errors from zero."""
TESTS = {"none": "", "t": "paired t-test", "wilcoxon": "Wilcoxon's signed-rank test"}
"""The tests of the differences; see `p_value`."""
DIGITS = 12
"""Of a difference of accuracies; what is beyond them is of floating point."""


# --- groups of runs ------------------------------------------------------------------------


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

    def by_seed(self, column: Column, of: Callable[[Run, str, str], Score | Tail]) -> pd.Series:
        """Return the means of the runs that have a seed, by seed; `of` is `Run.last` or `.tail`."""
        means = {run.seed: of(run, *column).mean for run in self.runs if run.seed is not None}
        return pd.Series(means, dtype=float)

    def total(self, cost: str) -> Spread:
        """Return one of `Run.totals`, such as `bytes_up` or `seconds`, over the runs."""
        return Spread.of(float(run.totals[cost]) for run in self.runs)

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


def runs_below(folder: Path) -> list[Path]:
    """Return the run's directory that a folder is, or those one or two levels below it."""
    if (folder / "config.toml").is_file():
        return [folder]
    near = {path.parent for path in folder.glob("*/config.toml")}
    far = {path.parent for path in folder.glob("*/*/config.toml")}
    return sorted(near | {path for path in far if path.parent not in near})


def load_runs(folders: Sequence[Path | str]) -> tuple[list[Run], list[str]]:
    """Return the runs that can be read, and a note for each that cannot.

    The folders are the runs' directories, or parents of these one or two levels above.
    """
    paths: dict[Path, Path] = {}
    for folder in map(Path, folders):
        below = runs_below(folder)
        if not below:
            raise StateError(f"{folder}: neither a run's directory nor a parent of one")
        for path in below:
            paths.setdefault(path.resolve(), path)
    runs, notes = [], []
    for path in paths.values():
        try:
            runs.append(load_run(path))
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
        changed = {run.path: (run.path / "metrics.jsonl").stat().st_mtime for run in some}
        for run in sorted(whole or some, key=lambda run: (run.done, changed[run.path])):
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
        " ".join([method, *(f"{short(key, method)}={row[key] or 'none'}" for key in row.index)])
        for method, (_, every) in zip(methods, settings.iterrows(), strict=True)
        for row in [every[varies.loc[method]].dropna()]
    ]


# --- the comparison ------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """The differences of an accuracy between two groups, for the seeds that both have.

    With fewer than two of them, mean and standard error are NaN.
    """

    per_seed: Mapping[int, float] = field(default_factory=dict)
    mean: float = NAN
    se: float = NAN
    """The sample standard deviation of the differences, divided by the root of their number."""

    @classmethod
    def of(cls, ours: pd.Series, theirs: pd.Series) -> Difference:
        """Return ours - theirs, both indexed by seed."""
        each = (ours - theirs).dropna().sort_index().round(DIGITS)
        per_seed = {int(seed): float(value) for seed, value in each.items()}
        if len(each) < 2:
            return cls(per_seed)
        return cls(per_seed, float(each.mean()), float(each.sem(ddof=1)))

    @property
    def n(self) -> int:
        """The number of seeds."""
        return len(self.per_seed)

    @property
    def clear(self) -> bool:
        """Whether the mean is more than two standard errors from zero."""
        return abs(self.mean) > CLEAR * self.se


@dataclass(frozen=True)
class Pair:
    """A group and its baseline: the differences of the last round, and of the tail."""

    group: Group
    baseline: Group
    column: Column
    baseline_column: Column
    """Of the same protocol; its kind of model may be another."""
    last: Difference
    tail: Difference
    p: float = NAN
    """Of the last round's differences, corrected for the number of pairs; NaN if not tested."""

    @property
    def fault(self) -> str:
        """Why the two cannot be compared seed by seed, or ""."""
        if self.last.n > 1:
            return ""
        if self.group.dataset != self.baseline.dataset:
            return "another data set"
        sides = (self.group, self.column), (self.baseline, self.baseline_column)
        if not all(group.score(column).n for group, column in sides):
            return "not evaluated"
        return "only 1 shared seed" if self.last.n else "no shared seed"


@dataclass(frozen=True)
class Comparison:
    """Groups, best first by the headline column, and notes for the reader."""

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    target: float
    target_label: str
    """The target as it is shown: a percentage if the metric is a fraction."""
    notes: tuple[str, ...]
    figures: tuple[str, ...]
    """The methods' own metrics that are also drawn over rounds."""
    pairs: tuple[Pair, ...]
    """The differences to the baseline, one pair a group."""
    metric: Metric
    """What is compared; the runs' scores are of this metric."""
    test: str
    """How the pairs were tested."""

    @property
    def headline(self) -> Column:
        """The protocol and kind by which the groups are ordered."""
        return self.columns[0]

    def to_target(self, group: Group, cost: str) -> Spread:
        """Return a cost when the target was first reached, over a group's runs that reached it.

        `cost` is cumulative, a column of `Run.costs`: `bytes` or `clock`, in simulated seconds.
        """
        sign = -1 if self.metric.lower_is_better else 1
        found = []
        for run in group.runs:
            means = run.curve(*self.headline)["mean"]
            reached = means.index[sign * means >= sign * self.target]
            found.append(float(run.costs[cost][reached[0]]) if len(reached) else NAN)
        return Spread.of(found)

    @property
    def has_clock(self) -> bool:
        """Whether any group has a simulated clock."""
        return any(group.total("clock").n for group in self.groups)

    @property
    def has_seeds(self) -> bool:
        """Whether any group has several runs."""
        return any(len(group.runs) > 1 for group in self.groups)

    @property
    def basis(self) -> str:
        """What the table shows, and the order of its rows."""
        metric = "" if self.metric.name == ACCURACY else f", {self.metric.title}"
        return f"last round{metric}, mean ± std over seeds; ordered by {' '.join(self.headline)}"

    @property
    def title(self) -> str:
        """The metric's name at the beginning of a title."""
        return self.metric.title[0].upper() + self.metric.title[1:]


def compare(
    dirs: Sequence[Path | str],
    target: float | None = None,
    kind: str | None = None,
    figures: str = "",
    protocol: str | None = None,
    against: str | None = None,
    metric: str = ACCURACY,
    test: str = "none",
) -> Comparison:
    """Compare runs, given by their directories or by parents up to two levels above.

    `kind` and `protocol` say whose accuracy on which test set orders the runs, is paired, and
    defines the bytes to reach; by default that of the clients' own models, `private`, under the
    headline protocol of most runs. `target` is the accuracy of "bytes to reach": a fraction, or a
    percentage if above 1; by default 90 % of the lowest last accuracy, which all runs reach.
    `figures` are names of the methods' own metrics, comma-separated, to be drawn over rounds too.
    `against` is the baseline of the paired differences; see `pair_groups`.
    `metric` is compared in place of the accuracy, where the runs have measured it. `test`: whether
    the paired differences are tested, and how; see `p_value`. Raises StateError if nothing can be
    compared, SettingsError for a kind, protocol, metric or baseline that these runs do not have.
    """
    if test not in TESTS:
        raise SettingsError(f"'--test {test}' is not allowed: it takes {', '.join(TESTS)}")
    judged = metric_of(metric)
    sign = -1 if judged.lower_is_better else 1
    if target is not None and (judged.is_fraction or not judged.lowest < target <= judged.highest):
        if not 0 < target <= 100:
            raise SettingsError(
                f"setting 'target' = {target!r} is not allowed: it takes a fraction or a percentage"
            )
        target = target / 100 if target > 1 else target
    runs, notes = load_runs(dirs)
    measured = {name for run in runs for name in run.metrics}
    if metric not in (ACCURACY, *measured):
        known = ", ".join([ACCURACY, *sorted(measured, key=in_order)])
        raise SettingsError(
            f"setting 'metric' = {metric!r} is not allowed: these runs have {known}; "
            "'metrics' says what a run measures"
        )
    groups, more = group_runs([run.measuring(metric) for run in runs])
    columns = choose_columns(groups, kind, protocol)

    def rank(group: Group) -> tuple[float, str]:
        mean = sign * group.score(columns[0]).mean
        return (-mean if math.isfinite(mean) else math.inf), group.label

    ranked = sorted(groups, key=rank)
    pairs = pair_groups(ranked, columns[0], against, test)
    notes += [*more, *cautions(ranked, columns[0])]
    faults = {pair.fault for pair in pairs}
    if pairs and "" not in faults:
        notes.append(f"no paired differences over seeds: {' or '.join(sorted(faults))}")
    basis = ""
    if target is None:
        target = default_target(ranked, columns[0], judged)
        share = "110 % of the highest" if judged.lower_is_better else "90 % of the lowest"
        above = f" above {judged.lowest:g}" if judged.lowest else ""
        basis = f"{share} {judged.title}{above}, so all reach it"
    label = percent(target) if judged.is_fraction else score(target)
    notes += [f"bytes to {label}: {basis}"] if basis else []
    own = chosen_figures(figures, sorted({name for group in groups for name in group.figures}))
    return Comparison(tuple(ranked), columns, target, label, tuple(notes), own, pairs, judged, test)


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
        headline = sum(group.runs[0].headline == under for group in groups)
        evaluated = sum(any(run.kinds(under) for run in group.runs) for group in groups)
        preferred = (-headline, -evaluated, position(under, list(TEST_SETS)))
        return column not in wanted, preferred, position(each, KINDS)

    return tuple(sorted(columns, key=place))


def _check(name: str, value: str | None, there: set[str], where: str = "") -> None:
    if value not in (None, *there):
        known = ", ".join(sorted(there)) + where
        raise SettingsError(f"setting '{name}' = {value!r} is not allowed: these runs have {known}")


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


def default_target(groups: Sequence[Group], column: Column, metric: Metric) -> float:
    """Return 90 % of the lowest last value of any run, so that all of them reach it.

    Of a metric of which lower values are better, it is 110 % of the highest. The percentage counts
    from the metric's lowest possible value.
    """
    last = pd.Series([run.last(*column).mean for group in groups for run in group.runs])
    if not last.count():
        return metric.lowest
    bound = float(last.max() if metric.lower_is_better else last.min())
    if metric.lower_is_better:
        return math.ceil((metric.lowest + 1.1 * (bound - metric.lowest)) * 1000) / 1000
    target = metric.lowest + 0.9 * (bound - metric.lowest)
    return math.floor(target * 1000) / 1000 or target


def cautions(groups: Sequence[Group], column: Column) -> list[str]:
    """Return notes on what makes rows hard to compare."""
    notes = []
    datasets = sorted({group.dataset for group in groups})
    if len(datasets) > 1:
        notes.append(f"Rows of different data sets cannot be compared: {', '.join(datasets)}.")
    rounds = sorted({run.done for group in groups for run in group.runs})
    if len(rounds) > 1:
        notes.append(f"The runs have different numbers of rounds: {', '.join(map(str, rounds))}.")
    if len({tuple(map(str, group.seeds)) for group in groups}) > 1:
        notes.append("The groups do not all have the same seeds.")
    unjudged = [group.label for group in groups if group.score(column).n == 0]
    if unjudged:
        notes.append(
            f"Not evaluated under {' '.join(column)}, and therefore last: {', '.join(unjudged)}."
        )
    for name in sorted({group.runs[0].headline for group in groups} - {"", column[0]}):
        labels = ", ".join(group.label for group in groups if group.runs[0].headline == name)
        used, usual = (TEST_SETS.get(each, each) for each in (column[0], name))
        notes.append(
            f"Rows are ordered by the scores on the {used}. The pages of {labels} show the scores "
            f"on the {usual} first; here, they are in the columns '{name} …'."
        )
    return notes


# --- differences seed by seed ----------------------------------------------------------------


def pair_groups(
    groups: Sequence[Group], column: Column, against: str | None = None, test: str = "none"
) -> tuple[Pair, ...]:
    """Return each group with its baseline, in the order of the groups.

    `against` names the baseline by its label or its method; "NAME:KIND" takes its models of another
    kind. By default it is `local`, or the first group if `local` is not among them. If a method is
    named that several groups have, each group's baseline is the one with which it shares most
    settings. Raises SettingsError for a baseline that is not there.
    """
    baselines, theirs = _baselines(groups, column, against)
    pairs = []
    for group in groups:
        ours = set(group.settings.items())
        baseline = max(baselines, key=lambda each: len(ours & set(each.settings.items())))
        if baseline is group and (theirs == column or not group.score(column).n):
            continue
        last = tail = Difference()
        if group.dataset == baseline.dataset:
            last, tail = (
                Difference.of(group.by_seed(column, of), baseline.by_seed(theirs, of))
                for of in (Run.last, Run.tail)
            )
        p = p_value([*last.per_seed.values()], test)
        pairs.append(Pair(group, baseline, column, theirs, last, tail, p))
    corrected = holm([pair.p for pair in pairs])
    return tuple(replace(pair, p=p) for pair, p in zip(pairs, corrected, strict=True))


def _baselines(
    groups: Sequence[Group], column: Column, against: str | None
) -> tuple[list[Group], Column]:
    """Return the groups that are baselines, and their protocol and kind."""

    def named(name: str) -> list[Group]:  # the group of that label, or else those of that method
        labeled = [group for group in groups if group.label == name]
        return labeled or [group for group in groups if group.method == name]

    if against is None:
        local = [group for group in named(BASELINE) if group.score(column).n]
        return local or [groups[0]], column
    if found := named(against):
        return found, column
    name, _, kind = against.rpartition(":")
    if not (found := named(name)):
        labels = [group.label for group in groups]
        raise SettingsError(
            f"'--against {against}' is none of these runs: {', '.join(labels)}"
            f"{nearest(against, labels)}"
        )
    theirs = column[0], kind
    if not any(group.score(theirs).n for group in found):
        runs = [run for group in found for run in group.runs]
        known = sorted({known for run in runs for known in run.kinds(column[0])})
        raise SettingsError(
            f"'--against {against}': {name} has no {kind!r} models under {column[0]}, but "
            f"{', '.join(known) or 'none at all'}"
        )
    return found, theirs


def p_value(differences: Sequence[float], test: str) -> float:
    """Return the two-sided p of differences whose center would be 0; NaN if none can be said.

    The paired t-test takes them as normal; Wilcoxon's signed-rank test takes them as symmetric and
    cannot go below 2^(1-n) for n seeds: 0.25 for three, 0.0625 for five.
    """
    from scipy import stats

    differences = [round(each, DIGITS) for each in differences]
    if test == "none" or len(differences) < 2 or not any(differences):
        return NAN
    if test == "wilcoxon":
        return float(stats.wilcoxon(differences).pvalue)
    if len(set(differences)) == 1:  # without any spread nothing is known of it
        return NAN
    return float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Return p values with Holm's correction: the chance of one false finding among all is p.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979. The i-th smallest of m is
    multiplied by m - i + 1, and is no smaller than those before it. NaN stays and does not count.
    """
    known = sorted((value, place) for place, value in enumerate(values) if not math.isnan(value))
    found, largest = list(values), 0.0
    for rank, (value, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * value))
        found[place] = largest
    return found
