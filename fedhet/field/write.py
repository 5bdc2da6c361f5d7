"""Writes the table of all methods: as Markdown, as a page, as CSV, and in LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedhet.base.disk import Folder, write_text
from fedhet.field.declaration import NAME
from fedhet.field.plan import Cell as Place
from fedhet.field.ranks import ALPHA
from fedhet.field.results import ACCURACIES, FieldResults
from fedhet.report.groups import Spread
from fedhet.report.latex import HEAD, tabular
from fedhet.report.page import render
from fedhet.report.tables import MARK, Cell, Cells, markdown, plain
from fedhet.runs.records import PROTOCOLS
from fedhet.runs.units import ABSENT, human_bytes, human_seconds, plural, plus_minus

TITLES = {
    "personal": "Accuracy on each client's own test split",
    "common": "Accuracy on the common test set",
    "worst client": "Accuracy of the worst client on its own test split",
}
COSTS: Mapping[str, Callable[[float], str]] = {
    "bytes": human_bytes,
    **{f"bytes to 90 %, {protocol}": human_bytes for protocol in PROTOCOLS},
    **{f"time to 90 %, {protocol}": human_seconds for protocol in PROTOCOLS},
    "seconds": human_seconds,
    "memory": human_bytes,
}
"""The costs of a run, and how each is shown."""
LEGEND = "In percent: the last round's mean over clients; mean ± standard deviation over the seeds."
RANKS = (
    "Mean rank over the cells, the best 1, of the methods that run in all of them; in brackets the "
    f"number of cells. {MARK}: behind the best by more than Nemenyi's critical difference, which "
    f'holds for all pairs at once at {ALPHA:g}. "Seeds apart": the critical difference if each '
    "seed counts as a data set of its own, which it is not quite. p: of Friedman's test that the "
    "methods do not differ."
)
COST = (
    "Means over the cells and seeds in which the method runs. To 90 %: until the accuracy first "
    "reaches 90 % of central's in that cell and seed; in brackets the runs that reach it, where "
    "not all do. Time is simulated where the runs have a simulated clock; seconds are those of a "
    "run on this machine, and memory is the peak of its process."
)


def write_field(results: FieldResults, out: Path) -> Path:
    """Write field-SIZE.md, .html and .csv into a folder; return the path of the page."""
    stem = f"{NAME}-{results.plan.size}"
    write_text(out / f"{stem}.md", as_markdown(results))
    with Folder(out).replacing(f"{stem}.csv") as path:
        results.runs.to_csv(path, index=False)
    return write_text(out / f"{stem}.html", _page(results))


def write_latex(results: FieldResults, out: Path) -> Path:
    """Write field-SIZE.tex into a folder: accuracies by cell, ranks, and costs; return its path."""
    parts = [HEAD]
    for measure in PROTOCOLS:
        found = matrix(results, measure)
        parts.append(tabular(found, dict.fromkeys(found.headers[1:], 1)))
    parts += [tabular(ranks(results)), tabular(costs(results))]
    return write_text(out / f"{NAME}-{results.plan.size}.tex", "\n".join(parts))


def as_markdown(results: FieldResults) -> str:
    """Return the table as a section of Markdown."""
    parts = [
        f"## {plain(results.plan.table.title)}\n",
        f"{plain(about(results))}\n",
        f"```bash\n{results.plan.command}\n```\n",
    ]
    for measure, title in TITLES.items():
        parts += [f"### {title}\n", markdown(matrix(results, measure)), f"{LEGEND}\n"]
    parts += ["### Ranks\n", markdown(ranks(results)), f"{RANKS}\n"]
    parts += ["### Costs\n", markdown(costs(results)), f"{COST}\n"]
    if found := refusals(results):
        parts += ["### Where a method cannot run\n", markdown(found)]
    parts += ["\n", *(f"- {plain(note)}\n" for note in results.plan.table.notes)]
    return "\n".join(parts)


def about(results: FieldResults) -> str:
    """Return a line on the size, the seeds, and how much is finished."""
    plan = results.plan
    runs = f"{results.finished} of {len(plan.runs)} runs are finished"
    says = plan.table.sizes[plan.size].says
    return f"Size {plan.size}: {says} {runs}, seeds {', '.join(map(str, plan.seeds))}."


def matrix(results: FieldResults, measure: str) -> Cells:
    """Return an accuracy in percent: a row for each method, a column for each cell."""
    methods = results.plan.methods
    columns = {
        ", ".join(place): [_accuracy(results.by_seed(name, place, measure)) for name in methods]
        for place in results.plan.cells
    }
    return Cells({"method": [Cell(name) for name in methods], **columns})


def every(results: FieldResults) -> Cells:
    """Return a row for each method in each cell with all that is told of it, or why it has none."""
    cells = results.plan.every
    columns: dict[str, Sequence[Cell]] = {
        "method": [Cell(each.method) for each in cells],
        "architectures": [Cell(each.cell[0]) for each in cells],
        "split": [Cell(each.cell[1]) for each in cells],
        "why not": [Cell(each.refused) for each in cells],
    }
    for measure in ACCURACIES:
        columns[measure] = [
            _accuracy(results.by_seed(each.method, each.cell, measure)) for each in cells
        ]
    for measure, shown in COSTS.items():
        columns[measure] = [
            _cost(results.by_seed(each.method, each.cell, measure), shown) for each in cells
        ]
    return Cells(columns, words=4)


def ranks(results: FieldResults) -> Cells:
    """Return the methods' mean ranks by protocol and scope, the best over all cells first."""
    found = results.rankings
    leading = next(iter(found.values())).ranks.index if found else []
    methods = sorted(results.ranked_methods, key=[*leading, *results.ranked_methods].index)
    ends = ("critical difference", "seeds apart", "p")
    columns: dict[str, Sequence[Cell]] = {"method": [Cell(name) for name in (*methods, *ends)]}
    for (protocol, scope), ranking in found.items():
        values = (ranking.critical, ranking.critical_by_seed, ranking.p)
        shown = [
            Cell(f"{ranking.ranks[name]:.2f}{f' {MARK}' if ranking.behind(name) else ''}",
                 float(ranking.ranks[name]))
            if name in ranking.ranks else Cell(ABSENT, math.nan)
            for name in methods
        ]  # fmt: skip
        columns[f"{protocol}, {scope} ({ranking.cells})"] = [
            *shown, *(Cell(f"{value:.2g}", math.nan) for value in values)
        ]  # fmt: skip
    return Cells(columns)


def costs(results: FieldResults) -> Cells:
    """Return what a run of each method costs, over the cells in which it runs."""
    methods = results.plan.methods
    columns = {
        measure: [_cost(_over_cells(results, name, measure), shown) for name in methods]
        for measure, shown in COSTS.items()
    }
    return Cells({"method": [Cell(name) for name in methods], **columns})


def refusals(results: FieldResults) -> Cells | None:
    """Return the methods that cannot run in some cells, where, and why; None if all can."""
    found: dict[tuple[str, str], list[Place]] = {}
    for each in results.plan.every:
        if each.refused:
            found.setdefault((each.method, each.refused), []).append(each.cell)
    if not found:
        return None
    return Cells(
        {
            "method": [Cell(method) for method, _ in found],
            "where": [Cell(_where(places)) for places in found.values()],
            "why": [Cell(why) for _, why in found],
        },
        words=3,
    )


def _where(places: Iterable[Place]) -> str:
    return ", ".join(dict.fromkeys(architectures for architectures, _ in places))


def _over_cells(results: FieldResults, method: str, measure: str) -> pd.Series:
    each = [results.by_seed(method, place, measure) for place in results.plan.cells]
    return pd.concat(each, ignore_index=True) if each else pd.Series(dtype=float)


def _accuracy(values: pd.Series) -> Cell:
    found = Spread.of(100 * values)
    return Cell(plus_minus(found.mean, found.std, 1), found.mean)


def _cost(values: pd.Series, shown: Callable[[float], str]) -> Cell:
    """Return a mean over runs, with how many of them have the value if not all."""
    known = int(values.count())
    some = f" ({known} of {len(values)})" if 0 < known < len(values) else ""
    mean = float(values.mean())
    return Cell(shown(mean) + some, mean)


def _page(results: FieldResults) -> str:
    found = {title: matrix(results, measure) for measure, title in TITLES.items()}
    runs = plural(results.finished, "finished run")
    return render(
        "field.html",
        title=results.plan.table.title,
        facts=(f"size {results.plan.size}", runs, plural(len(results.plan.methods), "method")),
        about=about(results),
        command=results.plan.command,
        every=every(results),
        matrices=found,
        legend=LEGEND,
        ranks=ranks(results),
        ranks_legend=RANKS,
        cost_legend=COST,
        refusals=refusals(results),
        notes=results.plan.table.notes,
    )
