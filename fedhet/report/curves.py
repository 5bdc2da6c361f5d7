"""The figures of a comparison: each a function that draws onto a matplotlib Figure."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.report import style
from fedhet.report.groups import Comparison, Curve, Group
from fedhet.report.run import PROTOCOLS
from fedhet.report.style import Drawing
from fedhet.report.units import human_number, percent, printable

WIDTH, HEIGHT = 5.4, 3.5
SHOWN = 12
"""So many groups, the best, are drawn as curves."""


def drawings(comparison: Comparison) -> list[Drawing]:
    """Return the figures of the page, the methods' own that were asked for last."""
    return [
        finals(comparison),
        curves(comparison),
        costs(comparison),
        *(own(comparison, name) for name in comparison.figures),
    ]


def own(comparison: Comparison, name: str) -> Drawing:
    """One of the methods' own figures over rounds, a curve a group that has it."""
    draw = partial(_own, comparison=comparison, name=name)
    return Drawing(f"compare-{name}", WIDTH, _height(comparison), _alone(draw), f"{name} by round")


def curves(comparison: Comparison) -> Drawing:
    """Accuracy over rounds, a curve a group with a band over seeds."""
    draw = partial(_curves, comparison=comparison, by="rounds")
    return Drawing("curves", WIDTH, _height(comparison), _alone(draw), "accuracy over rounds")


def costs(comparison: Comparison) -> Drawing:
    """Accuracy against the bytes sent so far, a curve a group."""
    draw = partial(_curves, comparison=comparison, by="bytes")
    return Drawing("costs", WIDTH, _height(comparison), _alone(draw), "accuracy by bytes sent")


def finals(comparison: Comparison) -> Drawing:
    """The last round's accuracy: a dot a seed, a mark for the mean."""
    height = max(2.2, 1.3 + 0.32 * len(comparison.groups))
    draw = partial(_finals, comparison=comparison)
    return Drawing("finals", WIDTH, height, _alone(draw), "last accuracy by group")


def overview(comparison: Comparison) -> Drawing:
    """Accuracy over rounds, and the last round's, side by side."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _curves(left, comparison, "rounds")
        _finals(right, comparison)

    return Drawing("compare", 2 * WIDTH, max(_height(comparison), finals(comparison).height), draw)


def _alone(draw: partial[None]) -> partial[None]:
    return partial(_on_axes, draw=draw)


def _on_axes(figure: Figure, draw: partial[None]) -> None:
    draw(figure.subplots())


def _height(comparison: Comparison) -> float:
    names = [_name(group) for group in comparison.groups[:SHOWN]]
    rows = math.ceil(len(names) / style.legend_columns(names))
    return HEIGHT + 0.18 * (rows - 1)


def _name(group: Group, width: int = 40) -> str:
    name = printable(group.label) + ("" if group.finished else " *")
    return name if len(name) <= width else name[: width - 1] + "…"


def _title(comparison: Comparison) -> str:
    protocol, kind = comparison.headline
    return f"{kind} model, {PROTOCOLS.get(protocol, protocol)}"


def _curves(ax: Axes, comparison: Comparison, by: str) -> None:
    longest = [1]
    for number, group in enumerate(comparison.groups[:SHOWN]):
        curve = group.curve(comparison.headline)
        if not curve.rounds:
            continue
        _draw(ax, number, curve, _name(group), by)
        longest += curve.rounds
    ax.axhline(comparison.target, color=style.MUTED, linewidth=0.8, linestyle=(0, (1, 3)))
    style.ticks(ax)
    best = f" (best {SHOWN})" if len(comparison.groups) > SHOWN else ""
    if by == "rounds":
        band = "; band: ± std over seeds" if any(len(g.runs) > 1 for g in comparison.groups) else ""
        style.over_rounds(ax, longest, note=f"dotted: {percent(comparison.target)}{band}")
        style.head(ax, f"Accuracy: {_title(comparison)}{best}")
    else:
        ax.set_xlim(left=0)
        style.ticks(ax, style.in_bytes, "x")
        ax.set_xlabel("bytes sent, up and down")
        style.head(ax, f"Accuracy for bytes{best}")


def _finals(ax: Axes, comparison: Comparison) -> None:
    column = comparison.headline
    for row, group in enumerate(comparison.groups):
        colour, mark = style.mark(row)
        each = [run.last(*column).mean for run in group.runs]
        spread = group.score(column)
        if math.isfinite(spread.std):
            low, high = spread.mean - spread.std, spread.mean + spread.std
            ax.hlines(row, low, high, color=colour, linewidth=5, alpha=0.25)
        if len(each) > 1:
            ax.scatter(each, [row] * len(each), color=colour, s=14, alpha=0.6, linewidth=0)
        ax.scatter(spread.mean, row, color=colour, marker=mark, s=52, zorder=3)
    ax.set_ylim(len(comparison.groups) - 0.4, -0.6)
    ax.set_yticks(range(len(comparison.groups)), [_name(group, 30) for group in comparison.groups])
    ax.tick_params(axis="y", labelcolor=style.INK)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    style.ticks(ax, axis="x")
    ax.set_xlabel("accuracy (dots: seeds; bar: ± std)" if _many(comparison) else "accuracy")
    style.head(ax, "Last round")


def _many(comparison: Comparison) -> bool:
    return any(len(group.runs) > 1 for group in comparison.groups)


def _draw(ax: Axes, number: int, curve: Curve, name: str, by: str = "rounds") -> None:
    """Draw the curve of the group `number`, with a band over seeds."""
    colour, _ = style.mark(number)
    x = np.array(curve.rounds) if by == "rounds" else curve.sent
    dash, mark = style.DASHES[number % len(style.DASHES)], style.marker(len(x))
    ax.plot(x, curve.mean, color=colour, linestyle=dash, label=name, marker=mark, markersize=3)
    low, high = curve.mean - curve.std, curve.mean + curve.std
    ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)


def _own(ax: Axes, comparison: Comparison, name: str) -> None:
    longest = [1]
    for number, group in enumerate(comparison.groups[:SHOWN]):
        curve = group.own_curve(name)
        if curve.rounds:
            _draw(ax, number, curve, _name(group))
            longest += curve.rounds
    style.ticks(ax, human_number)
    style.over_rounds(ax, longest, note="band: ± std over seeds" if _many(comparison) else "")
    style.head(ax, name)
