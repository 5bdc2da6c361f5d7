"""Figures of one run that show its clients: their labels and their accuracies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from fedhet.report import canvas, frames, style
from fedhet.report.run import TEST_SETS, Run
from fedhet.report.style import Drawing

NAMED = 30
"""Maximum number of clients that are drawn with their names."""


def labels(run: Run) -> Drawing | None:
    """Draw the number of samples of each class at each client."""
    if not run.partition or not run.partition.counts or not run.partition.classes:
        return None
    counts = pd.DataFrame.from_dict(run.partition.counts, orient="index")
    counts = counts.loc[[name for name in run.clients if name in counts.index]]
    draw = partial(_labels, counts=counts, classes=run.partition.classes)
    return Drawing("labels", draw, "labels by client", height=_tall(len(counts)))


def _labels(figure: Figure, counts: pd.DataFrame, classes: Sequence[str]) -> None:
    ax = figure.subplots()
    top = max(int(counts.to_numpy().max()), 1)
    norm = PowerNorm(0.6, vmin=0, vmax=top)
    ax.imshow(counts, cmap=style.HEAT, norm=norm, aspect="auto", interpolation="nearest")
    if len(counts) <= NAMED and len(classes) <= 12 and top < 10_000:
        _cell_counts(ax, counts, norm)
    ax.grid(visible=False)
    for row, (name, each) in enumerate(counts.iterrows()):
        shown = [f"{label}: {count:,}" for label, count in zip(classes, each, strict=True)]
        places = pd.Series(float(row), range(len(classes)))
        canvas.record(ax, "labels", places, str(name), shown)
    canvas.panel(ax, mode="point", unit="none", x_unit="none", dots=False)
    _names(ax, "y", list(counts.index))
    _names(ax, "x", classes)
    ax.set_xlabel("class")
    ax.set_ylabel("client" if len(counts) > NAMED else "")
    style.head(ax, f"Labels: samples per class (at most {top:,})")


def _cell_counts(ax: Axes, counts: pd.DataFrame, norm: PowerNorm) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = style.ON_DARK if float(norm(int(count))) > 0.55 else style.INK
            ax.text(column, row, str(count), ha="center", va="center", fontsize=7, color=colour)


def _tall(rows: int) -> float:
    """Return the height of a figure with one row per client."""
    return min(max(2.5, 1.5 + 0.2 * rows), 5.6)


def _names(ax: Axes, axis: str, names: Sequence[str]) -> None:
    """Label the ticks of one axis; only some of them if there are many."""
    room = NAMED if axis == "y" else 12 if max(map(len, names)) > 3 else 20
    ticks = range(0, len(names), math.ceil(len(names) / room))
    shown = [style.short(names[tick]) for tick in ticks]
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_ticks(list(ticks), shown)
    if axis == "x" and len(shown) * max(map(len, shown)) > 70:
        ax.tick_params(axis="x", labelrotation=40)
        for label in ax.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def accuracies(run: Run) -> Drawing | None:
    """Draw the last accuracy of every client, coloured by its model."""
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    known = _by_model(run, run.last(protocol, kind).per_client)
    if known.empty:
        return None
    title = f"Clients: {kind} model, {TEST_SETS.get(protocol, protocol)}"
    draw = partial(_rows if len(known) <= NAMED else _models, scores=known, title=title)
    return Drawing("clients", draw, "last accuracy by client", height=_tall(len(known)))


def curves(run: Run) -> Drawing | None:
    """Draw a curve for each client, coloured by its model; None for one client or one round."""
    if not run.columns:
        return None
    protocol, kind = run.columns[0]
    each = frames.by_client(run.records, protocol, kind).dropna(axis="columns", how="all")
    if min(each.shape) < 2:
        return None
    title = f"Accuracy per client: {kind} model, {TEST_SETS.get(protocol, protocol)}"
    models = {name: run.models.get(name, "model unknown") for name in each}
    draw = partial(_curves, each=each, models=models, title=title)
    return Drawing("client-curves", draw, "accuracy of every client over rounds")


def _curves(figure: Figure, each: pd.DataFrame, models: Mapping[str, str], title: str) -> None:
    ax = figure.subplots()
    pool = sorted({*models.values()})
    alpha = min(0.8, max(0.25, 8 / len(each.columns)))
    for name in sorted(each, key=lambda name: pool.index(models[name])):
        model = models[name]
        colour, _ = style.mark(pool.index(model))
        drawn = ax.plot(each.index, each[name], color=colour, linewidth=1.0, alpha=alpha)
        canvas.tag(ax, model, drawn)
        canvas.record(ax, model, each[name], name)
    for number, model in enumerate(pool):
        key = ax.plot([], [], color=style.mark(number)[0], label=style.short(model))
        canvas.tag(ax, model, key)
    mean = each.mean(axis="columns")
    style.line(ax, mean, style.INK, series="mean", label="mean", linewidth=2.2)
    canvas.panel(ax, mode="point")
    style.over_rounds(ax, each.index)
    style.ticks(ax)
    style.head(ax, title)


def relative(run: Run) -> Drawing | None:
    """Draw each client's accuracy relative to its model after local training alone."""
    if run.relative is None:
        return None
    protocol, ratio = run.relative
    title = f"Accuracy relative to training alone, {TEST_SETS.get(protocol, protocol)}"
    draw = partial(_models, scores=_by_model(run, ratio.per_client), title=title)
    return Drawing("relative", draw, "relative accuracy by client")


def _by_model(run: Run, values: Mapping[str, float]) -> pd.DataFrame:
    """Return the clients that have a value, lowest first, with their `model` and `value`."""
    frame = pd.DataFrame({"value": pd.Series(values, dtype=float).dropna()})
    models = [run.models.get(name, "model unknown") for name in frame.index]
    return frame.assign(model=models).sort_values("value", kind="stable")


def _rows(figure: Figure, scores: pd.DataFrame, title: str) -> None:
    """Draw one row per client."""
    ax = figure.subplots()
    mean = float(scores["value"].mean())
    ax.axvline(mean, color=style.MUTED, zorder=1, **style.DASHED)
    rows = scores.assign(row=range(len(scores)))
    for number, (model, some) in enumerate(rows.groupby("model")):
        colour, mark = style.mark(number)
        rules = ax.hlines(some["row"], mean, some["value"], color=colour, alpha=0.45)
        dots = ax.scatter(
            some["value"], some["row"], color=colour, marker=mark, s=34, zorder=3,
            label=style.short(str(model)),
        )  # fmt: skip
        canvas.tag(ax, str(model), [rules, dots])
        places = pd.Series(some["row"].to_numpy(), some["value"])
        canvas.record(ax, str(model), places, str(model), [*map(str, some.index)])
    canvas.panel(ax, mode="point", unit="none", x_unit="score")
    _names(ax, "y", list(scores.index))
    style.ticks(ax, axis="x")
    ax.set_ylim(-0.8, len(scores) - 0.2)
    style.grid(ax, "x")
    ax.set_xlabel(f"accuracy (line: mean {mean:.3f})")
    style.head(ax, title)


def _models(figure: Figure, scores: pd.DataFrame, title: str) -> None:
    """Draw one column per model, with one mark per client."""
    ax = figure.subplots()
    pool = {str(model): some["value"] for model, some in scores.groupby("model")}
    for column, (model, values) in enumerate(pool.items()):
        _model(ax, column, values, model)
    _names(ax, "x", list(pool))
    ax.set_xlim(-0.6, len(pool) - 0.2)
    ax.set_xlabel("model  (a mark: a client; bar: mean)")
    style.ticks(ax)
    style.head(ax, title)


def _model(ax: Axes, column: int, values: pd.Series, model: str) -> None:
    colour, mark = style.mark(column)
    places = column + _swarm(values)
    ax.scatter(places, values, color=colour, marker=mark, s=18, alpha=0.75, linewidth=0)
    canvas.record(ax, model, pd.Series(values.to_numpy(), places), model, [*map(str, values.index)])
    canvas.panel(ax, mode="point", x_unit="none")
    mean = float(values.mean())
    ax.hlines(mean, column - 0.36, column + 0.36, color=style.INK, linewidth=1.4)
    ax.annotate(f"{mean:.3f}", (column + 0.38, mean), fontsize=8, va="center", color=style.INK)


def _swarm(values: pd.Series, reach: float = 0.3) -> pd.Series:
    """Return horizontal offsets that separate values of a bin: the fuller the bin, the wider."""
    span = values.max() - values.min() or 1.0
    bins = values.groupby((values - values.min()) // (span / 24))
    number, size = bins.cumcount(), bins.transform("size")
    width = reach * (size / 8).clip(upper=1)
    return width * (2 * number / (size - 1).clip(lower=1) - 1).where(size > 1, 0.0)
