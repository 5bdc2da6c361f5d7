"""One setting over several values: a table and a figure, mean and spread over seeds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from fedhet.errors import SettingsError, nearest
from fedhet.report import style
from fedhet.report.groups import Spread
from fedhet.report.run import PROTOCOLS, Run, load_run
from fedhet.report.style import Drawing
from fedhet.report.units import human_number, printable, setting

WIDTH, HEIGHT = 5.4, 3.5


@dataclass(frozen=True)
class Sweep:
    """What each value of a setting gave: quantity -> value -> a number a seed."""

    name: str
    values: tuple[object, ...]
    quantities: Mapping[str, tuple[tuple[float, ...], ...]]


def sweep(name: str, runs: Mapping[object, Sequence[Path]]) -> Sweep:
    """Gather the runs of each value; a quantity that no run has is left out."""
    loaded = [[_quantities(load_run(path)) for path in paths] for paths in runs.values()]
    names = dict.fromkeys(name for seeds in loaded for found in seeds for name in found)
    table = {
        quantity: tuple(tuple(found.get(quantity, math.nan) for found in seeds) for seeds in loaded)
        for quantity in names
    }
    return Sweep(name, tuple(runs), table)


def _quantities(run: Run) -> dict[str, float]:
    """Return what a run came to: the last round's accuracies, and each figure's last value."""
    found: dict[str, float] = {}
    last = run.last_evaluated
    for protocol, ratio in (last.relative if last else {}).items():
        for statistic in ("mean", "best", "worst"):
            found[f"relative accuracy, {protocol}, {statistic}"] = getattr(ratio, statistic)
    for protocol, kind in run.columns:
        found[f"accuracy, {protocol}, {kind}"] = run.last(protocol, kind).mean
    for record in run.records:
        found |= record.method
    return found


def shown(found: Sweep, figures: str) -> list[str]:
    """Return the quantities to draw: the accuracy, relative if there is one, and `figures`.

    `figures` are names of the method's figures, comma-separated; empty: its first. Raises
    SettingsError for one that there is not.
    """
    ours = [name for name in found.quantities if "accuracy, " not in name]
    wanted = [name.strip() for name in figures.split(",") if name.strip()] or ours[:1]
    for name in wanted:
        if name not in ours:
            raise SettingsError(
                f"'--figures {name}' is no figure of these runs: {', '.join(ours) or 'none'}"
                f"{nearest(name, ours)}"
            )
    return [*list(found.quantities)[:1], *wanted]


def write_sweep(found: Sweep, out: Path, figures: str = "") -> Path:
    """Write sweep.png, sweep.md and sweep.json into a directory; return the figure's path."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "sweep.md").write_text(_markdown(found), "utf-8")
    content = {"setting": found.name, "values": found.values, "quantities": _json(found)}
    (out / "sweep.json").write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    return drawing(found, shown(found, figures)).png(out)


def sweep_table(found: Sweep, figures: str = "") -> Table:
    """Return the table for the terminal: a row a value, what is drawn; all is in sweep.md."""
    brief = shown(found, figures)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for column in (found.name, *brief):
        table.add_column(printable(column), overflow="fold", justify="right")
    for place, value in enumerate(found.values):
        table.add_row(setting(value), *(_cell(found, name, place) for name in brief))
    return table


def drawing(found: Sweep, names: Sequence[str]) -> Drawing:
    """Return the figure: a panel a quantity, over the values of the setting."""

    def draw(figure: Figure) -> None:
        for ax, name in zip(np.ravel(figure.subplots(1, len(names))), names, strict=True):
            _panel(ax, found, name)

    return Drawing("sweep", WIDTH * len(names), HEIGHT, draw, f"{found.name} swept")


def _panel(ax: Axes, found: Sweep, name: str) -> None:
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in found.values)
    x = np.array(found.values if numeric else range(len(found.values)), float)
    spreads = [Spread.of(seeds) for seeds in found.quantities[name]]
    mean = np.array([spread.mean for spread in spreads])
    std = np.array([spread.std for spread in spreads])
    several = any(spread.n > 1 for spread in spreads)
    colour, _ = style.mark(0)
    ax.plot(x, mean, color=colour, marker=style.marker(len(x)), markersize=4)
    if several:
        ax.fill_between(x, mean - std, mean + std, color=colour, alpha=0.15, linewidth=0)
    if name.startswith("relative"):
        ax.axhline(1.0, color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 3)))
    if not numeric:
        ax.set_xticks(x, [setting(value) for value in found.values])
    band = "  (band: ± std over seeds)" if several else ""
    ax.set_xlabel(found.name + band)
    style.ticks(ax, human_number)
    style.head(ax, _title(name))


def _title(name: str) -> str:
    for protocol, words in PROTOCOLS.items():
        name = name.replace(f", {protocol},", f", {words},")
    return name[0].upper() + name[1:]


def _cell(found: Sweep, name: str, place: int) -> str:
    """Return the mean over seeds, and the deviation where there are several."""
    spread = Spread.of(found.quantities[name][place])
    text = human_number(spread.mean)
    return f"{text} ± {human_number(spread.std)}" if math.isfinite(spread.std) else text


def _markdown(found: Sweep) -> str:
    names = list(found.quantities)
    rows = [
        [setting(value), *(_cell(found, name, place) for name in names)]
        for place, value in enumerate(found.values)
    ]
    lines = [[found.name, *names], ["---"] * (len(names) + 1), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _json(found: Sweep) -> dict[str, list[list[float | None]]]:
    return {
        name: [[v if math.isfinite(v) else None for v in seeds] for seeds in per_value]
        for name, per_value in found.quantities.items()
    }
