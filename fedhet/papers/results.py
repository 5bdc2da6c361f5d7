"""Collects a table's results: means over seeds, the printed numbers, and which claims hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path

import pandas as pd

from fedhet.papers.plan import Plan, PlannedCell
from fedhet.papers.source import Claim
from fedhet.report.paired import Difference
from fedhet.report.run import Run, load_run
from fedhet.runs.records import NAN

OUTCOMES = ("holds", "within noise", "does not hold", "not measured")
"""The possible outcomes of a claim in a place."""
KIB = 1024.0
Place = tuple[str, str]
"""The names of a row and of a column."""


@dataclass(frozen=True)
class CellResult:
    """What was measured for a cell, in the unit of the printed numbers."""

    planned: PlannedCell
    by_seed: Mapping[int, float]
    """Of the finished runs alone."""

    @property
    def mean(self) -> float:
        """The mean over seeds; NaN if no run has finished."""
        return float(self._values.mean())

    @property
    def std(self) -> float:
        """The standard deviation over seeds; NaN for fewer than two."""
        return float(self._values.std(ddof=1))

    @property
    def _values(self) -> pd.Series:
        return pd.Series(self.by_seed, dtype=float)


@dataclass(frozen=True)
class Verdict:
    """A claim in one place: the difference between two cells, seed by seed."""

    claim: Claim
    where: str
    above: str
    below: str
    difference: Difference

    @property
    def outcome(self) -> str:
        """One of OUTCOMES: a claim holds or does not hold only beyond two standard errors."""
        mean, found = self.difference.mean, self.difference
        if math.isnan(mean):
            return "not measured"
        if not found.clear:
            return "within noise"
        return "holds" if mean > 0 else "does not hold"


@dataclass(frozen=True)
class Results:
    """A table's results, as far as its runs have finished."""

    plan: Plan
    cells: Mapping[Place, CellResult]

    @property
    def finished(self) -> int:
        """The number of finished runs."""
        return sum(run.finished for run in self.plan.runs)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Every claim, in every place and for every pair of names that it compares."""
        return [verdict for claim in self.plan.table.claims for verdict in self._verdicts(claim)]

    def agreement(self, column: str) -> float:
        """Return Kendall's tau between measured and printed numbers over the rows of a column.

        NaN for fewer than two rows that have both.
        """
        found = [cell for (_, name), cell in self.cells.items() if name == column]
        both = [
            (cell.mean, cell.planned.printed)
            for cell in found
            if cell.planned.printed is not None and not math.isnan(cell.mean)
        ]
        if len(both) < 2:
            return NAN
        measured, printed = (pd.Series(values) for values in zip(*both, strict=True))
        return float(measured.corr(printed, method="kendall"))

    def _verdicts(self, claim: Claim) -> Iterator[Verdict]:
        by_rows = claim.of == "rows"
        places = [column for _, column in self.cells] if by_rows else [r for r, _ in self.cells]
        wanted = [p for p in dict.fromkeys(places) if not claim.where or p in claim.where]
        for where, above, below in product(wanted, claim.above, claim.below):
            ends = [(name, where) if by_rows else (where, name) for name in (above, below)]
            if above != below and all(end in self.cells for end in ends):
                ours, theirs = (pd.Series(self.cells[end].by_seed, dtype=float) for end in ends)
                yield Verdict(claim, where, above, below, Difference.of(ours, theirs))


def collect(plan: Plan) -> Results:
    """Return the results of a plan's finished runs. Raises StateError for a damaged run."""
    cells = {}
    for cell in plan.cells:
        in_percent = plan.table.unit == "percent" and not is_amount(cell.metric)
        factor = 100.0 if in_percent else 1.0
        done = {seed: run.directory for seed, run in cell.runs.items() if run.finished}
        values = {seed: factor * _measured(path, cell.metric) for seed, path in done.items()}
        known = {seed: value for seed, value in values.items() if not math.isnan(value)}
        cells[cell.row.name, cell.column.name] = CellResult(cell, known)
    return Results(plan, cells)


def is_amount(metric: str) -> bool:
    """Return whether a metric has a unit of its own: it is no accuracy and no ratio of them."""
    return metric.startswith(("figure/", "bytes/"))


@lru_cache(maxsize=256)
def _run(path: Path) -> Run:
    return load_run(path)


def _measured(path: Path, metric: str) -> float:
    """Return the value of a metric in a finished run; NaN if the run does not have it."""
    run, (first, second, *rest) = _run(path), metric.split("/")
    statistic = rest[0] if rest else "mean"
    if first == "figure":
        return float(run.figures[second].ffill().iloc[-1]) if second in run.figures else NAN
    if first == "bytes":
        return float(run.costs[f"bytes_{second}"].mean()) / KIB
    if first == "relative":
        found = run.last_evaluated.relative if run.last_evaluated else {}
        return float(getattr(found[second], statistic)) if second in found else NAN
    if statistic == "tail":
        return run.tail(first, second).mean
    return float(getattr(run.last(first, second), statistic))
