"""Comparison of runs: grouped over seeds, ordered by the last round's headline accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd
from pydantic_core import to_json

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import SettingsError
from fedhet.base.metrics import ACCURACY, Metric, in_order, metric_of
from fedhet.report.comparison import Comparison
from fedhet.report.curves import drawings, overview
from fedhet.report.groups import (
    Column,
    Group,
    cautions,
    choose_columns,
    chosen_figures,
    default_target,
    find_runs,
    group_runs,
    load_all,
)
from fedhet.report.latex import comparison_latex
from fedhet.report.page import render_comparison
from fedhet.report.paired import Difference, Pair, Test, pair_groups
from fedhet.report.run import Run
from fedhet.report.significance import tested
from fedhet.report.tables import (
    TAIL_OF,
    comparison_cells,
    markdown,
    paired_cells,
    paired_legend,
    plain,
)
from fedhet.report.tidy import comparison_frame
from fedhet.runs.units import path_text


def compare(
    dirs: Sequence[Path | str],
    out: Path | str | None = None,
    target: float | None = None,
    kind: str | None = None,
    figures: str = "",
    protocol: str | None = None,
    against: str | None = None,
    metric: str = ACCURACY,
    test: Test = "none",
) -> Comparison:
    """Compare runs, given by their directories or by parents up to two levels above.

    `kind` and `protocol` say whose accuracy on which test set orders the runs, is paired, and
    defines the bytes to reach; by default that of the clients' own models, `private`, under the
    headline protocol of most runs. `target` is the accuracy of "bytes to reach": a fraction, or a
    percentage if above 1; by default 90 % of the lowest last accuracy, which all runs reach.
    `figures` are names of the methods' own metrics, comma-separated, to be drawn over rounds too.
    `against` is the baseline of the paired differences; see `fedhet.report.paired.pair_groups`.
    `metric` is compared in place of the accuracy, where the runs have measured it. `test`: whether
    the paired differences are tested, and how; see `fedhet.report.significance`.
    With `out` the comparison is written there. Raises StateError if nothing can be compared,
    SettingsError for a kind, protocol, metric or baseline that these runs do not have.
    """
    judged = metric_of(metric)
    wanted = None if target is None else _wanted(target, judged)
    runs, notes = load_all(find_runs(dirs))
    _check_metric(metric, runs)
    runs = [run.measuring(metric) for run in runs]
    groups, more = group_runs(runs)
    columns = choose_columns(groups, kind, protocol)
    ranked = sorted(groups, key=lambda group: _rank(group, columns[0], judged))
    pairs = tested(pair_groups(ranked, columns[0], against), test)
    notes += [*more, *cautions(ranked, columns[0]), *_unpaired(pairs)]
    basis = ""
    if wanted is None:
        lower = judged.lower_is_better
        wanted = default_target(ranked, columns[0], lower_is_better=lower)
        share = "110 % of the highest" if lower else "90 % of the lowest"
        basis = f"{share} {judged.title}, so all reach it"
    own = chosen_figures(figures, sorted({name for group in groups for name in group.figures}))
    comparison = Comparison(tuple(ranked), columns, wanted, tuple(notes), own, pairs, judged, test)
    if basis:
        noted = (*notes, f"bytes to {comparison.said_target}: {basis}")
        comparison = replace(comparison, notes=noted)
    if out is not None:
        write_comparison(comparison, out)
    return comparison


def _unpaired(pairs: Sequence[Pair]) -> list[str]:
    """Return a note that there are no paired differences, if there are none, with the reasons."""
    faults = {pair.fault for pair in pairs}
    found = not pairs or "" in faults
    return [] if found else [f"no paired differences over seeds: {' or '.join(sorted(faults))}"]


def _check_metric(metric: str, runs: Sequence[Run]) -> None:
    there = {name for run in runs for name in run.metrics}
    if metric not in (ACCURACY, *there):
        known = ", ".join([ACCURACY, *sorted(there, key=in_order)])
        raise SettingsError(
            f"setting 'metric' = {metric!r} is not allowed: these runs have {known}; "
            "'metrics' says what a run measures"
        )


def _rank(group: Group, column: Column, metric: Metric) -> tuple[float, str]:
    sign = -1 if metric.lower_is_better else 1
    mean = sign * group.score(column).mean
    return (-mean if math.isfinite(mean) else math.inf), group.label


def _wanted(target: float, metric: Metric) -> float:
    if metric.highest > 1 and 0 < target <= metric.highest:
        return target
    if not 0 < target <= 100:
        raise SettingsError(
            f"setting 'target' = {target!r} is not allowed: it takes a fraction or a percentage"
        )
    return target / 100 if target > 1 else target


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
    protocol, kind = comparison.headline
    return {
        "headline": {"protocol": protocol, "kind": kind},
        "metric": comparison.metric.name,
        "target": comparison.target,
        "groups": [_group_dict(group, comparison) for group in comparison.groups],
        "paired": [_pair_dict(pair) for pair in comparison.pairs],
        "notes": list(comparison.notes),
    }


COSTS = ("bytes_up", "bytes_down", "seconds", "start")


def _group_dict(group: Group, comparison: Comparison) -> dict[str, object]:
    column = comparison.headline
    return {
        "label": group.label, "method": group.method, "dataset": group.dataset,
        "seeds": list(group.seeds), "rounds": [run.done for run in group.runs],
        "finished": group.finished, "runs": [path_text(run.path) for run in group.runs],
        "settings": dict(group.settings),
        comparison.metric.name: _scores(group, comparison.columns),
        **{cost: asdict(group.total(cost)) for cost in COSTS},
        "seconds_a_round": asdict(group.seconds_a_round()),
        "bytes_to_target": asdict(comparison.bytes_to_target(group)),
        "clock": asdict(group.clock()),
        "clock_to_target": asdict(comparison.clock_to_target(group)),
        "curve": _curve(group.curve(column)),
        "figures": {name: _curve(group.figure(name)) for name in comparison.figures},
    }  # fmt: skip


def _scores(group: Group, columns: Sequence[Column]) -> dict[str, dict[str, object]]:
    """Return, by protocol and kind, the group's last accuracies."""
    found: dict[str, dict[str, object]] = {}
    for protocol, kind in columns:
        spread, worst = group.score((protocol, kind)), group.worst((protocol, kind))
        if spread.n:
            tail = group.tail((protocol, kind))
            scores = {**asdict(spread), "tail": asdict(tail), "worst": asdict(worst)}
            found.setdefault(protocol, {})[kind] = scores
    return found


def _pair_dict(pair: Pair) -> dict[str, object]:
    return {
        "group": pair.group.label, "against": pair.baseline.label, "protocol": pair.column[0],
        "kind": pair.column[1], "against_kind": pair.baseline_column[1], "fault": pair.fault,
        "last": _difference_dict(pair.last), "tail": _difference_dict(pair.tail), "p": pair.p,
    }  # fmt: skip


def _difference_dict(found: Difference) -> dict[str, object]:
    return {**asdict(found), "n": found.n, "beyond_2_se": found.clear}


def _curve(curve: pd.DataFrame) -> dict[str, list[float]]:
    return {"rounds": curve.index.tolist(), **curve.to_dict("list")}
