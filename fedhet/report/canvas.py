"""A matplotlib figure that also records what the page shows when one points at it.

A drawing tags the artists of a series, so that the page can switch the series off, and records the
values behind them, which the page shows. Colours of the page are CSS variables; see `style`.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import pandas as pd
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

TAG = "series-"
"""Begins the id of a tagged artist; the series' number follows."""
POINTS = 72
"""Units of an SVG per inch."""
GAP = "\N{EN SPACE}"
"""Separates a series' name from its number: SVG would merge two ordinary spaces into one."""
MOST_VALUES = 60_000
"""Beyond this many values in a figure the page does not show them, to stay small."""

Mode = Literal["x", "point"]


@dataclass(frozen=True)
class Curve:
    """A named sequence of points; `names`, if given, are those of the points."""

    series: int
    name: str
    x: list[float]
    y: list[float]
    names: list[str] = field(default_factory=list)


@dataclass
class Panel:
    """What the page shows of an axes: all curves at one x, or the nearest point."""

    mode: Mode = "x"
    head: str = "round"
    """Stands before the x in mode "x"."""
    unit: str = "score"
    """How the page formats values: score, bytes, seconds or number."""
    x_unit: str = "number"
    dots: bool = True
    """Whether points are marked where the values are; not for stacked bars."""
    curves: list[Curve] = field(default_factory=list)


class Canvas(Figure):
    """A figure that knows its series, by name, and the values of its axes."""

    def __init__(self, **look: Any) -> None:
        super().__init__(**look)
        self.series: list[str] = []
        self.panels: dict[Axes, Panel] = {}

    def series_number(self, series: str) -> int:
        """Return the number of a series, a new one for a new name."""
        if series not in self.series:
            self.series.append(series)
        return self.series.index(series)


def panel(ax: Axes, **look: Any) -> Panel:
    """Return what the page shows of an axes, with `look` changed; see `Panel`."""
    figure = ax.figure
    panels = figure.panels if isinstance(figure, Canvas) else {}
    found = panels.setdefault(ax, Panel())
    for name, value in look.items():
        setattr(found, name, value)
    return found


def tag(ax: Axes, series: str, artists: Iterable[Artist]) -> None:
    """Make artists part of a series, which the page switches on and off."""
    if isinstance(ax.figure, Canvas):
        for artist in artists:
            artist.set_gid(f"{TAG}{ax.figure.series_number(series)}")


def record(
    ax: Axes, series: str, values: pd.Series, name: str = "", names: Sequence[str] = ()
) -> None:
    """Record a series' values, by their index as x, under `name` (by default the series')."""
    if isinstance(ax.figure, Canvas):
        x = [float(place) for place in values.index]
        number, y = ax.figure.series_number(series), values.astype(float).tolist()
        panel(ax).curves.append(Curve(number, name or series, x, y, [*names]))


@dataclass(frozen=True)
class Entry:
    """A line of the page's legend; `series` is None if it cannot be switched off."""

    text: str
    value: str
    """The series' last value, or ""."""
    colour: str
    series: int | None
    look: str
    """How the series is drawn: "solid", "dashed", "dotted" or "dot"."""


@dataclass(frozen=True)
class Chart:
    """A figure for the page: its title, its legend, and the SVG."""

    title: str
    legend: list[Entry]
    svg: Markup


def take_title(figure: Canvas) -> str:
    """Remove the titles and legends, which the page has in HTML; return the title."""
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    for ax in figure.axes:
        ax.set_title("")
        if legend := ax.get_legend():
            legend.remove()
    return next(filter(None, titles), "")


def entries(figure: Canvas, colour: Callable[[str], str]) -> list[Entry]:
    """Return the legend of a figure, each series once; `colour` makes a colour one of the page."""
    found: dict[str, Entry] = {}
    for ax in figure.axes:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            artist: Any = handle[0] if isinstance(handle, Container) else handle
            if isinstance(artist, Line2D):
                looks = {"-": "solid", "--": "dashed", ":": "dotted"}
                ink: Any = artist.get_color()
                look = looks.get(str(artist.get_linestyle()), "dashed")
            else:
                face = artist.get_facecolor()
                ink, look = face if len(face) and isinstance(face[0], float) else face[0], "dot"
            tagged = re.fullmatch(rf"{TAG}(\d+)", artist.get_gid() or "")
            name, _, value = text.partition(GAP)
            series = int(tagged[1]) if tagged else None
            found.setdefault(text, Entry(name, value, colour(to_hex(ink)), series, look))
    return list(found.values())


def description(figure: Canvas) -> str:
    """Return the figure's panels as JSON: where each axes lies, its limits, and its curves."""
    panels = [(ax, found) for ax, found in figure.panels.items() if found.curves]
    count = sum(len(curve.y) for _, found in panels for curve in found.curves)
    shown = panels if count <= MOST_VALUES else []
    width, height = (POINTS * inches for inches in figure.get_size_inches())
    content = []
    for ax, found in shown:
        place = ax.get_position()
        box = place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height
        x = [*_rounded(ax.get_xlim()), ax.get_xscale() == "log"]
        y = [*_rounded(ax.get_ylim()), ax.get_yscale() == "log"]
        content.append(_content(found, box, x, y))
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def lone_curve(values: pd.Series, box: Sequence[float], xs: Sequence[int]) -> str:
    """Return the description of an SVG that is a single curve, as of `description`.

    `box` is left, top, right and bottom of the curve; it spans `xs` and the values' range.
    """
    curve = Curve(0, str(values.name), values.index.astype(float).tolist(), values.tolist())
    limits = [min(xs), max(xs), False], [values.min(), values.max(), False]
    content = _content(Panel(unit="number", curves=[curve]), box, *limits)
    return json.dumps([content], separators=(",", ":"), allow_nan=False)


def _content(
    found: Panel, box: Sequence[float], x: Sequence[object], y: Sequence[object]
) -> dict[str, object]:
    return {
        "box": _rounded(box),
        "x": x,
        "y": y,
        "mode": found.mode,
        "head": found.head,
        "unit": found.unit,
        "xUnit": found.x_unit,
        "dots": found.dots,
        "curves": [
            {"s": c.series, "name": c.name, "x": _rounded(c.x), "y": _rounded(c.y)}
            | ({"names": c.names} if c.names else {})
            for c in found.curves
        ],
    }


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Return values with six significant digits; None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def inline(svg: str, figure: Canvas, alt: str, variables: dict[str, str]) -> Markup:
    """Return a figure's SVG for the page.

    What only a standalone file needs is removed, colours become CSS variables, and the series and
    values are added. Texts are escaped: by matplotlib in the SVG, and here in the attributes.
    """
    named = f'class="plot" role="img" aria-label="{html.escape(alt)}"'
    named += f' data-chart="{html.escape(description(figure))}"'
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(rf'<g id="{TAG}(\d+)"', r'<g data-series="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    size = r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"'
    svg = re.sub(size, lambda found: f"{found[1]} {named}", svg)

    def variable(match: re.Match[str]) -> str:
        name = variables.get(match[2])
        return f"{match[1]}var({name})" if name else match[0]

    return Markup(re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})\b", variable, svg))  # noqa: S704
