"""Results of a sweep over values of one or more settings: table, figure, and HTML report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator
from pydantic_core import to_json

from fedhet.base.disk import Folder, write_text
from fedhet.base.metrics import ACCURACY, Metric, metric_of
from fedhet.report import style
from fedhet.report.comparison import choose_metrics
from fedhet.report.differences import paired_difference, samples_text, smallest
from fedhet.report.page import render
from fedhet.report.run import TEST_SETS, Run, load_run
from fedhet.report.style import WIDTH, Drawing
from fedhet.report.tables import Blocks, Cell, Cells, markdown
from fedhet.runs.records import COMMON, VALIDATION
from fedhet.runs.units import human_number, path_text, plural, plus_minus, printable
from fedhet.settings.schema import as_text

TAIL = ", tail"
"""Suffix in the names of quantities that are means over the last fifth of the rounds."""
MAX_CURVES = 12
"""Maximum number of curves in a panel. Each combination of values of the second and later settings
has a curve."""
Point = tuple[object, ...]
"""Point of a sweep: a value for each swept setting."""


@dataclass(frozen=True)
class Sweep:
    """Results at each point of a sweep."""

    names: tuple[str, ...]
    """Swept settings."""
    runs: Mapping[Point, tuple[Run, ...]]
    """Runs at each point, with one run per seed, in the order of the sweep."""

    @property
    def metric(self) -> Metric:
        """Headline metric of the runs."""
        return metric_of(next(iter(self.runs.values()))[0].headline_metric)

    @cached_property
    def results(self) -> pd.DataFrame:
        """Final value of each quantity (column) in each run (row).

        The index contains the number of each run's point. Quantities are headline scores, their
        means over the last fifth of the rounds, and all other metrics.
        """
        index, rows = [], []
        for number, runs in enumerate(self.runs.values()):
            for run in runs:
                values: dict[str, float] = {}
                last = run.last_evaluated
                for protocol, ratio in (last.relative if last else {}).items():
                    for statistic in ("mean", "best", "worst"):
                        name = f"relative accuracy, {protocol}, {statistic}"
                        values[name] = getattr(ratio, statistic)
                for protocol, kind in run.columns:
                    name = f"{run.metric_title}, {protocol}, {kind}"
                    values[name] = run.last(protocol, kind).mean
                    values[f"{name}{TAIL}"] = run.tail(protocol, kind).mean
                for title, view in run.extra_metrics:
                    for protocol, kind in view.columns:
                        values[f"{title}, {protocol}, {kind}"] = view.last(protocol, kind).mean
                if run.has_clock:
                    values["simulated hours"] = run.records[-1].clock / 3600
                rows.append({**values, **run.method_metrics.ffill().iloc[-1].to_dict()})
                index.append(number)
        return pd.DataFrame(rows, index=index, dtype=float)

    @cached_property
    def metrics(self) -> list[str]:
        """Quantities other than the headline scores, with the method's metrics first."""
        of_method = {name for runs in self.runs.values() for r in runs for name in r.method_metrics}
        metrics = [name for name in self.results if f"{self.metric.title}, " not in name]
        return sorted(metrics, key=lambda name: name not in of_method)

    def title_of(self, quantity: str) -> str:
        """Return the title of a quantity."""
        if quantity not in self.metrics:
            return quantity
        return next(iter(self.runs.values()))[0].title_of(quantity)

    @cached_property
    def selection(self) -> str:
        """Quantity that selects the best point.

        It is the first quantity on validation samples or, if a run has no validation scores, on
        test samples.
        """
        first, run = str(self.results.columns[0]), next(iter(self.runs.values()))[0]
        name = f"{run.metric_title}, {', '.join(run.selection or ())}"
        if first.startswith("relative"):
            name = ", ".join([first.split(", ")[0], VALIDATION, first.split(", ")[2]])
        return name if name in self.results and self.results[name].notna().all() else first

    @property
    def selection_basis(self) -> str:
        """Description of the samples on which the best point is selected."""
        if self.selection == self.results.columns[0]:
            return "test data"
        bases = {run.selection_basis: None for runs in self.runs.values() for run in runs}
        return " or ".join(bases)

    @cached_property
    def best(self) -> int | None:
        """Number of the point with the best mean score in `selection`, or None without a score."""
        means = self.spread(self.selection)["mean"].dropna()
        if means.empty:
            return None
        return int(means.idxmin() if self.metric.lower_is_better else means.idxmax())

    @property
    def test_samples(self) -> str:
        """Numbers of test samples of the headline score, as text."""
        columns = [
            (run, run.columns[0]) for runs in self.runs.values() for run in runs if run.columns
        ]
        protocol = columns[0][1][0] if columns else COMMON
        return samples_text((run.test_samples(*column) for run, column in columns), protocol)

    def unclear(self, quantity: str, best: int) -> tuple[int, int]:
        """Return how many other points are within noise of the point `best`, and were compared.

        Points are compared with the best point by seed (see `fedhet.report.differences`). Points
        with fewer than two shared seeds are not compared.
        """
        runs, parts = list(self.runs.values()), quantity.split(", ")
        is_accuracy = parts[0].endswith("accuracy") and len(parts) > 2

        def by_seed(number: int) -> pd.Series:
            values = self.results.loc[[number], quantity].to_numpy()
            return pd.Series(values, [run.seed for run in runs[number]], dtype=float)

        def samples(number: int) -> float | None:
            protocol, kind = parts[1], "private" if parts[0].startswith("relative") else parts[2]
            return smallest(run.test_samples(protocol, kind) for run in runs[number])

        differences = [
            paired_difference(
                by_seed(best),
                by_seed(number),
                smallest([samples(best), samples(number)]) if is_accuracy else None,
            )
            for number in range(len(runs))
            if number != best
        ]
        compared = [each for each in differences if each.n > 1]
        return sum(not each.is_clear for each in compared), len(compared)

    def spread(self, quantity: str) -> pd.DataFrame:
        """Return the mean, std and count of a quantity over the seeds at each point."""
        return self.results.groupby(level=0)[quantity].agg(["mean", "std", "count"])


def sweep(names: Sequence[str], runs: Mapping[Point, Sequence[Path]]) -> Sweep:
    """Load the runs of a sweep over the settings `names`, with one run per seed at each point."""
    loaded = {point: tuple(load_run(path) for path in paths) for point, paths in runs.items()}
    return Sweep(tuple(names), loaded)


def _label(names: Sequence[str], point: Point) -> str:
    """Format a point as text, e.g. "lr=0.1, alpha=0.5"."""
    pairs = zip(names, point, strict=True)
    return ", ".join(f"{name.rpartition('.')[2]}={as_text(value)}" for name, value in pairs)


def plotted_quantities(results: Sweep, figures: str) -> list[str]:
    """Return the quantities to plot: the headline score, the selecting score, and `figures`.

    If there are relative accuracies, the first of them replaces the headline score. `figures` is a
    comma-separated list of metrics, by default the first metric. Raises SettingsError if a metric
    is unknown.
    """
    metrics = results.metrics
    scores = dict.fromkeys([*results.results.columns[:1], results.selection])
    return [*scores, *(choose_metrics(figures, metrics) or metrics[:1])]


def write_sweep(results: Sweep, out: Path, figures: str = "") -> Path:
    """Write sweep.html, .png, .svg, .md and .json, and return the path of sweep.html.

    `figures` is a comma-separated list of metrics to plot, by default the first metric.
    """
    settings, points = results.names, list(results.runs)
    is_single = len(settings) == 1
    cells = _cells(results, list(results.results))
    selected = _selected(results)
    write_text(out / "sweep.md", markdown(cells) + (selected and f"\n{selected}\n"))
    content: dict[str, object] = {"settings": settings, "points": points}
    if is_single:
        content = {"setting": settings[0], "values": [point[0] for point in points]}
    content |= {"selected_on": results.selection_basis, "selected_by": results.selection}
    content["best"] = None if results.best is None else points[results.best]
    content["quantities"] = results.results.groupby(level=0).agg(list).to_dict("list")
    text = to_json(content, indent=1, inf_nan_mode="null").decode()
    write_text(out / "sweep.json", text + "\n")
    names = plotted_quantities(results, figures)
    drawing(results, names).write_files(Folder(out))
    labeled = [
        (as_text(point[0]) if is_single else _label(settings, point), run, _below(run.path, out))
        for point, runs in results.runs.items()
        for run in runs
    ]
    best = None
    if (number := results.best) is not None:
        lower, by = results.metric.lower_is_better, results.selection
        titles = [_title(name) if lower else _title(name).lower() for name in (names[0], by)]
        extreme = "lowest" if lower else "highest"
        of = f"{extreme} mean over seeds"
        if by != names[0]:
            of = f"mean over seeds at the point with the {extreme} {titles[1]}"
        unclear, compared = results.unclear(by, number)
        best = {
            "value": human_number(results.spread(names[0])["mean"][number]),
            "description": f"{titles[0]}, {of}",
            "basis": results.selection_basis,
            "is_biased": by == names[0],
            "settings": dict(zip(settings, map(as_text, points[number]), strict=True)),
            "noise": f"By {titles[1]}, {unclear} of {plural(compared, 'other point')} "
            f"{'differs' if unclear == 1 else 'differ'} from this point only within noise (95 % "
            "confidence interval over seeds and samples)."
            if compared
            else "With one seed, no error of the differences between points is known.",
        }
    html = render(
        "sweep.html",
        title=f"Sweep of {', '.join(settings)}",
        method=labeled[0][1].method,
        points=len(points),
        runs=len(labeled),
        best=best,
        plots=[drawing(results, [name]).chart() for name in names],
        table=cells,
        test_samples=results.test_samples,
        labeled=labeled,
    )
    return write_text(out / "sweep.html", html)


def _selected(results: Sweep) -> str:
    """Return a sentence with the best point and the samples that selected it, or ""."""
    if results.best is None:
        return ""
    point = _label(results.names, list(results.runs)[results.best])
    return f"Best point, selected on {results.selection_basis}: {point}."


def _below(path: Path, out: Path) -> str:
    """Return a path relative to the directory of the report, if it is inside this directory."""
    is_inside = path.resolve().is_relative_to(out.resolve())
    return path_text(path.resolve().relative_to(out.resolve()) if is_inside else path)


def sweep_table(results: Sweep, figures: str = "") -> Blocks:
    """Build the terminal table with a row per point.

    The table shows the plotted quantities (see `write_sweep`) and the mean headline score over the
    last fifth of the rounds.
    """
    first, *rest = plotted_quantities(results, figures)
    tails = [name for name in results.results if name.endswith(TAIL)]
    caption = f"last round, mean ± std over seeds; {results.test_samples}"
    caption += f"\n{printable(_selected(results))}" if results.best is not None else ""
    return Blocks(_cells(results, [first, *tails[:1], *rest]), "", caption)


def _cells(results: Sweep, quantities: Sequence[str]) -> Cells:
    columns = {
        name: [Cell(as_text(point[index])) for point in results.runs]
        for index, name in enumerate(results.names)
    }
    words, is_accuracy = len(columns), results.metric.name == ACCURACY

    def mean_and_std(mean: float, std: float) -> str:
        """Format "MEAN ± STD". STD has as many decimals as MEAN, but at least two."""
        text = human_number(mean)
        decimals = max(2, len(text.partition(".")[2]))
        return text + (f" ± {human_number(round(std, decimals))}" if math.isfinite(std) else "")

    for name in quantities:
        shown = plus_minus if is_accuracy and "accuracy, " in name else mean_and_std
        spread = results.spread(name)
        pairs = zip(spread["mean"], spread["std"], strict=True)
        columns[results.title_of(name)] = [Cell(shown(mean, std), mean) for mean, std in pairs]
    return Cells(columns, words=words)


def drawing(results: Sweep, names: Sequence[str]) -> Drawing:
    """Plot each quantity against the first setting.

    Each curve belongs to one combination of the other settings' values.
    """

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(names), squeeze=False)
        for ax, name in zip(grid[0], names, strict=True):
            _panel(ax, results, name)

    alt = f"sweep of {', '.join(results.names)}"
    return Drawing("sweep", draw, alt, width=WIDTH * len(names))


def _panel(ax: Axes, results: Sweep, name: str) -> None:
    points = list(results.runs)
    values = list(dict.fromkeys(point[0] for point in results.runs))
    numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    places = {value: float(value) if numeric else float(n) for n, value in enumerate(values)}  # type: ignore[arg-type]
    spread = results.spread(name)
    combinations = list(dict.fromkeys(point[1:] for point in results.runs))
    for number, combination in enumerate(combinations[:MAX_CURVES]):
        rows = [row for row, point in enumerate(points) if point[1:] == combination]
        curve = spread.loc[rows]
        curve.index = pd.Index([places[points[row][0]] for row in rows], dtype=float)
        label = _label(results.names[1:], combination)
        style.band(ax, number, curve["mean"], curve["std"], label)
    if name.startswith("relative"):
        ax.axhline(1.0, color=style.MUTED, **style.DOTTED)
    if numeric and is_log_spaced([places[value] for value in values]):
        ax.set_xscale("log")
        ax.set_xticks(list(places.values()), [as_text(value) for value in values])
        ax.xaxis.set_minor_locator(NullLocator())
    if not numeric:
        ax.set_xticks(list(places.values()), [as_text(value) for value in values])
    several = bool(spread["count"].max() > 1)
    ax.set_xlabel(results.names[0] + ("  (band: ± std over seeds)" if several else ""))
    style.ticks(ax, human_number)
    more = f" (first {MAX_CURVES})" if len(combinations) > MAX_CURVES else ""
    style.set_title(ax, _title(results.title_of(name)) + more)


def is_log_spaced(values: Sequence[float]) -> bool:
    """Return whether values are spaced more evenly on a logarithmic than on a linear axis.

    The values must be positive, and the largest value at least ten times the smallest value.
    """
    ordered = sorted(values)
    if len(ordered) < 2 or ordered[0] <= 0 or ordered[-1] < 10 * ordered[0]:
        return False
    if len(ordered) == 2:
        return True

    def unevenness(places: Sequence[float]) -> float:
        gaps = pd.Series(places).diff().dropna()
        return float(gaps.std(ddof=0) / gaps.mean())

    return unevenness([math.log(value) for value in ordered]) < unevenness(ordered)


def _title(name: str) -> str:
    for protocol, words in TEST_SETS.items():
        name = name.replace(f", {protocol},", f", {words},")
    return name[0].upper() + name[1:]
