"""Sweep over the values of one setting or of several: table, figure and page over the points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_json
from rich.table import Table

from fedhet.base.disk import Folder, write_text
from fedhet.report import style
from fedhet.report.comparison import chosen_figures
from fedhet.report.page import render
from fedhet.report.run import TEST_SETS, Run, load_run
from fedhet.report.style import WIDTH, Drawing
from fedhet.report.tables import Cell, Cells, markdown
from fedhet.runs.units import human_number, plus_minus, printable
from fedhet.settings.text import as_text

TAIL = ", tail"
"""Ends the name of a quantity that is the mean of the last fifth of the rounds."""
CURVES = 12
"""Maximum number of curves in a panel: of the combinations of all settings but the first."""
Point = tuple[object, ...]
"""A value for each of the swept settings."""


@dataclass(frozen=True)
class Sweep:
    """The results at each point of a sweep."""

    names: tuple[str, ...]
    """The swept settings."""
    runs: Mapping[Point, tuple[Run, ...]]
    """The runs of each point, one for each seed, in the order of the sweep."""

    @cached_property
    def results(self) -> pd.DataFrame:
        """One column per quantity and one row per run, indexed by the place of its point.

        Last accuracies with their tails, and each metric's last value.
        """
        places, rows = [], []
        for place, runs in enumerate(self.runs.values()):
            for run in runs:
                found: dict[str, float] = {}
                last = run.last_evaluated
                for protocol, ratio in (last.relative if last else {}).items():
                    for statistic in ("mean", "best", "worst"):
                        name = f"relative accuracy, {protocol}, {statistic}"
                        found[name] = getattr(ratio, statistic)
                for protocol, kind in run.columns:
                    name = f"accuracy, {protocol}, {kind}"
                    found[name] = run.last(protocol, kind).mean
                    found[f"{name}{TAIL}"] = run.tail(protocol, kind).mean
                for title, view in run.besides:
                    for protocol, kind in view.columns:
                        found[f"{title}, {protocol}, {kind}"] = view.last(protocol, kind).mean
                if run.has_clock:
                    found["simulated hours"] = run.records[-1].clock / 3600
                rows.append({**found, **run.figures.ffill().iloc[-1].to_dict()})
                places.append(place)
        return pd.DataFrame(rows, index=places, dtype=float)

    @cached_property
    def figures(self) -> list[str]:
        """The quantities that may be drawn next to the accuracy; the method's own come first."""
        own = {name for some in self.runs.values() for run in some for name in run.figures}
        others = [name for name in self.results if "accuracy, " not in name]
        return sorted(others, key=lambda name: name not in own)

    def title_of(self, quantity: str) -> str:
        """Return what a quantity is called: one of the method's own has a title."""
        if quantity not in self.figures:
            return quantity
        return next(iter(self.runs.values()))[0].title_of(quantity)

    def spread(self, quantity: str) -> pd.DataFrame:
        """Return mean, std and count of a quantity over the seeds of each point."""
        return self.results.groupby(level=0)[quantity].agg(["mean", "std", "count"])


def sweep(names: Sequence[str], runs: Mapping[Point, Sequence[Path]]) -> Sweep:
    """Collect the runs of each point; a quantity that no run has is left out."""
    found = {point: tuple(load_run(path) for path in paths) for point, paths in runs.items()}
    return Sweep(tuple(names), found)


def _label(names: Sequence[str], point: Point) -> str:
    """Return the values of a point as text, each with the last part of its setting's name."""
    pairs = zip(names, point, strict=True)
    return ", ".join(f"{name.rpartition('.')[2]}={as_text(value)}" for name, value in pairs)


def shown(found: Sweep, figures: str) -> list[str]:
    """Return the quantities to draw: the accuracy, relative if there is one, and `figures`.

    `figures` are names of the method's metrics, comma-separated; if empty, its first. Raises
    SettingsError for an unknown one.
    """
    own = found.figures
    return [*found.results.columns[:1], *(chosen_figures(figures, own) or own[:1])]


def write_sweep(found: Sweep, out: Path, figures: str = "") -> Path:
    """Write sweep.html, .png (and .svg), .md and .json into a directory; return the page."""
    settings, points = found.names, list(found.runs)
    one = len(settings) == 1
    cells = _cells(found, list(found.results))
    write_text(out / "sweep.md", markdown(cells))
    content: dict[str, object] = {"settings": settings, "points": points}
    if one:
        content = {"setting": settings[0], "values": [point[0] for point in points]}
    content["quantities"] = found.results.groupby(level=0).agg(list).to_dict("list")
    numbers = to_json(content, indent=1, inf_nan_mode="null").decode()
    write_text(out / "sweep.json", numbers + "\n")
    names = shown(found, figures)
    drawing(found, names).write(Folder(out))
    made = [
        (as_text(point[0]) if one else _label(settings, point), run)
        for point, runs in found.runs.items()
        for run in runs
    ]
    best, means = None, found.spread(names[0])["mean"].dropna()
    if len(means):
        point = points[int(means.idxmax())]
        best = {
            "value": human_number(means.max()),
            "what": f"{_title(names[0]).lower()}, the highest mean over the seeds",
            "settings": dict(zip(settings, map(as_text, point), strict=True)),
        }
    page = render(
        "sweep.html",
        title=f"Sweep of {', '.join(settings)}",
        method=made[0][1].method,
        points=len(points),
        runs=len(made),
        best=best,
        plots=[drawing(found, [name]).chart() for name in names],
        table=cells,
        made=made,
    )
    return write_text(out / "sweep.html", page)


def sweep_table(found: Sweep, figures: str = "") -> Table:
    """Return the terminal's table, one row per point: what is drawn, and the accuracy's tail."""
    first, *rest = shown(found, figures)
    tails = [name for name in found.results if name.endswith(TAIL)]
    cells = _cells(found, [first, *tails[:1], *rest])
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for header in cells.headers:
        table.add_column(printable(header), overflow="fold", justify="right")
    for row in cells.rows:
        table.add_row(*(cell.text for cell in row))
    return table


def _cells(found: Sweep, quantities: Sequence[str]) -> Cells:
    columns = {
        name: [Cell(as_text(point[place])) for point in found.runs]
        for place, name in enumerate(found.names)
    }
    words = len(columns)

    def mean_and_std(mean: float, std: float) -> str:
        """Return "0.627 ± 0.019": a standard deviation has its mean's decimals, at least two."""
        text = human_number(mean)
        decimals = max(2, len(text.partition(".")[2]))
        return text + (f" ± {human_number(round(std, decimals))}" if math.isfinite(std) else "")

    for name in quantities:
        spread, shown = found.spread(name), plus_minus if "accuracy, " in name else mean_and_std
        pairs = zip(spread["mean"], spread["std"], strict=True)
        columns[found.title_of(name)] = [Cell(shown(mean, std), mean) for mean, std in pairs]
    return Cells(columns, words=words)


def drawing(found: Sweep, names: Sequence[str]) -> Drawing:
    """Return the figure: one panel per quantity, over the values of the first setting.

    With several settings each combination of the others is a curve.
    """

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(names), squeeze=False)
        for ax, name in zip(grid[0], names, strict=True):
            _panel(ax, found, name)

    alt = f"{', '.join(found.names)} swept"
    return Drawing("sweep", draw, alt, width=WIDTH * len(names))


def _panel(ax: Axes, found: Sweep, name: str) -> None:
    points = list(found.runs)
    values = list(dict.fromkeys(point[0] for point in found.runs))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {value: float(value) if numeric else float(n) for n, value in enumerate(values)}  # type: ignore[arg-type]
    spread = found.spread(name)
    others = list(dict.fromkeys(point[1:] for point in found.runs))
    for number, other in enumerate(others[:CURVES]):
        rows = [place for place, point in enumerate(points) if point[1:] == other]
        curve = spread.loc[rows]
        curve.index = pd.Index([places[points[row][0]] for row in rows], dtype=float)
        style.band(ax, number, curve["mean"], curve["std"], _label(found.names[1:], other))
    if name.startswith("relative"):
        ax.axhline(1.0, color=style.MUTED, **style.DOTTED)
    if not numeric:
        ax.set_xticks(list(places.values()), [as_text(value) for value in values])
    several = bool(spread["count"].max() > 1)
    ax.set_xlabel(found.names[0] + ("  (band: ± std over seeds)" if several else ""))
    style.ticks(ax, human_number)
    more = f" (first {CURVES})" if len(others) > CURVES else ""
    style.head(ax, _title(found.title_of(name)) + more)


def _title(name: str) -> str:
    for protocol, words in TEST_SETS.items():
        name = name.replace(f", {protocol},", f", {words},")
    return name[0].upper() + name[1:]
