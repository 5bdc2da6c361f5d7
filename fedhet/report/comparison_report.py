"""A comparison's figures and files: its page, its tables, and its numbers as JSON and CSV."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_json

from fedhet.base.disk import Folder, write_text
from fedhet.report import canvas, style
from fedhet.report.comparison import Comparison, Difference, compare
from fedhet.report.groups import Group
from fedhet.report.page import render_comparison
from fedhet.report.run import TEST_SETS
from fedhet.report.style import Drawing
from fedhet.report.tables import (
    TAIL_OF,
    comparison_cells,
    comparison_latex,
    markdown,
    paired_cells,
    paired_legend,
    plain,
)
from fedhet.runs.units import human_number, path_text

SHOWN = 12
"""Maximum number of groups, the best ones, that are drawn as curves."""
COST_AXES = {
    "bytes": ("for bytes", "bytes sent, up and down", "bytes"),
    "epsilon": ("for epsilon", "epsilon spent, the largest of any client", "number"),
    "clock": ("by simulated time", "simulated hours", "seconds"),
}
"""The costs over which accuracy is drawn: the end of the title, the axis' label, and its unit."""
COSTS = ("bytes_up", "bytes_down", "seconds", "start")


# --- files ------------------------------------------------------------------------------------


def write_comparison(comparison: Comparison, out_dir: Path | str) -> list[Path]:
    """Write compare.png, .html, .md, .json and the requested figures; return their paths.

    Beside each PNG, an SVG of the same figure is written.
    """
    out = Path(out_dir)
    page = drawings(comparison)
    own = page[len(page) - len(comparison.figures) :]
    pngs = [figure.write(Folder(out)) for figure in (overview(comparison), *own)]
    html = write_text(out / "compare.html", render_comparison(comparison, page))
    markdown = write_text(out / "compare.md", to_markdown(comparison))
    numbers = to_json(to_dict(comparison), indent=1, inf_nan_mode="null").decode()
    data = write_text(out / "compare.json", numbers + "\n")
    return [*pngs, html, markdown, data]


def write_for_paper(
    comparison: Comparison, out_dir: Path | str, *, latex: bool, csv: bool
) -> list[Path]:
    """Write compare.tex, the tables in LaTeX, and compare.csv, a row for each run and model."""
    out, paths = Path(out_dir), []
    if latex:
        paths.append(write_text(out / "compare.tex", comparison_latex(comparison)))
    if csv:
        flat = comparison_frame(comparison).to_csv(index=False)
        paths.append(write_text(out / "compare.csv", flat))
    return paths


def write_figures_for_paper(comparison: Comparison, out_dir: Path | str) -> list[Path]:
    """Write a comparison's figures as PDFs of a paper's size and fonts into `paper/`."""
    out = Path(out_dir)
    folder = Folder(out / "paper", out)
    return [figure.write_for_paper(folder) for figure in drawings(comparison)]


def comparison_page(dirs: Sequence[Path | str]) -> str:
    """Return the page of a comparison of runs; nothing is written. Raises as `compare` does."""
    found = compare(dirs)
    return render_comparison(found, drawings(found))


def to_markdown(comparison: Comparison) -> str:
    """Return the table, with the notes below it, in Markdown."""
    headline = " ".join(comparison.headline)
    what = f"Last round{comparison.beside_accuracy}, mean ± std over seeds"
    basis = f"{what}; ordered by {headline}. {TAIL_OF} {headline}."
    notes = "".join(f"- {plain(note)}\n" for note in comparison.notes)
    table = markdown(comparison_cells(comparison))
    paired = paired_cells(comparison)
    below = f"\n{markdown(paired)}\n{paired_legend(comparison)}\n" if paired else ""
    return f"{table}\n{basis}\n{below}" + (f"\n{notes}" if notes else "")


def to_dict(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as plain data; unknown values are NaN."""

    def curve(found: pd.DataFrame) -> dict[str, list[float]]:
        return {"rounds": found.index.tolist(), **found.to_dict("list")}

    def difference(found: Difference) -> dict[str, object]:
        return {**asdict(found), "n": found.n, "beyond_2_se": found.clear}

    protocol, kind = comparison.headline
    groups = [
        {
            "label": group.label, "method": group.method, "dataset": group.dataset,
            "seeds": list(group.seeds), "rounds": [run.done for run in group.runs],
            "finished": group.finished, "runs": [path_text(run.path) for run in group.runs],
            "settings": dict(group.settings),
            comparison.metric.name: _scores(group, comparison.columns),
            **{cost: asdict(group.total(cost)) for cost in COSTS},
            "seconds_a_round": asdict(group.seconds_a_round()),
            "bytes_to_target": asdict(comparison.to_target(group, "bytes")),
            "clock": asdict(group.clock()),
            "clock_to_target": asdict(comparison.to_target(group, "clock")),
            "curve": curve(group.curve(comparison.headline)),
            "figures": {name: curve(group.figure(name)) for name in comparison.figures},
        }
        for group in comparison.groups
    ]  # fmt: skip
    pairs = [
        {
            "group": pair.group.label, "against": pair.baseline.label, "protocol": pair.column[0],
            "kind": pair.column[1], "against_kind": pair.baseline_column[1], "fault": pair.fault,
            "last": difference(pair.last), "tail": difference(pair.tail), "p": pair.p,
        }
        for pair in comparison.pairs
    ]  # fmt: skip
    return {
        "headline": {"protocol": protocol, "kind": kind},
        "metric": comparison.metric.name,
        "target": comparison.target,
        "groups": groups,
        "paired": pairs,
        "notes": list(comparison.notes),
    }


def _scores(group: Group, columns: Sequence[tuple[str, str]]) -> dict[str, dict[str, object]]:
    """Return, by protocol and kind, the group's last accuracies."""
    found: dict[str, dict[str, object]] = {}
    for protocol, kind in columns:
        spread, worst = group.score((protocol, kind)), group.worst((protocol, kind))
        if spread.n:
            tail = group.tail((protocol, kind))
            scores = {**asdict(spread), "tail": asdict(tail), "worst": asdict(worst)}
            found.setdefault(protocol, {})[kind] = scores
    return found


def comparison_frame(comparison: Comparison) -> pd.DataFrame:
    """Return a row for each run, protocol and kind of model that it was evaluated with.

    `mean`, `std` and `worst` are over the clients in the last round, `tail` is the mean of the last
    fifth of the rounds; all of the metric that is compared.
    """
    rows = [
        {
            "run": group.label, "method": run.method, "dataset": run.dataset, "seed": run.seed,
            "rounds": run.done, "metric": comparison.metric.name,
            "protocol": protocol, "kind": kind,
            "mean": score.mean, "std": score.std, "worst": score.worst,
            "tail": run.tail(protocol, kind).mean,
            "bytes_up": run.totals["bytes_up"], "bytes_down": run.totals["bytes_down"],
            "seconds": run.totals["seconds"], "directory": path_text(run.path),
        }
        for group in comparison.groups
        for run in group.runs
        for protocol, kind in run.columns
        for score in [run.last(protocol, kind)]
    ]  # fmt: skip
    return pd.DataFrame(rows)


# --- figures ----------------------------------------------------------------------------------


def drawings(comparison: Comparison) -> list[Drawing]:
    """Return the page's figures, with the requested metrics of the methods last."""
    title = comparison.metric.title
    bars = _alone(comparison, "finals", f"last {title} by group", _finals)
    found = [
        replace(bars, height=max(2.2, 1.3 + 0.32 * len(comparison.groups))),
        _alone(comparison, "curves", f"{title} over rounds", _by_round),
        _alone(comparison, "costs", f"{title} by bytes sent", partial(_by_cost, cost="bytes")),
    ]
    if any(group.spent().n for group in comparison.groups):
        draw = partial(_by_cost, cost="epsilon")
        found.append(_alone(comparison, "privacy", f"{title} by epsilon", draw))
    if comparison.has_clock:
        draw = partial(_by_cost, cost="clock")
        found.append(_alone(comparison, "clock", f"{title} by simulated time", draw))
    for name in comparison.figures:
        own = partial(_own, name=name)
        found.append(_alone(comparison, f"compare-{name}", f"{name} by round", own))
    return found


def overview(comparison: Comparison) -> Drawing:
    """Draw accuracy over rounds next to the last round's accuracy."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _by_round(left, comparison)
        _finals(right, comparison)

    height = max(drawing.height for drawing in drawings(comparison)[:2])
    return Drawing("compare", draw, width=2 * style.WIDTH, height=height)


def _alone(
    comparison: Comparison, name: str, alt: str, draw: Callable[[Axes, Comparison], None]
) -> Drawing:
    """Return a figure with one axes that `draw` fills, with room for a legend of groups."""
    names = _names(comparison)[:SHOWN]
    rows = math.ceil(len(names) / style.legend_columns(names))
    height = style.HEIGHT + 0.18 * (rows - 1)
    return Drawing(name, lambda figure: draw(figure.subplots(), comparison), alt, height=height)


def _names(comparison: Comparison, width: int = 40) -> list[str]:
    """Return the groups' labels in a figure, in their order."""
    labels = [group.label + ("" if group.finished else " *") for group in comparison.groups]
    return style.told_apart(labels, width)


def _by_round(ax: Axes, comparison: Comparison) -> None:
    rounds = _accuracies(ax, comparison)
    band = "; band: ± std over seeds" if comparison.has_seeds else ""
    style.over_rounds(ax, rounds, note=f"dotted: {comparison.said_target}{band}")
    protocol, kind = comparison.headline
    title = f"{comparison.title}: {kind} model, {TEST_SETS.get(protocol, protocol)}"
    style.head(ax, title + _best(comparison))


def _by_cost(ax: Axes, comparison: Comparison, cost: str) -> None:
    title, label, unit = COST_AXES[cost]
    _accuracies(ax, comparison, x=cost)
    if cost == "bytes":
        style.log_bytes(ax, "x")
    else:
        ax.set_xlim(left=0)
    if cost == "clock":
        style.ticks(ax, style.in_hours, "x")
    canvas.panel(ax, mode="point", x_unit=unit)
    ax.set_xlabel(label)
    style.head(ax, f"{comparison.title} {title}{_best(comparison)}")


def _accuracies(ax: Axes, comparison: Comparison, x: str = "") -> list[int]:
    rounds = _draw(ax, comparison, lambda group: group.curve(comparison.headline), x)
    ax.axhline(comparison.target, color=style.MUTED, **style.DOTTED)
    style.ticks(ax)
    return rounds


def _best(comparison: Comparison) -> str:
    return f" (best {SHOWN})" if len(comparison.groups) > SHOWN else ""


def _own(ax: Axes, comparison: Comparison, name: str) -> None:
    rounds = _draw(ax, comparison, lambda group: group.figure(name))
    style.ticks(ax, human_number)
    canvas.panel(ax, unit="number")
    note = "band: ± std over seeds" if comparison.has_seeds else ""
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
    """Draw the last round's accuracy: one dot per seed, a mark for the mean."""
    names, column = _names(comparison), comparison.headline
    for row, (group, name) in enumerate(zip(comparison.groups, names, strict=True)):
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
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), _names(comparison, 30))
    ax.tick_params(axis="y", labelcolor=style.INK)
    style.grid(ax, "x")
    style.ticks(ax, axis="x")
    what = comparison.metric.title
    ax.set_xlabel(f"{what} (dots: seeds; bar: ± std)" if comparison.has_seeds else what)
    style.head(ax, "Last round")
