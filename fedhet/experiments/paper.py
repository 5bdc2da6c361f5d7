"""A paper's table: what its runs have measured, which claims hold, and how both are written."""

from __future__ import annotations

import csv
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel, Field

from fedhet.base.disk import Folder, write_text
from fedhet.experiments.plan import Place, Plan, PlannedCell, Size, about, command_of, finished_run
from fedhet.report.comparison import Difference
from fedhet.report.page import render
from fedhet.report.tables import LATEX_HEAD, Cell, Cells, markdown, plain, tabular
from fedhet.runs.directory import read_known
from fedhet.runs.records import NAN, Origin, Summary

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


class Comparison(BaseModel, frozen=True, extra="forbid"):
    """A claim in one place, and what came of it: the difference between two cells, seed by seed."""

    claim: str
    where: str
    above: str
    below: str
    outcome: Literal["holds", "within noise", "does not hold", "not measured"]
    """A claim holds or does not hold only beyond two standard errors."""
    difference: float | None = None
    """The mean over the seeds, in the unit of the printed numbers; None: not measured."""
    se: float | None = None
    """Its standard error."""


@dataclass(frozen=True)
class Results:
    """A table's results, as far as its runs have finished."""

    plan: Plan
    cells: Mapping[Place, tuple[PlannedCell, pd.Series]]
    """Each cell, and its measurements by seed in the unit of the printed numbers."""

    @property
    def finished(self) -> int:
        """The number of finished runs."""
        return sum(run.finished for run in self.plan.runs)

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Every claim, in every place and for every pair of names that it compares."""
        found = []
        for claim in self.plan.table.claims:
            by_rows = claim.of == "rows"
            places = dict.fromkeys(column if by_rows else row for row, column in self.cells)
            wanted = [place for place in places if not claim.where or place in claim.where]
            for where, above, below in product(wanted, claim.above, claim.below):
                ends = [(name, where) if by_rows else (where, name) for name in (above, below)]
                if above == below or not all(end in self.cells for end in ends):
                    continue
                d = Difference.of(*(self.cells[end][1] for end in ends))
                place = {"claim": claim.says, "where": where, "above": above, "below": below}
                if math.isnan(d.mean):
                    found.append(Comparison(**place, outcome="not measured"))
                    continue
                clear: Any = "holds" if d.mean > 0 else "does not hold"
                outcome = clear if d.clear else "within noise"
                found.append(Comparison(**place, outcome=outcome, difference=d.mean, se=d.se))
        return found

    def agreement(self, column: str) -> float:
        """Return Kendall's tau between measured and printed numbers over the rows of a column.

        NaN for fewer than two rows that have both.
        """
        both = [
            (values.mean(), cell.printed)
            for (_, name), (cell, values) in self.cells.items()
            if name == column and cell.printed is not None and len(values)
        ]
        if len(both) < 2:
            return NAN
        measured, printed = (pd.Series(values) for values in zip(*both, strict=True))
        return float(measured.corr(printed, method="kendall"))


def collect(plan: Plan) -> Results:
    """Return the results of a plan's finished runs. Raises StateError for a damaged run."""
    cells = {}
    for cell in plan.cells:
        in_percent = plan.table.unit == "percent" and not is_amount(cell.metric)
        done = {seed: run.directory for seed, run in cell.runs.items() if run.finished}
        values = {seed: _measured(path, cell.metric) for seed, path in done.items()}
        found = pd.Series(values, dtype=float).dropna() * (100.0 if in_percent else 1.0)
        cells[cell.row.name, cell.column.name] = cell, found
    return Results(plan, cells)


def is_amount(metric: str) -> bool:
    """Return whether a metric has a unit of its own: it is no accuracy and no ratio of them."""
    return metric.startswith(("figure/", "bytes/"))


def _measured(path: Path, metric: str) -> float:
    """Return the value of a metric in a finished run; NaN if the run does not have it."""
    run, (first, second, *rest) = finished_run(path), metric.split("/")
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
        origins = [read_known(run / "run.json", Origin) or Origin() for run in done]
        began = [origin.started for origin in origins]
        summaries = [read_known(run / "summary.json", Summary) for run in done]
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
                column.name: None if math.isnan(tau) else round(tau, 2)
                for column in plan.table.columns_in(plan.size)
                for tau in [results.agreement(column.name)]
            },
            comparisons=[
                each.model_copy(
                    update={"difference": round(each.difference, 4), "se": round(each.se, 4)}
                )
                if each.difference is not None and each.se is not None
                else each
                for each in results.comparisons
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
        for place, (cell, values) in results.cells.items():
            first = (*place, cell.row.method, cell.metric)
            for seed, value in values.items():
                table.writerow((*first, seed, value, cell.printed, cell.printed_spread))
    page = render(
        "table.html",
        "fedhet.experiments",
        title=plan.table.title,
        source=plan.table.source,
        about=about(plan, results.finished),
        command=command_of(plan),
        table=cells(results),
        legend=f"{LEGEND} {TAU}",
        claims=claims(results) if results.comparisons else None,
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
    scored = {}  # 1 if higher numbers of a column are better, -1 if lower ones
    for column in plan.table.columns_in(plan.size):
        found = results.cells.items()
        metrics = {cell.metric for (_, name), (cell, _) in found if name == column.name}
        if not any(metric.startswith("figure/") for metric in metrics):
            lower = any(each.endswith("/std") or each.startswith("bytes/") for each in metrics)
            scored[column.name] = -1 if lower else 1
    outcomes = [each.outcome for each in results.comparisons]
    clear = [row for row, each in enumerate(outcomes) if each in ("holds", "does not hold")]
    parts = [LATEX_HEAD, tabular(cells(results), scored)]
    if results.comparisons:
        parts.append(tabular(claims(results), {"difference": 0}, clear))
    name = f"{plan.name}-{plan.size}.tex"
    return write_text(out / name, "\n".join(parts))


def write_overview(found: Sequence[Results], path: Path) -> None:
    """Write several tables into one Markdown file: which claims hold, then each table."""
    sections = "\n".join(as_markdown(results) for results in found)
    write_text(path, f"{markdown(overview(found))}\n{sections}")


def overview(found: Sequence[Results]) -> Cells:
    """Return a row for each table: how many runs are finished, and how many claims hold."""
    counts = [Counter[str](each.outcome for each in results.comparisons) for results in found]
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
        f"```bash\n{command_of(plan)}\n```\n",
        markdown(cells(results)),
        f"{LEGEND} {TAU}\n",
    ]
    if results.comparisons:
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
        shown = []
        for row in rows:
            cell, values = results.cells[row, column.name]
            mean, std = float(values.mean()), float(values.std())
            spread = "" if math.isnan(std) else f" ± {_number(std)}"
            paper = "" if cell.printed is None else f" ({_number(cell.printed)})"
            value = None if math.isnan(mean) else mean
            shown.append(Cell(f"{_number(mean)}{spread}{paper}", value))
        found[column.name] = [*shown, Cell(_number(results.agreement(column.name)))]
    return Cells(found)


def outcomes(results: Results) -> Cells:
    """Return the claims of the paper, each with the number of places where it holds or does not."""
    found: dict[str, Counter[str]] = {}
    for each in results.comparisons:
        found.setdefault(each.claim, Counter())[each.outcome] += 1
    return Cells(
        {
            "claim": [Cell(says) for says in found],
            **{name: [Cell(str(count[name])) for count in found.values()] for name in OUTCOMES},
        }
    )


def claims(results: Results) -> Cells:
    """Return the claims of the paper, each place where it was tested, and its outcome there."""
    found = results.comparisons
    return Cells(
        {
            "claim": [Cell(each.claim) for each in found],
            "where": [Cell(f"{each.where}: {each.above} against {each.below}") for each in found],
            "difference": [
                Cell("" if each.difference is None else f"{each.difference:+.2f} ± {each.se:.2f}")
                for each in found
            ],
            "holds?": [Cell(each.outcome) for each in found],
        },
        words=2,
    )


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"
