"""Style of all figures (colors, fonts, axes), and their export to files and HTML reports.

Figures use matplotlib's object interface instead of pyplot, so that no global state is changed.
Series have the colors of Okabe and Ito, which color-blind readers can distinguish. The style sheet
of a report (`page.css`) replaces these colors, to match the report's light or dark color scheme.
"""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from fedhet.base.disk import Folder
from fedhet.runs.units import human_bytes, printable

WIDTH, HEIGHT = 5.4, 3.5
"""Size of a figure with a single Axes object, in inches."""
REPORT_SCALE = 0.87
"""Scale of the width of figures in reports, below 1 so that their text is legible on a phone."""
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
"""CSS variable of each color in a report; `page.css` has a rule for each of them."""
POINTS = 72
"""SVG units per inch."""
GAP = "\N{EN SPACE}"
"""Separator between the name and the value of a series; SVG would merge two ordinary spaces."""

COST_AXES = {
    "bytes": ("costs", "bytes sent", "bytes sent, up and down"),
    "epsilon": ("privacy", "epsilon", "consumed epsilon, maximum over clients"),
    "clock": ("clock", "simulated time", "simulated hours"),
}
"""Cumulative costs against which the score is plotted, each with the name of its figure, its name
in titles, and the axis label."""


class Chart(NamedTuple):
    """Figure in a report, with a separate title."""

    title: str
    svg: Markup


@dataclass(frozen=True)
class Drawing:
    """Named figure that is drawn on demand."""

    name: str
    draw: Callable[[Figure], None]
    alt: str = ""
    """Alternative text."""
    width: float = WIDTH
    height: float = HEIGHT

    def write_files(self, folder: Folder, dpi: int = 160) -> Path:
        """Write the figure as PNG and SVG, and return the path of the PNG file."""
        with _styled(self, self.width, self.height) as figure:
            _fix_layout(figure, dpi)
            self._save(figure, folder, "png", dpi=dpi, metadata={"Software": "fedhet"})
            self._save(figure, folder, "svg", metadata={"Date": None})
        return folder.path / f"{self.name}.png"

    def write_for_paper(self, folder: Folder) -> Path:
        """Write the figure as PDF, with the size and fonts of a paper, and return its path.

        Fonts are embedded as TrueType (type 42), as required by publishers.
        """
        width = COLUMN_WIDTH if self.width <= WIDTH else TEXT_WIDTH
        height = self.height * width / self.width
        with _styled(self, width, height, PAPER_RC) as figure:
            _fix_layout(figure)
            dates = {"Creator": "fedhet", "CreationDate": None}
            self._save(figure, folder, "pdf", metadata=dates)
        return folder.path / f"{self.name}.pdf"

    def _save(self, figure: Figure, folder: Folder, form: str, **options: Any) -> None:
        with folder.replacing(f"{self.name}.{form}") as path:
            figure.savefig(path, format=form, **options)

    def chart(self) -> Chart:
        """Return the figure as inline SVG for a report, with the title of its first panel."""
        with _styled(self, REPORT_SCALE * self.width, self.height) as figure:
            title = figure.axes[0].get_title(loc="left")
            for ax in figure.axes:
                ax.set_title("")
            _fix_layout(figure)
            file = io.StringIO()
            omitted = dict.fromkeys(("Creator", "Date", "Format", "Type"))
            figure.savefig(file, format="svg", transparent=True, metadata=omitted)
        svg = file.getvalue()
        image = Markup('<div class="plot" role="img" aria-label="{}">{}</div>')
        # Matplotlib escapes the text in the SVG.
        return Chart(title, image.format(self.alt, Markup(svg[svg.index("<svg") :])))  # noqa: S704


@contextmanager
def _styled(
    drawing: Drawing,
    width: float,
    height: float,
    overrides: Mapping[str, Any] = MappingProxyType({}),
) -> Iterator[Figure]:
    """Draw a figure of the given size in inches, in the style of `RC` with `overrides`."""
    rc: Any = {**RC, "svg.hashsalt": drawing.name, **overrides}
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # Ignore matplotlibrc files of the user and in the working directory.
        mpl.rcParams.update(rc)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        figure = Figure(figsize=(width, height), layout=layout)
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


# --- parts of figures ------------------------------------------------------------------------


def legend_columns(labels: Sequence[str], max_chars: int = LEGEND_CHARS) -> int:
    """Return the number of legend columns that fit above a plot, in a single row if possible."""
    if sum(len(label) + 5 for label in labels) <= max_chars:
        return max(len(labels), 1)
    return max(1, max_chars // (max(map(len, labels)) + 5))


def legend_chars(ax: Axes) -> int:
    """Return the number of characters that fit into a legend line above a plot."""
    grid, figure = ax.get_gridspec(), ax.get_figure(root=True)
    assert grid is not None
    assert figure is not None
    scale = figure.get_figwidth() / grid.ncols / WIDTH
    return int(LEGEND_CHARS * scale * RC["font.size"] / mpl.rcParams["font.size"])


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


def over_cost(ax: Axes, cost: str, title: str, note: str = "") -> None:
    """Configure the axes of a plot over a cumulative cost (see `COST_AXES`).

    Bytes have a logarithmic axis, because traffic differs between methods by powers of ten.
    """
    ticks(ax)
    if cost == "bytes":
        ax.set_xscale("log")
        low, high = ax.get_xlim()
        if high < 10 * low:  # Extend the range to a factor of ten, so that it contains a tick.
            middle = math.sqrt(low * high)
            ax.set_xlim(middle / math.sqrt(10), middle * math.sqrt(10))
        ax.xaxis.set_major_locator(LogLocator(numticks=6))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value)))
    else:
        ax.set_xlim(left=0)
    if cost == "clock":
        ticks(ax, lambda seconds: f"{seconds / 3600:.3g}", "x")
    ax.set_xlabel(COST_AXES[cost][2] + note)
    set_title(ax, title)


def in_bytes(value: float) -> str:
    """Format a number of bytes as a tick label, without trailing zeros."""
    number, _, unit = human_bytes(value).partition(" ")
    return f"{float(number):g} {unit}"


def mark(number: int) -> tuple[str, str]:
    """Return the color and the marker of a series. Their combination repeats after 64 series."""
    cycle, index = divmod(number, len(SERIES))
    return SERIES[index], MARKERS[(index + cycle) % len(MARKERS)]


def line(
    ax: Axes, values: pd.Series, color: str = SERIES[0], size: float = 3.2, **look: Any
) -> None:
    """Plot values against their index as a curve, with markers if there are few values."""
    marker = "o" if len(values) <= 25 else ""
    ax.plot(values.index, values, color=color, marker=marker, markersize=size, **look)


def band(ax: Axes, number: int, mean: pd.Series, std: pd.Series, label: str = "") -> None:
    """Draw the mean of a series with a band of one standard deviation."""
    color, _ = mark(number)
    line(ax, mean, color, size=3, linestyle=DASHES[number % len(DASHES)], label=label)
    ax.fill_between(mean.index, mean - std, mean + std, color=color, linewidth=0, alpha=0.15)


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
