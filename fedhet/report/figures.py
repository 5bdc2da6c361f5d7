"""Figures of a run: curves over rounds, and values of each client."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke

from fedhet.base.disk import Folder
from fedhet.base.metrics import ACCURACY, REGRESSION, Metric, metric_of
from fedhet.report import style
from fedhet.report.run import STAGES, TEST_SETS, Run
from fedhet.report.style import GAP, HEIGHT, WIDTH, Drawing
from fedhet.report.tables import MAX_MATRICES
from fedhet.runs.records import ConfusionMatrix
from fedhet.runs.units import human_bytes, human_seconds, plural, score

MAX_BARS = 50
"""Maximum number of bars; in longer runs, each bar is the mean over several rounds."""
STAGE_NAMES = {
    "train": "training", "evaluate": "evaluation", "server": "server", "overhead": "overhead",
}  # fmt: skip
MAX_PANELS, PANELS_PER_ROW = 12, 3
"""Maximum number of method metrics to plot, and maximum number of panels in a row."""
MAX_NAMED = 30
"""Maximum number of clients that are labeled with their names."""
MAX_CELLS = 12
"""Maximum number of classes of a confusion matrix with numbers in the cells."""


def write_figures(run: Run, *, paper: bool = False) -> list[Path]:
    """Write the figures of a run as PNG and SVG into `figures/`, and return the paths of the PNGs.

    With `paper`, writes PDFs with the size and fonts of a paper into `figures/paper/` instead.
    """
    directory = Folder(run.path / "figures" / ("paper" if paper else ""), run.path)
    write = Drawing.write_for_paper if paper else Drawing.write_files
    return [write(drawing, directory) for drawing in drawings(run)]


def drawings(run: Run) -> list[Drawing]:
    """Return the figures for which the run has data."""
    figures: list[Drawing | None] = [accuracy(run, run.protocols)] if run.protocols else []
    figures += [_traffic(run), _time(run), _loss(run), _by_cost(run, "epsilon")]
    figures += [_by_cost(run, "clock"), metrics(run.extra_metrics), _labels(run)]
    figures.append(_last_accuracies(run))
    if run.relative is not None:
        protocol, ratio = run.relative
        test_set = TEST_SETS.get(protocol, protocol)
        title = f"Accuracy relative to the models before the exchange, {test_set}"
        draw = partial(_models, scores=_by_model(run, ratio.per_client), title=title)
        figures.append(Drawing("relative", draw, "relative accuracy by client"))
    figures += [*confusions(run), _client_curves(run), _method(run)]
    return [drawing for drawing in figures if drawing]


# --- over rounds ------------------------------------------------------------------------------


def accuracy(run: Run, protocols: Sequence[str]) -> Drawing:
    """Plot the headline metric, with a panel per protocol and a curve per kind of model."""
    metric = metric_of(run.metric)

    def draw(figure: Figure) -> None:
        grid = figure.subplots(1, len(protocols), squeeze=False)
        for ax, protocol in zip(grid[0], protocols, strict=True):
            for kind in run.kinds(protocol):
                _curve(ax, run.curve(protocol, kind), kind, metric)
            if run.baseline and run.baseline_column:
                mean = run.baseline.curve(protocol, run.baseline_column[1])["mean"]
                if not mean.empty:
                    name, look = run.baseline.method, {"size": 2, **style.DOTTED}
                    label = f"{name}{GAP}{score(mean.iloc[-1], run.metric, 3)}"
                    style.line(ax, mean, style.OTHER_COLOR, label=label, **look)
            note = "dashes: worst client; band: ± std over clients" if len(run.clients) > 1 else ""
            whose = "the" if protocol == "common" else "each client's"
            title = f"{_capitalized(metric.title)} on {whose} {TEST_SETS.get(protocol, protocol)}"
            style.over_rounds(ax, run.costs.index, title, note)
            if metric.is_fraction:
                low, high = ax.get_ylim()
                pad = max(0.0, 0.1 - (high - low)) / 2
                ax.set_ylim(max(low - pad, -0.01), min(high + pad, 1.01))

    last = [
        f"{' '.join(column)} {score(run.last(*column).mean, run.metric, 3)}"
        for column in run.columns
        if column[0] in protocols
    ]
    rounds = plural(len(run.records), "round")
    alt = f"{metric.title} over {rounds}, in the last round: {', '.join(last)}"
    return Drawing("accuracy", draw, alt, width=WIDTH * len(protocols))


def _capitalized(title: str) -> str:
    return f"{title[0].upper()}{title[1:]}"


def _curve(ax: Axes, curve: pd.DataFrame, kind: str, metric: Metric) -> None:
    if curve.empty:
        return
    color = style.KIND_COLORS.get(kind, style.OTHER_COLOR)
    mean, worst = curve["mean"], curve["worst"]
    low = (mean - curve["std"]).clip(metric.lowest, metric.highest)
    high = (mean + curve["std"]).clip(metric.lowest, metric.highest)
    label = f"{kind}{GAP}{score(mean.iloc[-1], metric.name, 3)}"
    style.line(ax, mean, color, label=label)
    if not np.allclose(worst, mean, equal_nan=True):
        style.line(ax, worst, color, size=2, alpha=0.85, **style.DASHED)
    if len(curve) == 1:
        ax.vlines(curve.index, low, high, color=color, alpha=0.35, linewidth=5)
    else:
        ax.fill_between(curve.index, low, high, color=color, linewidth=0, alpha=0.13)


def _traffic(run: Run) -> Drawing:
    """Draw the cumulative uploaded and downloaded payload bytes over rounds."""
    totals = {way: run.costs[f"bytes_{way}"].cumsum() for way in ("up", "down")}
    ends = {way: human_bytes(float(total.iloc[-1])) for way, total in totals.items()}

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for number, (way, total) in enumerate(totals.items()):
            look: Any = {"label": f"{way}{GAP}{ends[way]}", "linestyle": style.DASHES[number]}
            style.line(ax, total, style.SERIES[number], **look)
        ax.set_ylim(bottom=0)
        style.over_rounds(ax, run.costs.index, "Cumulative bytes sent", text=style.in_bytes)

    rounds = plural(len(run.records), "round")
    alt = f"bytes sent over {rounds}, in total {ends['up']} up and {ends['down']} down"
    return Drawing("bytes", draw, alt)


def _time(run: Run) -> Drawing:
    """Draw the time by stage, with a bar for the full run and a bar for each round.

    If clients train at the same time, the sum of their times exceeds the wall time. The axis label
    therefore states both times.
    """
    stages = [stage for stage in STAGES if run.totals[stage] > 0]
    fractions = run.totals[stages] / run.totals[stages].sum()

    def draw(figure: Figure) -> None:
        top, ax = figure.subplots(2, 1, height_ratios=[1, 7])
        max_chars = style.legend_chars(top)

        # Draw the fractions of the stages as one horizontal bar.
        starts = fractions.cumsum() - fractions
        for stage, start, fraction in zip(stages, starts, fractions, strict=True):
            top.barh(0, fraction, left=start, color=style.STAGE_COLORS[stage], height=1)
            text = f"{STAGE_NAMES[stage]} {fraction:.0%}"
            if len(text) + 1 < fraction * max_chars:
                ink = style.ON_DARK if stage == "train" else style.ON_LIGHT
                look: Any = {"ha": "center", "va": "center", "color": ink, "fontsize": 8}
                top.text(start + fraction / 2, 0, text, **look)
        top.set_xlim(0, 1)
        top.axis("off")

        # Draw a stacked bar for each round or, in long runs, for several rounds.
        step = math.ceil(len(run.costs) / MAX_BARS)
        means = run.costs.reset_index().groupby(np.arange(len(run.costs)) // step).mean()
        means = means.set_index("round")
        rounds, bottoms = means.index, means[stages].cumsum(axis="columns") - means[stages]
        width = 0.78 * (rounds[1] - rounds[0] if len(rounds) > 1 else 0.4)
        for stage in stages:
            look = {"color": style.STAGE_COLORS[stage], "label": STAGE_NAMES[stage]}
            ax.bar(rounds, means[stage], bottom=bottoms[stage], width=width, **look)
        if means["seconds"].gt(0).any():
            halo = [Stroke(linewidth=3.2, foreground=style.PAPER), Normal()]
            look = {"linewidth": 1.2, "path_effects": halo, "label": "wall clock"}
            style.line(ax, means["seconds"], style.INK, **look)
        ax.set_ylim(bottom=0)
        work, wall = run.totals[stages].sum(), run.totals["seconds"]
        note = f"total of clients and server: {human_seconds(work)}"
        note += f", wall time: {human_seconds(wall)}" if wall > 0 else ""
        note += f"; bar: mean of {step} rounds" if step > 1 else ""
        seconds = "{:g} s".format
        style.over_rounds(ax, run.costs.index, note=note, text=seconds, margin=0.7 * step)
        handles, names = ax.get_legend_handles_labels()
        top.legend(
            handles, names, loc="lower left", bbox_to_anchor=(0, 1.1), labelcolor=style.INK,
            ncols=style.legend_columns(names, max_chars), handletextpad=0.5, columnspacing=1.0,
        )  # fmt: skip
        top.set_title("Time by stage", color=style.INK, pad=26)

    shares = (f"{STAGE_NAMES[stage]} {fractions[stage]:.0%}" for stage in stages)
    return Drawing("time", draw, f"seconds by stage: {', '.join(shares) or 'none'}")


def _loss(run: Run) -> Drawing | None:
    """Draw the mean training loss over rounds, with the range that contains 80 % of the clients."""
    mean = run.mean_loss
    if mean.empty:
        return None

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        style.line(ax, mean, label=f"mean{GAP}{mean.iloc[-1]:.3f}")
        each = run.losses.loc[mean.index]
        if each.count(axis="columns").max() > 2:
            low, high = (each.quantile(level, axis="columns") for level in (0.1, 0.9))
            look: Any = {"color": style.SERIES[0], "linewidth": 0, "alpha": 0.13}
            ax.fill_between(each.index, low, high, label="80 % of the clients", **look)
        style.over_rounds(ax, run.costs.index, "Training loss")

    alt = f"training loss over rounds, last mean: {mean.iloc[-1]:.3f}"
    return Drawing("loss", draw, alt)


def _by_cost(run: Run, cost: str) -> Drawing | None:
    """Plot the headline score against epsilon or simulated time (`clock`), if it is recorded."""
    total = float(run.totals[cost])
    if math.isnan(total) or not run.columns:
        return None
    name, words, _ = style.COST_AXES[cost]
    late = float(np.mean([len(record.late) for record in run.records]))
    note = f"  (on average {late:.3g} late clients per round)" if cost == "clock" else ""
    most = human_seconds(total) if cost == "clock" else f"{total:.3g}"

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        for kind in run.kinds(run.headline):
            means = run.curve(run.headline, kind)["mean"]
            curve = means.set_axis(run.costs[cost].loc[means.index].rename(cost))
            color = style.KIND_COLORS.get(kind, style.OTHER_COLOR)
            entry = f"{kind}{GAP}{score(means.iloc[-1], run.metric, 3)}"
            style.line(ax, curve, color, label=entry)
        where = TEST_SETS.get(run.headline, run.headline)
        title = f"{_capitalized(run.metric_title)} by {words}: {where}"
        style.over_cost(ax, cost, title, note)

    return Drawing(name, draw, f"{run.metric_title} by {words}, up to {most}")


def metrics(views: Sequence[tuple[str, Run]]) -> Drawing | None:
    """Draw the metrics in `Run.extra_metrics` over rounds, with a panel for each metric."""

    def draw(ax: Axes, title: str) -> None:
        view = dict(views)[title]
        for kind in view.kinds(view.headline):
            metric = replace(metric_of(view.metric), highest=math.inf)
            _curve(ax, view.curve(view.headline, kind), kind, metric)
        where = f", {TEST_SETS[view.headline]}" if view.headline in TEST_SETS else ""
        style.over_rounds(ax, view.costs.index, f"{_capitalized(title)}{where}")

    return _grid("metrics", list(dict(views)), draw, "further metrics over rounds")


def _method(run: Run) -> Drawing | None:
    """Draw the method's metrics over rounds, with a panel for each metric."""

    def draw(ax: Axes, name: str) -> None:
        style.line(ax, run.method_metrics[name])
        style.over_rounds(ax, run.method_metrics.index, style.short(run.title_of(name), 42))

    return _grid("method", list(run.method_metrics)[:MAX_PANELS], draw, "metrics of the method")


def _grid(
    name: str, panels: Sequence[str], draw: Callable[[Axes, str], None], alt: str
) -> Drawing | None:
    """Return a figure with small panels, each filled by `draw`, or None if `panels` is empty."""
    columns = min(len(panels), PANELS_PER_ROW)
    if not columns:
        return None
    rows = math.ceil(len(panels) / columns)

    def fill(figure: Figure) -> None:
        grid = figure.subplots(rows, columns, squeeze=False).flatten()
        for ax, panel in zip_longest(grid, panels):
            ax.axis("off") if panel is None else draw(ax, panel)

    size = {"width": WIDTH * 0.75 * columns, "height": HEIGHT * 0.75 * rows}
    return Drawing(name, fill, alt, **size)


# --- clients ----------------------------------------------------------------------------------


def _labels(run: Run) -> Drawing | None:
    """Draw the number of samples of each class on each client."""
    if not run.partition or not run.partition.counts or not run.partition.classes:
        return None
    classes = run.partition.classes
    counts = pd.DataFrame.from_dict(run.partition.counts, orient="index")
    counts = counts.loc[[name for name in run.clients if name in counts.index]]
    top = max(int(counts.to_numpy().max()), 1)
    of = "range" if metric_of(run.headline_metric).task == REGRESSION else "class"

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        norm = PowerNorm(0.6, vmin=0, vmax=top)
        ax.imshow(counts, cmap=style.HEAT, norm=norm, aspect="auto", interpolation="nearest")
        if len(counts) <= MAX_NAMED and len(classes) <= 12 and top < 10_000:
            for (row, column), count in np.ndenumerate(counts):
                if count:
                    ink = style.ON_DARK if float(norm(int(count))) > 0.55 else style.INK
                    look: Any = {"ha": "center", "va": "center", "fontsize": 7, "color": ink}
                    ax.text(column, row, str(count), **look)
        ax.grid(visible=False)
        _set_names(ax, "y", list(counts.index))
        _set_names(ax, "x", classes)
        ax.set_xlabel(of if of == "class" else "range of the target")
        ax.set_ylabel("client" if len(counts) > MAX_NAMED else "")
        what = "Labels" if of == "class" else "Targets"
        style.set_title(ax, f"{what}: samples per {of} (at most {top:,})")

    height = min(max(2.5, 1.5 + 0.2 * len(counts)), 5.6)
    return Drawing("labels", draw, "labels by client", height=height)


def confusions(run: Run) -> list[Drawing]:
    """Draw the confusion matrices of the headline models, normalized by row."""
    shown = [*run.confusion_matrices.items()][:MAX_MATRICES]
    return [
        _confusion(title, matrix, run.class_names, f"-{number}" if number else "")
        for number, (title, matrix) in enumerate(shown)
    ]


def _confusion(title: str, matrix: ConfusionMatrix, names: Sequence[str], suffix: str) -> Drawing:
    counts = np.array(matrix.counts)
    totals = counts.sum(1, keepdims=True)
    fractions = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        look: Any = {"vmin": 0.0, "vmax": 1.0, "interpolation": "nearest", "aspect": "auto"}
        ax.imshow(np.nan_to_num(fractions), cmap=style.HEAT, **look)
        if len(counts) <= MAX_CELLS:
            for (row, column), fraction in np.ndenumerate(fractions):
                if counts[row, column]:
                    ink = style.ON_DARK if fraction > 0.55 else style.INK
                    at: Any = {"ha": "center", "va": "center", "fontsize": 7.5, "color": ink}
                    percent = f"{100 * fraction:.0f}" if fraction >= 0.01 else "<1"
                    ax.text(column, row, percent, **at)
        ax.grid(visible=False)
        _set_names(ax, "y", names)
        _set_names(ax, "x", names)
        ax.set_xlabel(
            "predicted class" + ("  (% of the true class)" if len(counts) <= MAX_CELLS else "")
        )
        ax.set_ylabel("true class")
        style.set_title(ax, f"Confusion matrix: {title}")

    right = int(np.trace(counts))
    correct = f"{right:,} of {matrix.samples:,} correct"
    alt = f"confusion matrix of {len(counts)} classes, {title}: {correct}"
    height = WIDTH * (0.5 if len(counts) <= 3 else 0.85 if len(counts) <= MAX_CELLS else 1.0)
    return Drawing(f"confusion{suffix}", draw, alt, height=height)


def _set_names(ax: Axes, axis: str, names: Sequence[str]) -> None:
    """Label the ticks on an axis, or every n-th tick if there are many names."""
    max_ticks = MAX_NAMED if axis == "y" else 12 if max(map(len, names)) > 3 else 20
    ticks = range(0, len(names), math.ceil(len(names) / max_ticks))
    shown = [style.short(names[tick]) for tick in ticks]
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_ticks(list(ticks), shown)
    if axis == "x" and len(shown) * max(map(len, shown)) > 70:
        ax.tick_params(axis="x", labelrotation=40)
        for label in ax.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _last_accuracies(run: Run) -> Drawing | None:
    """Draw the last accuracy of each client, colored by model."""
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    scores = _by_model(run, run.last(protocol, kind).per_client)
    if scores.empty:
        return None
    title, metric = f"Clients: {kind} model, {TEST_SETS.get(protocol, protocol)}", run.metric
    if len(scores) <= MAX_NAMED:
        draw = partial(_rows, scores=scores, title=title, metric=metric)
    else:
        draw = partial(_models, scores=scores, title=title, metric=metric)
    height = min(max(2.5, 1.5 + 0.2 * len(scores)), 5.6)
    return Drawing("clients", draw, f"last {run.metric_title} by client", height=height)


def _client_curves(run: Run) -> Drawing | None:
    """Draw the accuracy of each client over rounds, colored by model.

    Returns None for a single client or a single round.
    """
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    each = run.by_client(protocol, kind).dropna(axis="columns", how="all")
    if min(each.shape) < 2:
        return None
    models = {name: run.models.get(name, "model unknown") for name in each}
    pool = sorted({*models.values()})

    def draw(figure: Figure) -> None:
        ax = figure.subplots()
        alpha = min(0.8, max(0.25, 8 / len(each.columns)))
        for name in sorted(each, key=lambda name: pool.index(models[name])):
            model = models[name]
            color, _ = style.mark(pool.index(model))
            ax.plot(each.index, each[name], color=color, linewidth=1.0, alpha=alpha)
        for number, model in enumerate(pool):
            ax.plot([], [], color=style.mark(number)[0], label=style.short(model))
        mean = each.mean(axis="columns")
        style.line(ax, mean, style.INK, label="mean", linewidth=2.2)
        where = TEST_SETS.get(protocol, protocol)
        title = f"{_capitalized(run.metric_title)} per client: {kind} model, {where}"
        style.over_rounds(ax, each.index, title)

    return Drawing("client-curves", draw, f"{run.metric_title} of each client over rounds")


def _by_model(run: Run, values: Mapping[str, float]) -> pd.DataFrame:
    """Return the model and value of each client that has a value, in ascending order of values."""
    frame = pd.DataFrame({"value": pd.Series(values, dtype=float).dropna()})
    models = [run.models.get(name, "model unknown") for name in frame.index]
    return frame.assign(model=models).sort_values("value", kind="stable")


def _rows(figure: Figure, scores: pd.DataFrame, title: str, metric: str) -> None:
    """Draw the score of each client in a separate row, colored by model."""
    ax = figure.subplots()
    mean = float(scores["value"].mean())
    ax.axvline(mean, color=style.MUTED, zorder=1, **style.DASHED)
    rows = scores.assign(row=range(len(scores)))
    for number, (model, clients) in enumerate(rows.groupby("model")):
        color, mark = style.mark(number)
        ax.hlines(clients["row"], mean, clients["value"], color=color, alpha=0.45)
        look: Any = {"color": color, "marker": mark, "label": style.short(str(model))}
        ax.scatter(clients["value"], clients["row"], s=34, zorder=3, **look)
    _set_names(ax, "y", list(scores.index))
    style.ticks(ax, axis="x")
    ax.set_ylim(-0.8, len(scores) - 0.2)
    ax.grid(visible=False)
    ax.grid(visible=True, axis="x")
    ax.set_xlabel(f"{metric_of(metric).title} (line: mean {score(mean, metric, 3)})")
    style.set_title(ax, title)


def _models(figure: Figure, scores: pd.DataFrame, title: str, metric: str = ACCURACY) -> None:
    """Draw a column for each model, with a marker for each client."""
    ax = figure.subplots()
    pool = {str(model): clients["value"] for model, clients in scores.groupby("model")}
    for column, values in enumerate(pool.values()):
        color, mark = style.mark(column)
        # Spread the markers of similar values horizontally, so that they do not overlap.
        span = values.max() - values.min() or 1.0
        bins = values.groupby((values - values.min()) // (span / 24))
        number, size = bins.cumcount(), bins.transform("size")
        offsets = (2 * number / (size - 1).clip(lower=1) - 1).where(size > 1, 0.0)
        places = column + 0.3 * (size / 8).clip(upper=1) * offsets
        ax.scatter(places, values, color=color, marker=mark, s=18, alpha=0.75, linewidth=0)
        mean = float(values.mean())
        ax.hlines(mean, column - 0.36, column + 0.36, color=style.INK, linewidth=1.4)
        end = (column + 0.38, mean)
        ax.annotate(score(mean, metric, 3), end, fontsize=8, va="center", color=style.INK)
    _set_names(ax, "x", list(pool))
    ax.set_xlim(-0.6, len(pool) - 0.2)
    ax.set_xlabel("model  (marker: client; bar: mean)")
    style.ticks(ax)
    style.set_title(ax, title)
