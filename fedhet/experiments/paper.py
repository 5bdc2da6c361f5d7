"""A paper's table: what its runs have measured, which claims hold, and how both are written."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, Field

from fedhet.base.disk import Folder, write_text
from fedhet.experiments.declaration import Claim, Size
from fedhet.experiments.plan import Place, Plan, PlannedCell, about
from fedhet.report.comparison import Difference
from fedhet.report.page import render
from fedhet.report.run import Run, load_run
from fedhet.report.tables import LATEX_HEAD, Cell, Cells, markdown, plain, tabular
from fedhet.runs.directory import read_origin, read_summary
from fedhet.runs.records import NAN

OUTCOMES = ("holds", "within noise", "does not hold", "not measured")
"""The possible outcomes of a claim in a place."""
KIB = 1024.0
COLUMNS = ("row", "column", "method", "metric", "seed", "measured", "printed", "printed_spread")
"""The columns of the CSV file: one line for each cell and seed."""
LEGEND = (
    "Mean ± standard deviation over the seeds, of the last round; the paper's numbers are in "
    "brackets."
)
TAU = (
    "Kendall's τ compares the order of the rows with the paper's: 1 is the same order, 0 no "
    "agreement, -1 the reverse order."
)


# --- what the runs have measured --------------------------------------------------------------


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


# --- what is left of a table when its runs are gone: NAME-SIZE.json ---------------------------


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """A claim in one place, and what came of it."""

    claim: str
    where: str
    above: str
    below: str
    outcome: Literal["holds", "within noise", "does not hold", "not measured"]
    difference: float | None = None
    """The mean over the seeds, in the unit of the printed numbers; None: not measured."""
    se: float | None = None
    """Its standard error."""


class Finished(BaseModel, frozen=True, extra="forbid"):
    """A table in one size, as far as it was made: what is left of it when its runs are gone."""

    table: str
    size: Size
    seeds: list[int] = Field(min_length=1)
    settings: dict[str, Any] = Field(default_factory=dict)
    """The settings that all of its runs had instead of the table's."""
    runs: int
    finished: int
    """The runs of which it was made."""
    made: str = ""
    """The day on which the last of them was begun, as 2026-11-24."""
    hours: float | None = None
    """What they took together, by the clock of the machine that made them."""
    agreement: dict[str, float | None] = Field(default_factory=dict)
    """Kendall's tau with the printed numbers, by column."""
    comparisons: list[Comparison] = Field(default_factory=list)

    @classmethod
    def of(cls, results: Results) -> Finished:
        """Return what a table's results come to."""
        plan = results.plan
        done = [run.directory for run in plan.runs if run.finished]
        began = [read_origin(run / "run.json").started for run in done]
        summaries = [read_summary(run / "summary.json") for run in done]
        return cls(
            table=plan.name,
            size=plan.size,
            seeds=[*plan.seeds],
            settings=dict(plan.over),
            runs=len(plan.runs),
            finished=len(done),
            made=max(began, default="")[: len("2026-11-24")],
            hours=round(sum(each.seconds.total for each in summaries if each) / 3600, 2),
            agreement={
                column.name: _known(results.agreement(column.name), 2)
                for column in plan.table.columns_in(plan.size)
            },
            comparisons=[
                Comparison(
                    claim=verdict.claim.says,
                    where=verdict.where,
                    above=verdict.above,
                    below=verdict.below,
                    outcome=verdict.outcome,
                    difference=_known(verdict.difference.mean, 4),
                    se=_known(verdict.difference.se, 4),
                )
                for verdict in results.verdicts
            ],
        )

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.table}-{self.size}.json"

    def to_json(self) -> str:
        """Return its file's text, with a line for each comparison."""
        head = self.model_dump(exclude={"comparisons"})
        lines = [json.dumps(each.model_dump(), ensure_ascii=False) for each in self.comparisons]
        listed = "\n  " + ",\n  ".join(lines) + "\n " if lines else ""
        text = json.dumps({**head, "comparisons": []}, indent=1, ensure_ascii=False)
        return text.replace('"comparisons": []', f'"comparisons": [{listed}]') + "\n"


def _known(value: float, digits: int) -> float | None:
    return None if math.isnan(value) else round(value, digits)


# --- the table as it is written --------------------------------------------------------------


def write_results(results: Results, out: Path) -> Path:
    """Write NAME-SIZE.md, .html, .csv and .json into a folder; return the path of the page."""
    plan, finished = results.plan, Finished.of(results)
    stem = f"{plan.name}-{plan.size}"
    write_text(out / finished.file_name, finished.to_json())
    write_text(out / f"{stem}.md", as_markdown(results))
    with (
        Folder(out).replacing(f"{stem}.csv") as path,
        path.open("w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for place, cell in results.cells.items():
            planned = cell.planned
            first = (*place, planned.row.method, planned.metric)
            for seed, value in cell.by_seed.items():
                row = (*first, seed, value, planned.printed, planned.printed_spread)
                table.writerow(row)
    page = render(
        "table.html",
        "fedhet.experiments",
        title=plan.table.title,
        source=plan.table.source,
        about=about(plan, results.finished),
        command=plan.command,
        table=cells(results),
        legend=f"{LEGEND} {TAU}",
        claims=claims(results) if results.verdicts else None,
        notes=plan.table.notes,
        runs=plan.runs,
    )
    return write_text(out / f"{stem}.html", page)


def write_latex(results: Results, out: Path) -> Path:
    """Write NAME-SIZE.tex into a folder: the table and the claims; return its path.

    In a column of scores the best row is in bold and the second underlined; a dagger marks
    differences beyond two standard errors.
    """
    plan = results.plan
    columns = [column.name for column in plan.table.columns_in(plan.size)]
    scored = {name: sign for name in columns if (sign := _sign(results, name))}
    clear = [row for row, verdict in enumerate(results.verdicts) if verdict.difference.clear]
    parts = [LATEX_HEAD, tabular(cells(results), scored)]
    if results.verdicts:
        parts.append(tabular(claims(results), {"difference": 0}, clear))
    name = f"{plan.name}-{plan.size}.tex"
    return write_text(out / name, "\n".join(parts))


def _sign(results: Results, column: str) -> int:
    """Return 1 if higher numbers of a column are better, -1 if lower ones, 0 if neither."""
    metrics = {c.planned.metric for (_, name), c in results.cells.items() if name == column}
    if any(metric.startswith("figure/") for metric in metrics):
        return 0
    lower = any(metric.endswith("/std") or metric.startswith("bytes/") for metric in metrics)
    return -1 if lower else 1


def write_overview(found: Sequence[Results], path: Path) -> None:
    """Write several tables into one Markdown file: which claims hold, then each table."""
    sections = "\n".join(as_markdown(results) for results in found)
    write_text(path, f"{markdown(overview(found))}\n{sections}")


def overview(found: Sequence[Results]) -> Cells:
    """Return a row for each table: how many runs are finished, and how many claims hold."""
    counts = [Counter(verdict.outcome for verdict in results.verdicts) for results in found]
    taus = [
        [results.agreement(c.name) for c in results.plan.table.columns_in(results.plan.size)]
        for results in found
    ]
    shown = [", ".join(_number(tau) for tau in each if not math.isnan(tau)) for each in taus]
    return Cells(
        {
            "table": [Cell(results.plan.name) for results in found],
            "what it is": [Cell(results.plan.table.title) for results in found],
            "runs": [Cell(f"{r.finished} of {len(r.plan.runs)}") for r in found],
            "Kendall's τ": [Cell(known or "–") for known in shown],
            **{name: [Cell(str(count[name])) for count in counts] for name in OUTCOMES},
        },
        words=2,
    )


def as_markdown(results: Results) -> str:
    """Return a table's results as a section of Markdown."""
    plan = results.plan
    parts = [
        f"## {plain(plan.table.title)}\n",
        f"{plain(plan.table.source)}. {about(plan, results.finished)}\n",
        f"```bash\n{plan.command}\n```\n",
        markdown(cells(results)),
        f"{LEGEND} {TAU}\n",
    ]
    if results.verdicts:
        folded = f"<details><summary>Each comparison</summary>\n\n{markdown(claims(results))}"
        parts += [markdown(outcomes(results)), f"{folded}\n</details>\n"]
    parts += [f"- {plain(note)}\n" for note in plan.table.notes]
    return "\n".join(parts)


def cells(results: Results) -> Cells:
    """Return the table: a row for each of the paper's, and the agreement of each column."""
    plan = results.plan
    rows = [row.name for row in plan.table.rows_in(plan.size)]
    found: dict[str, Sequence[Cell]] = {plan.name: [*map(Cell, rows), Cell("Kendall's τ")]}
    for column in plan.table.columns_in(plan.size):
        measured = [_cell(results.cells[row, column.name]) for row in rows]
        found[column.name] = [*measured, Cell(_number(results.agreement(column.name)))]
    return Cells(found)


def outcomes(results: Results) -> Cells:
    """Return the claims of the paper, each with the number of places where it holds or does not."""
    found: dict[str, Counter[str]] = {}
    for verdict in results.verdicts:
        found.setdefault(verdict.claim.says, Counter())[verdict.outcome] += 1
    return Cells(
        {
            "claim": [Cell(says) for says in found],
            **{name: [Cell(str(count[name])) for count in found.values()] for name in OUTCOMES},
        }
    )


def claims(results: Results) -> Cells:
    """Return the claims of the paper, each place where it was tested, and its outcome there."""
    found = results.verdicts
    return Cells(
        {
            "claim": [Cell(verdict.claim.says) for verdict in found],
            "where": [Cell(f"{v.where}: {v.above} against {v.below}") for v in found],
            "difference": [
                Cell("" if math.isnan(d.mean) else f"{d.mean:+.2f} ± {d.se:.2f}")
                for d in (verdict.difference for verdict in found)
            ],
            "holds?": [Cell(verdict.outcome) for verdict in found],
        },
        words=2,
    )


def _cell(found: CellResult) -> Cell:
    printed = found.planned.printed
    paper = "" if printed is None else f" ({_number(printed)})"
    if math.isnan(found.mean):
        return Cell(f"–{paper}")
    spread = "" if math.isnan(found.std) else f" ± {_number(found.std)}"
    return Cell(f"{_number(found.mean)}{spread}{paper}", found.mean)


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
