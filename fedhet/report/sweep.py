"""Sweep of one setting over several values: table and figure, mean and spread over seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_json
from rich.table import Table

from fedhet.report import style
from fedhet.report.groups import chosen_figures
from fedhet.report.run import TEST_SETS, Run, load_run
from fedhet.report.style import WIDTH, Drawing
from fedhet.report.tables import Cell, Cells, markdown
from fedhet.runs.units import human_number, printable, setting

TAIL = ", tail"
"""Ends the name of a quantity that is the mean of the last fifth of the rounds."""


@dataclass(frozen=True)
class Sweep:
    """The results for each value of a setting."""

    name: str
    values: tuple[object, ...]
    results: pd.DataFrame
    """One column per quantity and one row per run, indexed by the position of its value."""

    def spread(self, quantity: str) -> pd.DataFrame:
        """Return mean, std and count of a quantity over the seeds of each value."""
        return self.results.groupby(level=0)[quantity].agg(["mean", "std", "count"])


def sweep(name: str, runs: Mapping[object, Sequence[Path]]) -> Sweep:
    """Collect the runs of each value; a quantity that no run has is left out."""
    rows = {
        (place, path): _quantities(load_run(path))
        for place, paths in enumerate(runs.values())
        for path in paths
    }
    results = pd.DataFrame([*rows.values()], index=[place for place, _ in rows], dtype=float)
    return Sweep(name, tuple(runs), results)


def _quantities(run: Run) -> dict[str, float]:
    """Return a run's results: last accuracies with their tails, and each metric's last value."""
    found: dict[str, float] = {}
    last = run.last_evaluated
    for protocol, ratio in (last.relative if last else {}).items():
        for statistic in ("mean", "best", "worst"):
            found[f"relative accuracy, {protocol}, {statistic}"] = getattr(ratio, statistic)
    for protocol, kind in run.columns:
        found[f"accuracy, {protocol}, {kind}"] = run.last(protocol, kind).mean
        found[f"accuracy, {protocol}, {kind}{TAIL}"] = run.tail(protocol, kind).mean
    return {**found, **run.figures.ffill().iloc[-1].to_dict()}


def shown(found: Sweep, figures: str) -> list[str]:
    """Return the quantities to draw: the accuracy, relative if there is one, and `figures`.

    `figures` are names of the method's metrics, comma-separated; if empty, its first. Raises
    SettingsError for an unknown one.
    """
    own = [name for name in found.results if "accuracy, " not in name]
    return [*found.results.columns[:1], *(chosen_figures(figures, own) or own[:1])]


def write_sweep(found: Sweep, out: Path, figures: str = "") -> Path:
    """Write sweep.png (also .pdf, .svg), .md and .json into a directory; return the PNG's path."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.md").write_text(markdown(_cells(found, list(found.results))), "utf-8")
    quantities = found.results.groupby(level=0).agg(list).to_dict("list")
    content = {"setting": found.name, "values": found.values, "quantities": quantities}
    data = to_json(content, indent=1, inf_nan_mode="null")
    (out / "sweep.json").write_bytes(data + b"\n")
    return drawing(found, shown(found, figures)).write(out)


def sweep_table(found: Sweep, figures: str = "") -> Table:
    """Return the terminal's table, one row per value: what is drawn, and the accuracy's tail."""
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
    values = {found.name: [Cell(setting(value)) for value in found.values]}
    return Cells({**values, **{name: _column(found.spread(name)) for name in quantities}})


def _column(spread: pd.DataFrame) -> list[Cell]:
    """Return means over seeds, with standard deviations if there are several."""
    means, stds = spread["mean"].map(human_number), spread["std"].map(human_number)
    texts = means.where(spread["std"].isna(), means + " ± " + stds)
    return [Cell(text, value) for text, value in zip(texts, spread["mean"], strict=True)]


def drawing(found: Sweep, names: Sequence[str]) -> Drawing:
    """Return the figure: one panel per quantity, over the values of the setting."""
    draw = partial(_panels, found=found, names=names)
    return Drawing("sweep", draw, f"{found.name} swept", width=WIDTH * len(names))


def _panels(figure: Figure, found: Sweep, names: Sequence[str]) -> None:
    grid = figure.subplots(1, len(names), squeeze=False)
    for ax, name in zip(grid[0], names, strict=True):
        _panel(ax, found, name)


def _panel(ax: Axes, found: Sweep, name: str) -> None:
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found.values)
    spread = found.spread(name)
    spread.index = pd.Index(found.values if numeric else range(len(found.values)), dtype=float)
    several = bool(spread["count"].max() > 1)
    style.band(ax, 0, spread["mean"], spread["std"])
    if name.startswith("relative"):
        ax.axhline(1.0, color=style.MUTED, **style.DOTTED)
    if not numeric:
        ax.set_xticks(spread.index, [setting(value) for value in found.values])
    ax.set_xlabel(found.name + ("  (band: ± std over seeds)" if several else ""))
    style.ticks(ax, human_number)
    style.head(ax, _title(name))


def _title(name: str) -> str:
    for protocol, words in TEST_SETS.items():
        name = name.replace(f", {protocol},", f", {words},")
    return name[0].upper() + name[1:]
