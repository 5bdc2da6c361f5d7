"""Comparison of runs: grouped over seeds, ordered by the last round's headline accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd
from pydantic_core import to_json

from fedhet.errors import SettingsError
from fedhet.report.curves import drawings, overview
from fedhet.report.groups import (
    Column,
    Comparison,
    Group,
    cautions,
    choose_columns,
    chosen_figures,
    default_target,
    find_runs,
    group_runs,
    load_all,
)
from fedhet.report.page import write_comparison_page
from fedhet.report.tables import comparison_cells, markdown, plain
from fedhet.runs.units import percent


def compare(
    dirs: Sequence[Path | str],
    out: Path | str | None = None,
    target: float | None = None,
    kind: str | None = None,
    figures: str = "",
) -> Comparison:
    """Compare runs, given by their directories or by parents up to two levels above.

    `kind` is the kind of model whose accuracy orders the runs and defines the bytes to reach; by
    default the clients' own, `private`. `target` is the accuracy of "bytes to reach": a fraction,
    or a percentage if above 1; by default 90 % of the lowest last accuracy, which all runs reach.
    `figures` are names of the methods' own metrics, comma-separated, to be drawn over rounds too.
    With `out` the comparison is written there. Raises StateError if nothing can be compared,
    SettingsError for a kind or metric that these runs do not have.
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
    own = chosen_figures(figures, sorted({name for group in groups for name in group.figures}))
    comparison = Comparison(tuple(ranked), columns, wanted, tuple(notes), own)
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
    """Write compare.png, .html, .md, .json and the requested figures; return their paths."""
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    page = drawings(comparison)
    own = page[len(page) - len(comparison.figures) :]
    pngs = [figure.png(out) for figure in (overview(comparison), *own)]
    html = write_comparison_page(comparison, page, out / "compare.html")
    markdown, data = out / "compare.md", out / "compare.json"
    markdown.write_text(to_markdown(comparison), "utf-8")
    data.write_bytes(to_json(to_dict(comparison), indent=1, inf_nan_mode="null") + b"\n")
    return [*pngs, html, markdown, data]


def to_markdown(comparison: Comparison) -> str:
    """Return the table, with the notes below it, in Markdown."""
    basis = f"Last round, mean ± std over seeds; ordered by {' '.join(comparison.headline)}."
    notes = "".join(f"- {plain(note)}\n" for note in comparison.notes)
    table = markdown(comparison_cells(comparison))
    return f"{table}\n{basis}\n" + (f"\n{notes}" if notes else "")


def to_dict(comparison: Comparison) -> dict[str, object]:
    """Return a comparison as plain data; unknown values are NaN."""
    protocol, kind = comparison.headline
    return {
        "headline": {"protocol": protocol, "kind": kind},
        "target": comparison.target,
        "groups": [_group_dict(group, comparison) for group in comparison.groups],
        "notes": list(comparison.notes),
    }


def _group_dict(group: Group, comparison: Comparison) -> dict[str, object]:
    column = comparison.headline
    return {
        "label": group.label, "method": group.method, "dataset": group.dataset,
        "seeds": list(group.seeds), "rounds": [run.done for run in group.runs],
        "finished": group.finished, "runs": [str(run.path) for run in group.runs],
        "settings": dict(group.settings), "accuracy": _scores(group, comparison.columns),
        **{cost: asdict(group.total(cost)) for cost in ("bytes_up", "bytes_down", "seconds")},
        "bytes_to_target": asdict(group.bytes_to(column, comparison.target)),
        "curve": _curve(group.curve(column)),
        "figures": {name: _curve(group.figure(name)) for name in comparison.figures},
    }  # fmt: skip


def _scores(group: Group, columns: Sequence[Column]) -> dict[str, dict[str, object]]:
    """Return, by protocol and kind, the group's last accuracies."""
    found: dict[str, dict[str, object]] = {}
    for protocol, kind in columns:
        spread, worst = group.score((protocol, kind)), group.worst((protocol, kind))
        if spread.n:
            scores = {**asdict(spread), "worst": asdict(worst)}
            found.setdefault(protocol, {})[kind] = scores
    return found


def _curve(curve: pd.DataFrame) -> dict[str, list[float]]:
    return {"rounds": curve.index.tolist(), **curve.to_dict("list")}
