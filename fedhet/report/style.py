"""Style of all figures (colors, fonts, axes), and their export to files and HTML reports.

Figures use matplotlib's object interface instead of pyplot, so that no global state is changed.
Series have the colors of Okabe and Ito, which color-blind readers can distinguish. In a report,
each color is a CSS variable, so that figures match the report's light or dark color scheme. Artists
are tagged with their series, so that the report can hide a series, and their values are recorded
for tooltips.
"""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import re
import textwrap
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import matplotlib as mpl
import pandas as pd
from markupsafe import Markup
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.container import Container
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fedhet.base.disk import Folder
from fedhet.base.metrics import Metric
from fedhet.runs.units import human_bytes, printable

WIDTH, HEIGHT = 5.4, 3.5
"""Size of a figure with a single Axes object, in inches."""
REPORT_SCALE = 0.87
"""Scale of figures in reports, below 1 so that their text is legible on a phone."""
RC: Any = {
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 9.0,
    "text.color": "#1d2329", "text.parse_math": False,
    "axes.titlesize": 10.0, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.titlepad": 10.0, "axes.labelsize": 9.0, "axes.labelcolor": "#66707a",
    "axes.edgecolor": "#dfe3e8", "axes.linewidth": 0.8, "axes.facecolor": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "axes.formatter.use_mathtext": False, "grid.color": "#dfe3e8", "grid.linewidth": 0.7,
    "xtick.color": "#dfe3e8", "xtick.labelcolor": "#66707a",
    "ytick.color": "#dfe3e8", "ytick.labelcolor": "#66707a",
    "xtick.labelsize": 8.5, "ytick.labelsize": 8.5,
    "xtick.major.size": 3.0, "ytick.major.size": 0.0,
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round",
    "legend.frameon": False, "legend.fontsize": 8.5, "legend.handlelength": 1.4,
    "legend.columnspacing": 1.4, "legend.borderaxespad": 0.0,
    "figure.facecolor": "#ffffff", "savefig.facecolor": "#ffffff",
    "svg.fonttype": "none", "pdf.fonttype": 42, "path.simplify_threshold": 0.3,
}  # fmt: skip
"""Style of all figures. In reports, CSS variables replace the colors (see `VARIABLES`)."""
COLUMN_WIDTH, TEXT_WIDTH = 3.25, 6.75
"""Widths of a paper's figures with one and with several Axes objects, in inches."""
PAPER_RC: Any = {
    "font.family": "serif",
    # Both fonts resemble Times, and matplotlib includes them.
    "font.serif": ["STIXGeneral", "DejaVu Serif"],
    "font.size": 8.0, "axes.titlesize": 8.0, "axes.labelsize": 8.0, "legend.fontsize": 7.0,
    "xtick.labelsize": 7.0, "ytick.labelsize": 7.0, "lines.linewidth": 1.2,
    "axes.labelcolor": "000000", "text.color": "000000",
    "xtick.labelcolor": "000000", "ytick.labelcolor": "000000",
}  # fmt: skip
"""Style overrides for papers, in which printed text has a size of 8 points."""
LEGEND_CHARS = 72
"""Number of characters that fit into a legend line above an Axes object of width WIDTH."""
MAX_LABEL = 60
"""Maximum number of characters in a line of an axis label."""
INK, MUTED = RC["text.color"], RC["axes.labelcolor"]
RULE, PAPER = RC["grid.color"], RC["figure.facecolor"]
ON_LIGHT, ON_DARK = "#14181c", "#fdfdfd"
"""Text colors on light and on dark fills, for both color schemes of a report."""
SERIES = (
    "#0072b2", "#d55e00", "#009e73", "#c2619b", "#c98a00", "#56b4e9", "#7a5c3e", "#6f6fb5",
)  # fmt: skip
DASHED: Any = {"linewidth": 1.0, "linestyle": (0, (4, 2.5))}
DOTTED: Any = {"linewidth": 0.8, "linestyle": (0, (1, 3))}
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (5, 1.2, 1.2, 1.2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_COLORED = ("private", "proxy", "global", "server", "local", "unseen", "unseen-epoch")
KIND_COLORS = dict(zip(_COLORED, SERIES, strict=False))
STAGE_COLORS = {
    "train": SERIES[0], "evaluate": SERIES[5], "server": SERIES[4], "overhead": "#a9b1ba",
}  # fmt: skip
OTHER_COLOR = SERIES[7]
HEAT = LinearSegmentedColormap.from_list(
    "heat", [(*to_rgb(SERIES[0]), 0.0), (*to_rgb(SERIES[0]), 1.0)]
)

VARIABLES = {
    INK: "--ink", MUTED: "--muted", RULE: "--rule", PAPER: "--card",
    **{color: f"--s{number}" for number, color in enumerate(SERIES)},
}  # fmt: skip
TAG = "series-"
"""Prefix of the id of a tagged artist, followed by the number of the series."""
POINTS = 72
"""SVG units per inch."""
GAP = "\N{EN SPACE}"
"""Separator between the name and the value of a series; SVG would merge two ordinary spaces."""
MAX_VALUES = 60_000
"""Maximum number of values per figure that a report includes for tooltips."""

COST_AXES = {
    "bytes": ("costs", "bytes sent", "bytes sent, up and down", "bytes"),
    "epsilon": ("privacy", "epsilon", "consumed epsilon, maximum over clients", "number"),
    "clock": ("clock", "simulated time", "simulated hours", "seconds"),
}
"""Cumulative costs against which the score is plotted, each with the name of its figure, its name
in titles, the axis label, and the unit."""
PANEL = {"mode": "x", "head": "round", "unit": "score", "xUnit": "number", "dots": True}
"""Default tooltip options of an Axes object. The mode "x" shows all curves at the nearest x,
preceded by `head`; the mode "point" shows the nearest point. `dots` marks each value. The units are
score, unit (of a target), bytes, seconds, and number."""


def unit_of(metric: Metric) -> str:
    """Return the unit of a metric's values in tooltips."""
    return "unit" if metric.has_unit else "score"


class Canvas(Figure):
    """Figure that records the names and values of its series."""

    def __init__(self, **look: Any) -> None:
        super().__init__(**look)
        self.series: list[str] = []
        self.panels: defaultdict[Axes, dict[str, Any]] = defaultdict(
            lambda: {**PANEL, "curves": []}
        )

    def series_number(self, series: str) -> int:
        """Return the number of a series. A new series receives the next number."""
        if series not in self.series:
            self.series.append(series)
        return self.series.index(series)

    def description(self) -> str:
        """Return the position, limits and curves of each Axes object as JSON."""
        filled = ("curves", "cells")
        panels = [(ax, each) for ax, each in self.panels.items() if any(map(each.get, filled))]
        count = sum(len(curve["y"]) for _, content in panels for curve in content["curves"])
        width, height = (POINTS * inches for inches in self.get_size_inches())
        described = []
        for ax, content in panels if count <= MAX_VALUES else ():
            (left, low), (right, high) = ax.get_position().get_points()
            box = (left * width, (1 - high) * height, right * width, (1 - low) * height)
            x = [*_rounded(ax.get_xlim()), ax.get_xscale() == "log"]
            y = [*_rounded(ax.get_ylim()), ax.get_yscale() == "log"]
            described.append({"box": _rounded(box), "x": x, "y": y, **content})
        return json.dumps(described, separators=(",", ":"), allow_nan=False)


def panel(ax: Axes, **options: Any) -> None:
    """Override some of the default tooltip options (`PANEL`) of an Axes object."""
    if isinstance(ax.figure, Canvas):
        ax.figure.panels[ax].update(options)


def tag(ax: Axes, series: str, artists: Iterable[Artist]) -> None:
    """Assign artists to a series that can be toggled in the report."""
    if isinstance(ax.figure, Canvas):
        for artist in artists:
            artist.set_gid(f"{TAG}{ax.figure.series_number(series)}")


def record(
    ax: Axes, series: str, values: pd.Series, name: str = "", names: Sequence[str] = ()
) -> None:
    """Record the values of a curve, indexed by x, for tooltips.

    `name` is the name of the curve, by default the name of the series, and `names`
    contains the names of the points.
    """
    if isinstance(ax.figure, Canvas):
        curve = _curve(ax.figure.series_number(series), name or series, values)
        ax.figure.panels[ax]["curves"].append(curve | ({"names": [*names]} if names else {}))


def cells(ax: Axes, counts: Sequence[Sequence[int]], names: Sequence[str]) -> None:
    """Record the counts of a confusion matrix, for tooltips that name the true class of a row."""
    if isinstance(ax.figure, Canvas):
        ax.figure.panels[ax]["cells"] = {"counts": [[*row] for row in counts], "names": [*names]}


def _curve(series: int, name: str, values: pd.Series) -> dict[str, Any]:
    x, y = map(float, values.index), values.astype(float)
    return {"s": series, "name": name, "x": _rounded(x), "y": _rounded(y)}


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Round values to six significant digits, with None for NaN and infinity."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def single_curve(values: pd.Series, box: Sequence[float], xs: Sequence[int]) -> str:
    """Describe an SVG of a single curve over `xs`, in the format of `Canvas.description`.

    `box` contains the left, top, right and bottom edges of the curve.
    """
    x, y = [min(xs), max(xs), False], [values.min(), values.max(), False]
    options = {"box": _rounded(box), "x": x, "y": y, **PANEL, "unit": "number"}
    content = [{**options, "curves": [_curve(0, str(values.name), values)]}]
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


# --- drawings and files ----------------------------------------------------------------------


class Chart(NamedTuple):
    """Figure in a report, with a separate title and legend."""

    title: str
    legend: Sequence[dict[str, Any]]
    """Legend entries: text, last value or "", color, series (None if it cannot be toggled), and
    look ("solid", "dashed", "dotted" or "dot")."""
    svg: Markup | str


@dataclass(frozen=True)
class Drawing:
    """Named figure that is drawn on demand."""

    name: str
    draw: Callable[[Figure], None]
    alt: str = ""
    """Alternative text."""
    width: float = WIDTH
    height: float = HEIGHT

    def write(self, folder: Folder, dpi: int = 160) -> Path:
        """Write the figure as PNG and SVG, and return the path of the PNG file."""
        with _styled(self) as figure:
            for artist in figure.findobj():
                artist.set_gid(None)  # Ids must be unique, but artists may share a series.
            _fix_layout(figure, dpi)
            self._save(figure, folder, "png", dpi=dpi, metadata={"Software": "fedhet"})
            self._save(figure, folder, "svg", metadata={"Date": None})
        return folder.path / f"{self.name}.png"

    def write_for_paper(self, folder: Folder) -> Path:
        """Write the figure as PDF, with the size and fonts of a paper, and return its path.

        Fonts are embedded as TrueType (type 42), as required by publishers.
        """
        width = COLUMN_WIDTH if self.width <= WIDTH else TEXT_WIDTH
        with _styled(self, width / self.width, PAPER_RC) as figure:
            _fix_layout(figure)
            dates = {"Creator": "fedhet", "CreationDate": None}
            self._save(figure, folder, "pdf", metadata=dates)
        return folder.path / f"{self.name}.pdf"

    def _save(self, figure: Figure, folder: Folder, form: str, **options: Any) -> None:
        with folder.replacing(f"{self.name}.{form}") as path:
            figure.savefig(path, format=form, **options)

    def chart(self) -> Chart:
        """Return the figure for a report, with a separate title and legend."""
        with _styled(self, REPORT_SCALE) as figure:
            titles = [ax.get_title(loc="left") for ax in figure.axes]
            for ax in figure.axes:
                ax.set_title("")
                if box := ax.get_legend():
                    box.remove()
            # Collect the entries by text, without duplicates.
            legend: dict[str, dict[str, Any]] = {}
            for ax in figure.axes:
                for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
                    artist: Any = handle[0] if isinstance(handle, Container) else handle
                    if isinstance(artist, Line2D):
                        looks = {"-": "solid", "--": "dashed", ":": "dotted"}
                        ink: Any = artist.get_color()
                        look = looks.get(str(artist.get_linestyle()), "dashed")
                    else:
                        face, look = artist.get_facecolor(), "dot"
                        ink = face if len(face) and isinstance(face[0], float) else face[0]
                    tagged = re.fullmatch(rf"{TAG}(\d+)", artist.get_gid() or "")
                    name, _, value = text.partition(GAP)
                    color, series = to_hex(ink), int(tagged[1]) if tagged else None
                    color = f"var({VARIABLES[color]})" if color in VARIABLES else color
                    entry = {"text": name, "value": value, "color": color}
                    legend.setdefault(text, {**entry, "series": series, "look": look})
            _fix_layout(figure)
            file = io.StringIO()
            metadata = {"Date": None, "Creator": None}
            figure.savefig(file, format="svg", transparent=True, metadata=metadata)
            svg = _inline(file.getvalue(), self.alt, figure.description())
        return Chart(next(filter(None, titles), ""), [*legend.values()], svg)


@contextmanager
def _styled(drawing: Drawing, scale: float = 1.0, overrides: Any = None) -> Iterator[Canvas]:
    rc = {**RC, "svg.hashsalt": drawing.name, **(overrides or {})}
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # Ignore matplotlibrc files of the user and in the working directory.
        mpl.rcParams.update(rc)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        size = (scale * drawing.width, scale * drawing.height)
        figure = Canvas(figsize=size, layout=layout)
        FigureCanvasAgg(figure)
        drawing.draw(figure)
        yield figure


def _fix_layout(figure: Figure, dpi: int = POINTS) -> None:
    """Compute the layout of a figure at a resolution, and remove its layout engine.

    Matplotlib draws a figure with a layout engine twice whenever it is saved.
    """
    if (engine := figure.get_layout_engine()) is not None:
        figure.set_dpi(dpi)
        engine.execute(figure)
        figure.set_layout_engine(None)


def _inline(svg: str, alt: str, description: str) -> Markup:
    """Convert the content of an SVG file to inline SVG for a report.

    Removes attributes that only a file needs, replaces colors with CSS variables, and adds the
    description of series and values. Matplotlib escapes the text in the SVG; attributes are escaped
    here.
    """
    attributes = f'class="plot" role="img" aria-label="{html.escape(alt)}"'
    attributes += f' data-chart="{html.escape(description)}"'
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(rf'<g id="{TAG}(\d+)"', r'<g data-series="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    size = r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"'
    svg = re.sub(size, lambda match: f"{match[1]} {attributes}", svg)

    def variable(match: re.Match[str]) -> str:
        name = VARIABLES.get(match[2])
        return f"{match[1]}var({name})" if name else match[0]

    return Markup(re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})\b", variable, svg))  # noqa: S704


# --- parts of figures ------------------------------------------------------------------------


def legend_columns(labels: Sequence[str], max_chars: int = LEGEND_CHARS) -> int:
    """Return the number of legend columns that fit above a plot, in a single row if possible."""
    if sum(len(label) + 5 for label in labels) <= max_chars:
        return max(len(labels), 1)
    return max(1, max_chars // (max(map(len, labels)) + 5))


def legend_chars(ax: Axes) -> int:
    """Return the number of characters that fit into a legend line above a plot."""
    if mpl.rcParams["font.family"] != [PAPER_RC["font.family"]]:
        return LEGEND_CHARS
    spec = ax.get_subplotspec()
    columns = spec.get_gridspec().ncols if spec else 1
    figure = ax.get_figure(root=True)
    scale = (figure.get_figwidth() / columns if figure else WIDTH) / WIDTH
    return int(LEGEND_CHARS * scale * RC["legend.fontsize"] / PAPER_RC["legend.fontsize"])


def set_title(ax: Axes, title: str) -> None:
    """Set the title of a plot and, below it, a legend of the labeled series."""
    handles, labels = ax.get_legend_handles_labels()
    columns = legend_columns(labels, legend_chars(ax))
    ax.set_title(title, color=INK, pad=10 + 13 * math.ceil(len(labels) / columns))
    if handles:
        ax.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), labelcolor=INK,
            ncols=columns, handletextpad=0.5, borderpad=0.1, borderaxespad=0.2,
        )  # fmt: skip


def over_rounds(
    ax: Axes,
    rounds: Sequence[int],
    title: str = "",
    note: str = "",
    text: Callable[[float], str] = "{:.4g}".format,
    margin: float = 0.0,
) -> None:
    """Configure the axes of a plot over rounds, and add `note` to the label of the x-axis."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel(textwrap.fill(f"round  ({note})", MAX_LABEL) if note else "round")
    low, high = min(rounds), max(rounds)
    margin = max(margin, 0.5 if low == high else 0.02 * (high - low))
    ax.set_xlim(low - margin, high + margin)
    ticks(ax, text)
    if title:
        set_title(ax, title)


def ticks(ax: Axes, text: Callable[[float], str] = "{:.4g}".format, axis: str = "y") -> None:
    """Set a few ticks at round values on an axis, with labels formatted by `text`."""
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_bytes(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Use a logarithmic byte scale, because traffic differs between methods by powers of ten."""
    ax.set(**{f"{axis}scale": "log"})
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    low, high = chosen.get_view_interval()
    if high < 10 * low:  # Extend the range to a factor of ten, so that it contains a tick.
        middle = math.sqrt(low * high)
        ax.set(**{f"{axis}lim": (middle / math.sqrt(10), middle * math.sqrt(10))})
    chosen.set_major_locator(LogLocator(numticks=6))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value)))


def in_bytes(value: float) -> str:
    """Format a number of bytes as a tick label, without trailing zeros."""
    number, _, unit = human_bytes(value).partition(" ")
    return f"{float(number):g} {unit}"


def in_hours(seconds: float) -> str:
    """Format seconds as a tick label in hours."""
    return f"{seconds / 3600:.3g}"


def mark(number: int) -> tuple[str, str]:
    """Return the color and the marker of a series. Their combination repeats after 64 series."""
    cycle, index = divmod(number, len(SERIES))
    return SERIES[index], MARKERS[(index + cycle) % len(MARKERS)]


def line(
    ax: Axes,
    values: pd.Series,
    color: str = SERIES[0],
    size: float = 3.2,
    series: str = "",
    name: str = "",
    **look: Any,
) -> None:
    """Plot values against their index as a curve, with markers if there are few values.

    `name` is the name of the curve in tooltips, by default the name of the series.
    """
    marker = "o" if len(values) <= 25 else ""
    artists = ax.plot(values.index, values, color=color, marker=marker, markersize=size, **look)
    tag(ax, series or name, artists)
    record(ax, series or name, values, name)


def band(ax: Axes, number: int, mean: pd.Series, std: pd.Series, label: str = "") -> None:
    """Draw the mean of a series with a band of one standard deviation."""
    color, _ = mark(number)
    dashes = DASHES[number % len(DASHES)]
    line(ax, mean, color, size=3, series=label or "mean", linestyle=dashes, label=label)
    shade(ax, mean - std, mean + std, color, series=label or "mean", alpha=0.15)


def shade(
    ax: Axes, low: pd.Series, high: pd.Series, color: str, series: str = "", **look: Any
) -> None:
    """Fill the area between two curves with the same index."""
    artist = ax.fill_between(low.index, low, high, color=color, linewidth=0, **look)
    tag(ax, series, [artist])


def short(name: str, width: int = 16) -> str:
    """Shorten a name to at most `width` characters by omitting its middle."""
    name = printable(name)
    tail = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[-tail:]}"


def disambiguate(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to at most `width` characters, and try to keep them distinct.

    Names that would become equal start with "…" and the first word in which they differ.
    """
    shortened = [short(name, width) for name in names]
    labels = shortened[:]
    for index, (name, label) in enumerate(zip(names, shortened, strict=True)):
        equal = {n for n, other in zip(names, shortened, strict=True) if other == label}
        columns = zip(*equal, strict=False)
        start = sum(1 for _ in itertools.takewhile(lambda chars: len(set(chars)) == 1, columns))
        start = max(name.rfind(char, 0, start) for char in " =,") + 1  # Start with a full word.
        if start and len(equal) > 1:
            labels[index] = f"…{short(name[start:], width - 1)}"
    return labels
