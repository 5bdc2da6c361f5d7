"""Comparison of groups of runs: their order, their differences seed by seed, and what to note.

Runs of one seed share data, split and initial weights wherever their settings allow it, so that the
difference of two methods varies less over seeds than either accuracy. Tests of the differences have
Holm's correction for their number; SciPy is imported when a test is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, get_args

import pandas as pd

from fedhet.base.errors import SettingsError, StateError, nearest
from fedhet.base.metrics import ACCURACY, METRICS, Metric, in_order, metric_of
from fedhet.report.groups import Column, Group, Spread, find_runs, group_runs, load_all
from fedhet.report.run import TEST_SETS, Run
from fedhet.runs.measures import Tail
from fedhet.runs.records import KINDS, NAN, Score
from fedhet.runs.units import percent, position, score

BASELINE = "local"
"""The method that is the baseline by default, if it is among the runs."""
CLEAR = 2.0
"""A difference is marked if it is more than this many standard errors from zero."""
Test = Literal["none", "t", "wilcoxon"]
"""The test of the differences; see `p_value`."""
DIGITS = 12
"""Of a difference of accuracies; what is beyond them is of floating point."""


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
    notes: tuple[str, ...]
    figures: tuple[str, ...] = ()
    """The methods' own metrics that are also drawn over rounds."""
    pairs: tuple[Pair, ...] = ()
    """The differences to the baseline, one pair a group."""
    metric: Metric = METRICS[ACCURACY]
    """What is compared; the runs' scores are of this metric."""
    test: Test = "none"
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
        return any(group.clock().n for group in self.groups)

    @property
    def has_seeds(self) -> bool:
        """Whether any group has several runs."""
        return any(len(group.runs) > 1 for group in self.groups)

    @property
    def said_target(self) -> str:
        """The target as it is shown: a percentage if the metric is a fraction."""
        return percent(self.target) if self.metric.is_fraction else score(self.target)

    @property
    def beside_accuracy(self) -> str:
        """The metric's name after a comma, if it is not accuracy."""
        return "" if self.metric.name == ACCURACY else f", {self.metric.title}"

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
    test: Test = "none",
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
    judged = metric_of(metric)
    sign = -1 if judged.lower_is_better else 1
    wanted = None if target is None else _wanted(target, judged)
    runs, notes = load_all(find_runs(dirs))
    measured = {name for run in runs for name in run.metrics}
    if metric not in (ACCURACY, *measured):
        known = ", ".join([ACCURACY, *sorted(measured, key=in_order)])
        raise SettingsError(
            f"setting 'metric' = {metric!r} is not allowed: these runs have {known}; "
            "'metrics' says what a run measures"
        )
    runs = [run.measuring(metric) for run in runs]
    groups, more = group_runs(runs)
    columns = choose_columns(groups, kind, protocol)

    def rank(group: Group) -> tuple[float, str]:
        mean = sign * group.score(columns[0]).mean
        return (-mean if math.isfinite(mean) else math.inf), group.label

    ranked = sorted(groups, key=rank)
    pairs = tested(pair_groups(ranked, columns[0], against), test)
    notes += [*more, *cautions(ranked, columns[0])]
    faults = {pair.fault for pair in pairs}
    if pairs and "" not in faults:
        notes.append(f"no paired differences over seeds: {' or '.join(sorted(faults))}")
    basis = ""
    if wanted is None:
        wanted = default_target(ranked, columns[0], judged)
        share = "110 % of the highest" if judged.lower_is_better else "90 % of the lowest"
        above = f" above {judged.lowest:g}" if judged.lowest else ""
        basis = f"{share} {judged.title}{above}, so all reach it"
    own = chosen_figures(figures, sorted({name for group in groups for name in group.figures}))
    comparison = Comparison(tuple(ranked), columns, wanted, tuple(notes), own, pairs, judged, test)
    if basis:
        noted = (*notes, f"bytes to {comparison.said_target}: {basis}")
        comparison = replace(comparison, notes=noted)
    return comparison


def _wanted(target: float, metric: Metric) -> float:
    if not metric.is_fraction and metric.lowest < target <= metric.highest:
        return target
    if not 0 < target <= 100:
        raise SettingsError(
            f"setting 'target' = {target!r} is not allowed: it takes a fraction or a percentage"
        )
    return target / 100 if target > 1 else target


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
        headline = sum(group.headline == under for group in groups)
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
    for name in sorted({group.headline for group in groups} - {"", column[0]}):
        labels = ", ".join(group.label for group in groups if group.headline == name)
        used, usual = (TEST_SETS.get(each, each) for each in (column[0], name))
        notes.append(
            f"Rows are ordered by the scores on the {used}. The pages of {labels} show the scores "
            f"on the {usual} first; here, they are in the columns '{name} …'."
        )
    return notes


# --- differences seed by seed ----------------------------------------------------------------


def pair_groups(
    groups: Sequence[Group], column: Column, against: str | None = None
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
        if baseline is not group or (theirs != column and group.score(column).n):
            last = tail = Difference()
            if group.dataset == baseline.dataset:
                sides = ((group, column), (baseline, theirs))
                last = Difference.of(*(_by_seed(*side, Run.last) for side in sides))
                tail = Difference.of(*(_by_seed(*side, Run.tail) for side in sides))
            pairs.append(Pair(group, baseline, column, theirs, last, tail))
    return tuple(pairs)


def _by_seed(
    group: Group, column: Column, score: Callable[[Run, str, str], Score | Tail]
) -> pd.Series:
    values = {run.seed: score(run, *column).mean for run in group.runs if run.seed is not None}
    return pd.Series(values, dtype=float)


def _baselines(
    groups: Sequence[Group], column: Column, against: str | None
) -> tuple[list[Group], Column]:
    """Return the groups that are baselines, and their protocol and kind."""
    if against is None:
        local = [group for group in _named(groups, BASELINE) if group.score(column).n]
        return local or [groups[0]], column
    if named := _named(groups, against):
        return named, column
    name, _, kind = against.rpartition(":")
    if not (named := _named(groups, name)):
        labels = [group.label for group in groups]
        raise SettingsError(
            f"'--against {against}' is none of these runs: {', '.join(labels)}"
            f"{nearest(against, labels)}"
        )
    theirs = column[0], kind
    if not any(group.score(theirs).n for group in named):
        runs = [run for group in named for run in group.runs]
        known = sorted({known for run in runs for known in run.kinds(column[0])})
        raise SettingsError(
            f"'--against {against}': {name} has no {kind!r} models under {column[0]}, but "
            f"{', '.join(known) or 'none at all'}"
        )
    return named, theirs


def _named(groups: Sequence[Group], name: str) -> list[Group]:
    """Return the group of that label, or else the groups of that method."""
    labelled = [group for group in groups if group.label == name]
    return labelled or [group for group in groups if group.method == name]


def read_test(name: str) -> Test:
    """Return the test of that name. Raises SettingsError for one that there is not."""
    for known in get_args(Test):
        if name == known:
            return known  # type: ignore[no-any-return]
    raise SettingsError(f"'--test {name}' is not allowed: it takes {', '.join(get_args(Test))}")


def tested(pairs: Sequence[Pair], test: Test) -> tuple[Pair, ...]:
    """Return pairs with the corrected p of their differences in the last round."""
    values = [p_value([*pair.last.per_seed.values()], test) for pair in pairs]
    return tuple(replace(pair, p=p) for pair, p in zip(pairs, holm(values), strict=True))


def p_value(differences: Sequence[float], test: Test) -> float:
    """Return the two-sided p of differences whose centre would be 0; NaN if none can be said.

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
