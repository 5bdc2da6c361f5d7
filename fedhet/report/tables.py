"""The tables of runs and comparisons, and their forms: Markdown, LaTeX, and the terminal.

The page has macros of its own for the same cells.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedhet.base.metrics import is_shown
from fedhet.report.comparison import Spread
from fedhet.report.run import MEANING, STATISTICS, Run, highest, lowest
from fedhet.runs.records import HELD_OUT, NAN
from fedhet.runs.units import ABSENT, plural, printable, score, spans

MARK = "†"
NAMED = 3
"""Models that are named in a sentence, at most."""
WHOLE, ENDS = 30, 5
"""Maximum number of clients listed in full in the terminal; beyond, so many best and worst ones."""
MIN_TEXT = 14
"""Columns of the terminal that a column of text has at least, if its texts are that long."""

SPECIAL = str.maketrans(
    {
        "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_",
        "{": r"\{", "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
        "<": r"\textless{}", ">": r"\textgreater{}",
        "±": r"$\pm$", MARK: r"$^\dagger$", "–": "--", "−": "$-$", "τ": r"$\tau$",
        "ε": r"$\varepsilon$",
    }
)  # fmt: skip
"""What LaTeX reads as something else, or does not have in every font."""
DAGGER = SPECIAL[ord(MARK)]
LATEX_HEAD = "% \\usepackage{booktabs}\n"


@dataclass(frozen=True)
class Cell:
    """A table's cell: its text, and the number to sort by if it has one."""

    text: str
    value: float | None = None

    @property
    def key(self) -> float | str:
        """The sort key: the number, or the text."""
        if self.value is None:
            return self.text
        return self.value if math.isfinite(self.value) else ""


Row = tuple[Cell, ...]


@dataclass(frozen=True)
class Cells:
    """A table: its columns by their headers; the first `words` columns are text."""

    columns: Mapping[str, Sequence[Cell]]
    foot: Sequence[Sequence[str]] = ()
    words: int = 1

    @property
    def headers(self) -> tuple[str, ...]:
        """The columns' headers."""
        return tuple(self.columns)

    @property
    def rows(self) -> list[Row]:
        """The cells row by row."""
        return list(zip(*self.columns.values(), strict=True))


def client_cells(run: Run, *, besides: bool = True) -> Cells:
    """Return one row per client: model, samples, last accuracy by protocol and kind.

    The metrics `besides` accuracy follow, under each protocol and kind.
    """
    about = {"client": [Cell(printable(name)) for name in run.clients]}
    if run.models:
        about["model"] = [Cell(run.models.get(name, ABSENT)) for name in run.clients]
    words = len(about)
    if run.samples:
        counts = [run.samples.get(name) for name in run.clients]
        about["samples"] = [Cell(ABSENT, 0) if n is None else Cell(f"{n:,}", n) for n in counts]
    if epsilon := run.records[-1].epsilon:
        about["epsilon"] = [_number(epsilon.get(name, NAN)) for name in run.clients]
    shown = [(run, column, " ".join(column)) for column in run.columns]
    for title, view in run.besides if besides else ():
        shown += [(view, column, f"{title}, {' '.join(column)}") for column in view.columns]
    if run.baseline and run.against:
        title = f"{run.baseline.method} {' '.join(run.against)}"
        shown.append((run.baseline, run.against, title))
    scores = {title: view.last(*column) for view, column, title in shown}
    values = {
        title: [_number(each.per_client.get(name, NAN)) for name in run.clients]
        for title, each in scores.items()
    }
    blank = [""] * (len(about) - 1)
    foot = [
        [statistic, *blank, *(score(getattr(each, statistic)) for each in scores.values())]
        for statistic in STATISTICS
    ]
    foot.append(["tail", *blank, *(score(view.tail(*column).mean) for view, column, _ in shown)])
    majority = [view.majority(protocol) for view, (protocol, _), _ in shown]
    if any(majority):
        means = (float(np.mean([*each.values()] or NAN)) for each in majority)
        foot.append(["majority", *blank, *map(score, means)])
    foot.append(["clients", *blank, *(view.counted(*column) for view, column, _ in shown)])
    return Cells({**about, **values}, foot if scores else [], words)


def _number(value: float) -> Cell:
    return Cell(score(value), value)


def mean_cell(spread: Spread, shown: Callable[[float], str], runs: int = 0) -> Cell:
    """Return a mean, with the number of the `runs` that it covers if it does not cover all."""
    some = f" ({spread.n} of {runs})" if 0 < spread.n < runs else ""
    return Cell(shown(spread.mean) + some, spread.mean)


def recall_cells(run: Run) -> Cells | None:
    """Return one row per class with its recall by protocol and kind; None if it is not measured.

    A class's recall is the mean over the clients whose test data has the class, with the worst.
    """
    names = [name for name in run.metrics if not is_shown(name)]
    if not names:
        return None
    labels = [int(name.rpartition(".")[2]) for name in names]
    known = run.partition.classes if run.partition else run.origin.classes
    views = [run.measuring(name) for name in names]
    columns: dict[str, list[Cell]] = {
        "class": [Cell(printable(known[n]) if n < len(known) else str(n)) for n in labels]
    }
    for column in run.columns:
        last = [view.last(*column) for view in views]
        title = " ".join(column)
        columns[title] = [_number(each.mean) for each in last]
        if column[1] != "server":
            columns[f"{title}, worst client"] = [_number(each.worst) for each in last]
            counts = [len(each.per_client) for each in last]
            columns[f"{title}, clients"] = [Cell(str(count), count) for count in counts]
    return Cells(columns)


def legend(run: Run) -> str:
    """Return a line that says what the columns of a run's table are."""
    names = [protocol for protocol, _ in run.columns] + [kind for _, kind in run.columns]
    known = [f"{name}: {MEANING[name]}" for name in dict.fromkeys(names) if name in MEANING]
    if known and any(run.majority(protocol) for protocol in run.protocols):
        known.append("majority: always predicting the most frequent class of the test set")
    return "; ".join([*known, "tail: mean of the last fifth of the rounds"]) if known else ""


def remarks(run: Run) -> list[str]:
    """Return sentences on models below the majority class, and clients not connected or late."""
    below = [
        f"{name} ({protocol} {kind})"
        for protocol, kind in run.columns
        for name, accuracy in run.last(protocol, kind).per_client.items()
        if accuracy < run.majority(protocol).get(name, 0.0)
    ]
    lines = []
    if below:
        more = f" and {len(below) - NAMED} more" if len(below) > NAMED else ""
        lines.append(
            "less accurate than always predicting the most frequent class: "
            f"{', '.join(below[:NAMED])}{more}"
        )
    # By a simulated clock late clients are the rule, and are counted among the method's metrics.
    absences = ("absent", "not connected"), *(() if run.has_clock else (("late", "late"),))
    for field, what in absences:
        found: dict[str, list[int]] = {}
        for record in run.records:
            for name in getattr(record, field):
                found.setdefault(name, []).append(record.round)
        for name, rounds in found.items():
            noun = "rounds" if len(rounds) > 1 else "round"
            lines.append(f"{name} was {what} in {noun} {spans(rounds)}")
    kinds = {kind for _, kind in run.columns}
    if run.settings.get("data.held-out-clients") and run.finished and HELD_OUT not in kinds:
        lines.append(f"{run.method} offers a client nothing with which nobody has trained")
    wanted, joined = run.settings.get("clients"), len(run.clients)
    if run.origin.deployed and isinstance(wanted, int) and wanted > joined:
        every = plural(wanted, "client")
        lines.append(f"{wanted - joined} of {every} never took part: the run's log says why")
    return lines


def baseline_line(run: Run) -> str:
    """Return a sentence that compares a run with its baseline; "" without one."""
    if run.baseline is None or run.against is None:
        return ""
    own, other = run.last(*run.columns[0]), run.baseline.last(*run.against)
    both = own.per_client.keys() & other.per_client.keys()
    better = sum(own.per_client[name] > other.per_client[name] for name in both)
    return (
        f"against {run.baseline.method}: {own.mean - other.mean:+.4f} ({score(own.mean)}, "
        f"{score(other.mean)}), {better} of {plural(len(both), 'client')} better"
    )


def relative_line(run: Run) -> str:
    """Return a sentence on the clients' gains over local training; "" if not measured."""
    if run.relative is None:
        return ""
    protocol, ratio = run.relative
    best = f"{score(ratio.best)} ({highest(ratio.per_client)})"
    worst = f"{score(ratio.worst)} ({lowest(ratio.per_client)})"
    mean = score(ratio.mean)
    return f"relative to training alone, {protocol}: mean {mean}, best {best}, worst {worst}"


# --- as text ---------------------------------------------------------------------------------


def markdown(cells: Cells) -> str:
    """Return a table in Markdown."""
    rule = ["---" if place < cells.words else "---:" for place in range(len(cells.columns))]
    rows = [[plain(cell.text) for cell in row] for row in cells.rows]
    lines = [[plain(header) for header in cells.headers], rule, *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """Return text escaped for Markdown."""
    escaped = printable(text).replace("&", "&amp;").replace("<", "&lt;")
    return re.sub(r"([\\|*_`\[])", r"\\\1", escaped)


def escaped(text: str) -> str:
    """Return text as LaTeX shows it."""
    return text.translate(SPECIAL)


def tabular(
    cells: Cells, better: Mapping[str, int] | None = None, marked: Collection[int] = ()
) -> str:
    """Return a table in LaTeX.

    `better`: for the columns, by header, in which the best and the second are marked, 1 if higher
    numbers are better or -1 if lower ones are. The first of these columns has a dagger in the rows
    `marked`.
    """
    better = better or {}
    columns = []
    for header, column in cells.columns.items():
        known = {c.value for c in column if c.value is not None and math.isfinite(c.value)}
        sign, looks = better.get(header, 0), dict[float, str]()
        if sign and len(known) > 1:
            best, second = sorted(known, key=lambda value: -sign * value)[:2]
            looks = {best: r"\textbf{%s}", second: r"\underline{%s}"}
        daggers = marked if header == next(iter(better), "") else ()
        texts = []
        for row, cell in enumerate(column):
            text = escaped(cell.text) + (DAGGER if row in daggers else "")
            look = "%s" if cell.value is None else looks.get(cell.value, "%s")
            texts.append(look.replace("%s", text))
        columns.append(texts)
    layout = "".join("l" if place < cells.words else "r" for place in range(len(columns)))
    rows = [[escaped(header) for header in cells.headers], *zip(*columns, strict=True)]
    head, *body = [" & ".join(row) + r" \\" for row in rows]
    lines = [rf"\begin{{tabular}}{{{layout}}}", r"\toprule", head, r"\midrule", *body]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


# --- for the terminal --------------------------------------------------------------------------


@dataclass(frozen=True)
class Blocks:
    """A table whose columns follow each other in blocks where they do not fit side by side."""

    cells: Cells
    title: str
    caption: str = ""
    parts: Sequence[Sequence[Row]] | None = None
    """The rows that are shown, in sections; None: all."""
    between: str = ""
    """The line between two sections."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield as many tables as it takes, each with the columns that are text."""
        words, width = list(range(self.cells.words)), options.max_width
        blocks = [words[:]]  # the numbers of the columns that fit side by side
        for number in range(self.cells.words, len(self.cells.columns)):
            wider = self._table([*blocks[-1], number], width)
            measured = console.measure(wider, options=options.update(width=10_000)).maximum
            if blocks[-1] != words and measured > width:
                blocks.append(words[:])
            blocks[-1].append(number)
        for place, block in enumerate(blocks):
            table = self._table(block, width)
            if place == 0:
                table.title = Text(self.title)
            yield table
        if self.caption:
            yield Text(self.caption, style="table.caption")

    def _table(self, columns: Sequence[int], width: int) -> Table:
        """Build a table of the given columns; text columns may wrap, numbers are right-aligned.

        The width of each text column is fixed, because Rich would otherwise shrink it to nothing in
        favor of the numbers. Text columns take at most half of `width`.
        """
        cells, every = self.cells, list(self.cells.columns.items())
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
            for number, (header, column) in enumerate(every[: cells.words])
        ]
        while sum(widths) > width // 2 and max(widths, default=0) > MIN_TEXT:
            widths[widths.index(max(widths))] -= 1
        table = Table(
            title_justify="left", box=SIMPLE_HEAD, show_footer=bool(cells.foot),
            collapse_padding=True, pad_edge=False,
        )  # fmt: skip
        for number in columns:
            header = every[number][0]
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
    """Return the last round's accuracy of every client, with mean, std and worst in the footer.

    The footer ends in the tail, the mean over clients in the last fifth of the rounds, and the
    number of clients that a mean is over. For more than 30 clients, only the best and the worst
    five are shown.
    """
    cells = client_cells(run, besides=False)
    last = run.last_evaluated.round if run.last_evaluated else run.done
    ended = "failed" if run.origin.fault else "unfinished"
    state = f"last round ({last})" if run.finished else f"{ended}, round {last}"
    best, rest = cells.rows, list[Row]()
    if len(best) > WHOLE and run.columns:
        headline = cells.columns[" ".join(run.columns[0])]
        known = pd.Series([cell.value for cell in headline], dtype=float).dropna()
        order = known.sort_values(ascending=False, kind="stable").index
        ranked = [cells.rows[place] for place in order]
        best, rest = ranked[:ENDS], ranked[ENDS:][-ENDS:]
    hidden = len(cells.rows) - len(best[:WHOLE]) - len(rest)
    lines = filter(None, [baseline_line(run), relative_line(run), *remarks(run), legend(run)])
    return Blocks(
        cells,
        printable(f"{run.method} on {run.dataset}: {state}"),
        "\n".join(map(printable, lines)),
        [best[:WHOLE], rest] if hidden else [best],
        f"… {hidden} not shown",
    )


def metric_table(run: Run) -> Blocks | None:
    """Return the metrics besides accuracy over the clients for the terminal; None without any."""
    rows = [
        (title, column, view.last(*column), view.tail(*column).mean)
        for title, view in run.besides
        for column in view.columns
    ]
    if not rows:
        return None
    columns = {
        "metric": [Cell(title) for title, _, _, _ in rows],
        "of": [Cell(" ".join(column)) for _, column, _, _ in rows],
        **{name: [_number(getattr(last, name)) for _, _, last, _ in rows] for name in STATISTICS},
        "tail": [_number(tail) for *_, tail in rows],
    }
    return Blocks(Cells(columns, words=2), "metrics besides accuracy, over the clients")
