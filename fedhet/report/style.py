"""Style of all figures: colors, fonts, axes; as PNG on white, or as SVG for the page.

Figures use matplotlib's object interface, never pyplot, so no global state is changed. The series
colors are Okabe and Ito's, which color-blind readers can distinguish. In SVG each color becomes
a CSS variable of the page, so that a figure follows its light or dark scheme. A drawing tags the
artists of a series, so that the page can switch the series off, and records the values behind them,
which the page shows when one points at them.
"""

from __future__ import annotations

import html
import io
import itertools
import json
import math
import re
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
from fedhet.runs.units import human_bytes, printable

WIDTH, HEIGHT = 5.4, 3.5
"""Size of a figure with one axes, in inches."""
PAGE_SCALE = 0.87
"""How much smaller figures are drawn for the page, so that their text is legible on a phone."""
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
"""Style of all figures. Page variables replace the colors of text and lines; see `VARIABLES`."""
COLUMN, PAGE = 3.25, 6.75
"""Widths of a paper's column and of its text, in inches: of a figure with one axes, and others."""
PAPER_RC: Any = {
    "font.family": "serif",
    "font.serif": ["STIXGeneral", "DejaVu Serif"],  # like Times; both come with matplotlib
    "font.size": 8.0, "axes.titlesize": 8.0, "axes.labelsize": 8.0, "legend.fontsize": 7.0,
    "xtick.labelsize": 7.0, "ytick.labelsize": 7.0, "lines.linewidth": 1.2,
    "axes.labelcolor": "000000", "text.color": "000000",
    "xtick.labelcolor": "000000", "ytick.labelcolor": "000000",
}  # fmt: skip
"""What a paper's figures have instead: text of 8 points as large as it will be printed."""
ROOM = 72
"""Letters of a legend beside each other, above an axes of WIDTH."""
INK, MUTED = RC["text.color"], RC["axes.labelcolor"]
RULE, PAPER = RC["grid.color"], RC["figure.facecolor"]
ON_LIGHT, ON_DARK = "#14181c", "#fdfdfd"
"""Colors of text on a fill that stays light, or dark, in both of the page's schemes."""
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
"""Begins the id of a tagged artist; the series' number follows."""
POINTS = 72
"""Units of an SVG per inch."""
GAP = "\N{EN SPACE}"
"""Separates a series' name from its number: SVG would merge two ordinary spaces into one."""
MAX_VALUES = 60_000
"""Beyond this many values in a figure the page does not show them, to stay small."""

PANEL = {"mode": "x", "head": "round", "unit": "score", "xUnit": "number", "dots": True}
"""What the page shows of an axes by default: all curves at one x (or, in mode "point", the nearest
point), `head` before the x, and a dot at each value; units are score, bytes, seconds, number."""


class Canvas(Figure):
    """A figure that knows its series, by name, and the values of its axes."""

    def __init__(self, **look: Any) -> None:
        super().__init__(**look)
        self.series: list[str] = []
        self.panels: defaultdict[Axes, dict[str, Any]] = defaultdict(
            lambda: {**PANEL, "curves": []}
        )

    def series_number(self, series: str) -> int:
        """Return the number of a series, a new one for a new name."""
        if series not in self.series:
            self.series.append(series)
        return self.series.index(series)

    def description(self) -> str:
        """Return as JSON where each axes lies, its limits, and its curves."""
        panels = [(ax, found) for ax, found in self.panels.items() if found["curves"]]
        count = sum(len(curve["y"]) for _, found in panels for curve in found["curves"])
        width, height = (POINTS * inches for inches in self.get_size_inches())
        content = []
        for ax, found in panels if count <= MAX_VALUES else ():
            (left, low), (right, high) = ax.get_position().get_points()
            box = (left * width, (1 - high) * height, right * width, (1 - low) * height)
            x = [*_rounded(ax.get_xlim()), ax.get_xscale() == "log"]
            y = [*_rounded(ax.get_ylim()), ax.get_yscale() == "log"]
            content.append({"box": _rounded(box), "x": x, "y": y, **found})
        return json.dumps(content, separators=(",", ":"), allow_nan=False)


def panel(ax: Axes, **look: Any) -> None:
    """Change what the page shows of an axes; see PANEL."""
    if isinstance(ax.figure, Canvas):
        ax.figure.panels[ax].update(look)


def tag(ax: Axes, series: str, artists: Iterable[Artist]) -> None:
    """Make artists part of a series, which the page switches on and off."""
    if isinstance(ax.figure, Canvas):
        for artist in artists:
            artist.set_gid(f"{TAG}{ax.figure.series_number(series)}")


def record(
    ax: Axes, series: str, values: pd.Series, name: str = "", names: Sequence[str] = ()
) -> None:
    """Record a series' values, by their index as x, under `name` (by default the series').

    `names`, if given, are those of the points.
    """
    if isinstance(ax.figure, Canvas):
        curve = _curve(ax.figure.series_number(series), name or series, values)
        ax.figure.panels[ax]["curves"].append(curve | ({"names": [*names]} if names else {}))


def _curve(series: int, name: str, values: pd.Series) -> dict[str, Any]:
    x, y = map(float, values.index), values.astype(float)
    return {"s": series, "name": name, "x": _rounded(x), "y": _rounded(y)}


def _rounded(values: Iterable[float]) -> list[float | None]:
    """Return values with six significant digits; None for those that are not finite."""
    return [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]


def lone_curve(values: pd.Series, box: Sequence[float], xs: Sequence[int]) -> str:
    """Return the description of an SVG that is a single curve, as of `Canvas.description`.

    `box` is left, top, right and bottom of the curve; it spans `xs` and the values' range.
    """
    x, y = [min(xs), max(xs), False], [values.min(), values.max(), False]
    shown = {"box": _rounded(box), "x": x, "y": y, **PANEL, "unit": "number"}
    content = [{**shown, "curves": [_curve(0, str(values.name), values)]}]
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


# --- a drawing, and its files ----------------------------------------------------------------


class Chart(NamedTuple):
    """A figure for the page, with its title and legend apart."""

    title: str
    legend: Sequence[dict[str, Any]]
    """A line has a text, the series' last value or "", its color, its series, or None if it cannot
    be switched off, and its look: "solid", "dashed", "dotted" or "dot"."""
    svg: Markup | str


@dataclass(frozen=True)
class Drawing:
    """A named figure, drawn on demand."""

    name: str
    draw: Callable[[Figure], None]
    alt: str = ""
    """Text alternative for readers who cannot see the figure."""
    width: float = WIDTH
    height: float = HEIGHT

    def write(self, folder: Folder, dpi: int = 160) -> Path:
        """Write `<name>.png` and `.svg` into a folder and return the PNG's path.

        PDFs are for papers: their fonts take as much time as the rest of a report.
        """
        with _styled(self) as figure:
            for artist in figure.findobj():
                artist.set_gid(None)  # several artists share one: an id of a file must be unique
            self._save(figure, folder, "png", dpi=dpi, metadata={"Software": "fedhet"})
            figure.set_layout_engine("none")  # what was laid out stays: it takes half of the time
            self._save(figure, folder, "svg", metadata={"Date": None})
        return folder.path / f"{self.name}.png"

    def write_for_paper(self, folder: Folder) -> Path:
        """Write `<name>.pdf` in a paper's size and fonts into a folder and return its path.

        The fonts are embedded as TrueType (type 42), which publishers ask for.
        """
        width = COLUMN if self.width <= WIDTH else PAGE
        with _styled(self, width / self.width, PAPER_RC) as figure:
            dates = {"Creator": "fedhet", "CreationDate": None}
            self._save(figure, folder, "pdf", metadata=dates)
        return folder.path / f"{self.name}.pdf"

    def _save(self, figure: Figure, folder: Folder, form: str, **options: Any) -> None:
        with folder.replacing(f"{self.name}.{form}") as path:
            figure.savefig(path, format=form, **options)

    def chart(self) -> Chart:
        """Return the figure for the page, with its title and legend apart."""
        with _styled(self, PAGE_SCALE) as figure:
            titles = [ax.get_title(loc="left") for ax in figure.axes]
            for ax in figure.axes:
                ax.set_title("")
                if shown := ax.get_legend():
                    shown.remove()
            legend: dict[str, dict[str, Any]] = {}  # each series once
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
            file = io.StringIO()
            nothing = {"Date": None, "Creator": None}
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
            svg = _inline(file.getvalue(), self.alt, figure.description())
        return Chart(next(filter(None, titles), ""), [*legend.values()], svg)


@contextmanager
def _styled(drawing: Drawing, scale: float = 1.0, look: Any = None) -> Iterator[Canvas]:
    rc = {**RC, "svg.hashsalt": drawing.name, **(look or {})}
    with mpl.rc_context(), warnings.catch_warnings():
        mpl.rcdefaults()  # not the user's matplotlibrc, nor that of the working directory
        mpl.rcParams.update(rc)
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        size = (scale * drawing.width, scale * drawing.height)
        figure = Canvas(figsize=size, layout=layout)
        FigureCanvasAgg(figure)
        drawing.draw(figure)
        yield figure


def _inline(svg: str, alt: str, description: str) -> Markup:
    """Return a figure's SVG for the page.

    What only a standalone file needs is removed, colors become CSS variables, and the series and
    values are added. Texts are escaped: by matplotlib in the SVG, and here in the attributes.
    """
    named = f'class="plot" role="img" aria-label="{html.escape(alt)}"'
    named += f' data-chart="{html.escape(description)}"'
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\s(xmlns(:\w+)?|version)="[^"]*"', "", svg)
    svg = re.sub(rf'<g id="{TAG}(\d+)"', r'<g data-series="\1"', svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    size = r'(<svg[^>]*?) width="[\d.]+pt" height="[\d.]+pt"'
    svg = re.sub(size, lambda found: f"{found[1]} {named}", svg)

    def variable(match: re.Match[str]) -> str:
        name = VARIABLES.get(match[2])
        return f"{match[1]}var({name})" if name else match[0]

    return Markup(re.sub(r"((?:fill|stroke): )(#[0-9a-f]{6})\b", variable, svg))  # noqa: S704


# --- parts of figures ------------------------------------------------------------------------


def legend_columns(labels: Sequence[str], room: int = ROOM) -> int:
    """Return the number of legend columns that fit above an axes: all in one row if possible."""
    if sum(len(label) + 5 for label in labels) <= room:
        return max(len(labels), 1)
    return max(1, room // (max(map(len, labels)) + 5))


def room(ax: Axes) -> int:
    """Return the letters of a legend that fit above an axes: fewer in a paper's column."""
    if mpl.rcParams["font.family"] != [PAPER_RC["font.family"]]:
        return ROOM
    place = ax.get_subplotspec()
    across = place.get_gridspec().ncols if place else 1
    figure = ax.get_figure(root=True)
    inches = figure.get_figwidth() / across if figure else WIDTH
    return int(ROOM * inches / WIDTH * RC["legend.fontsize"] / PAPER_RC["legend.fontsize"])


def head(ax: Axes, title: str) -> None:
    """Set the title of an axes and, below it, a legend of the labeled series."""
    handles, labels = ax.get_legend_handles_labels()
    columns = legend_columns(labels, room(ax))
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
    """Set up a horizontal axis of integer rounds, with a note; then `ticks` of y, and `head`."""
    ax.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    ax.set_xlabel(f"round  ({note})" if note else "round")
    low, high = min(rounds), max(rounds)
    margin = max(margin, 0.5 if low == high else 0.02 * (high - low))
    ax.set_xlim(low - margin, high + margin)
    ticks(ax, text)
    if title:
        head(ax, title)


def ticks(ax: Axes, text: Callable[[float], str] = "{:.4g}".format, axis: str = "y") -> None:
    """Give an axis a few round ticks, formatted by `text`."""
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    chosen.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def log_bytes(ax: Axes, axis: Literal["x", "y"] = "y") -> None:
    """Give an axis of bytes a logarithmic scale: methods differ by powers of ten."""
    ax.set(**{f"{axis}scale": "log"})
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    low, high = chosen.get_view_interval()
    if high < 10 * low:  # of less than a power of ten: there might be no tick at all
        middle = math.sqrt(low * high)
        ax.set(**{f"{axis}lim": (middle / math.sqrt(10), middle * math.sqrt(10))})
    chosen.set_major_locator(LogLocator(numticks=6))
    chosen.set_minor_locator(NullLocator())
    chosen.set_major_formatter(FuncFormatter(lambda value, _: in_bytes(value)))


def in_bytes(value: float) -> str:
    """Return a tick's number of bytes without superfluous digits."""
    number, _, unit = human_bytes(value).partition(" ")
    return f"{float(number):g} {unit}"


def in_hours(seconds: float) -> str:
    """Return a tick's number of seconds in hours."""
    return f"{seconds / 3600:.3g}"


def mark(number: int) -> tuple[str, str]:
    """Return the color and the marker of a series; pairs repeat only after many series."""
    rounds, place = divmod(number, len(SERIES))
    return SERIES[place], MARKERS[(place + rounds) % len(MARKERS)]


def line(
    ax: Axes,
    values: pd.Series,
    color: str = SERIES[0],
    size: float = 3.2,
    series: str = "",
    name: str = "",
    **look: Any,
) -> None:
    """Draw values over their index, with markers if they are few, as a part of `series`.

    On the page they are shown under `name`, by default the series'.
    """
    marks = "o" if len(values) <= 25 else ""
    drawn = ax.plot(values.index, values, color=color, marker=marks, markersize=size, **look)
    tag(ax, series or name, drawn)
    record(ax, series or name, values, name)


def band(ax: Axes, number: int, mean: pd.Series, std: pd.Series, label: str = "") -> None:
    """Draw the mean of a numbered series with a band of one standard deviation."""
    color, _ = mark(number)
    dashes = DASHES[number % len(DASHES)]
    line(ax, mean, color, size=3, series=label or "mean", linestyle=dashes, label=label)
    shade(ax, mean - std, mean + std, color, series=label or "mean", alpha=0.15)


def shade(
    ax: Axes, low: pd.Series, high: pd.Series, color: str, series: str = "", **look: Any
) -> None:
    """Fill the area between two series with the same index, as a part of `series`."""
    drawn = ax.fill_between(low.index, low, high, color=color, linewidth=0, **look)
    tag(ax, series, [drawn])


def short(name: str, width: int = 16) -> str:
    """Return a printable name of at most `width` characters, shortened in the middle.

    Names of clients and runs often differ at their ends.
    """
    name = printable(name)
    tail = (width - 1) // 2
    return name if len(name) <= width else f"{name[: width - 1 - tail]}…{name[-tail:]}"


def disambiguate(names: Sequence[str], width: int) -> list[str]:
    """Return the names shortened; those that would look the same begin where they first differ."""
    found = [short(name, width) for name in names]
    labels = found[:]
    for place, (name, label) in enumerate(zip(names, found, strict=True)):
        alike = {n for n, other in zip(names, found, strict=True) if other == label}
        columns = zip(*alike, strict=False)
        start = sum(1 for _ in itertools.takewhile(lambda signs: len(set(signs)) == 1, columns))
        start = max(name.rfind(sign, 0, start) for sign in " =,") + 1  # of the word that differs
        if start and len(alike) > 1:
            labels[place] = f"…{short(name[start:], width - 1)}"
    return labels
