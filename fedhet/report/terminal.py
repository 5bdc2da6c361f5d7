"""Tables for the terminal: as wide as it is, in blocks where that is too narrow for all columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from fedhet.report.comparison import Comparison
from fedhet.report.groups import Column
from fedhet.report.run import Run
from fedhet.report.tables import (
    TAIL_OF,
    Cells,
    Row,
    away_lines,
    baseline_line,
    client_cells,
    comparison_cells,
    legend,
    majority_line,
    metric_cells,
    paired_cells,
    paired_legend,
    relative_line,
)
from fedhet.runs.units import printable

WHOLE = 30
"""Maximum number of clients listed in full; beyond, only the best and the worst."""
ENDS = 5
LEAST_TEXT = 14
"""Columns of the terminal that a column of text has at least, if its texts are that long."""


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
        blocks = list(self._blocks(console, options))
        for number, block in enumerate(blocks):
            table = self._table(block, options.max_width)
            if number == 0:
                table.title = Text(self.title)
            yield table
        if self.caption:
            yield Text(self.caption, style="table.caption")

    def _blocks(self, console: Console, options: ConsoleOptions) -> Iterator[list[int]]:
        """Yield the numbers of the columns that fit side by side."""
        words, columns = list(range(self.cells.words)), len(self.cells.columns)
        block = words[:]
        for number in range(self.cells.words, columns):
            wider = self._table([*block, number], options.max_width)
            width = console.measure(wider, options=options.update(width=10_000)).maximum
            if block != words and width > options.max_width:
                yield block
                block = words[:]
            block = [*block, number]
        yield block

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
        while sum(widths) > width // 2 and max(widths, default=0) > LEAST_TEXT:
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
    best, hidden, rest = _ends(cells, run.columns)
    lines = filter(
        None,
        [baseline_line(run), relative_line(run), majority_line(run), *away_lines(run), legend(run)],
    )
    return Blocks(
        cells,
        printable(f"{run.method} on {run.dataset}: {state}"),
        "\n".join(map(printable, lines)),
        [best, rest] if hidden else [best],
        f"… {hidden} not shown",
    )


def metric_table(run: Run) -> Blocks | None:
    """Return the metrics besides accuracy for the terminal; None if none were measured."""
    cells = metric_cells(run)
    return None if cells is None else Blocks(cells, "metrics besides accuracy, over the clients")


def comparison_table(comparison: Comparison) -> Blocks:
    """Return a comparison for the terminal, with its notes below."""
    headline = " ".join(comparison.headline)
    title = f"last round{comparison.beside_accuracy}, mean ± std over seeds; ordered by {headline}"
    notes = [f"{TAIL_OF} {headline}", *comparison.notes]
    return Blocks(comparison_cells(comparison), title, "\n".join(map(printable, notes)))


def paired_table(comparison: Comparison) -> Blocks | None:
    """Return the paired differences for the terminal, or None if no pair has two seeds."""
    cells = paired_cells(comparison)
    title = f"differences by seed: {' '.join(comparison.headline)}"
    return None if cells is None else Blocks(cells, title, paired_legend(comparison))


def _ends(cells: Cells, columns: Sequence[Column]) -> tuple[list[Row], int, list[Row]]:
    """Return the best rows by the first of the columns, the number left out, and the worst."""
    rows = cells.rows
    if len(rows) <= WHOLE or not columns:
        return rows[:WHOLE], len(rows[WHOLE:]), []
    headline = cells.columns[" ".join(columns[0])]
    known = pd.Series([cell.value for cell in headline], dtype=float).dropna()
    ranked = [rows[place] for place in known.sort_values(ascending=False, kind="stable").index]
    best, worst = ranked[:ENDS], ranked[ENDS:][-ENDS:]
    return best, len(rows) - len(best) - len(worst), worst
