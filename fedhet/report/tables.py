"""Tables of runs and comparisons, rendered as Markdown, as LaTeX, or on the terminal.

HTML reports render the same cells with macros in their templates.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedhet.base.metrics import (
    ACCURACY,
    CLASSIFICATION,
    MAX_CONFUSION,
    METRICS,
    MULTI_LABEL,
    is_shown,
    metric_of,
)
from fedhet.report.differences import Spread, sample_error, samples_text, smallest
from fedhet.report.run import MEANING, STATISTICS, Run, client_with, where
from fedhet.runs.records import COMMON, HELD_OUT, HELD_OUT_EPOCH, NAN, VALIDATION
from fedhet.runs.units import (
    ABSENT,
    difference,
    natural,
    plural,
    printable,
    score,
    shown_path,
    spans,
)
from fedhet.tasks import find_task

MARK = "†"
HELD_OUT_KINDS = (HELD_OUT, HELD_OUT_EPOCH)
MAX_NAMED = 3
"""Maximum number of models named in a sentence."""
MAX_ROWS, ENDS = 30, 5
"""Maximum number of clients to list on the terminal, and the number of best and of worst clients to
show if the run has more clients."""
MAX_MATRICES = 6
"""Maximum number of confusion matrices in a report."""
MAX_ERRORS = 10
"""Maximum number of pairs of classes in the table of the most frequent confusions."""
MIN_TEXT = 14
"""Minimum width of a text column, in characters, if the column must be shrunk."""

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}",
        "±": r"$\pm$", MARK: r"$^\dagger$", "–": "--", "−": "$-$", "τ": r"$\tau$",
        "ε": r"$\varepsilon$",
    }
)  # fmt: skip
"""Replacements of characters that are special in LaTeX or missing in some fonts."""
DAGGER = SPECIAL[ord(MARK)]
LATEX_HEAD = "% \\usepackage{booktabs}\n"


@dataclass(frozen=True)
class Cell:
    """Cell of a table."""

    text: str
    value: float | None = None
    """Number by which to sort, or None to sort by the text."""

    @property
    def key(self) -> float | str:
        """Sort key: the number ("" if it is not finite), or the text if there is no number."""
        if self.value is None:
            return self.text
        return self.value if math.isfinite(self.value) else ""


EMPTY = Cell(ABSENT, NAN)
"""Cell without a value, which is last in each order."""
WORDS = {"client", "owner", "model"}
"""Columns of the clients' table that contain text."""
Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Cells:
    """Table with named columns."""

    columns: Mapping[str, Sequence[Cell]]
    """Cells of each column, by header."""
    foot: Sequence[Sequence[str]] = ()
    """Rows of the footer."""
    words: int = 1
    """Number of leading columns that contain text."""

    @property
    def headers(self) -> tuple[str, ...]:
        """Headers of the columns."""
        return tuple(self.columns)

    @property
    def rows(self) -> list[Row]:
        """Rows of the table, with one cell per column."""
        return list(zip(*self.columns.values(), strict=True))


def client_cells(run: Run, *, extra_metrics: bool = True) -> Cells:
    """Build the table of a run's clients: owners, models, samples, and last scores.

    With `extra_metrics`, the table includes metrics other than the headline metric.
    """
    # Each property has a value for each client, and the format of a value. Properties without any
    # value are not shown.
    properties: list[tuple[str, Mapping[str, Any], Callable[[Any], Cell]]] = [
        ("client", dict(zip(run.clients, run.clients, strict=True)), _text),
        ("owner", run.partition.owners if run.partition else {}, _text),
        ("model", run.models, Cell),
        ("samples", run.samples, _count),
        ("epsilon", run.records[-1].epsilon, _number),
    ]
    columns = {
        title: [shown(values[name]) if name in values else EMPTY for name in run.clients]
        for title, values, shown in properties
        if values
    }
    words, blank = len(columns.keys() & WORDS), [""] * (len(columns) - 1)

    scores = [(" ".join(column), run, column) for column in run.columns]
    for metric, view in run.extra_metrics if extra_metrics else ():
        scores += [(f"{metric}, {' '.join(column)}", view, column) for column in view.columns]
    if run.baseline and run.baseline_column:
        title = f"{run.baseline.method} {' '.join(run.baseline_column)}"
        scores.append((title, run.baseline, run.baseline_column))
    for title, view, column in scores:
        each = view.last(*column).per_client
        columns[title] = [_number(each.get(name, NAN), view.metric) for name in run.clients]

    # Each row of the footer has a rule for the column of a score.
    foot: dict[str, Callable[[Run, str, str], str]] = {
        name: lambda view, *column, name=name: score(view.statistic(name, *column), view.metric)
        for name in STATISTICS
    }
    if any(view.majority(protocol) for _, view, (protocol, _) in scores):
        foot[constant_of(run)[0]] = lambda view, protocol, _: score(
            constant_score(view, protocol), run.metric
        )
    foot["clients"] = Run.client_count
    rows = [
        [name, *blank, *(rule(view, *column) for _, view, column in scores)]
        for name, rule in foot.items()
    ]
    return Cells(columns, rows if scores else [], words)


def constant_score(run: Run, protocol: str) -> float:
    """Return the mean score of the constant prediction over clients, or NaN if it is unknown."""
    return float(np.mean([*run.majority(protocol).values()] or NAN))


def _text(value: str) -> Cell:
    return Cell(printable(value))


def _count(value: int) -> Cell:
    return Cell(f"{value:,}", value)


def _number(value: float, metric: str = ACCURACY) -> Cell:
    return Cell(score(value, metric), value)


def mean_cell(spread: Spread, shown: Callable[[float], str], runs: int = 0) -> Cell:
    """Format a mean, with the number of runs if the mean includes fewer than `runs` runs."""
    count = f" ({spread.n} of {runs})" if 0 < spread.n < runs else ""
    return Cell(shown(spread.mean) + count, spread.mean)


def label_cells(run: Run) -> Cells | None:
    """Build a table of the metrics of each class, label, or target.

    Returns None if the run has no such metrics. The score of a class is averaged over the clients
    whose test data contain the class.
    """
    names = [name for name in run.metrics if not is_shown(name)]
    if not names:
        return None
    metrics = [metric_of(name.partition(".")[0]) for name in names]
    labels = [int(name.rpartition(".")[2]) for name in names]
    noun, classes = metrics[0].noun, run.origin.classes
    # In tasks other than classification, the groups of a partition are not labels.
    if run.partition and noun == "class":
        classes = run.partition.classes
    views = [run.with_metric(name) for name in names]
    columns: dict[str, list[Cell]] = {
        noun: [Cell(printable(classes[n]) if n < len(classes) else str(n)) for n in labels]
    }
    if len({metric.name for metric in metrics}) > 1:
        columns["metric"] = [Cell(metric.title) for metric in metrics]
    for column in run.columns:
        last = [view.last(*column) for view in views]
        title = " ".join(column)
        columns[title] = [_number(each.mean) for each in last]
        if column[1] != "server":
            columns[f"{title}, worst client"] = [_number(each.worst) for each in last]
            counts = [len(each.per_client) for each in last]
            columns[f"{title}, clients"] = [Cell(str(count), count) for count in counts]
    return Cells(columns, words=2 if "metric" in columns else 1)


def frequent_confusions(matrix: ArrayLike, names: Sequence[str]) -> Cells | None:
    """Build a table of the most frequent errors in a confusion matrix [C, C], or None without any.

    Errors are sorted by their number, and then by their fraction of the true class.
    """
    counts = np.asarray(matrix)
    totals = counts.sum(1)
    errors = counts - np.diag(np.diag(counts))
    pairs = [(int(row), int(column)) for row, column in zip(*errors.nonzero(), strict=True)]
    fractions = {(row, column): errors[row, column] / totals[row] for row, column in pairs}
    pairs.sort(key=lambda pair: (-errors[pair], -fractions[pair], pair))
    if not (shown := pairs[:MAX_ERRORS]):
        return None
    return Cells(
        {
            "true class": [Cell(names[row]) for row, _ in shown],
            "predicted class": [Cell(names[column]) for _, column in shown],
            "samples": [Cell(f"{errors[pair]:,}", int(errors[pair])) for pair in shown],
            "of the true class": [Cell(f"{100 * fractions[p]:.1f} %", fractions[p]) for p in shown],
        },
        words=2,
    )


def confusion_note(run: Run) -> str:
    """Return remarks on the confusion matrices of a run, or "" if it has none."""
    if run.confusion is None:
        return ""
    shown, without = run.confusion_matrices, run.confusion.without
    parts = []
    if hidden := len(shown) - MAX_MATRICES:
        parts.append(f"{hidden} other architectures are in confusion.json." if hidden > 0 else "")
    uncounted = sum(m.samples - sum(map(sum, m.counts)) for m in shown.values())
    if uncounted:
        parts.append(f"{uncounted:,} predictions are not finite, and are not counted.")
    if without:
        parts.append(f"The matrices of {plural(len(without), 'client')} are not available.")
    parts.append(f"A client's matrix: fedhet confusion {shown_path(run.path)} CLIENT.")
    return " ".join(filter(None, parts))


def missing_confusion(run: Run) -> str:
    """Return the reason why a run of a classification has no confusion matrix, and what to do.

    Returns "" if the run has a confusion matrix, no scores, or no classes.
    """
    if run.confusion is not None or not run.columns:
        return ""
    task, classes = metric_of(run.headline_metric).task, run.origin.classes
    if run.partition:
        classes = run.partition.classes
    client = f"fedhet confusion {shown_path(run.path)} CLIENT"
    if task == MULTI_LABEL:
        return "A sample can have several labels, so there is no confusion matrix of the labels."
    if task != CLASSIFICATION:
        return ""
    if COMMON not in run.protocols:
        return (
            "The run has no common test set, so there is no confusion matrix of all clients. For a "
            f"client's own test split, use {client} --protocol personal."
        )
    if len(classes) > MAX_CONFUSION:
        return (
            f"There is no confusion matrix, because the data has {len(classes):,} classes; the "
            f"limit is {MAX_CONFUSION}."
        )
    if not run.finished:
        return f"The confusion matrix is recorded after the last round. Until then, use {client}."
    if run.origin.deployed:
        return (
            "The confusion matrices of the clients' models stay at the sites. To show one at a "
            "site, use fedhet confusion STATE CLIENT."
        )
    return f"The run has not recorded its confusion matrix. Use {client}."


def legend(run: Run) -> str:
    """Return the legend for the columns in a run's table."""
    names = [protocol for protocol, _ in run.columns] + [kind for _, kind in run.columns]
    entries = [f"{name}: {MEANING[name]}" for name in dict.fromkeys(names) if name in MEANING]
    if entries and any(run.majority(protocol) for protocol in run.protocols):
        entries.append(": ".join(constant_of(run)))
    return "; ".join([*entries, "tail: mean of the last fifth of the rounds"]) if entries else ""


def constant_of(run: Run) -> tuple[str, str]:
    """Return the name and the description of the constant prediction for a run's task."""
    return find_task(metric_of(run.headline_metric).task).constant


def remarks(run: Run) -> list[str]:
    """Return remarks on selection, inaccurate models, and clients disconnected or late."""
    lines = [line for line in (run.selection_note, better_kind_line(run)) if line]
    lines += undefined_lines(run)
    sign = -1 if metric_of(run.metric).lower_is_better else 1
    below = [
        f"{name} ({protocol} {kind})"
        for protocol, kind in run.columns
        if protocol != VALIDATION  # The clients may have only a few validation samples.
        for name, value in run.last(protocol, kind).per_client.items()
        if sign * value < sign * run.majority(protocol).get(name, -sign * math.inf)
    ]
    if below:
        more = f" and {len(below) - MAX_NAMED} more" if len(below) > MAX_NAMED else ""
        lines.append(
            f"less accurate than {constant_of(run)[1].removesuffix(' of the test set')}: "
            f"{', '.join(below[:MAX_NAMED])}{more}"
        )
    # With a simulated clock, late clients are common, and the method's metrics count them.
    absences = ("absent", "not connected"), *(() if run.has_clock else (("late", "late"),))
    for field, state in absences:
        by_client: dict[str, list[int]] = {}
        for record in run.records:
            for name in getattr(record, field):
                by_client.setdefault(name, []).append(record.round)
        for name, rounds in by_client.items():
            noun = "rounds" if len(rounds) > 1 else "round"
            lines.append(f"{name} was {state} in {noun} {spans(rounds)}")
    kinds = {kind for _, kind in run.columns}
    if run.settings.get("data.held-out-clients") and run.finished and HELD_OUT not in kinds:
        lines.append(f"{run.method} offers no model to held-out clients")
    expected, joined = run.settings.get("clients"), len(run.clients)
    if run.origin.deployed and isinstance(expected, int) and expected > joined:
        total = plural(expected, "client")
        lines.append(f"{expected - joined} of {total} never took part; see the run's log")
    return lines


def undefined_lines(run: Run) -> list[str]:
    """Return a line for each requested metric that is undefined for some clients, with the reason.

    A metric of the separate classes is defined for each class with test samples, so it has no line.
    """
    requested = run.settings.get("metrics", ())
    names = [requested] if isinstance(requested, str) else requested
    lines = []
    for name in names if isinstance(names, list | tuple) else ():
        metric = METRICS.get(str(name))
        if metric is None or metric.by_class:
            continue
        view = run.with_metric(metric.name)
        for protocol in run.protocols:
            kind = run.kinds(protocol)[0]
            scores, defined = run.last(protocol, kind).per_client, view.last(protocol, kind)
            if missing := sorted(scores.keys() - defined.per_client.keys(), key=natural):
                of = f"{len(missing)} of {plural(len(scores), 'client')}"
                shown = ", ".join(missing[:MAX_NAMED]) + (", …" if missing[MAX_NAMED:] else "")
                lines.append(
                    f"{metric.title} ({protocol} {kind}) is undefined for {of}, because "
                    f"{metric.undefined_if}: {shown}"
                )
    return lines


def headline_line(run: Run) -> str:
    """Return a line with the headline score and the model to which it belongs, or ""."""
    if not run.columns:
        return ""
    protocol, kind = run.columns[0]
    mean = score(run.last(protocol, kind).mean, run.metric)
    return f"headline: {run.metric_title} {mean}, {kind} models {where(protocol)}"


def baseline_line(run: Run) -> str:
    """Return a line that compares a run with its baseline, or "" if it has no baseline.

    The line compares the headline models on each test set that both runs have.
    """
    baseline = run.baseline
    if baseline is None or run.baseline_column is None:
        return ""
    first, sign = run.columns[0][0], -1 if metric_of(run.metric).lower_is_better else 1
    parts: list[str] = []
    for protocol in sorted({*run.protocols} & {*baseline.protocols} - {VALIDATION} | {first}):
        kinds = run.kinds(protocol)[0], baseline.kinds(protocol)[0]
        if protocol == first:
            kinds = run.columns[0][1], run.baseline_column[1]
        ours, other = run.last(protocol, kinds[0]), baseline.last(protocol, kinds[1])
        both = ours.per_client.keys() & other.per_client.keys()
        gains = [sign * (ours.per_client[name] - other.per_client[name]) for name in both]
        means = f"{score(ours.mean, run.metric)}, {score(other.mean, run.metric)}"
        better = f"{sum(gain > 0 for gain in gains)} of {plural(len(both), 'client')} better"
        models = "" if kinds[0] == kinds[1] else f" ({kinds[0]} against {kinds[1]})"
        gain = difference(ours.mean - other.mean, run.metric)
        if protocol == first:
            begin = f"against {baseline.method}{models}: {gain} ({means}), {better}"
            parts.insert(0, f"{begin} {where(protocol)}")
        else:
            parts.append(f"{where(protocol)}{models}: {gain} ({means}), {better}")
    return "; ".join(parts)


def better_kind_line(run: Run) -> str:
    """Return a line about a kind of model with a better score than the headline kind, or "".

    The difference must exceed twice the error due to the number of test samples. Metrics other than
    the accuracy, and unknown numbers of test samples, have no such error.
    """
    if not run.columns or run.metric != ACCURACY:
        return ""
    protocol, kind = run.columns[0]
    headline = run.last(protocol, kind).mean
    others = [each for each in run.kinds(protocol)[1:] if each not in HELD_OUT_KINDS]
    scores = {each: run.last(protocol, each).mean for each in others}
    best = max(scores, key=lambda each: scores[each], default="")
    samples = smallest(run.test_samples(protocol, each) for each in (kind, best)) if best else None
    if samples is None:
        return ""
    error = sample_error(scores[best] - headline, samples)
    if not scores[best] - headline > 2 * error:
        return ""
    return (
        f"the kind {best} has a higher score than the headline kind {kind} {where(protocol)}: "
        f"{score(scores[best])} instead of {score(headline)}, a difference of more than twice the "
        f"error ({score(error)}) due to {samples_text([samples], protocol)}"
    )


def relative_line(run: Run) -> str:
    """Return a line about accuracies relative to those before the exchange, or "" without any."""
    if run.relative is None:
        return ""
    protocol, ratio = run.relative
    best = f"{score(ratio.best)} ({client_with(ratio.best, ratio.per_client)})"
    worst = f"{score(ratio.worst)} ({client_with(ratio.worst, ratio.per_client)})"
    mean = score(ratio.mean)
    means = f"mean {mean}, best {best}, worst {worst}"
    return f"relative to the models before the exchange, {protocol}: {means}"


# --- Markdown and LaTeX ----------------------------------------------------------------------


def markdown(cells: Cells) -> str:
    """Return a table as Markdown."""
    rule = ["---" if index < cells.words else "---:" for index in range(len(cells.columns))]
    rows = [[escape_markdown(cell.text) for cell in row] for row in cells.rows]
    lines = [[escape_markdown(header) for header in cells.headers], rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def escape_markdown(text: str) -> str:
    """Escape text for Markdown."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|*_`\[])", r"\\\1", escaped)


def tabular(
    cells: Cells, better: Mapping[str, int] | None = None, marked: Collection[int] = ()
) -> str:
    """Return a table as LaTeX.

    `better` contains the headers of the columns to highlight, with 1 if higher values are better or
    -1 if lower values are better. In each of these columns, the best value is bold, and the
    second-best value is underlined. Rows with an index in `marked` have a dagger in the first of
    these columns.
    """
    better = better or {}
    columns = []
    for header, column in cells.columns.items():
        values = {c.value for c in column if c.value is not None and math.isfinite(c.value)}
        sign, styles = better.get(header, 0), dict[float, str]()
        if sign and len(values) > 1:
            best, second = sorted(values, key=lambda value: -sign * value)[:2]
            styles = {best: r"\textbf{%s}", second: r"\underline{%s}"}
        daggers = marked if header == next(iter(better), "") else ()
        texts = []
        for row, cell in enumerate(column):
            text = cell.text.translate(SPECIAL) + (DAGGER if row in daggers else "")
            style = "%s" if cell.value is None else styles.get(cell.value, "%s")
            texts.append(style.replace("%s", text))
        columns.append(texts)
    layout = "".join("l" if index < cells.words else "r" for index in range(len(columns)))
    rows = [[header.translate(SPECIAL) for header in cells.headers], *zip(*columns, strict=True)]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def captioned(table: str, caption: str) -> str:
    """Return a LaTeX table, from `tabular`, with a caption that explains its columns and marks."""
    text = caption.translate(SPECIAL)
    return f"\\begin{{table}}\n\\centering\n\\caption{{{text}}}\n{table}\\end{{table}}\n"


# --- terminal ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """Terminal table that is split into blocks of columns if it is too wide."""

    cells: Cells
    title: str
    caption: str = ""
    parts: Sequence[Sequence[Row]] | None = None
    """Sections of rows to show, or None to show all rows."""
    between: str = ""
    """Text of the row between two sections."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield a table for each block of columns; each table repeats the text columns."""
        words, width = list(range(self.cells.words)), options.max_width
        blocks = [words[:]]  # Each block is a list of column indices.
        for number in range(self.cells.words, len(self.cells.columns)):
            wider = self._table([*blocks[-1], number], width)
            measured = console.measure(wider, options=options.update(width=10_000)).maximum
            if blocks[-1] != words and measured > width:
                blocks.append(words[:])
            blocks[-1].append(number)
        for index, block in enumerate(blocks):
            table = self._table(block, width)
            if index == 0:
                table.title = Text(self.title)
            yield table
        if self.caption:
            yield Text(self.caption, style="table.caption")

    def _table(self, columns: Sequence[int], width: int) -> Table:
        """Build a table of the given columns. Text columns may wrap, and numbers are right-aligned.

        The width of text columns is fixed, because Rich might otherwise shrink a column to zero
        width. All text columns together use at most half of `width`.
        """
        cells, all_columns = self.cells, list(self.cells.columns.items())
        widths = [
            max(
                cell_len(text)
                for text in (
                    header,
                    *(printable(cell.text) for cell in column),
                    *(row[number] for row in cells.foot),
                    self.between if number == 0 and len(self.parts or ()) > 1 else "",
                )
            )
            for number, (header, column) in enumerate(all_columns[: cells.words])
        ]
        while sum(widths) > width // 2 and max(widths, default=0) > MIN_TEXT:
            widths[widths.index(max(widths))] -= 1
        table = Table(
            title_justify="left", box=SIMPLE_HEAD, show_footer=bool(cells.foot),
            collapse_padding=True, pad_edge=False,
        )  # fmt: skip
        for number in columns:
            header = all_columns[number][0]
            foot = Text("\n".join(row[number] for row in cells.foot))
            if number < cells.words:
                table.add_column(Text(header), foot, overflow="fold", width=widths[number])
            else:
                stacked = Text(header.replace(" ", "\n", 1), justify="right")
                table.add_column(stacked, foot, justify="right", no_wrap=True)
        for part, rows in enumerate(self.parts or [cells.rows]):
            if part:
                table.add_section()
                table.add_row(Text(self.between, style="dim"))
                table.add_section()
            for row in rows:
                texts = (printable(row[number].text) for number in columns)
                table.add_row(*(Text(text.replace(" ± ", "\n± ")) for text in texts))
        return table


def final_table(run: Run) -> Blocks:
    """Build the terminal table with each client's accuracy in the last round.

    The footer contains statistics over clients, the mean over the last fifth of the rounds, and the
    number of clients in the means. For more than 30 clients, only the best five and the worst five
    are shown.
    """
    cells = client_cells(run, extra_metrics=False)
    last = run.last_evaluated.round if run.last_evaluated else run.done
    ended = "failed" if run.origin.fault else "unfinished"
    state = f"last round ({last})" if run.finished else f"{ended}, round {last}"
    best, worst = cells.rows, list[Row]()
    if len(best) > MAX_ROWS and run.columns:
        headline = cells.columns[" ".join(run.columns[0])]
        values = pd.Series([cell.value for cell in headline], dtype=float).dropna()
        lower = metric_of(run.metric).lower_is_better
        order = values.sort_values(ascending=lower, kind="stable").index
        ranked = [cells.rows[index] for index in order]
        best, worst = ranked[:ENDS], ranked[ENDS:][-ENDS:]
    hidden = len(cells.rows) - len(best[:MAX_ROWS]) - len(worst)
    first = headline_line(run), baseline_line(run), relative_line(run)
    lines = filter(None, [*first, *remarks(run), legend(run)])
    return Blocks(
        cells,
        printable(f"{run.method} on {run.dataset}: {state}"),
        "\n".join(map(printable, lines)),
        [best[:MAX_ROWS], worst] if hidden else [best],
        f"… {hidden} not shown",
    )


def metric_table(run: Run) -> Blocks | None:
    """Build the terminal table of the metrics other than the headline metric.

    Returns None if there are no such metrics.
    """
    rows = [(title, view, column) for title, view in run.extra_metrics for column in view.columns]
    if not rows:
        return None
    columns = {
        "metric": [Cell(title) for title, _, _ in rows],
        "of": [Cell(" ".join(column)) for _, _, column in rows],
    }
    for name in STATISTICS:
        columns[name] = [_number(view.statistic(name, *column)) for _, view, column in rows]
    return Blocks(Cells(columns, words=2), f"metrics other than {run.metric_title}, over clients")
