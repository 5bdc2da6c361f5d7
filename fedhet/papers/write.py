"""Writes a table's results as Markdown, as a page, and as CSV."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fedhet.base.disk import Folder, write_text
from fedhet.papers.finished import Finished
from fedhet.papers.plan import as_options
from fedhet.papers.results import OUTCOMES, CellResult, Results, Verdict
from fedhet.report.latex import HEAD, tabular
from fedhet.report.page import render
from fedhet.report.tables import Cell, Cells, markdown, plain

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


def write_results(results: Results, out: Path) -> Path:
    """Write NAME-SIZE.md, .html, .csv and .json into a folder; return the path of the page."""
    stem = f"{results.plan.name}-{results.plan.size}"
    finished = Finished.of(results)
    write_text(out / finished.file_name, finished.to_json())
    write_text(out / f"{stem}.md", as_markdown(results))
    with (
        Folder(out).replacing(f"{stem}.csv") as path,
        path.open("w", newline="", encoding="utf-8") as file,
    ):
        csv.writer(file).writerows([COLUMNS, *_lines(results)])
    return write_text(out / f"{stem}.html", _page(results))


def write_latex(results: Results, out: Path) -> Path:
    """Write NAME-SIZE.tex into a folder: the table and the claims; return its path.

    In a column of scores the best row is in bold and the second underlined; a dagger marks
    differences beyond two standard errors.
    """
    plan = results.plan
    columns = [column.name for column in plan.table.columns_in(plan.size)]
    scored = {name: sign for name in columns if (sign := _sign(results, name))}
    clear = [row for row, verdict in enumerate(results.verdicts) if verdict.difference.clear]
    parts = [HEAD, tabular(cells(results), scored)]
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
    return Cells(
        {
            "table": [Cell(results.plan.name) for results in found],
            "what it is": [Cell(results.plan.table.title) for results in found],
            "runs": [Cell(f"{r.finished} of {len(r.plan.runs)}") for r in found],
            "Kendall's τ": [Cell(_agreements(results)) for results in found],
            **{name: [Cell(str(count[name])) for count in counts] for name in OUTCOMES},
        },
        words=2,
    )


def _agreements(results: Results) -> str:
    columns = results.plan.table.columns_in(results.plan.size)
    known = [value for c in columns if not math.isnan(value := results.agreement(c.name))]
    return ", ".join(map(_number, known)) or "–"


def as_markdown(results: Results) -> str:
    """Return a table's results as a section of Markdown."""
    plan = results.plan
    parts = [
        f"## {plain(plan.table.title)}\n",
        f"{plain(plan.table.source)}. {_about(results)}\n",
        f"```bash\n{command(results)}\n```\n",
        markdown(cells(results)),
        f"{LEGEND} {TAU}\n",
    ]
    if results.verdicts:
        parts += [markdown(outcomes(results)), folded("Each comparison", markdown(claims(results)))]
    parts += [f"- {plain(note)}\n" for note in plan.table.notes]
    return "\n".join(parts)


def command(results: Results) -> str:
    """Return the command that makes the table."""
    plan = results.plan
    seeds = ",".join(map(str, plan.seeds))
    words = [f"fedhet table {plan.name} --size {plan.size} --seeds {seeds}"]
    return " ".join([*words, *as_options(plan.over)])


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


def folded(summary: str, content: str) -> str:
    """Return Markdown that is collapsed under its summary."""
    return f"<details><summary>{summary}</summary>\n\n{content}\n</details>\n"


def claims(results: Results) -> Cells:
    """Return the claims of the paper, each place where it was tested, and its outcome there."""
    found = results.verdicts
    return Cells(
        {
            "claim": [Cell(verdict.claim.says) for verdict in found],
            "where": [Cell(f"{v.where}: {v.above} against {v.below}") for v in found],
            "difference": [Cell(_difference(verdict)) for verdict in found],
            "holds?": [Cell(verdict.outcome) for verdict in found],
        },
        words=2,
    )


def _about(results: Results) -> str:
    plan, scale = results.plan, results.plan.table.sizes[results.plan.size]
    runs = f"{results.finished} of {len(plan.runs)} runs are finished"
    return f"Size {plan.size}: {scale.says} {runs}, seeds {', '.join(map(str, plan.seeds))}."


def _cell(found: CellResult) -> Cell:
    printed = found.planned.printed
    paper = "" if printed is None else f" ({_number(printed)})"
    if math.isnan(found.mean):
        return Cell(f"–{paper}")
    spread = "" if math.isnan(found.std) else f" ± {_number(found.std)}"
    return Cell(f"{_number(found.mean)}{spread}{paper}", found.mean)


def _difference(verdict: Verdict) -> str:
    found = verdict.difference
    return "" if math.isnan(found.mean) else f"{found.mean:+.2f} ± {found.se:.2f}"


def _number(value: float) -> str:
    return "–" if math.isnan(value) else f"{value:.2f}"


def _lines(results: Results) -> list[tuple[object, ...]]:
    return [
        (
            *place,
            cell.planned.row.method,
            cell.planned.metric,
            seed,
            value,
            cell.planned.printed,
            cell.planned.printed_spread,
        )
        for place, cell in results.cells.items()
        for seed, value in cell.by_seed.items()
    ]


def _page(results: Results) -> str:
    plan = results.plan
    return render(
        "table.html",
        title=plan.table.title,
        source=plan.table.source,
        about=_about(results),
        command=command(results),
        table=cells(results),
        legend=f"{LEGEND} {TAU}",
        claims=claims(results) if results.verdicts else None,
        notes=plan.table.notes,
        runs=plan.runs,
    )
