"""Presentation of a comparison: tables, figures, HTML report and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from pydantic_core import to_json

from fedhet.base.disk import Folder, write_text
from fedhet.base.metrics import ACCURACY
from fedhet.report import style
from fedhet.report.comparison import HEADLINE, Column, Comparison, Group, compare
from fedhet.report.differences import TESTS, Difference
from fedhet.report.page import render
from fedhet.report.run import TEST_SETS, where
from fedhet.report.style import Drawing
from fedhet.report.tables import (
    LATEX_HEAD,
    MARK,
    Blocks,
    Cell,
    Cells,
    captioned,
    escape_markdown,
    markdown,
    mean_cell,
    tabular,
)
from fedhet.runs.records import COMMON, NAN
from fedhet.runs.units import (
    ABSENT,
    difference,
    human_bytes,
    human_number,
    human_seconds,
    path_text,
    plus_minus,
    printable,
    score,
)

MAX_CURVES = 12
"""Maximum number of curves in a plot; only the best groups are shown."""
COSTS = ("bytes_up", "bytes_down", "seconds", "start", "seconds_a_round", "clock")
"""Entries of `Run.totals` that compare.json contains."""
EFFECTIVE = (
    "Effective test samples: number of clients times the harmonic mean of their test splits, which "
    "is at most the sum of the splits."
)
PAIRED = (
    "Paired differences: mean ± standard error over the n shared seeds{}. "
    f"{MARK}: the 95 % confidence interval (Student's t) excludes zero."
)
UNKNOWN = (
    "If the number of test samples is unknown, the standard error covers only the seeds, so the "
    "difference can be one test sample."
)
WORDS = ("run", "dataset", "model")
"""Columns of a comparison's table that contain text."""
MAX_COLUMNS = 6
"""Maximum number of columns that fit into the text width of a paper."""
MIN_P = 0.0001
"""Smallest p-value that is shown as a number."""


# --- files ------------------------------------------------------------------------------------


def write_comparison(comparison: Comparison, out_dir: Path | str) -> list[Path]:
    """Write compare.png, .html, .md and .json, and a figure for each requested method metric.

    Each figure is also written as SVG. Returns the paths of all files except the SVG files.
    """
    out = Path(out_dir)
    figures = drawings(comparison)
    of_methods = figures[len(figures) - len(comparison.method_metrics) :]
    pngs = [figure.write_files(Folder(out)) for figure in (overview(comparison), *of_methods)]
    html = write_text(out / "compare.html", render_comparison(comparison, figures))
    markdown = write_text(out / "compare.md", to_markdown(comparison))
    content = to_json(to_dict(comparison), indent=1, inf_nan_mode="null").decode()
    data = write_text(out / "compare.json", content + "\n")
    return [*pngs, html, markdown, data]


def write_for_paper(
    comparison: Comparison, out_dir: Path | str, *, latex: bool, csv: bool
) -> list[Path]:
    """Write the tables as LaTeX (compare.tex) and the scores as CSV (compare.csv).

    The CSV file has a row for each run, protocol and kind of model. Returns the paths of the files.
    """
    texts = {}
    if latex:
        texts["compare.tex"] = comparison_latex(comparison)
    if csv:
        rows = [
            {
                "run": group.label, "method": run.method, "dataset": run.dataset, "seed": run.seed,
                "rounds": run.done, "metric": comparison.metric.name,
                "protocol": protocol, "kind": kind,
                "mean": last.mean, "std": last.std, "worst": last.worst,
                "tail": run.tail(protocol, kind).mean,
                "bytes_up": run.totals["bytes_up"], "bytes_down": run.totals["bytes_down"],
                "seconds": run.totals["seconds"], "directory": path_text(run.path),
            }
            for group in comparison.groups
            for run in group.runs
            for protocol, kind in run.columns
            for last in [run.last(protocol, kind)]
        ]  # fmt: skip
        texts["compare.csv"] = pd.DataFrame(rows).to_csv(index=False)
    return [write_text(Path(out_dir) / name, text) for name, text in texts.items()]


def write_figures_for_paper(comparison: Comparison, out_dir: Path | str) -> list[Path]:
    """Write the figures as PDFs into `paper/`, with a size and fonts suitable for a paper."""
    out = Path(out_dir)
    directory = Folder(out / "paper", out)
    return [figure.write_for_paper(directory) for figure in drawings(comparison)]


def comparison_html(dirs: Sequence[Path | str]) -> str:
    """Return the HTML report of a comparison without writing files.

    Raises the same errors as `compare`.
    """
    comparison = compare(dirs)
    return render_comparison(comparison, drawings(comparison))


def render_comparison(comparison: Comparison, panels: Sequence[Drawing]) -> str:
    """Return the HTML report of a comparison."""
    groups, metric, headline = comparison.groups, comparison.metric, comparison.headline
    # The scores of all groups are undefined if, e.g., no model made a finite prediction.
    best, *following = [each for each in groups if each.score(headline).n] or groups[:1]
    spread = best.score(headline)
    hero = {"std over seeds": score(spread.std, metric.name)} if spread.n > 1 else {}
    worse, last = ("above", "highest") if metric.lower_is_better else ("below", "lowest")
    for name, group in zip(["next", last], [*following[:1], *following[1:][-1:]], strict=False):
        gap = score(abs(spread.mean - group.score(headline).mean), metric.name)
        hero[name] = f"{comparison.label(group, group.resolved(headline))}, {gap} {worse}"
    protocol, kind = best.resolved(headline)
    of = f"mean {metric.title} of {best.label}: {kind} models {where(protocol)}, last round"
    # Omit empty columns, and the column `dataset` if all groups have the same dataset.
    cells = comparison_cells(comparison).columns
    texts = {header: {cell.text for cell in column} for header, column in cells.items()}
    kept = {
        header: column
        for header, column in cells.items()
        if texts[header] != {ABSENT} and (header != "dataset" or len(texts[header]) > 1)
    }
    # A setting counts as shared even if some methods do not have it.
    settings = pd.DataFrame([group.settings for group in groups])
    differs = settings.nunique() > 1
    return render(
        "comparison.html",
        title="Comparison",
        comparison=comparison,
        groups=groups,
        datasets=sorted({group.dataset for group in groups}),
        hero={"value": score(spread.mean, metric.name), "description": of, **hero},
        table=Cells(kept, words=sum(header in WORDS for header in kept)),
        legend=table_legend(comparison),
        paired=paired_cells(comparison),
        paired_legend=paired_legend(comparison),
        plots=[panel.chart() for panel in panels],
        shared=settings.loc[:, ~differs].bfill().iloc[0].fillna(ABSENT).to_dict(),
        differing=settings.loc[:, differs].fillna(ABSENT).to_dict("list"),
    )


def to_markdown(comparison: Comparison) -> str:
    """Return the tables and notes of a comparison as Markdown."""
    parts = [markdown(comparison_cells(comparison)), f"{table_legend(comparison)}\n"]
    if (paired := paired_cells(comparison)) is not None:
        parts += [markdown(paired), f"{paired_legend(comparison)}\n"]
    if comparison.notes:
        parts.append("".join(f"- {escape_markdown(note)}\n" for note in comparison.notes))
    return "\n".join(parts)


def to_dict(comparison: Comparison) -> dict[str, object]:
    """Convert a comparison to built-in Python types, with NaN for unknown values."""

    def curve(frame: pd.DataFrame) -> dict[str, list[float]]:
        return {"rounds": frame.index.tolist(), **frame.to_dict("list")}

    def difference(values: Difference) -> dict[str, object]:
        combined = {"se": values.se, "margin": values.margin, "is_clear": values.is_clear}
        return asdict(values) | combined

    def scores(group: Group) -> dict[str, dict[str, object]]:
        by_protocol: dict[str, dict[str, object]] = {}
        for column in comparison.columns:
            if column[1] != HEADLINE and (spread := group.score(column)).n:
                extra = {name: asdict(group.score(column, name)) for name in ("tail", "worst")}
                by_protocol.setdefault(column[0], {})[column[1]] = asdict(spread) | extra
        return by_protocol

    protocol, kind = comparison.headline
    groups = [
        {
            "label": group.label, "method": group.method, "dataset": group.dataset,
            "headline_kind": group.resolved(comparison.headline)[1],
            "seeds": list(group.seeds), "rounds": [run.done for run in group.runs],
            "finished": group.finished, "runs": [path_text(run.path) for run in group.runs],
            "settings": dict(group.settings),
            comparison.metric.name: scores(group),
            **{cost: asdict(group.total(cost)) for cost in COSTS},
            "bytes_to_target": asdict(comparison.to_target(group, "bytes")),
            "clock_to_target": asdict(comparison.to_target(group, "clock")),
            "curve": curve(group.curve(comparison.headline)),
            "figures": {
                name: curve(group.method_curve(name)) for name in comparison.method_metrics
            },
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


# --- tables ----------------------------------------------------------------------------------


def comparison_cells(comparison: Comparison) -> Cells:
    """Build the table of a comparison, with one row per group."""
    headline, target, clock = comparison.headline, comparison.target_label, comparison.has_clock

    def scores(column: Column, statistic: str = "mean") -> Callable[[Group], Cell]:
        def cell(group: Group) -> Cell:
            spread = group.score(column, statistic)
            text = plus_minus(spread.mean, spread.std, metric=comparison.metric.name)
            return Cell(text, spread.mean)

        return cell

    def total(cost: str, shown: Callable[[float], str]) -> Callable[[Group], Cell]:
        return lambda group: mean_cell(group.total(cost), shown)

    def to_target(cost: str, shown: Callable[[float], str]) -> Callable[[Group], Cell]:
        return lambda group: mean_cell(comparison.to_target(group, cost), shown, len(group.runs))

    # Each column has a header, a condition, and the rule of its cells.
    rules: list[tuple[str, bool, Callable[[Group], Cell]]] = [
        ("run", True, lambda group: Cell(_named(group))),
        ("dataset", True, lambda group: Cell(printable(group.dataset))),
        # Without a column for the kind, the header of the score names it.
        ("model", headline[1] == HEADLINE,
         lambda group: Cell(printable(group.resolved(headline)[1] or ABSENT))),
        ("n", True, lambda group: Cell(str(len(group.runs)), len(group.runs))),
        *((" ".join(column), True, scores(column)) for column in comparison.columns),
        ("tail", True, scores(headline, "tail")),
        ("worst client", True, scores(headline, "worst")),
        ("epsilon", any(group.total("epsilon").n for group in comparison.groups),
         total("epsilon", score)),
        ("bytes up", True, total("bytes_up", human_bytes)),
        ("bytes down", True, total("bytes_down", human_bytes)),
        (f"bytes to {target}", True, to_target("bytes", human_bytes)),
        ("simulated time", clock, total("clock", human_seconds)),
        (f"simulated time to {target}", clock, to_target("clock", human_seconds)),
        ("time", True, total("seconds", human_seconds)),
        ("start", True, total("start", human_seconds)),
        ("per round", True, total("seconds_a_round", human_seconds)),
    ]  # fmt: skip
    columns = {
        header: [rule(group) for group in comparison.groups]
        for header, is_shown, rule in rules
        if is_shown
    }
    return Cells(columns, words=sum(header in WORDS for header in columns))


def _named(group: Group) -> str:
    """Return the label of a group, with an asterisk if a run is unfinished."""
    return printable(group.label) + ("" if group.finished else " *")


def table_legend(comparison: Comparison) -> str:
    """Return the legend for the table of a comparison."""
    protocol, metric = comparison.headline[0], comparison.metric.title
    legend = (
        "Mean over clients in the last round, ± standard deviation over seeds. Tail: mean over the "
        f"last fifth of the rounds. Rows are ordered by the {metric} of {comparison.models} "
        f"{where(protocol)} ({comparison.test_samples}). The tail and the worst client also refer "
        "to this score."
    )
    return legend if protocol == COMMON else f"{legend} {EFFECTIVE}"


def paired_cells(comparison: Comparison) -> Cells | None:
    """Build the table of paired differences; return None if no pair has two shared seeds."""
    pairs, metric = comparison.pairs, comparison.metric.name
    if all(pair.fault for pair in pairs):
        return None

    def gain(values: Difference, absent: str) -> Cell:
        if values.n < 2:
            return Cell(absent, NAN)
        mark = f" {MARK}" if values.is_clear else ""
        text = f"{difference(values.mean, metric)} ± {score(values.se, metric)}{mark}"
        return Cell(text, values.mean)

    columns = {
        "run": [Cell(printable(comparison.label(each.group, each.column))) for each in pairs],
        "against": [
            Cell(printable(comparison.label(each.baseline, each.baseline_column))) for each in pairs
        ],
        "n": [Cell(str(pair.last.n), pair.last.n) for pair in pairs],
    }
    if metric == ACCURACY:
        is_common = comparison.headline[0] == COMMON
        columns["test samples" if is_common else "effective test samples"] = [
            Cell("unknown", NAN) if count is None else Cell(f"{count:,.0f}", count)
            for count in (pair.last.samples for pair in pairs)
        ]
    columns["last round"] = [gain(pair.last, pair.fault) for pair in pairs]
    columns["tail"] = [gain(pair.tail, ABSENT) for pair in pairs]
    if comparison.test != "none":
        columns["p"] = [
            Cell(f"< {MIN_P}" if pair.p < MIN_P else score(pair.p), pair.p) for pair in pairs
        ]
    return Cells(columns, words=2)


def paired_legend(comparison: Comparison) -> str:
    """Return the legend for the paired differences."""
    # The error of other metrics due to test samples is unknown.
    is_accuracy = comparison.metric.name == ACCURACY
    parts = [PAIRED.format(" and the test samples" if is_accuracy else "")]
    if is_accuracy and any(p.last.n > 1 and p.last.samples is None for p in comparison.pairs):
        parts.append(UNKNOWN)
    if comparison.test != "none":
        test = TESTS[comparison.test]
        parts.append(f"p: two-sided {test} of the last round, with Holm's correction across rows.")
    return " ".join(parts)


def comparison_table(comparison: Comparison) -> Blocks:
    """Build the terminal table of a comparison, with its legend and notes as the caption."""
    lines = map(printable, (table_legend(comparison), *comparison.notes))
    metric = comparison.metric
    named = "" if metric.name == ACCURACY else f", {metric.title}"
    title = f"last round{named}: {' '.join(comparison.headline)}"
    return Blocks(comparison_cells(comparison), title, "\n".join(lines))


def paired_table(comparison: Comparison) -> Blocks | None:
    """Build the terminal table of paired differences; return None if there are no differences."""
    cells = paired_cells(comparison)
    title = f"paired differences: {' '.join(comparison.headline)}"
    return None if cells is None else Blocks(cells, title, paired_legend(comparison))


def comparison_latex(comparison: Comparison) -> str:
    """Return the table of a comparison and the table of paired differences, if any, as LaTeX.

    The table has at most `MAX_COLUMNS` columns: label, dataset if there are several, headline
    score, epsilon, worst client, bytes, and further scores if they fit. A comment lists the omitted
    columns.
    """
    columns = comparison_cells(comparison).columns
    headline, *others = [" ".join(column) for column in comparison.columns]
    several = len({group.dataset for group in comparison.groups}) > 1
    labels = [header for header in WORDS if header in columns and (header != "dataset" or several)]
    costs = ("bytes up", "bytes down")
    preferred = [*labels, headline, "epsilon", "worst client", *costs, *others, "tail"]
    chosen = [header for header in preferred if header in columns][:MAX_COLUMNS]
    kept = Cells({h: columns[h] for h in columns if h in chosen}, words=len(labels))
    omitted = [header for header in columns if header not in (*chosen, *WORDS)]
    notes = f"% Columns only in compare.json: {', '.join(omitted)}\n" if omitted else ""
    sign = -1 if comparison.metric.lower_is_better else 1
    scores = [
        header for header in (headline, *others, "tail", "worst client") if header in kept.columns
    ]
    clear = {pair.group.label for pair in comparison.pairs if pair.last.is_clear}
    marked = [row for row, group in enumerate(comparison.groups) if group.label in clear]
    unit = " Scores are fractions, not percentages." if comparison.metric.is_fraction else ""
    counts = sorted({len(group.runs) for group in comparison.groups})
    seeds = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    basis = f"{table_legend(comparison)}{unit} Number of seeds: {seeds}."
    if marked:
        baselines = dict.fromkeys(pair.baseline.label for pair in comparison.pairs)
        basis += (
            f" {MARK}: the 95 % confidence interval of the paired difference from "
            f"{', '.join(baselines)} excludes zero."
        )
    table = tabular(kept, dict.fromkeys(scores, sign), marked)
    parts = [LATEX_HEAD + notes, captioned(table, basis)]
    if (paired := paired_cells(comparison)) is not None:
        parts.append(captioned(tabular(paired), paired_legend(comparison) + unit))
    return "\n".join(parts)


# --- figures ----------------------------------------------------------------------------------


def drawings(comparison: Comparison) -> list[Drawing]:
    """Return the figures of a comparison, with method metrics last."""
    title, groups, names = comparison.metric.title, comparison.groups, _names(comparison)
    legend_rows = math.ceil(len(names[:MAX_CURVES]) / style.legend_columns(names[:MAX_CURVES]))
    default = style.HEIGHT + 0.18 * (legend_rows - 1)

    def drawing(
        name: str, alt: str, draw: Callable[[Axes, Comparison], None], height: float = default
    ) -> Drawing:
        return Drawing(name, lambda figure: draw(figure.subplots(), comparison), alt, height=height)

    return [
        drawing("finals", f"last {title} by group", _finals, max(2.2, 1.3 + 0.32 * len(groups))),
        drawing("curves", f"{title} over rounds", _by_round),
        *(
            drawing(name, f"{title} by {words}", partial(_by_cost, cost=cost))
            for cost, (name, words, _) in style.COST_AXES.items()
            if cost == "bytes" or any(group.total(cost).n for group in groups)
        ),
        *(
            drawing(f"compare-{name}", f"{name} by round", partial(_method_metric, name=name))
            for name in comparison.method_metrics
        ),
    ]


def overview(comparison: Comparison) -> Drawing:
    """Create a figure with two panels: scores over rounds, and scores in the last round."""

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2)
        _by_round(left, comparison)
        _finals(right, comparison)

    height = max(drawing.height for drawing in drawings(comparison)[:2])
    return Drawing("compare", draw, width=2 * style.WIDTH, height=height)


def _names(comparison: Comparison, width: int = 40) -> list[str]:
    """Return shortened, distinct labels of the groups."""
    labels = [group.label + ("" if group.finished else " *") for group in comparison.groups]
    return style.disambiguate(labels, width)


def _by_round(ax: Axes, comparison: Comparison) -> None:
    rounds = _draw(ax, comparison, lambda group: group.curve(comparison.headline))
    notes = ["band: ± std over seeds"] if comparison.has_seeds else []
    if comparison.target_label:
        ax.axhline(comparison.target, color=style.MUTED, **style.DOTTED)
        notes.insert(0, f"dotted: {comparison.target_label}")
    protocol, kind = comparison.headline
    models = "each method's headline model" if kind == HEADLINE else f"{kind} model"
    title = f"{comparison.title}: {models}, {TEST_SETS.get(protocol, protocol)}"
    style.over_rounds(ax, rounds, title + _best(comparison), "; ".join(notes))


def _by_cost(ax: Axes, comparison: Comparison, cost: str) -> None:
    _draw(ax, comparison, lambda group: group.curve(comparison.headline), cost)
    if comparison.target_label:
        ax.axhline(comparison.target, color=style.MUTED, **style.DOTTED)
    words = style.COST_AXES[cost][1]
    style.over_cost(ax, cost, f"{comparison.title} by {words}{_best(comparison)}")


def _best(comparison: Comparison) -> str:
    return f" (best {MAX_CURVES})" if len(comparison.groups) > MAX_CURVES else ""


def _method_metric(ax: Axes, comparison: Comparison, name: str) -> None:
    rounds = _draw(ax, comparison, lambda group: group.method_curve(name))
    note = "band: ± std over seeds" if comparison.has_seeds else ""
    style.over_rounds(ax, rounds, name, note, human_number)


def _draw(
    ax: Axes, comparison: Comparison, curve_of: Callable[[Group], pd.DataFrame], x: str = ""
) -> list[int]:
    """Draw a curve for each group, with a band of one standard deviation over seeds.

    The x-axis shows the rounds or the column `x`. Returns the rounds that the curves cover.
    """
    rounds, names = [1], _names(comparison)
    for number, group in enumerate(comparison.groups[:MAX_CURVES]):
        curve = curve_of(group)
        if len(curve):
            rounds += curve.index.tolist()
            x_values = curve[x].clip(lower=1) if x == "bytes" else curve.get(x)
            curve = curve if x_values is None else curve.set_index(x_values)
            style.band(ax, number, curve["mean"], curve["std"], names[number])
    return rounds


def _finals(ax: Axes, comparison: Comparison) -> None:
    """Draw the scores in the last round, with a dot for each seed and a marker for the mean."""
    names, column = _names(comparison), comparison.headline
    for row, group in enumerate(comparison.groups):
        color, mark = style.mark(row)
        means = [run.last(*group.resolved(column)).mean for run in group.runs]
        spread = group.score(column)
        if math.isfinite(spread.std):
            low, high = spread.mean - spread.std, spread.mean + spread.std
            ax.hlines(row, low, high, color=color, linewidth=5, alpha=0.25)
        if len(means) > 1:
            ax.scatter(means, [row] * len(means), color=color, s=14, alpha=0.6, linewidth=0)
        ax.scatter(spread.mean, row, color=color, marker=mark, s=52, zorder=3)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.set_yticks(range(len(names)), _names(comparison, 30))
    ax.tick_params(axis="y", labelcolor=style.INK)
    ax.grid(visible=False)
    ax.grid(visible=True, axis="x")
    style.ticks(ax, axis="x")
    title = comparison.metric.title
    ax.set_xlabel(f"{title} (dots: seeds; bar: ± std)" if comparison.has_seeds else title)
    style.set_title(ax, "Last round")
