"""Comparison of groups of runs that differ only in their seeds, with paired differences.

Runs with the same seed share data, splits and initial weights, as far as their settings allow.
Therefore, the difference between two methods varies less over seeds than their accuracies.
`fedhet.report.differences` computes the errors and the tests of the differences.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from fedhet.base.errors import SettingsError, StateError, nearest
from fedhet.base.metrics import ACCURACY, MAX_ERROR, Metric, in_order, metric_of
from fedhet.report.differences import (
    TESTS,
    Difference,
    Spread,
    holm,
    p_value,
    paired_difference,
    samples_text,
    smallest,
    spread_of,
)
from fedhet.report.run import TEST_SETS, Run, load_run, where
from fedhet.runs.records import KINDS, NAN
from fedhet.runs.units import path_text, percent, plural, position, score
from fedhet.settings.run import where_it_ran
from fedhet.settings.schema import as_text

MAX_NAMED = 4
"""Maximum number of different models, seeds, or splits that a note names."""
Column = tuple[str, str]
"""A protocol and a kind of model."""
HEADLINE = "headline"
"""Kind in a column that contains the headline score of each method, whose kinds differ."""
BASELINE = "local"
"""Default baseline method, if it is among the runs."""


# --- groups of runs ------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Runs with the same settings and different seeds."""

    label: str
    settings: Mapping[str, str]
    runs: tuple[Run, ...]

    @property
    def method(self) -> str:
        """Name of the method."""
        return self.runs[0].method

    @property
    def dataset(self) -> str:
        """Name of the dataset."""
        return self.runs[0].dataset

    @property
    def finished(self) -> bool:
        """Whether all runs are finished."""
        return all(run.finished for run in self.runs)

    @property
    def model_names(self) -> str:
        """Models of the clients, with the number of clients, e.g. "cnn2 (3), mlp (2)"."""
        counts = Counter(self.runs[0].models.values())
        return ", ".join(f"{name} ({counts[name]})" for name in sorted(counts)) or "unknown models"

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """Seeds of the runs in the group."""
        return tuple(run.seed for run in self.runs)

    def resolved(self, column: Column) -> Column:
        """Replace the kind `HEADLINE` with the kind of the method's headline score."""
        protocol, kind = column
        if kind == HEADLINE:
            kind = next((run.kinds(protocol)[0] for run in self.runs if run.kinds(protocol)), "")
        return protocol, kind

    def score(self, column: Column, statistic: str = "mean") -> Spread:
        """Return the mean and std, over runs, of a statistic over clients (see `Run.statistic`)."""
        column = self.resolved(column)
        return spread_of(run.statistic(statistic, *column) for run in self.runs)

    def test_samples(self, column: Column) -> float | None:
        """Return the smallest number of test samples of any run, or None if it is unknown."""
        column = self.resolved(column)
        return smallest(run.test_samples(*column) for run in self.runs)

    def by_seed(self, column: Column, statistic: str) -> pd.Series:
        """Return a statistic of the runs' scores by seed."""
        column = self.resolved(column)
        values = {run.seed: run.statistic(statistic, *column) for run in self.runs}
        return pd.Series({s: v for s, v in values.items() if s is not None}, dtype=float)

    def total(self, cost: str) -> Spread:
        """Return the mean and std, over runs, of an entry of `Run.totals`, such as `bytes_up`."""
        return spread_of(float(run.totals[cost]) for run in self.runs)

    def curve(self, column: Column) -> pd.DataFrame:
        """Return the mean and std of the score in each round, and the mean cumulative costs."""
        column = self.resolved(column)
        curve = over_seeds([run.curve(*column)["mean"] for run in self.runs])
        for cost in ("bytes", "epsilon", "clock"):
            mean = over_seeds([run.costs[cost] for run in self.runs])["mean"]
            curve = curve.join(mean.rename(cost))
        return curve

    @property
    def method_metrics(self) -> set[str]:
        """Names of the method's metrics that all runs have."""
        return set.intersection(*(set(run.method_metrics) for run in self.runs))

    def method_curve(self, metric: str) -> pd.DataFrame:
        """Return the mean and std of a method's metric in each round."""
        absent = pd.Series(dtype=float)
        return over_seeds([run.method_metrics.get(metric, absent) for run in self.runs])


def over_seeds(curves: Sequence[pd.Series]) -> pd.DataFrame:
    """Return the mean and sample standard deviation of curves, in the rounds that they share.

    The standard deviation of a single curve is NaN.
    """
    table = pd.concat([curve.dropna() for curve in curves], axis=1, join="inner").sort_index()
    return pd.DataFrame({"mean": table.mean(axis=1), "std": table.std(axis=1)})


def find_runs(directory: Path) -> list[Path]:
    """Return the run directories among `directory` and two levels of its subdirectories."""
    if (directory / "config.toml").is_file():
        return [directory]
    near = {path.parent for path in directory.glob("*/config.toml")}
    far = {path.parent for path in directory.glob("*/*/config.toml")}
    return sorted(near | {path for path in far if path.parent not in near})


def load_runs(directories: Sequence[Path | str]) -> tuple[list[Run], list[str]]:
    """Load the runs that `find_runs` finds in the directories.

    Returns the runs, and a note for each run that cannot be read. Raises StateError if a directory
    contains no run, or if no run can be read.
    """
    paths: dict[Path, Path] = {}
    for directory in map(Path, directories):
        found = find_runs(directory)
        if not found:
            raise StateError(f"no run found in {directory}")
        for path in found:
            paths.setdefault(path.resolve(), path)
    runs, notes = [], []
    for path in paths.values():
        try:
            runs.append(load_run(path))
        except StateError as error:
            notes.append(f"skipped: {error}")
    if not runs:
        raise StateError(notes[0].removeprefix("skipped: ") if notes else "no run to compare")
    return runs, notes


def group_runs(runs: Sequence[Run]) -> tuple[list[Group], list[str]]:
    """Group runs that differ only in their seeds. Return the groups, and notes on skipped runs.

    Unfinished runs are skipped if their group has finished runs. Several runs with the same seed
    count as one sample, so only the run with the most rounds is kept. Among equally long runs, the
    latest run is kept.
    """
    ignored = where_it_ran() | {"seed"}
    by_settings: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    for run in runs:
        texts = {key: as_text(value) for key, value in run.settings.items() if key not in ignored}
        by_settings.setdefault(tuple(sorted(texts.items())), []).append(run)
    notes: list[str] = []
    groups: list[tuple[Run, ...]] = []
    for candidates in by_settings.values():
        finished = [run for run in candidates if run.finished]
        for run in candidates:
            if not run.finished:
                action = "skipped" if finished else "its last round is shown, marked with *"
                progress = f"unfinished, {run.done} of {run.planned} rounds"
                notes.append(f"{path_text(run.path)}: {progress}; {action}")
        best: dict[int | None, Run] = {}
        changed = {run.path: (run.path / "metrics.jsonl").stat().st_mtime for run in candidates}
        for run in sorted(finished or candidates, key=lambda run: (run.done, changed[run.path])):
            if run.seed in best:
                shorter, longer = path_text(best[run.seed].path), path_text(run.path)
                notes.append(f"{shorter}: skipped, because {longer} has the same seed")
            best[run.seed] = run
        by_seed = sorted(best.values(), key=lambda run: -1 if run.seed is None else run.seed)
        groups.append(tuple(by_seed))
    settings = [dict(key) for key in by_settings]
    labels = _labels(pd.DataFrame(settings), [group[0].method for group in groups])
    return [Group(*parts) for parts in zip(labels, settings, groups, strict=True)], notes


def _labels(settings: pd.DataFrame, methods: Sequence[str]) -> list[str]:
    """Label each row with its method and the settings that vary among the method's rows.

    A setting's name is shortened to its last part if this part is unique, and paths are shortened
    to file names if the file names are still distinct.
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
class Pair:
    """Paired differences between a group and its baseline."""

    group: Group
    baseline: Group
    column: Column
    baseline_column: Column
    """Column of the baseline. It has the same protocol as `column`, but possibly another kind of
    model."""
    last: Difference
    """Differences in the last round."""
    tail: Difference
    """Differences in the last fifth of the rounds."""
    p: float = NAN
    """p-value for the last round, corrected for the number of pairs, or NaN without a test."""

    @property
    def fault(self) -> str:
        """Reason why the two groups cannot be compared by seed, or "" if they are comparable."""
        if self.last.n > 1:
            return ""
        if self.group.dataset != self.baseline.dataset:
            return "different datasets"
        sides = (self.group, self.column), (self.baseline, self.baseline_column)
        if not all(group.score(column).n for group, column in sides):
            return "not evaluated"
        return "only 1 shared seed" if self.last.n else "no shared seed"


@dataclass(frozen=True)
class Comparison:
    """Groups of runs from the best to the worst headline score, with paired differences."""

    groups: tuple[Group, ...]
    columns: tuple[Column, ...]
    target: float
    target_label: str
    """Target as text, in percent if the metric is a fraction."""
    notes: tuple[str, ...]
    method_metrics: tuple[str, ...]
    """Method metrics to plot over rounds."""
    pairs: tuple[Pair, ...]
    """Differences from the baseline, with one pair per group."""
    metric: Metric
    """Metric of the compared scores."""
    test: str
    """Test of the differences, as a key of `TESTS`."""

    @property
    def headline(self) -> Column:
        """Protocol and kind of the score that determines the order of the groups."""
        return self.columns[0]

    @property
    def models(self) -> str:
        """Description of the models in the headline column."""
        kind = self.headline[1]
        return "each method's headline models" if kind == HEADLINE else f"the {kind} models"

    def to_target(self, group: Group, cost: str) -> Spread:
        """Return the cumulative cost at which the runs in a group first reached the target.

        `cost` is a column of `Run.costs`, such as `bytes` or `clock` (simulated seconds). Runs for
        which `Run.round_of` is None are ignored.
        """
        column = group.resolved(self.headline)
        rounds = [(run, run.round_of(self.target, *column)) for run in group.runs]
        return spread_of(float(run.costs[cost][n]) for run, n in rounds if n is not None)

    @property
    def has_clock(self) -> bool:
        """Whether any group has a simulated clock."""
        return any(group.total("clock").n for group in self.groups)

    @property
    def has_seeds(self) -> bool:
        """Whether any group has several runs."""
        return any(len(group.runs) > 1 for group in self.groups)

    @property
    def test_samples(self) -> str:
        """Numbers of test samples of the headline score, as text."""
        scored = [group for group in self.groups if group.score(self.headline).n]
        counts = (group.test_samples(self.headline) for group in scored)
        return samples_text(counts, self.headline[0])

    def label(self, group: Group, column: Column) -> str:
        """Return the label of a group, with the kind of model if the compared kinds differ."""
        used = {each.resolved(self.headline)[1] for each in self.groups}
        used |= {pair.baseline_column[1] for pair in self.pairs}
        return f"{group.label} ({column[1]})" if len(used - {""}) > 1 else group.label

    @property
    def title(self) -> str:
        """Capitalized title of the metric."""
        return self.metric.title[0].upper() + self.metric.title[1:]


def compare(
    dirs: Sequence[Path | str],
    target: float | None = None,
    kind: str | None = None,
    figures: str = "",
    protocol: str | None = None,
    against: str | None = None,
    metric: str | None = None,
    test: str = "none",
) -> Comparison:
    """Compare runs that differ in settings, with statistics over seeds.

    Args:
        dirs: Run directories, or directories up to two levels above run directories.
        target: Score for the bytes-to-target column. For metrics that are fractions, a value above
            1 is a percentage. The default is 90 % of the lowest last score, which all runs reach.
        kind: Kind of model whose score determines the groups' order. The default is the kind that
            each method declares as its headline, so that the groups may have different kinds.
        protocol: Test set for this score; the default is the headline protocol of most runs.
        figures: Comma-separated method metrics to plot over rounds.
        against: Baseline for the paired differences; see `pair_groups`.
        metric: Metric to compare; the default is the headline metric of the runs.
        test: Test of the paired differences: "none", "t" or "wilcoxon" (see `p_value`).

    Returns:
        The comparison.

    Raises:
        StateError: If no run can be read, or if no run was evaluated.
        SettingsError: If an argument is invalid, or no run has the kind, protocol, metric or
            baseline.

    Example:
        >>> comparison = compare(["runs/felo", "runs/fedavg"], against="fedavg")
        >>> [group.label for group in comparison.groups]
        ['felo', 'fedavg']
    """
    if test not in TESTS:
        raise SettingsError(f"--test: must be one of {', '.join(TESTS)}, got {test!r}")
    runs, notes = load_runs(dirs)
    compared = choose_metric(runs, metric)
    groups, group_notes = group_runs([run.with_metric(compared.name) for run in runs])
    columns = choose_columns(groups, kind, protocol)
    sign = -1 if compared.lower_is_better else 1

    def rank(group: Group) -> tuple[float, str]:
        mean = sign * group.score(columns[0]).mean
        return (-mean if math.isfinite(mean) else math.inf), group.label

    ranked = sorted(groups, key=rank)
    reached, label, basis = choose_target(ranked, columns[0], compared, target)
    pairs = pair_groups(ranked, columns[0], against, test)
    notes += [*group_notes, *cautions(ranked, columns[0])]
    faults = {pair.fault for pair in pairs}
    if pairs and "" not in faults:
        notes.append(f"no paired differences: {' or '.join(sorted(faults))}")
    notes += [f"bytes to {label}: {basis}"] if basis else []
    chosen = choose_metrics(figures, sorted({n for group in groups for n in group.method_metrics}))
    return Comparison(
        tuple(ranked), columns, reached, label, tuple(notes), chosen, pairs, compared, test
    )


def choose_metric(runs: Sequence[Run], name: str | None) -> Metric:
    """Return the metric to compare, by default the headline metric of the runs.

    Raises SettingsError if the runs have different headline metrics or lack the metric.
    """
    headlines = list(dict.fromkeys(run.headline_metric for run in runs if run.last_evaluated))
    if name is None and len(headlines) > 1:
        raise SettingsError(
            f"metric: expected runs with the same headline metric, got {', '.join(headlines)}. "
            "Compare runs of the same task, or select a metric."
        )
    headlines = headlines or [ACCURACY]
    name = name or headlines[0]
    measured = {each for run in runs for each in run.metrics} - {*headlines}
    if name not in (known := [*headlines, *sorted(measured, key=in_order)]):
        raise SettingsError(
            f"metric: must be one of {', '.join(known)} for these runs, got {name!r}. The "
            "setting 'metrics' selects the metrics that a run measures."
        )
    return metric_of(name)


def choose_target(
    groups: Sequence[Group], column: Column, metric: Metric, target: float | None
) -> tuple[float, str, str]:
    """Return the target score, the score as text, and a description of a default target.

    The default is 90 % of the lowest last score of any run or, if lower scores are better, 110 % of
    the highest last score, so that all runs reach the target. The percentage is relative to the
    metric's lowest possible value, or to 0 if the metric has no lower bound. A target above 1 is a
    percentage if the metric is a fraction. Raises SettingsError if the target is out of range.
    """
    basis = ""
    if target is None:
        bound = "110 % of the highest" if metric.lower_is_better else "90 % of the lowest"
        above = f" above {metric.lowest:g}" if metric.lowest not in (0, -MAX_ERROR) else ""
        basis = f"{bound} {metric.title}{above}, reached by all runs"
        last = pd.Series(
            [run.last(*group.resolved(column)).mean for group in groups for run in group.runs]
        )
        if not last.count():
            target = metric.lowest
        elif metric.lower_is_better:
            target = metric.lowest + 1.1 * (float(last.max()) - metric.lowest)
            digits = 3 if target <= 0 else max(3, 3 - math.floor(math.log10(target)))
            scale = float(10**digits)
            target = math.ceil(target * scale) / scale
        else:
            worst = float(last.min())
            lowest = metric.lowest if metric.lowest > -MAX_ERROR else worst - abs(worst)
            target = lowest + 0.9 * (worst - lowest)
            target = math.floor(target * 1000) / 1000 or target
    elif metric.is_fraction or not metric.lowest < target <= metric.highest:
        if not 0 < target <= 100:
            raise SettingsError(f"target: must be a fraction or a percentage, got {target!r}")
        target = target / 100 if target > 1 else target
    return target, percent(target) if metric.is_fraction else score(target, metric.name), basis


def choose_columns(
    groups: Sequence[Group], kind: str | None = None, protocol: str | None = None
) -> tuple[Column, ...]:
    """Return all columns of the groups, with the comparison's headline column first.

    By default, the headline column has the headline kind of each group, or the kind `HEADLINE` if
    these kinds differ. The default protocol is the headline protocol of most groups; ties are
    broken by the number of evaluated groups, and then in favor of `common`. Raises StateError if no
    group was evaluated, and SettingsError if the kind or protocol is unknown.
    """
    columns = {column for group in groups for run in group.runs for column in run.columns}
    if not columns:
        raise StateError("no run to compare: none of the runs was evaluated")
    _check("protocol", protocol, {each for each, _ in columns})
    preferred = {column for column in columns if protocol in (None, column[0])}
    test_set = f" {where(protocol)}" if protocol else ""
    _check("kind", kind, {each for _, each in preferred}, test_set)
    preferred = {column for column in preferred if kind in (None, column[1])}

    def rank(column: Column) -> tuple[object, ...]:
        column_protocol, column_kind = column
        headline = sum(group.runs[0].headline == column_protocol for group in groups)
        evaluated = sum(any(run.kinds(column_protocol) for run in group.runs) for group in groups)
        order = (-headline, -evaluated, position(column_protocol, list(TEST_SETS)))
        return column not in preferred, order, position(column_kind, KINDS)

    ordered = sorted(columns, key=rank)
    if kind is None:
        chosen = ordered[0][0]
        kinds = {group.resolved((chosen, HEADLINE))[1] for group in groups} - {""}
        first = (chosen, kinds.pop() if len(kinds) == 1 else HEADLINE)
        ordered = [first, *(column for column in ordered if column != first)]
    return tuple(ordered)


def _check(name: str, value: str | None, available: set[str], test_set: str = "") -> None:
    if value not in (None, *available):
        choices = ", ".join(sorted(available))
        raise SettingsError(
            f"{name}: must be one of {choices} for these runs{test_set}, got {value!r}"
        )


def choose_metrics(names: str, available: Sequence[str]) -> tuple[str, ...]:
    """Split a comma-separated list of metric names. Raises SettingsError if a name is unknown."""
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in available:
            raise SettingsError(
                f"--figures: unknown metric {name!r}, expected one of "
                f"{', '.join(available) or 'none'}{nearest(name, available)}"
            )
    return chosen


def cautions(groups: Sequence[Group], column: Column) -> list[str]:
    """Return notes on differences between groups that limit the comparison."""
    notes = []
    datasets = sorted({group.dataset for group in groups})
    test_sets = {group.label: group.test_samples(column) for group in groups}
    if len(datasets) > 1:
        notes.append(f"Scores on different datasets are not comparable: {', '.join(datasets)}.")
    rounds = sorted({run.done for group in groups for run in group.runs})
    if len(rounds) > 1:
        notes.append(f"The runs have different numbers of rounds: {', '.join(map(str, rounds))}.")
    notes += unequal(
        "The seeds differ", {group.label: ", ".join(map(str, group.seeds)) for group in groups}
    )
    notes += unequal("The models differ", {group.label: group.model_names for group in groups})
    notes += unequal(
        "The test sets differ",
        {
            name: samples_text([count], column[0])
            for name, count in test_sets.items()
            if count is not None
        },
    )
    notes += _unequal_splits(groups)
    missing = [group.label for group in groups if group.score(column).n == 0]
    if missing:
        models = "models" if column[1] == HEADLINE else f"{column[1]} models"
        notes.append(
            f"Last, because their {models} were not evaluated {where(column[0])}: "
            f"{', '.join(missing)}."
        )
    selecting: dict[str, list[str]] = {}
    for group in groups:
        for note in dict.fromkeys(run.selection_note for run in group.runs if run.selection_note):
            selecting.setdefault(note, []).append(group.label)
    notes += [f"{', '.join(labels)}: {note}." for note, labels in selecting.items()]
    for name in sorted({group.runs[0].headline for group in groups} - {"", column[0]}):
        labels = ", ".join(group.label for group in groups if group.runs[0].headline == name)
        notes.append(
            f"Rows are ordered by scores {where(column[0])}. The headline scores of {labels} are "
            f"{where(name)}; see the columns '{name} …'."
        )
    return notes


def unequal(problem: str, texts: Mapping[str, str]) -> list[str]:
    """Return a note that names each text and its groups, or [] if all groups have the same text."""
    labels: dict[str, list[str]] = {}
    for label, text in texts.items():
        labels.setdefault(text, []).append(label)
    if len(labels) < 2:
        return []
    parts = [f"{text} ({'; '.join(names)})" for text, names in labels.items()]
    shown = " | ".join(parts[:MAX_NAMED])
    more = f" | and {len(parts) - MAX_NAMED} more" if len(parts) > MAX_NAMED else ""
    return [f"{problem}, so the comparison is not only of methods: {shown}{more}."]


def _unequal_splits(groups: Sequence[Group]) -> list[str]:
    """Return a note on the first seed for which the clients of two groups have different samples.

    Splits are compared by the number of samples per class and client.
    """
    for seed in sorted(
        {run.seed for group in groups for run in group.runs if run.seed is not None}
    ):
        splits: list[Mapping[str, list[int]]] = []
        texts = {}
        for group in groups:
            for run in group.runs:
                if run.seed == seed and run.partition:
                    if run.partition.counts not in splits:
                        splits.append(run.partition.counts)
                    clients = plural(len(run.partition.counts), "client")
                    total = sum(map(sum, run.partition.counts.values()))
                    number = splits.index(run.partition.counts) + 1
                    texts[group.label] = f"split {number}, {clients}, {total:,} samples"
        if notes := unequal(f"The data splits of seed {seed} differ", texts):
            return notes
    return []


# --- paired differences ----------------------------------------------------------------------


def pair_groups(
    groups: Sequence[Group], column: Column, against: str | None = None, test: str = "none"
) -> tuple[Pair, ...]:
    """Pair each group with its baseline, in the order of the groups.

    `against` is the label or method of the baseline, or "NAME:KIND" to compare with the baseline's
    models of another kind. The default is `local` or, if absent, the first group. If several groups
    have the baseline's method, each group is paired with the group that shares the most settings.
    Raises SettingsError if the baseline does not exist.
    """
    baselines, baseline_column = _baselines(groups, column, against)
    pairs = []
    compared, against_column = column, baseline_column
    for group in groups:
        settings = set(group.settings.items())
        baseline = max(baselines, key=lambda each: len(settings & set(each.settings.items())))
        column, baseline_column = group.resolved(compared), baseline.resolved(against_column)
        if baseline is group and (baseline_column == column or not group.score(column).n):
            continue
        last = tail = Difference()
        if group.dataset == baseline.dataset:
            samples = None
            if group.runs[0].metric == ACCURACY:  # Other scores are not fractions of the samples.
                sides = group.test_samples(column), baseline.test_samples(baseline_column)
                samples = smallest(sides)
            last, tail = (
                paired_difference(
                    group.by_seed(column, statistic),
                    baseline.by_seed(baseline_column, statistic),
                    samples,
                )
                for statistic in ("mean", "tail")
            )
        pairs.append(
            Pair(group, baseline, column, baseline_column, last, tail, p_value(last, test))
        )
    corrected = holm([pair.p for pair in pairs])
    return tuple(replace(pair, p=p) for pair, p in zip(pairs, corrected, strict=True))


def _baselines(
    groups: Sequence[Group], column: Column, against: str | None
) -> tuple[list[Group], Column]:
    """Return the baseline groups, and the protocol and kind of the scores to compare."""

    def with_name(name: str) -> list[Group]:  # Labels take precedence over methods.
        labeled = [group for group in groups if group.label == name]
        return labeled or [group for group in groups if group.method == name]

    if against is None:
        local = [group for group in with_name(BASELINE) if group.score(column).n]
        return local or [groups[0]], column
    if baselines := with_name(against):
        return baselines, column
    name, _, kind = against.rpartition(":")
    if not (baselines := with_name(name)):
        labels = [group.label for group in groups]
        raise SettingsError(
            f"--against: must be one of {', '.join(labels)}, got {against!r}"
            f"{nearest(against, labels)}"
        )
    baseline_column = column[0], kind
    if not any(group.score(baseline_column).n for group in baselines):
        runs = [run for group in baselines for run in group.runs]
        kinds = sorted({kind for run in runs for kind in run.kinds(column[0])})
        raise SettingsError(
            "--against: expected NAME:KIND, where KIND is a model kind that was evaluated for "
            f"{name!r} {where(column[0])} ({', '.join(kinds) or 'none'}), got {kind!r}"
        )
    return baselines, baseline_column
