"""Runs side by side: grouped over seeds, ordered by the last round's headline accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedhet.errors import SettingsError
from fedhet.report import style
from fedhet.report.groups import (
    Column,
    Comparison,
    Group,
    cautions,
    choose_columns,
    default_target,
    find_runs,
    group_runs,
    load_all,
)
from fedhet.report.page import write_comparison_page
from fedhet.report.run import PROTOCOLS
from fedhet.report.style import Drawing
from fedhet.report.tables import Cells, comparison_cells
from fedhet.report.units import percent, printable

WIDTH, HEIGHT = 5.4, 3.5
SHOWN = 12
"""So many groups, the best, are drawn as curves."""


def compare(
    dirs: Sequence[Path | str],
    out: Path | str | None = None,
    target: float | None = None,
    kind: str | None = None,
) -> Comparison:
    """Compare runs, given by their directories or by parents of these, up to two levels up.

    `kind` is the kind of model by whose accuracy the runs are ordered and the bytes counted; the
    clients' own, `private`, if it is not given. `target` is the accuracy of "bytes to reach": a
    fraction, or a percentage if above 1; without it, 90 % of the lowest last accuracy, which all
    runs reach. With `out` the comparison is written there. Raises StateError if there is nothing
    that can be compared.
    """
    wanted = None if target is None else _fraction(target)
    runs, notes = load_all(find_runs(dirs))
    groups, more = group_runs(runs)
    columns = choose_columns(groups, kind)
    ranked = sorted(groups, key=lambda group: _rank(group, columns[0]))
    notes += [*more, *cautions(ranked, columns[0])]
    if wanted is None:
        wanted = default_target(ranked, columns[0])
        notes.append(f"bytes to {percent(wanted)}: 90 % of the lowest accuracy, so all reach it")
    comparison = Comparison(tuple(ranked), columns, wanted, tuple(notes))
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def _rank(group: Group, column: Column) -> tuple[float, str]:
    mean = group.score(column).mean
    return (-mean if math.isfinite(mean) else math.inf), group.label


def _fraction(target: float) -> float:
    if not 0 < target <= 100:
        raise SettingsError(
            f"setting 'target' = {target!r} is not allowed: it takes a fraction or a percentage"
        )
    return target / 100 if target > 1 else target


def write_comparison(comparison: Comparison, out_dir: Path | str) -> list[Path]:
    """Write compare.png, .html, .md and .json into a directory and return their paths."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    png = _both(comparison).png(out)
    panels = [finals(comparison), curves(comparison), costs(comparison)]
    html = write_comparison_page(comparison, panels, out / "compare.html")
    markdown, data = out / "compare.md", out / "compare.json"
    markdown.write_text(to_markdown(comparison), "utf-8")
    data.write_text(json.dumps(_finite(to_dict(comparison)), indent=1) + "\n", "utf-8")
    return [png, html, markdown, data]


def to_markdown(comparison: Comparison) -> str:
    """Return the table, and the notes below it, in Markdown."""
    cells: Cells = comparison_cells(comparison)
    rule = ["---" if n < cells.words else "---:" for n in range(len(cells.headers))]
    texts = [[cell.text for cell in row] for row in cells.rows]
    lines = [_row(cells.headers), _row(rule, escape=False), *map(_row, texts)]
    basis = f"Last round, mean ± std over seeds; ordered by {' '.join(comparison.headline)}."
    notes = [f"- {_plain(note)}" for note in comparison.notes]
    return "\n".join([*lines, "", basis, *([""] if notes else []), *notes]) + "\n"


def _row(texts: Sequence[str], escape: bool = True) -> str:
    return "| " + " | ".join(_plain(text) if escape else text for text in texts) + " |"


def _plain(text: str) -> str:
    """Return text that Markdown sets as it is."""
    text = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    for mark in ("\\", "|", "*", "_", "`", "["):
        text = text.replace(mark, "\\" + mark)
    return text


def to_dict(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as plain data; what is unknown is NaN."""
    protocol, kind = comparison.headline
    return {
        "headline": {"protocol": protocol, "kind": kind},
        "target": comparison.target,
        "groups": [_group_dict(group, comparison) for group in comparison.groups],
        "notes": list(comparison.notes),
    }


def _group_dict(group: Group, comparison: Comparison) -> dict[str, object]:
    column = comparison.headline
    curve = group.curve(column)
    scores: dict[str, dict[str, object]] = {}
    for protocol, kind in comparison.columns:
        spread = asdict(group.score((protocol, kind)))
        if not spread["n"]:
            continue
        spread["worst"] = asdict(group.worst((protocol, kind)))
        scores.setdefault(protocol, {})[kind] = spread
    return {
        "label": group.label, "method": group.method, "dataset": group.dataset,
        "seeds": list(group.seeds), "rounds": [run.done for run in group.runs],
        "finished": group.finished, "runs": [str(run.path) for run in group.runs],
        "settings": dict(group.settings), "accuracy": scores,
        "bytes_up": asdict(group.bytes_up), "bytes_down": asdict(group.bytes_down),
        "bytes_to_target": asdict(group.bytes_to(column, comparison.target)),
        "seconds": asdict(group.seconds),
        "curve": {
            "rounds": list(curve.rounds), "mean": curve.mean.tolist(), "std": curve.std.tolist(),
            "bytes": curve.sent.tolist(),
        },
    }  # fmt: skip


def _finite(data: object) -> object:
    """Return plain data with null for what JSON has no number for."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


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


def _both(comparison: Comparison) -> Drawing:
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
        colour, _ = style.mark(number)
        x = np.array(curve.rounds) if by == "rounds" else curve.sent
        dash = style.DASHES[number % len(style.DASHES)]
        mark = style.marker(len(x))
        ax.plot(
            x, curve.mean, color=colour, linestyle=dash, label=_name(group), marker=mark,
            markersize=3,
        )  # fmt: skip
        low, high = curve.mean - curve.std, curve.mean + curve.std
        ax.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
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
