"""Output of a paper's table: figures, and files in Markdown, HTML, CSV, and LaTeX."""

from __future__ import annotations

import csv
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure

from fedhet.base.disk import Folder, write_text
from fedhet.base.metrics import ACCURACY, metric_of
from fedhet.experiments.paper import COSTS, Comparison, Range, Results, TableResult
from fedhet.experiments.plan import Claim, PaperTable, Plan, finished_run, is_spread
from fedhet.report.comparison import HEADLINE, Column, Group
from fedhet.report.comparison import Comparison as RunComparison
from fedhet.report.comparison_report import drawings
from fedhet.report.differences import OUTCOMES
from fedhet.report.page import render
from fedhet.report.style import Drawing, set_title
from fedhet.report.tables import (
    LATEX_HEAD,
    MARK,
    Cell,
    Cells,
    captioned,
    escape_markdown,
    markdown,
    tabular,
)
from fedhet.runs.records import EVALUATED, NAN
from fedhet.runs.units import human_bytes

COLUMNS = (
    "row", "column", "method", "metric", "seed", "measured", "printed", "printed_spread",
    "test_samples", *COSTS,
)  # fmt: skip
"""Columns in the CSV file, which has one line per cell and seed."""
DIFFERENCES = (
    "Difference for the same seed (or ratio, or value): mean ± standard error over the seeds and "
    "the test samples. A comparison holds if the 95 % confidence interval (Student's t) is within "
    "the bound, and does not hold if it is outside. If the number of test samples is unknown, the "
    "error covers only the seeds."
)
COST = (
    "Epochs: passes of a client over its own labeled samples in all rounds; a batch on which a "
    "method takes K steps counts K times. Up and down: bytes that a client sends and receives in "
    "all rounds, except models for an evaluation. All three are means over the clients."
)
TAU = (
    "Kendall's τ compares the order of the rows with the paper's order: 1 if they are equal, -1 "
    "if they are reversed."
)


def write_results(results: Results, out: Path) -> Path:
    """Write NAME-SIZE.md, .html, .csv and .json to a directory; return the HTML file's path.

    Each figure in `curves` is also written as PNG and SVG.
    """
    plan, result = results.plan, results.result
    stem, figures = f"{plan.name}-{plan.size}", curves(results)
    for drawing in figures:
        drawing.write_files(Folder(out))
    write_text(out / result.file_name, result.to_json())
    write_text(out / f"{stem}.md", as_markdown(result, plan.table))
    with (
        Folder(out).replacing(f"{stem}.csv") as path,
        path.open("w", newline="", encoding="utf-8") as file,
    ):
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for place, each in results.cells.items():
            cell = each.cell
            first = (*place, cell.row.method, cell.metric)
            for seed, value in each.values.items():
                numbers = value, cell.printed, cell.printed_spread
                costs = each.costs.loc[seed].round(2)
                table.writerow((*first, seed, *numbers, each.samples, *costs))
    page = render(
        "table.html",
        "fedhet.experiments",
        title=plan.table.title,
        source=plan.table.source,
        about=result.about(plan.table),
        command=result.command,
        table=cells(result, plan.table),
        legend=legend(result, plan.table),
        figures=[drawing.chart() for drawing in figures],
        claims=claims(result) if result.comparisons else None,
        differences=DIFFERENCES,
        notes=plan.table.notes,
        runs=plan.runs,
    )
    return write_text(out / f"{stem}.html", page)


@dataclass(frozen=True, eq=False)
class Curve(Group):
    """Finished runs of a cell, with the protocol and kind of its metric."""

    column: Column = ("", "")

    def resolved(self, column: Column) -> Column:
        """Return the protocol and kind of the cell."""
        return self.column


def curves(results: Results) -> list[Drawing]:
    """Return figures of each column's metrics over rounds and, for accuracies, over bytes.

    The list is empty if the table has no curves, or if no run has finished. Columns with the same
    curves have one figure.
    """
    drawn: dict[object, list[Drawing]] = {}
    if not results.plan.table.curves:
        return []
    for column in results.plan.table.columns_in(results.plan.size):
        rows: dict[tuple[object, Column], Curve] = {}
        for (row, name), each in results.cells.items():
            runs = [finished_run(run.directory) for run in each.cell.runs.values() if run.finished]
            words = re.split("[/@]", each.cell.metric.removeprefix("target/"))
            if name == column.name and runs and words[0] in (*EVALUATED, "figure"):
                key = tuple(run.path for run in runs), (words[0], words[1])
                # Rows that show different rounds of the same runs have the same curve.
                label = each.cell.row.method if key in rows else row
                rows[key] = Curve(label, {}, (*runs,), (words[0], words[1]))
        for of_method in (False, True):
            shown = {k: v for k, v in rows.items() if (v.column[0] == "figure") == of_method}
            labels = *shown, *(curve.label for curve in shown.values())
            if shown and labels not in drawn:
                parts = [*shown.values()], results.plan, column.name
                drawn[labels] = _drawn(*parts, of_method=of_method)
    return [figure for figures in drawn.values() for figure in figures]


def _drawn(shown: Sequence[Curve], plan: Plan, column: str, *, of_method: bool) -> list[Drawing]:
    """Return the figures of a column's accuracies, or of its metrics of methods."""
    names = tuple(sorted({curve.column[1] for curve in shown})) if of_method else ()
    headline, metric = (shown[0].column[0], HEADLINE), metric_of(ACCURACY)
    compared = RunComparison(
        (*shown,), (headline,), NAN, "", (), names, (), metric, "none"
    )  # fmt: skip
    wanted = {f"compare-{name}" for name in names} if of_method else {"curves", "costs"}
    return [_of_column(each, plan, column) for each in drawings(compared) if each.name in wanted]


def _of_column(drawing: Drawing, plan: Plan, column: str) -> Drawing:
    """Return a figure whose name and title contain the column."""

    def draw(figure: Figure) -> None:
        drawing.draw(figure)
        ax = figure.axes[0]
        set_title(ax, f"{column}: {ax.get_title(loc='left').partition(':')[0]}")

    words = re.sub(r"[^a-z0-9.]+", "-", column.lower()).strip("-")
    name = f"{plan.name}-{plan.size}-{words}-{drawing.name.removeprefix('compare-')}"
    return replace(drawing, name=name, draw=draw, alt=f"{column}: {drawing.alt}")


def write_latex(results: Results, out: Path) -> Path:
    """Write the table and its claims to NAME-SIZE.tex, and return the file's path.

    In each column of scores, the best value is bold and the second-best value is underlined. A
    dagger marks comparisons that hold or do not hold.
    """
    plan, result = results.plan, results.result
    # Map columns of scores to 1 if higher numbers are better, or to -1 otherwise.
    scored = {}
    for column in plan.table.columns_in(plan.size):
        of_column = [each for (_, name), each in results.cells.items() if name == column.name]
        metrics = {each.cell.metric for each in of_column}
        if not any(metric.startswith("figure/") for metric in metrics):
            lower = any(
                is_spread(each) or each.startswith(("bytes/", "target/")) for each in metrics
            )
            scored[column.name] = -1 if lower else 1
    outcomes = [each.outcome for each in result.comparisons]
    clear = [row for row, each in enumerate(outcomes) if each in ("holds", "does not hold")]
    in_percent = plan.table.unit == "percent"
    unit = f" Accuracies are {'percentages' if in_percent else 'fractions'}."
    caption = f"{plan.table.title}. {legend(result, plan.table)} {result.about(plan.table)}{unit}"
    parts = [LATEX_HEAD, captioned(tabular(cells(result, plan.table), scored), caption)]
    if result.comparisons:
        mark = f"{DIFFERENCES} {MARK}: the comparison holds, or does not hold.{unit}"
        parts.append(captioned(tabular(claims(result), {"difference": 0}, clear), mark))
    return write_text(out / f"{plan.name}-{plan.size}.tex", "\n".join(parts))


def write_overview(tables: Sequence[Results], path: Path) -> None:
    """Write an overview of several tables, followed by the tables, to one Markdown file."""
    sections = "\n".join(as_markdown(each.result, each.plan.table) for each in tables)
    write_text(path, f"{markdown(overview(tables))}\n{sections}")


def overview(tables: Sequence[Results]) -> Cells:
    """Build an overview with one row per table: finished runs, and outcomes of comparisons."""
    listed = [each.result for each in tables]
    counts = [Counter[str](each.outcome for each in result.comparisons) for result in listed]
    taus = [[tau for tau in result.agreement.values() if tau is not None] for result in listed]
    return Cells(
        {
            "table": [Cell(result.table) for result in listed],
            "title": [Cell(each.plan.table.title) for each in tables],
            "runs": [Cell(f"{result.finished} of {result.runs}") for result in listed],
            "Kendall's τ": [Cell(", ".join(map(_number, each)) or "–") for each in taus],
            **{name: [Cell(str(count[name])) for count in counts] for name in OUTCOMES},
        },
        words=2,
    )


def as_markdown(result: TableResult, table: PaperTable) -> str:
    """Return a Markdown section with the table, its claims, every comparison, and notes."""
    parts = [
        f"## {escape_markdown(table.title)}\n",
        f"{escape_markdown(table.source)}. {escape_markdown(result.about(table))}\n",
        f"```bash\n{result.command}\n```\n",
        markdown(cells(result, table)),
        f"{legend(result, table)}\n",
    ]
    if result.comparisons:
        folded = f"<details><summary>Each comparison</summary>\n\n{markdown(claims(result))}"
        folded += f"\n{DIFFERENCES}\n"
        parts += [markdown(outcomes(result)), f"{folded}\n</details>\n"]
    parts += [f"- {escape_markdown(note)}\n" for note in table.notes]
    return "\n".join(parts)


def legend(result: TableResult, table: PaperTable) -> str:
    """Return sentences about the numbers and the costs in a table."""
    return " ".join([table.legend(result.size), TAU, *([COST] if result.costs else [])])


def cells(result: TableResult, table: PaperTable, digits: int = 2, *, brief: bool = False) -> Cells:
    """Build the table of measured and published numbers, with Kendall's tau in the last row.

    With `brief`, the table has no Kendall's tau, no standard deviations, and no rows or columns
    without measurements.
    """
    rows = table.rows_in(result.size)
    if brief:
        measured = {
            name
            for name, columns in result.cells.items()
            if any(mean is not None for mean, _ in columns.values())
        }
        rows = [row for row in rows if row.name in measured]
    agrees = not brief and any(tau is not None for tau in result.agreement.values())
    names = [*(row.name for row in rows), *(["Kendall's τ"] if agrees else [])]
    columns: dict[str, Sequence[Cell]] = {result.table: [Cell(name) for name in names]}
    for column in table.columns_in(result.size):
        means = (cells.get(column.name, (None,))[0] for cells in result.cells.values())
        if brief and all(mean is None for mean in means):
            continue
        shown = []
        for row in rows:
            # A stored result may be older than a row or column.
            mean, std = result.cells.get(row.name, {}).get(column.name, (None, None))
            hidden = std is None or brief
            spread = "" if hidden else f" ± {_number(std, digits)}"
            printed, _ = row.printed_in(column.name)
            paper = "" if printed is None else f" ({_number(printed, digits)})"
            shown.append(Cell(f"{_number(mean, digits)}{spread}{paper}", mean))
        tau = [Cell(_number(result.agreement.get(column.name)))] if agrees else []
        columns[column.name] = [*shown, *tau]
    for title, name in zip(("epochs", "up", "down"), COSTS if result.costs else (), strict=False):
        ranges = [result.costs.get(row.name, {}).get(name) for row in rows]
        shown = [_range_cell(each, str if name == "epochs" else human_bytes) for each in ranges]
        columns[title] = [*shown, *([Cell("")] if agrees else [])]
    return Cells(columns)


def _range_cell(ends: Range, text: Callable[[float], str]) -> Cell:
    """Format a range, as in "3.1 MB–4.2 MB", or a single value if both ends are equal."""
    if ends is None:
        return Cell("–")
    texts = dict.fromkeys(text(end).removesuffix(".0") for end in ends)
    return Cell("–".join(texts), ends[1])


def outcomes(result: TableResult) -> Cells:
    """Build a table with one row per claim: its bounds, and its comparisons by outcome."""
    groups: dict[str, list[Comparison]] = {}
    for each in result.comparisons:
        groups.setdefault(each.claim, []).append(each)
    counts = [Counter(each.outcome for each in group) for group in groups.values()]
    return Cells(
        {
            "claim": [Cell(claim) for claim in groups],
            "bound": [Cell(bounds(each.stated for each in group)) for group in groups.values()],
            **{name: [Cell(str(count[name])) for count in counts] for name in OUTCOMES},
        },
        words=2,
    )


def bounds(claims: Iterable[Claim]) -> str:
    """Return the bounds of the claims with the same sentence, e.g. "above 0; at most 6"."""
    return "; ".join(dict.fromkeys(claim.bound for claim in claims))


def claims(result: TableResult) -> Cells:
    """Build a table with one row per comparison: claim, bound, cells, difference, and outcome."""
    comparisons = result.comparisons
    return Cells(
        {
            "claim": [Cell(each.claim) for each in comparisons],
            "bound": [Cell(each.stated.bound) for each in comparisons],
            "where": [Cell(each.cells) for each in comparisons],
            "difference": [Cell(each.text) for each in comparisons],
            "seeds": [Cell(str(each.seeds)) for each in comparisons],
            "test samples": [
                Cell("–" if each.test_samples is None else str(each.test_samples))
                for each in comparisons
            ],
            f"holds on {result.data}?": [Cell(each.outcome) for each in comparisons],
        },
        words=3,
    )


def _number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None or math.isnan(value) else f"{value:.{digits}f}"
