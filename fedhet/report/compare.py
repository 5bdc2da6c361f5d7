"""Runs side by side: grouped over seeds, ordered by the last round's headline accuracy."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from fedhet.errors import SettingsError, nearest
from fedhet.report.curves import drawings, overview
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
from fedhet.report.tables import Cells, comparison_cells
from fedhet.report.units import percent, printable


def compare(
    dirs: Sequence[Path | str],
    out: Path | str | None = None,
    target: float | None = None,
    kind: str | None = None,
    figures: str = "",
) -> Comparison:
    """Compare runs, given by their directories or by parents of these, up to two levels up.

    `kind` is the kind of model by whose accuracy the runs are ordered and the bytes counted; the
    clients' own, `private`, if it is not given. `target` is the accuracy of "bytes to reach": a
    fraction, or a percentage if above 1; without it, 90 % of the lowest last accuracy, which all
    runs reach. `figures` are names of the methods' own figures, comma-separated, to be drawn over
    rounds too. With `out` the comparison is written there. Raises StateError if there is nothing
    that can be compared, SettingsError for what these runs do not have.
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
    comparison = Comparison(tuple(ranked), columns, wanted, tuple(notes), _figures(groups, figures))
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def _figures(groups: Sequence[Group], names: str) -> tuple[str, ...]:
    known = sorted({own for group in groups for own in group.own_figures})
    wanted = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in wanted:
        if name not in known:
            raise SettingsError(
                f"'--figures {name}' is no figure of these runs: {', '.join(known) or 'none'}"
                f"{nearest(name, known)}"
            )
    return wanted


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
    """Write compare.png, .html, .md, .json and asked-for figures; return their paths."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    page = drawings(comparison)
    own = page[len(page) - len(comparison.figures) :]
    pngs = [figure.png(out) for figure in (overview(comparison), *own)]
    html = write_comparison_page(comparison, page, out / "compare.html")
    markdown, data = out / "compare.md", out / "compare.json"
    markdown.write_text(to_markdown(comparison), "utf-8")
    data.write_text(json.dumps(_finite(to_dict(comparison)), indent=1) + "\n", "utf-8")
    return [*pngs, html, markdown, data]


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
        "figures": {
            name: {"rounds": list(own.rounds), "mean": own.mean.tolist(), "std": own.std.tolist()}
            for name, own in ((name, group.own_curve(name)) for name in comparison.figures)
        },
    }  # fmt: skip


def _finite(data: object) -> object:
    """Return plain data with null for what JSON has no number for."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
