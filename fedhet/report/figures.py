"""Figures of one run over its rounds: accuracy, bytes, time, loss, the method's own metrics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from fedhet.base.disk import Folder
from fedhet.report import canvas, clients, frames, style
from fedhet.report.canvas import GAP
from fedhet.report.run import STAGES, TEST_SETS, Run
from fedhet.report.style import HEIGHT, WIDTH, Drawing
from fedhet.runs.units import human_bytes, human_seconds, plural

BARS = 50
"""Maximum number of bars; in longer runs, a bar is the mean of several rounds."""
STAGE_NAMES = {
    "train": "training", "evaluate": "evaluation", "server": "server", "overhead": "overhead",
}  # fmt: skip
PANELS, ACROSS = 12, 3
"""The maximum number of the method's own metrics that are drawn, and of panels in a row."""


def write_figures(run: Run) -> list[Path]:
    """Write the run's figures as PNG and SVG into `figures/`; return the PNGs' paths."""
    folder = Folder(run.path / "figures", run.path)
    found = [*drawings(run), method(run)]
    return [drawing.write(folder) for drawing in found if drawing]


def write_run_for_paper(run: Run) -> list[Path]:
    """Write the run's figures in a paper's size and fonts into `figures/paper/`; return the paths.

    They are PDFs: as wide as a column with one panel, else as the text of two columns.
    """
    folder = Folder(run.path / "figures" / "paper", run.path)
    found = [*drawings(run), method(run)]
    return [drawing.write_for_paper(folder) for drawing in found if drawing]


def drawings(run: Run) -> list[Drawing]:
    """Return the figures that the run has data for."""
    found = [
        accuracy(run, run.protocols) if run.protocols else None,
        Drawing("bytes", partial(_traffic, run=run), _traffic_in_words(run)),
        Drawing("time", partial(_time, run=run), "seconds by stage"),
        *(loss(run), privacy(run), clock(run), metrics(run.besides)),
        *(clients.labels(run), clients.accuracies(run), clients.relative(run)),
        clients.curves(run),
    ]
    return [drawing for drawing in found if drawing]


def accuracy(run: Run, protocols: Sequence[str]) -> Drawing:
    """Draw accuracy over rounds: one panel per protocol, one curve per kind of model."""
    draw = partial(_accuracy, run=run, protocols=protocols)
    last = [
        f"{' '.join(column)} {run.last(*column).mean:.3f}"
        for column in run.columns
        if column[0] in protocols
    ]
    alt = f"accuracy over {plural(len(run.records), 'round')}, at the end: {', '.join(last)}"
    return Drawing("accuracy", draw, alt, width=WIDTH * len(protocols))


def privacy(run: Run) -> Drawing | None:
    """Draw the headline accuracy by what it has cost the clients' samples; None if nothing."""
    if not run.epsilon or not run.columns:
        return None
    alt = f"accuracy by epsilon, at the end {run.spent:.3g}"
    return Drawing("privacy", partial(_privacy, run=run), alt)


def _privacy(figure: Figure, run: Run) -> None:
    ax = _by_cost(figure, run, "epsilon", "epsilon", unit="number")
    ax.set_xlabel("epsilon spent, the largest of any client")


def clock(run: Run) -> Drawing | None:
    """Draw the headline accuracy by simulated time; None without such a clock."""
    if not run.has_clock or not run.columns:
        return None
    alt = f"accuracy by simulated time, in all {human_seconds(run.records[-1].clock)}"
    return Drawing("clock", partial(_clock, run=run), alt)


def _clock(figure: Figure, run: Run) -> None:
    ax = _by_cost(figure, run, "clock", "simulated time", unit="seconds")
    style.ticks(ax, style.in_hours, "x")
    late = float(np.mean([len(record.late) for record in run.records]))
    ax.set_xlabel(f"simulated hours  ({late:.3g} clients late when a round closes, on average)")


def _by_cost(figure: Figure, run: Run, cost: str, name: str, unit: str) -> Axes:
    """Draw the headline accuracy of each kind of model over a cumulative cost, in its unit."""
    ax = figure.subplots()
    for kind in run.kinds(run.headline):
        means = run.curve(run.headline, kind)["mean"]
        spent = means.set_axis(run.costs[cost].loc[means.index].rename(cost))
        colour = style.KIND_COLOURS.get(kind, style.OTHER_COLOUR)
        style.line(ax, spent, colour, series=kind, label=f"{kind}{GAP}{means.iloc[-1]:.3f}")
    ax.set_xlim(left=0)
    ax.legend()
    style.ticks(ax)
    canvas.panel(ax, mode="point", x_unit=unit)
    style.head(ax, f"Accuracy by {name}: {TEST_SETS.get(run.headline, run.headline)}")
    return ax


def metrics(views: Sequence[tuple[str, Run]]) -> Drawing | None:
    """Draw metrics over rounds, one panel each, under the headline protocol; see `Run.besides`."""
    draw = partial(_metric, views=dict(views))
    return _grid("metrics", list(dict(views)), draw, "metrics besides accuracy over rounds")


def _metric(ax: Axes, title: str, views: Mapping[str, Run]) -> None:
    view = views[title]
    for kind in view.kinds(view.headline):
        _curve(ax, view.curve(view.headline, kind), kind, highest=math.inf)
    style.over_rounds(ax, view.costs.index)
    style.ticks(ax)
    where = f", {TEST_SETS[view.headline]}" if view.headline in TEST_SETS else ""
    style.head(ax, f"{title[0].upper()}{title[1:]}{where}")


def _grid(
    name: str, panels: Sequence[str], draw: Callable[[Axes, str], None], alt: str
) -> Drawing | None:
    """Return a figure of small panels, each filled by `draw`; None without panels."""
    across = min(len(panels), ACROSS)
    if not across:
        return None
    rows = math.ceil(len(panels) / across)

    def fill(figure: Figure) -> None:
        grid = figure.subplots(rows, across, squeeze=False).flatten()
        for ax, panel in zip_longest(grid, panels):
            ax.axis("off") if panel is None else draw(ax, panel)

    size = {"width": WIDTH * 0.75 * across, "height": HEIGHT * 0.75 * rows}
    return Drawing(name, fill, alt, **size)


def _accuracy(figure: Figure, run: Run, protocols: Sequence[str]) -> None:
    grid = figure.subplots(1, len(protocols), squeeze=False)
    for ax, protocol in zip(grid[0], protocols, strict=True):
        for kind in run.kinds(protocol):
            _curve(ax, run.curve(protocol, kind), kind)
        _baseline(ax, run, protocol)
        note = "dashes: worst client; band: ± std over clients" if len(run.clients) > 1 else ""
        style.over_rounds(ax, run.costs.index, note=note)
        _accuracy_limits(ax)
        whose = "each client's" if protocol == "personal" else "the"
        style.head(ax, f"Accuracy on {whose} {TEST_SETS.get(protocol, protocol)}")


def _baseline(ax: Axes, run: Run, protocol: str) -> None:
    """Draw the means of the run that this one is compared with, if it has that protocol."""
    if run.baseline is None or run.against is None:
        return
    mean = run.baseline.curve(protocol, run.against[1])["mean"]
    if not mean.empty:
        name, look = run.baseline.method, {"size": 2, **style.DOTTED}
        label = f"{name}{GAP}{mean.iloc[-1]:.3f}"
        style.line(ax, mean, style.OTHER_COLOUR, series=name, label=label, **look)


def _curve(ax: Axes, curve: pd.DataFrame, kind: str, highest: float = 1.0) -> None:
    if curve.empty:
        return
    colour = style.KIND_COLOURS.get(kind, style.OTHER_COLOUR)
    mean, worst = curve["mean"], curve["worst"]
    low = (mean - curve["std"]).clip(0, highest)
    high = (mean + curve["std"]).clip(0, highest)
    style.line(ax, mean, colour, series=kind, label=f"{kind}{GAP}{mean.iloc[-1]:.3f}")
    if not np.allclose(worst, mean, equal_nan=True):
        look = {"size": 2, "alpha": 0.85, **style.DASHED}
        style.line(ax, worst, colour, series=kind, name=f"{kind}, worst", **look)
    if len(curve) == 1:
        bar = ax.vlines(curve.index, low, high, color=colour, alpha=0.35, linewidth=5)
        canvas.tag(ax, kind, [bar])
    else:
        style.shade(ax, low, high, colour, series=kind, alpha=0.13)


def _accuracy_limits(ax: Axes) -> None:
    low, high = ax.get_ylim()
    pad = max(0.0, 0.1 - (high - low)) / 2
    ax.set_ylim(max(low - pad, -0.01), min(high + pad, 1.01))
    style.ticks(ax)


def _traffic_in_words(run: Run) -> str:
    up, down = (human_bytes(run.costs[f"bytes_{way}"].sum()) for way in ("up", "down"))
    return f"bytes sent over {plural(len(run.records), 'round')}, in total {up} up and {down} down"


def _traffic(figure: Figure, run: Run) -> None:
    """Draw the cumulative payload bytes up and down over rounds."""
    ax = figure.subplots()
    for number, name in enumerate(("up", "down")):
        total = run.costs[f"bytes_{name}"].cumsum()
        label = f"{name}{GAP}{human_bytes(float(total.iloc[-1]))}"
        look: Any = {"label": label, "linestyle": style.DASHES[number]}
        style.line(ax, total, style.SERIES[number], series=name, **look)
    canvas.panel(ax, unit="bytes")
    ax.set_ylim(bottom=0)
    style.ticks(ax, style.in_bytes)
    style.over_rounds(ax, run.costs.index)
    style.head(ax, "Bytes sent, cumulated")


def _time(figure: Figure, run: Run) -> None:
    """Draw the time by stage: one bar for the full run, and one bar per round.

    The times of clients are added up, so their sum exceeds the wall time if clients train at the
    same time. The axis label therefore states both.
    """
    top, ax = figure.subplots(2, 1, height_ratios=[1, 7])
    stages = [stage for stage in STAGES if run.totals[stage] > 0]
    _time_bar(top, run.totals[stages])
    step = math.ceil(len(run.costs) / BARS)
    means = run.costs.reset_index().groupby(np.arange(len(run.costs)) // step).mean()
    means = means.set_index("round")
    _time_stages(ax, means[stages])
    _wall_clock(ax, means["seconds"])
    ax.set_ylim(bottom=0)
    style.ticks(ax, "{:g} s".format)
    work, wall = run.totals[stages].sum(), run.totals["seconds"]
    note = f"work of all clients and the server: {human_seconds(work)}"
    note += f", wall time: {human_seconds(wall)}" if wall > 0 else ""
    note += f"; a bar: mean of {step}" if step > 1 else ""
    style.over_rounds(ax, run.costs.index, margin=0.7 * step, note=note)
    _time_head(top, ax)


def _time_stages(ax: Axes, seconds: pd.DataFrame) -> None:
    """Draw a bar for each row, with its stages stacked."""
    rounds = seconds.index
    width = 0.78 * (rounds[1] - rounds[0] if len(rounds) > 1 else 0.4)
    bottom = seconds.cumsum(axis="columns") - seconds
    for stage in seconds:
        look: Any = {"color": style.STAGE_COLOURS[stage], "label": STAGE_NAMES[stage]}
        bars = ax.bar(rounds, seconds[stage], bottom=bottom[stage], width=width, **look)
        canvas.tag(ax, STAGE_NAMES[stage], bars)
        canvas.record(ax, STAGE_NAMES[stage], seconds[stage])


def _wall_clock(ax: Axes, seconds: pd.Series) -> None:
    if seconds.gt(0).any():
        halo = [Stroke(linewidth=3.2, foreground=style.PAPER), Normal()]
        look: Any = {"linewidth": 1.2, "path_effects": halo}
        style.line(ax, seconds, style.INK, series="wall clock", label="wall clock", **look)
    canvas.panel(ax, unit="seconds", dots=False)


def _time_head(top: Axes, ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    top.legend(
        handles, names, loc="lower left", bbox_to_anchor=(0, 1.1), labelcolor=style.INK,
        ncols=style.legend_columns(names, style.room(top)),
        handletextpad=0.5, columnspacing=1.0,
    )  # fmt: skip
    top.set_title("Where the time went", color=style.INK, pad=26)


def _time_bar(ax: Axes, seconds: pd.Series) -> None:
    """Draw the shares of the stages as one horizontal bar."""
    shares = seconds / seconds.sum()
    starts = shares.cumsum() - shares
    for stage, share in shares.items():
        ax.barh(0, share, left=starts[stage], color=style.STAGE_COLOURS[str(stage)], height=1)
        if share > 0.16 * style.ROOM / style.room(ax):
            text = f"{STAGE_NAMES[str(stage)]} {share:.0%}"
            ink = style.ON_DARK if stage == "train" else style.ON_LIGHT
            place = (starts[stage] + share / 2, 0)
            ax.text(*place, text, ha="center", va="center", color=ink, fontsize=8)
    ax.set_xlim(0, 1)
    ax.axis("off")


def loss(run: Run) -> Drawing | None:
    """Draw the training loss over rounds, with the range of most clients."""
    if frames.mean_loss(run.records).empty:
        return None
    return Drawing("loss", partial(_loss, run=run), "training loss over rounds")


def _loss(figure: Figure, run: Run) -> None:
    ax = figure.subplots()
    mean = frames.mean_loss(run.records)
    style.line(ax, mean, series="mean", label=f"mean{GAP}{mean.iloc[-1]:.3f}")
    canvas.panel(ax, unit="number")
    each = frames.losses(run.records).loc[mean.index]
    if each.count(axis="columns").max() > 2:
        low, high = (each.quantile(share, axis="columns") for share in (0.1, 0.9))
        look: Any = {"alpha": 0.13, "label": "80 % of the clients"}
        style.shade(ax, low, high, style.SERIES[0], series="80 % of the clients", **look)
        for share, curve in (("lowest tenth", low), ("highest tenth", high)):
            canvas.record(ax, "80 % of the clients", curve, share)
    style.over_rounds(ax, run.costs.index)
    style.ticks(ax)
    style.head(ax, "Training loss")


def method(run: Run) -> Drawing | None:
    """Draw the method's own metrics over rounds, one panel each; the page has small curves."""
    draw = partial(_own, run=run)
    return _grid("method", list(run.figures)[:PANELS], draw, "method's figures")


def _own(ax: Axes, name: str, run: Run) -> None:
    style.line(ax, run.figures[name])
    style.over_rounds(ax, run.figures.index)
    style.ticks(ax)
    style.head(ax, style.short(run.title_of(name), 42))
