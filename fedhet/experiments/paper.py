"""Table of a paper: results of its runs, and verdicts on the paper's claims."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, Field, model_validator

from fedhet.base.metrics import metric_of
from fedhet.experiments.plan import (
    Claim,
    PaperTable,
    Place,
    Plan,
    PlannedCell,
    PlannedRun,
    Size,
    as_options,
    finished_run,
    is_spread,
    plan,
    read_table,
    round_of,
    table_names,
)
from fedhet.report.differences import (
    Difference,
    paired_difference,
    paired_ratio,
    sample_error,
    samples_text,
    smallest,
)
from fedhet.runs.directory import read_if_exists
from fedhet.runs.records import NAN, Origin, Summary
from fedhet.runs.units import plural
from fedhet.settings.run import RunSettings

KIB, MIB = 2.0**10, 2.0**20
COSTS = ("epochs", "bytes_up", "bytes_down")
"""Costs of a client in a run; see `TableResult.costs`."""
AMOUNTS = ("figure/", "bytes/", "target/")
"""Prefixes of metrics that are not accuracies."""
KEY = ("claim", "where", "above", "below", "ratio")
"""Fields that identify a comparison in a table."""


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """Comparison of cells for a claim: their difference, paired by seed, and its errors.

    Bounds and outcome are not stored, so that a stored table always has the bounds in the table's
    declaration, and the outcome that `fedhet.report.differences` defines.
    """

    stated: Claim = Field(exclude=True)
    """Declaration of the claim."""
    claim: str
    where: str
    above: str
    """Name of the first cell, or names separated by " + " if cells are added."""
    below: str
    """Name of the second cell, or "" if the claim is about the value of the first cell."""
    ratio: bool = False
    """Whether `difference` is the ratio of the cells."""
    difference: float | None = None
    """Mean difference, ratio, or value over the seeds, in the unit of the published numbers, or
    None if not measured."""
    seed_error: float | None = None
    """Standard error of `difference` over the seeds."""
    seeds: int = 0
    """Number of seeds that both cells share."""
    test_samples: int | Literal["unknown"] | None = None
    """Number of test samples, or None if the cells do not show accuracies."""
    unit: float = 1.0
    """Accuracy of a perfect model: 1, or 100 for percentages."""

    @property
    def measured(self) -> Difference:
        """Difference with its errors."""
        if self.difference is None or self.seed_error is None:
            return Difference(n=self.seeds)
        known = isinstance(self.test_samples, int)
        samples = float(self.test_samples) if known else None  # type: ignore[arg-type]
        # For the value of an accuracy, the difference from 1 has the error of a binomial fraction.
        # For ratios, whose denominator is at most 1, this error is a lower bound.
        is_value = self.ratio or not self.below
        shift = self.difference / self.unit - is_value
        error = self.unit * sample_error(shift, samples) if samples else 0.0
        return Difference(self.difference, self.seed_error, self.seeds, error, samples)

    @property
    def outcome(self) -> str:
        """Outcome of the claim in this comparison, one of `OUTCOMES`."""
        return self.measured.outcome(*self.stated.bounds)

    @property
    def cells(self) -> str:
        """Cells of the comparison, e.g. "IID: Velo against Felo"."""
        against = f"{' divided by ' if self.ratio else ' against '}{self.below}"
        return f"{self.where}: {self.above}{against if self.below else ''}"

    @property
    def text(self) -> str:
        """Difference, ratio, or value with its standard error, or "" if it is not measured."""
        if self.difference is None:
            return ""
        sign = "" if self.ratio or not self.below else "+"
        return f"{self.difference:{sign}.2f} ± {self.measured.se:.2f}"


Measured = tuple[float | None, float | None]
"""Mean and standard deviation over the seeds, each None if too few runs have finished."""
Range = tuple[float, float] | None
"""Smallest and largest value in the cells of a row, or None if it is unknown."""


class TableResult(BaseModel, frozen=True, extra="forbid"):
    """Results of a table at one size, stored in NAME-SIZE.json, so that they outlive the runs."""

    table: str
    size: Size
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings that override the table's settings in all runs."""
    runs: int
    finished: int
    """Number of runs that have finished."""
    made: str = ""
    """Date on which the last run started, as YYYY-MM-DD."""
    hours: float | None = None
    """Total duration of the runs, in hours."""
    selected: list[str] = Field(default_factory=list)
    """Samples on which early stopping and `keep-best` selected rounds, as sentences; empty if no
    run used them."""
    hardware: str = ""
    """Machine on which the table was made, as entered by hand."""
    remark: str = ""
    """Interpretation of the results, as entered by hand."""
    agreement: dict[str, float | None] = Field(default_factory=dict)
    """Kendall's tau between measured and published numbers, by column."""
    cells: dict[str, dict[str, Measured]] = Field(default_factory=dict)
    """Measured values, by row and column, in the unit of the published numbers."""
    costs: dict[str, dict[str, Range]] = Field(default_factory=dict)
    """Mean costs of a client in a run, by row and entry of `COSTS`; empty if they are unknown."""
    digests: dict[str, str] = Field(default_factory=dict)
    """Digest of the settings of each row; empty if it is unknown (see `Plan.digest`)."""
    test_samples: dict[str, int | Literal["unknown"] | None] = Field(default_factory=dict)
    """Smallest number of test samples in each column, or None for columns without accuracies."""
    comparisons: list[Comparison] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _claims_are_declared(cls, content: Any) -> Any:
        """Add the declaration of the claim to each stored comparison."""
        if not isinstance(content, dict) or content.get("table") not in table_names():
            return content
        name: str = content["table"]
        size: Any = content.get("size")
        declared = [(_key(*each), each[0]) for each in _compared(read_table(name), size)]
        listed = content.get("comparisons")
        for stored in listed if isinstance(listed, list) else ():
            if isinstance(stored, dict):
                key = {field: stored.get(field, False) for field in KEY}
                matching = [claim for fields, claim in declared if fields == key]
                if not matching:
                    raise ValueError(
                        f"expected comparisons of declared claims, got {key}. Repeat `fedhet table "
                        f"{name} --size {size}`, which reuses finished runs."
                    )
                stored["stated"] = matching[0]
        return content

    @property
    def file_name(self) -> str:
        """Name of the file that contains this result."""
        return f"{self.table}-{self.size}.json"

    @cached_property
    def data(self) -> str:
        """Names of the datasets on which the verdicts are based, e.g. "digits, breast-cancer"."""
        if self.table not in table_names():
            return "its data"
        planned = self.plan_now(read_table(self.table))
        default = RunSettings.fields()["data.dataset"].get_default()
        names = (str(run.values.get("data.dataset", default)) for run in planned.runs)
        # A source such as imagefolder:data/cifar10 is named after its directory. The directory is
        # DIR if every user chooses it; the table is then named after the dataset.
        short = (re.split(r"[:/]", name)[-1] for name in names)
        unnamed = self.table.partition("-")[2]
        return ", ".join(dict.fromkeys(unnamed if name == "DIR" else name for name in short))

    def plan_now(self, table: PaperTable) -> Plan:
        """Return a plan for the table with its current settings and a single seed."""
        return plan(self.table, table, self.size, [0], Path(), self.settings)

    def changed(self, table: PaperTable) -> list[str]:
        """Return the rows whose current settings are not those with which they were measured."""
        planned = self.plan_now(table)
        digests = self.digests.items()
        return [row for row, old in digests if planned.digest(row, self.cells.get(row, [])) != old]

    @property
    def command(self) -> str:
        """Command that creates this table."""
        seeds = ",".join(map(str, self.seeds))
        words = f"fedhet table {self.table} --size {self.size} --seeds {seeds}"
        return " ".join([words, *as_options(self.settings)])

    def about(self, table: PaperTable) -> str:
        """Return a line with the size, and the numbers of seeds and test samples.

        The line also contains the number of finished runs if some runs are missing, the rows whose
        settings have changed since, and the samples on which rounds were selected.
        """
        line = f"Size {self.size}: {table.sizes[self.size].says} {plural(len(self.seeds), 'seed')}"
        counts = [each for each in self.test_samples.values() if each is not None]
        if counts:
            line += f", {samples_text(None if each == 'unknown' else each for each in counts)}"
        line += "."
        if self.finished < self.runs:
            line += f" {self.finished} of {self.runs} runs are finished."
        if changed := self.changed(table):
            quoted = ", ".join(f"“{row}”" for row in changed)
            rows = "all rows" if len(changed) == len(self.digests) else quoted
            line += f" Measured before the settings changed: {rows}."
        return line + "".join(f" {note}." for note in self.selected)

    def to_json(self) -> str:
        """Serialize to JSON, with one line per row of cells and per comparison."""
        long = {
            "cells": [
                f"{_json(row)}: {_json(cells)}" for row, cells in self.model_dump()["cells"].items()
            ],
            "costs": [f"{_json(row)}: {_json(costs)}" for row, costs in self.costs.items()],
            "comparisons": [
                _json(each.model_dump(exclude=None if each.ratio else {"ratio"}))
                for each in self.comparisons
            ],
        }
        optional = {name for name in ("selected", "costs", "digests") if not getattr(self, name)}
        short = self.model_dump(exclude={*long, *optional})
        empty_parts: dict[str, object] = {
            name: [] if name == "comparisons" else {} for name in long
        }
        kept = {name: part for name, part in empty_parts.items() if name not in optional}
        text = json.dumps({**short, **kept}, indent=1, ensure_ascii=False)
        for name, lines in long.items():
            listed = "\n  " + ",\n  ".join(lines) + "\n " if lines else ""
            empty = "[]" if name == "comparisons" else "{}"
            filled = f"{empty[0]}{listed}{empty[1]}"
            text = text.replace(f'"{name}": {empty}', f'"{name}": {filled}')
        return text + "\n"


def _json(content: object) -> str:
    return json.dumps(content, ensure_ascii=False)


@dataclass(frozen=True)
class Measurements:
    """Measurements of a cell."""

    cell: PlannedCell
    values: pd.Series
    """Values by seed, in the unit of the published numbers."""
    unit: float
    """Accuracy of a perfect model in this unit."""
    samples: int | Literal["unknown"] | None
    """Smallest number of test samples of any run, or None if the cell does not show accuracies."""
    costs: pd.DataFrame
    """Costs of a client, by seed and entry of `COSTS`."""


@dataclass(frozen=True)
class Results:
    """Measurements from a table's finished runs."""

    plan: Plan
    cells: Mapping[Place, Measurements]
    """Cells, with their measurements by seed."""
    result: TableResult


def collect(plan: Plan) -> Results:
    """Return the results of a plan's finished runs. Raises StateError if a run is damaged."""
    cells = {}
    for cell in plan.cells:
        finished = {seed: run.directory for seed, run in cell.runs.items() if run.finished}
        # A score such as the perplexity has no binomial error.
        scores = {finished_run(path).headline_metric for path in finished.values()}
        is_fraction = all(metric_of(name).is_fraction for name in scores)
        is_amount = cell.metric.startswith(AMOUNTS) or not is_fraction
        unit = 100.0 if plan.table.unit == "percent" and not is_amount else 1.0
        values = {seed: _value(path, cell.metric) for seed, path in finished.items()}
        series = pd.Series(values, dtype=float).dropna() * unit
        samples: int | Literal["unknown"] | None = None
        if not (is_amount or is_spread(cell.metric)) and len(series):
            count = smallest(_test_samples(finished[seed], cell.metric) for seed in series.index)
            samples = "unknown" if count is None else round(count)
        costs = pd.DataFrame.from_dict(
            {seed: _costs(path) for seed, path in finished.items()}, "index", float, COSTS
        )
        cells[cell.row.name, cell.column.name] = Measurements(cell, series, unit, samples, costs)
    wholes = {each.name: each.percent_of for each in plan.table.columns_in(plan.size)}
    divided = {
        place: replace(each, values=100 * (each.values / whole.values).dropna(), samples=None)
        for place, each in cells.items()
        if (whole := cells.get((wholes[place[1]], place[1])))
    }
    cells |= divided
    runs = [run for run in plan.runs if run.finished]
    origins = [read_if_exists(run.directory / "run.json", Origin) or Origin() for run in runs]
    measured: dict[str, dict[str, Measured]] = {}
    for (row, column), each in cells.items():
        numbers = float(each.values.mean()), float(each.values.std())
        measured.setdefault(row, {})[column] = (_rounded(numbers[0]), _rounded(numbers[1]))
    result = TableResult(
        table=plan.name,
        size=plan.size,
        seeds=[*plan.seeds],
        settings=dict(plan.over),
        runs=len(plan.runs),
        finished=len(runs),
        made=max((origin.started for origin in origins), default="")[: len("2026-11-24")],
        selected=sorted({finished_run(run.directory).selection_note for run in runs} - {""}),
        hours=round(sum(map(_seconds, runs)) / 3600, 2),
        agreement={
            column.name: _rounded(_kendall(cells, column.name), 2)
            for column in plan.table.columns_in(plan.size)
        },
        cells=measured,
        costs=_cost_ranges(cells),
        digests={row: plan.digest(row, columns) for row, columns in measured.items()},
        test_samples={
            column.name: _fewest(each for (_, name), each in cells.items() if name == column.name)
            for column in plan.table.columns_in(plan.size)
        },
        comparisons=_compare(plan.table, plan.size, cells),
    )
    return Results(plan, cells, result)


def _costs(path: Path) -> list[float]:
    """Return the mean costs of a client in a finished run, in the order of `COSTS`."""
    run = finished_run(path)
    count = max(1, len(run.clients))
    return [run.epochs, *(float(run.totals[name]) / count for name in COSTS[1:])]


def _cost_ranges(cells: Mapping[Place, Measurements]) -> dict[str, dict[str, Range]]:
    """Return the range of each cost over the cells of each row with finished runs."""
    ranges: dict[str, dict[str, Range]] = {}
    for row in dict.fromkeys(row for row, _ in cells):
        means = [each.costs.mean() for (name, _), each in cells.items() if name == row]
        table = pd.DataFrame(means).dropna(how="all")
        if len(table):
            ends = table.min().round(2), table.max().round(2)
            pairs = {name: (float(ends[0][name]), float(ends[1][name])) for name in COSTS}
            ranges[row] = {k: None if math.isnan(pair[0]) else pair for k, pair in pairs.items()}
    return ranges


def _seconds(run: PlannedRun) -> float:
    summary = read_if_exists(run.directory / "summary.json", Summary)
    return summary.seconds.total if summary else 0.0


def _rounded(value: float, digits: int = 4) -> float | None:
    return None if math.isnan(value) else round(value, digits)


def _fewest(cells: Iterable[Measurements]) -> int | Literal["unknown"] | None:
    """Return the smallest number of test samples of any cell with accuracies."""
    counts = [cell.samples for cell in cells if cell.samples is not None]
    if "unknown" in counts:
        return "unknown"
    return min((each for each in counts if each != "unknown"), default=None)


def _compared(table: PaperTable, size: Size) -> Iterator[tuple[Claim, str, list[str], list[str]]]:
    """Yield each comparison at a size: the claim, the place, and the names on both sides.

    If a claim compares rows, there is one comparison per pair and column. If it compares columns,
    there is one comparison per pair and row.
    """
    lines = [[line.name for line in part] for part in (table.rows_in(size), table.columns_in(size))]
    for claim in table.claims:
        names, places = lines if claim.of == "rows" else lines[::-1]
        tested = [place for place in places if not claim.where or place in claim.where]
        for where, (above, below) in product(tested, claim.pairs):
            if {*above, *below} <= {*names}:
                yield claim, where, above, below


def _key(claim: Claim, where: str, above: list[str], below: list[str]) -> dict[str, str | bool]:
    """Return the fields of a comparison that identify it."""
    sides = " + ".join(above), " + ".join(below)
    return dict(zip(KEY, (claim.says, where, *sides, claim.ratio), strict=True))


def _compare(
    table: PaperTable, size: Size, cells: Mapping[Place, Measurements]
) -> list[Comparison]:
    """Compare each claim with the measurements."""
    comparisons = []
    for claim, where, *sides in _compared(table, size):
        above, below = (
            [cells[(name, where) if claim.of == "rows" else (where, name)] for name in side]
            for side in sides
        )
        first = _total(above)
        second = _total(below) if below else 0 * first
        d = paired_ratio(first, second) if claim.ratio else paired_difference(first, second)
        comparison = Comparison(
            stated=claim,
            **_key(claim, where, *sides),
            difference=_rounded(d.mean),
            seed_error=_rounded(d.seed_error),
            seeds=d.n,
            test_samples=_fewest([*above, *below]),
            unit=1.0 if claim.ratio else above[0].unit,
        )
        comparisons.append(comparison)
    return comparisons


def _total(cells: Sequence[Measurements]) -> pd.Series:
    """Add the values of the cells for each seed; NaN if a cell lacks the seed."""
    return pd.concat([each.values for each in cells], axis=1).sum(axis=1, skipna=False)


def _kendall(cells: Mapping[Place, Measurements], column: str) -> float:
    """Return Kendall's tau between the measured and published numbers in a column.

    The result is NaN if fewer than two rows have both numbers.
    """
    both = [
        (each.values.mean(), each.cell.printed)
        for (_, name), each in cells.items()
        if name == column and each.cell.printed is not None and len(each.values)
    ]
    if len(both) < 2:
        return NAN
    measured, printed = (pd.Series(values) for values in zip(*both, strict=True))
    return float(measured.corr(printed, method="kendall"))


def _value(path: Path, metric: str) -> float:
    """Return the value of a metric in a finished run, or NaN if the run lacks the metric.

    If the metric was not measured in its round, the value is from the last round before it.
    """
    run, (name, is_stated, _) = finished_run(path), metric.partition("@")
    first, second, *rest = name.split("/")
    statistic = rest[0] if rest else "mean"
    if first == "figure":
        recorded = run.method_metrics
        values = recorded[second] if second in recorded else pd.Series(dtype=float)
        if rest == ["mean"]:
            return float(values.mean())
        return last_of(values.loc[: round_of(metric, run.planned)])
    if first == "target":
        last = run.round_of(float(rest[1]), second, rest[0])
        return NAN if last is None else float(run.costs["bytes_up"].loc[:last].sum()) / MIB
    if first == "bytes":
        ways = ("up", "down") if second == "both" else (second,)
        return sum(float(run.costs[f"bytes_{way}"].mean()) for way in ways) / KIB
    if first == "relative":
        ratios = run.last_evaluated.relative if run.last_evaluated else {}
        return float(getattr(ratios[second], statistic)) if second in ratios else NAN
    if statistic == "tail":
        return run.tail(first, second).mean
    if is_stated:
        return last_of(run.curve(first, second)[statistic].loc[: round_of(metric, run.planned)])
    return float(getattr(run.last(first, second), statistic))


def last_of(values: pd.Series) -> float:
    """Return the last number in a series, or NaN if it contains no number."""
    known = values.dropna()
    return float(known.iloc[-1]) if len(known) else NAN


def _test_samples(path: Path, metric: str) -> float | None:
    """Return the number of test samples behind an accuracy, or None if it is unknown.

    For a ratio of two accuracies, the error of the first accuracy is a lower bound on the error.
    """
    first, second, *_ = metric.partition("@")[0].split("/")
    run = finished_run(path)
    return (
        run.test_samples(second, "private")
        if first == "relative"
        else run.test_samples(first, second)
    )
