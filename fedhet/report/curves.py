"""Figures of a comparison: each is a function that draws onto a matplotlib Figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.report import canvas, style
from fedhet.report.comparison import Comparison
from fedhet.report.groups import Column, Group
from fedhet.report.run import TEST_SETS
from fedhet.report.style import Drawing
from fedhet.runs.units import human_number

SHOWN = 12
"""Maximum number of groups, the best ones, that are drawn as curves."""


def drawings(comparison: Comparison) -> list[Drawing]:
    """Return the page's figures, with the requested metrics of the methods last."""
    return [
        finals(comparison),
        _alone("curves", f"{comparison.metric.title} over rounds", _accuracy_by_round, comparison),
        _alone("costs", f"{comparison.metric.title} by bytes sent", _accuracy_by_bytes, comparison),
        *_costs_of_privacy(comparison),
        *_costs_in_time(comparison),
        *(_alone(f"compare-{n}", f"{n} by round", _own, comparison, n) for n in comparison.figures),
    ]


def finals(comparison: Comparison) -> Drawing:
    """Draw the last round's accuracy: one dot per seed, a mark for the mean."""
    found = _alone("finals", f"last {comparison.metric.title} by group", _finals, comparison)
    return replace(found, height=max(2.2, 1.3 + 0.32 * len(comparison.groups)))


def overview(comparison: Comparison) -> Drawing:
    """Draw accuracy over rounds next to the last round's accuracy."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _accuracy_by_round(left, comparison)
        _finals(right, comparison)

    height = max(drawing.height for drawing in drawings(comparison)[:2])
    return Drawing("compare", draw, width=2 * style.WIDTH, height=height)


def _alone(
    name: str, alt: str, draw: Callable[..., None], comparison: Comparison, *more: str
) -> Drawing:
    """Return a figure with one axes that `draw` fills, with room for a legend of groups."""
    names = _names(comparison)[:SHOWN]
    rows = math.ceil(len(names) / style.legend_columns(names))
    return Drawing(
        name,
        lambda figure: draw(figure.subplots(), comparison, *more),
        alt,
        height=style.HEIGHT + 0.18 * (rows - 1),
    )


def _names(comparison: Comparison, width: int = 40) -> list[str]:
    """Return the groups' labels in a figure, in their order."""
    labels = [group.label + ("" if group.finished else " *") for group in comparison.groups]
    return style.told_apart(labels, width)


def _accuracy_by_round(ax: Axes, comparison: Comparison) -> None:
    rounds = _accuracies(ax, comparison)
    band = "; band: ± std over seeds" if _several_seeds(comparison) else ""
    style.over_rounds(ax, rounds, note=f"dotted: {comparison.said_target}{band}")
    protocol, kind = comparison.headline
    title = f"{comparison.title}: {kind} model, {TEST_SETS.get(protocol, protocol)}"
    style.head(ax, title + _best(comparison))


def _accuracy_by_bytes(ax: Axes, comparison: Comparison) -> None:
    _accuracies(ax, comparison, x="bytes")
    style.log_bytes(ax, "x")
    canvas.panel(ax, mode="point", x_unit="bytes")
    ax.set_xlabel("bytes sent, up and down")
    style.head(ax, f"{comparison.title} for bytes{_best(comparison)}")


def _costs_of_privacy(comparison: Comparison) -> list[Drawing]:
    """Return the accuracy by epsilon, if any client's samples are protected."""
    if not any(group.spent().n for group in comparison.groups):
        return []
    return [
        _alone("privacy", f"{comparison.metric.title} by epsilon", _accuracy_by_epsilon, comparison)
    ]


def _accuracy_by_epsilon(ax: Axes, comparison: Comparison) -> None:
    _accuracies(ax, comparison, x="epsilon")
    canvas.panel(ax, mode="point", x_unit="number")
    ax.set_xlim(left=0)
    ax.set_xlabel("epsilon spent, the largest of any client")
    style.head(ax, f"{comparison.title} for epsilon{_best(comparison)}")


def _costs_in_time(comparison: Comparison) -> list[Drawing]:
    """Return the accuracy by simulated time, if any group has such a clock."""
    if not comparison.has_clock:
        return []
    alt = f"{comparison.metric.title} by simulated time"
    return [_alone("clock", alt, _accuracy_by_clock, comparison)]


def _accuracy_by_clock(ax: Axes, comparison: Comparison) -> None:
    _accuracies(ax, comparison, x="clock")
    canvas.panel(ax, mode="point", x_unit="seconds")
    ax.set_xlim(left=0)
    style.ticks(ax, style.in_hours, "x")
    ax.set_xlabel("simulated hours")
    style.head(ax, f"{comparison.title} by simulated time{_best(comparison)}")


def _accuracies(ax: Axes, comparison: Comparison, x: str = "") -> list[int]:
    rounds = _draw(ax, comparison, lambda group: group.curve(comparison.headline), x)
    ax.axhline(comparison.target, color=style.MUTED, **style.DOTTED)
    style.ticks(ax)
    return rounds


def _best(comparison: Comparison) -> str:
    return f" (best {SHOWN})" if len(comparison.groups) > SHOWN else ""


def _several_seeds(comparison: Comparison) -> bool:
    return any(len(group.runs) > 1 for group in comparison.groups)


def _own(ax: Axes, comparison: Comparison, name: str) -> None:
    rounds = _draw(ax, comparison, lambda group: group.figure(name))
    style.ticks(ax, human_number)
    canvas.panel(ax, unit="number")
    note = "band: ± std over seeds" if _several_seeds(comparison) else ""
    style.over_rounds(ax, rounds, note=note)
    style.head(ax, name)


def _draw(
    ax: Axes, comparison: Comparison, curve_of: Callable[[Group], pd.DataFrame], x: str = ""
) -> list[int]:
    """Draw one curve per group, with a band over seeds, over rounds or a column `x`.

    Returns the rounds covered.
    """
    rounds, names = [1], _names(comparison)
    for number, group in enumerate(comparison.groups[:SHOWN]):
        curve = curve_of(group)
        if len(curve):
            rounds += curve.index.tolist()
            at = curve[x].clip(lower=1) if x == "bytes" else curve.get(x)
            curve = curve if at is None else curve.set_index(at)
            style.band(ax, number, curve["mean"], curve["std"], names[number])
    return rounds


def _finals(ax: Axes, comparison: Comparison) -> None:
    names = _names(comparison)
    for row, group in enumerate(comparison.groups):
        _final(ax, row, group, comparison.headline, names[row])
    ax.set_ylim(len(comparison.groups) - 0.4, -0.6)
    ax.set_yticks(range(len(comparison.groups)), _names(comparison, 30))
    ax.tick_params(axis="y", labelcolor=style.INK)
    style.grid(ax, "x")
    style.ticks(ax, axis="x")
    many = _several_seeds(comparison)
    what = comparison.metric.title
    ax.set_xlabel(f"{what} (dots: seeds; bar: ± std)" if many else what)
    style.head(ax, "Last round")


def _final(ax: Axes, row: int, group: Group, column: Column, name: str) -> None:
    colour, mark = style.mark(row)
    each, spread = [run.last(*column).mean for run in group.runs], group.score(column)
    if math.isfinite(spread.std):
        low, high = spread.mean - spread.std, spread.mean + spread.std
        line = ax.hlines(row, low, high, color=colour, linewidth=5, alpha=0.25)
        canvas.tag(ax, group.label, [line])
    if len(each) > 1:
        ax.scatter(each, [row] * len(each), color=colour, s=14, alpha=0.6, linewidth=0)
        seeds = [f"seed {run.seed}" for run in group.runs]
        canvas.record(ax, group.label, pd.Series(float(row), each), name, seeds)
    ax.scatter(spread.mean, row, color=colour, marker=mark, s=52, zorder=3)
    canvas.record(ax, group.label, pd.Series(float(row), [spread.mean]), name, ["mean"])
    canvas.panel(ax, mode="point", unit="none", x_unit="score")
