"""Paired differences: the groups of a comparison against a baseline, seed by seed.

Runs of one seed share data, split and initial weights wherever their settings allow it, so that the
difference of two methods varies less over seeds than either accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import pandas as pd

from fedhet.base.errors import SettingsError, nearest
from fedhet.report.groups import Column, Group
from fedhet.report.run import Run
from fedhet.runs.records import NAN

BASELINE = "local"
"""The method that is the baseline by default, if it is among the runs."""
CLEAR = 2.0
"""A difference is marked if it is more than this many standard errors from zero."""
Test = Literal["none", "t", "wilcoxon"]
"""The test of the differences; see `fedhet.report.significance`."""
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
    nearest_to = {group.label: _nearest(group, baselines) for group in groups}
    return tuple(
        _pair(group, nearest_to[group.label], column, theirs)
        for group in groups
        if nearest_to[group.label] is not group or (theirs != column and group.score(column).n)
    )


def _pair(group: Group, baseline: Group, ours: Column, theirs: Column) -> Pair:
    if group.dataset != baseline.dataset:
        return Pair(group, baseline, ours, theirs, Difference(), Difference())

    def difference(value: Callable[[Run, Column], float]) -> Difference:
        return Difference.of(_by_seed(group, ours, value), _by_seed(baseline, theirs, value))

    last = difference(lambda run, column: run.last(*column).mean)
    tail = difference(lambda run, column: run.tail(*column).mean)
    return Pair(group, baseline, ours, theirs, last, tail)


def _by_seed(group: Group, column: Column, value: Callable[[Run, Column], float]) -> pd.Series:
    values = {run.seed: value(run, column) for run in group.runs if run.seed is not None}
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
        raise SettingsError(
            f"'--against {against}': {name} has no {kind!r} models under {column[0]}, but "
            f"{', '.join(_kinds(named, column[0])) or 'none at all'}"
        )
    return named, theirs


def _named(groups: Sequence[Group], name: str) -> list[Group]:
    """Return the group of that label, or else the groups of that method."""
    labelled = [group for group in groups if group.label == name]
    return labelled or [group for group in groups if group.method == name]


def _kinds(groups: Sequence[Group], protocol: str) -> list[str]:
    return sorted({kind for group in groups for run in group.runs for kind in run.kinds(protocol)})


def _nearest(group: Group, baselines: Sequence[Group]) -> Group:
    """Return the baseline with which a group shares most settings, the first of equals."""
    ours = set(group.settings.items())
    return max(baselines, key=lambda each: len(ours & set(each.settings.items())))
