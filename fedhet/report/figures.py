"""The figures of one run: each a function that draws onto a matplotlib Figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.patheffects import Normal, Stroke
from numpy.typing import NDArray

from fedhet.report import style
from fedhet.report.run import PROTOCOLS, STAGES, Run
from fedhet.report.style import Drawing
from fedhet.report.units import human_bytes, human_seconds, printable

WIDTH, HEIGHT = 5.4, 3.5
GAP = "\N{EN SPACE}"
"""Between a name and its number: SVG would merge two common spaces into one."""
BARS = 50
"""Longer runs have the mean of several rounds in a bar."""
NAMED = 30
"""Up to so many clients are drawn each with its name."""
STAGE_NAMES = {
    "train": "training", "evaluate": "evaluation", "server": "server", "overhead": "overhead",
}  # fmt: skip
Numbers = NDArray[np.float64]
Look = dict[str, Any]
DASHED: Look = {"linewidth": 1.0, "linestyle": (0, (4, 2.5))}


def write_figures(run: Run) -> list[Path]:
    """Write the run's figures as PNG into `figures/` and return their paths."""
    folder = run.path / "figures"
    folder.mkdir(exist_ok=True)
    return [drawing.png(folder) for drawing in drawings(run)]


def drawings(run: Run) -> list[Drawing]:
    """Return the figures that the run has data for."""
    found = [accuracy(run, run.protocols) if run.protocols else None, traffic(run), time(run)]
    found += [loss(run), labels(run), clients(run), relative(run)]
    return [drawing for drawing in found if drawing]


def accuracy(run: Run, protocols: Sequence[str]) -> Drawing:
    """Accuracy over rounds: a panel a protocol, a curve a kind of model."""
    width = WIDTH * len(protocols)
    draw = partial(_accuracy, run=run, protocols=protocols)
    return Drawing("accuracy", width, HEIGHT, draw, "accuracy over rounds")


def _accuracy(figure: Figure, run: Run, protocols: Sequence[str]) -> None:
    grid = figure.subplots(1, len(protocols), squeeze=False)
    for ax, protocol in zip(grid[0], protocols, strict=True):
        for kind in run.kinds(protocol):
            _accuracy_curve(ax, run, protocol, kind)
        note = "dashes: worst client; band: ± std over clients" if len(run.clients) > 1 else ""
        style.over_rounds(ax, [record.round for record in run.records], note=note)
        _accuracy_limits(ax)
        name = PROTOCOLS.get(protocol, protocol)
        style.head(ax, f"Accuracy on the {name}" if protocol == "common" else _own(name))


def _own(name: str) -> str:
    return f"Accuracy on each client's {name}"


def _accuracy_curve(ax: Axes, run: Run, protocol: str, kind: str) -> None:
    curve = run.curve(protocol, kind)
    if not curve:
        return
    rounds = [number for number, _ in curve]
    mean, std, worst = (
        np.array([getattr(scores, name) for _, scores in curve], dtype=float)
        for name in ("mean", "std", "worst")
    )
    colour = style.KIND_COLOURS.get(kind, style.OTHER_COLOUR)
    low, high = np.clip(mean - std, 0, 1), np.clip(mean + std, 0, 1)
    if len(rounds) == 1:
        ax.vlines(rounds, low, high, color=colour, alpha=0.35, linewidth=5)
    else:
        ax.fill_between(rounds, low, high, color=colour, alpha=0.13, linewidth=0)
    mark = style.marker(len(rounds))
    if not np.allclose(worst, mean, equal_nan=True):
        ax.plot(rounds, worst, color=colour, alpha=0.85, marker=mark, markersize=2, **DASHED)
    label = f"{kind}{GAP}{mean[-1]:.3f}"
    ax.plot(rounds, mean, color=colour, label=label, marker=mark, markersize=3.2)


def _accuracy_limits(ax: Axes) -> None:
    low, high = ax.get_ylim()
    pad = max(0.0, 0.1 - (high - low)) / 2
    ax.set_ylim(max(low - pad, -0.01), min(high + pad, 1.01))
    style.ticks(ax)


def traffic(run: Run) -> Drawing:
    """Payload bytes up and down, cumulated over rounds."""
    return Drawing("bytes", WIDTH, HEIGHT, partial(_traffic, run=run), "bytes sent over rounds")


def _traffic(figure: Figure, run: Run) -> None:
    ax = figure.subplots()
    rounds = [record.round for record in run.records]
    for name, colour, dash in (("up", 0, "-"), ("down", 1, style.DASHES[1])):
        total = np.cumsum([getattr(record, f"bytes_{name}") for record in run.records])
        label = f"{name}{GAP}{human_bytes(float(total[-1]))}"
        colour_name, mark = style.SERIES[colour], style.marker(len(rounds))
        ax.plot(
            rounds, total, color=colour_name, label=label, linestyle=dash, marker=mark,
            markersize=3.2,
        )  # fmt: skip
    ax.set_ylim(bottom=0)
    style.ticks(ax, style.in_bytes)
    style.over_rounds(ax, rounds)
    style.head(ax, "Bytes sent, cumulated")


def time(run: Run) -> Drawing:
    """Where the time went: the whole run as one bar, and every round."""
    return Drawing("time", WIDTH, HEIGHT, partial(_time, run=run), "seconds by stage")


def _time(figure: Figure, run: Run) -> None:
    top, ax = figure.subplots(2, 1, height_ratios=[1, 7])
    stages = [stage for stage in STAGES if run.seconds.get(stage, 0.0) > 0]
    _time_bar(top, run.seconds, stages)
    step = math.ceil(len(run.records) / BARS)
    rounds = _binned([record.round for record in run.records], step)
    bottom: Numbers = np.zeros(len(rounds))
    width = 0.78 * (rounds[1] - rounds[0] if len(rounds) > 1 else 0.4)
    for stage in stages:
        seconds = np.nan_to_num([record.seconds.get(stage, 0.0) for record in run.records])
        values = _binned(seconds, step)
        colour, name = style.STAGE_COLOURS[stage], STAGE_NAMES[stage]
        ax.bar(rounds, values, bottom=bottom, color=colour, label=name, width=width)
        bottom = bottom + values
    _wall(ax, rounds, _binned([r.seconds.get("total", math.nan) for r in run.records], step))
    ax.set_ylim(bottom=0)
    style.ticks(ax, "{:g} s".format)
    whole = [record.round for record in run.records]
    note = "training, evaluation: sums over clients"
    note += f"; a bar: mean of {step}" if step > 1 else ""
    style.over_rounds(ax, whole, margin=0.7 * step, note=note)
    _time_head(top, ax)


def _binned(values: Sequence[float] | Numbers, step: int) -> Numbers:
    """Return the means of every `step` values."""
    edges = np.arange(0, len(values), step)
    sums = np.add.reduceat(np.asarray(values, dtype=float), edges)
    return np.asarray(sums / np.diff([*edges, len(values)]))


def _wall(ax: Axes, rounds: Numbers, seconds: Numbers) -> None:
    if not np.isfinite(seconds).any():
        return
    halo = [Stroke(linewidth=3.2, foreground=style.PAPER), Normal()]
    ax.plot(
        rounds, seconds, label="wall clock", marker=style.marker(len(rounds)), markersize=3.2,
        color=style.INK, linewidth=1.2, path_effects=halo,
    )  # fmt: skip


def _time_head(top: Axes, ax: Axes) -> None:
    handles, names = ax.get_legend_handles_labels()
    top.legend(
        handles, names, loc="lower left", bbox_to_anchor=(0, 1.1), ncols=5, labelcolor=style.INK,
        handletextpad=0.5, columnspacing=1.0,
    )  # fmt: skip
    top.set_title("Where the time went", color=style.INK, pad=26)


def _time_bar(ax: Axes, seconds: Mapping[str, float], stages: Sequence[str]) -> None:
    whole, left = math.fsum(seconds[stage] for stage in stages), 0.0
    for stage in stages:
        share = seconds[stage] / whole
        ax.barh(0, share, left=left, color=style.STAGE_COLOURS[stage], height=1)
        if share > 0.16:
            text = f"{human_seconds(seconds[stage])} · {share:.0%}"
            ink = style.ON_DARK if stage == "train" else style.ON_LIGHT
            ax.text(left + share / 2, 0, text, ha="center", va="center", color=ink, fontsize=8)
        left += share
    ax.set_xlim(0, 1)
    ax.axis("off")


def loss(run: Run) -> Drawing | None:
    """Training loss over rounds, with the span that most clients lie in."""
    known = [record for record in run.records if math.isfinite(record.loss.mean)]
    if not known:
        return None
    return Drawing("loss", WIDTH, HEIGHT, partial(_loss, run=run), "training loss over rounds")


def _loss(figure: Figure, run: Run) -> None:
    ax = figure.subplots()
    known = [record for record in run.records if math.isfinite(record.loss.mean)]
    rounds, mean = [r.round for r in known], np.array([r.loss.mean for r in known])
    label, mark = f"mean{GAP}{mean[-1]:.3f}", style.marker(len(rounds))
    ax.plot(rounds, mean, color=style.SERIES[0], label=label, marker=mark, markersize=3.2)
    each = [[x for x in r.loss.per_client.values() if math.isfinite(x)] for r in known]
    if max(map(len, each)) > 2:
        spans = [np.quantile(row, (0.1, 0.9)) if row else (math.nan, math.nan) for row in each]
        low, high = np.array(spans).T
        look: Look = {"color": style.SERIES[0], "alpha": 0.13, "linewidth": 0}
        ax.fill_between(rounds, low, high, label="80 % of the clients", **look)
    style.over_rounds(ax, [record.round for record in run.records])
    style.ticks(ax)
    style.head(ax, "Training loss")


def _tall(rows: int) -> float:
    """Return the height of a figure with a row a client."""
    return min(max(2.5, 1.5 + 0.2 * rows), 5.6)


def labels(run: Run) -> Drawing | None:
    """How many samples of each class each client holds."""
    if not run.labels or not run.labels.counts or not run.labels.classes:
        return None
    height = _tall(len(run.labels.counts))
    return Drawing("labels", WIDTH, height, partial(_labels, run=run), "labels by client")


def _labels(figure: Figure, run: Run) -> None:
    assert run.labels is not None
    ax = figure.subplots()
    names = [name for name in run.clients if name in run.labels.counts]
    counts = np.array([run.labels.counts[name] for name in names])
    top = max(int(counts.max()), 1)
    norm = PowerNorm(0.6, vmin=0, vmax=top)
    ax.imshow(counts, cmap=style.HEAT, norm=norm, aspect="auto", interpolation="nearest")
    if counts.shape[0] <= NAMED and counts.shape[1] <= 12 and top < 10_000:
        _cell_counts(ax, counts, norm)
    ax.grid(visible=False)
    _names(ax, "y", names)
    _names(ax, "x", list(run.labels.classes))
    ax.set_xlabel("class")
    ax.set_ylabel("client" if len(names) > NAMED else "")
    style.head(ax, f"Labels: samples a class (at most {top:,})")


def _cell_counts(ax: Axes, counts: NDArray[np.int64], norm: PowerNorm) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = style.ON_DARK if float(norm(int(count))) > 0.55 else style.INK
            ax.text(column, row, str(count), ha="center", va="center", fontsize=7, color=colour)


def _names(ax: Axes, axis: str, names: Sequence[str]) -> None:
    """Name the ticks of one axis; where there are many, only some of them."""
    room = NAMED if axis == "y" else 12 if max(map(len, names)) > 3 else 20
    step = math.ceil(len(names) / room)
    ticks = range(0, len(names), step)
    shown = [_short(names[tick]) for tick in ticks]
    chosen = ax.yaxis if axis == "y" else ax.xaxis
    chosen.set_ticks(list(ticks), shown)
    if axis == "x" and len(shown) * max(map(len, shown)) > 70:
        ax.tick_params(axis="x", labelrotation=40)
        for label in ax.get_xticklabels():
            label.set(ha="right", rotation_mode="anchor")


def _short(name: str, width: int = 16) -> str:
    name = printable(name)
    return name if len(name) <= width else name[: width - 1] + "…"


def clients(run: Run) -> Drawing | None:
    """The last accuracy of every client, coloured by its model."""
    if not run.columns:
        return None
    scores = run.last(*run.columns[0]).per_client
    known = {name: value for name, value in scores.items() if math.isfinite(value)}
    if not known:
        return None
    few = len(known) <= NAMED
    draw = partial(
        _client_rows if few else _client_models, run=run, scores=known, title=_client_title(run)
    )
    return Drawing("clients", WIDTH, _tall(len(known)), draw, "last accuracy by client")


def relative(run: Run) -> Drawing | None:
    """Each client's accuracy over that of its model after training alone, by model."""
    if run.relative is None:
        return None
    protocol, ratio = run.relative
    title = f"Accuracy relative to training alone, {PROTOCOLS.get(protocol, protocol)}"
    draw = partial(_client_models, run=run, scores=ratio.per_client, title=title)
    return Drawing("relative", WIDTH, HEIGHT, draw, "relative accuracy by client")


def _client_title(run: Run) -> str:
    protocol, kind = run.columns[0]
    return f"Clients: {kind} model, {PROTOCOLS.get(protocol, protocol)}"


def _pool(run: Run, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the clients by model; models in the order of their names."""
    pool: dict[str, list[str]] = {}
    for name in names:
        pool.setdefault(run.models.get(name, "model unknown"), []).append(name)
    return dict(sorted(pool.items()))


def _client_rows(figure: Figure, run: Run, scores: Mapping[str, float], title: str) -> None:
    ax = figure.subplots()
    ordered = sorted(scores, key=lambda name: scores[name])
    rows = {name: row for row, name in enumerate(ordered)}
    mean = float(np.mean([*scores.values()]))
    ax.axvline(mean, color=style.MUTED, zorder=1, **DASHED)
    for number, (model, names) in enumerate(_pool(run, ordered).items()):
        colour, mark = style.mark(number)
        places, values = [rows[name] for name in names], [scores[name] for name in names]
        ax.hlines(places, mean, values, color=colour, linewidth=1.4, alpha=0.45)
        ax.scatter(values, places, color=colour, marker=mark, s=34, label=_short(model), zorder=3)
    _names(ax, "y", ordered)
    style.ticks(ax, axis="x")
    ax.set_ylim(-0.8, len(ordered) - 0.2)
    ax.grid(visible=True, axis="x")
    ax.grid(visible=False, axis="y")
    ax.set_xlabel(f"accuracy (line: mean {mean:.3f})")
    style.head(ax, title)


def _client_models(figure: Figure, run: Run, scores: Mapping[str, float], title: str) -> None:
    ax = figure.subplots()
    pool = _pool(run, list(scores))
    for column, (_, names) in enumerate(pool.items()):
        colour, mark = style.mark(column)
        values = np.sort([scores[name] for name in names])
        ax.scatter(
            column + _swarm(values), values, color=colour, marker=mark, s=18, alpha=0.75,
            linewidth=0,
        )  # fmt: skip
        mean = float(values.mean())
        ax.hlines(mean, column - 0.36, column + 0.36, color=style.INK, linewidth=1.4)
        ax.annotate(f"{mean:.3f}", (column + 0.38, mean), fontsize=8, va="center", color=style.INK)
    _names(ax, "x", list(pool))
    ax.set_xlim(-0.6, len(pool) - 0.2)
    ax.set_xlabel("model  (a mark: a client; bar: mean)")
    style.ticks(ax)
    style.head(ax, title)


def _swarm(values: Numbers, reach: float = 0.3) -> Numbers:
    """Return sideways shifts that part equal-looking values: the fuller a bin, the wider."""
    span = float(np.ptp(values)) or 1.0
    bins = np.floor((values - values.min()) / span * 24).astype(int)
    shifts: Numbers = np.zeros(len(values))
    for number in np.unique(bins):
        inside = np.flatnonzero(bins == number)
        width = reach * min(1.0, len(inside) / 8)
        shifts[inside] = np.linspace(-width, width, len(inside)) if len(inside) > 1 else 0.0
    return shifts
