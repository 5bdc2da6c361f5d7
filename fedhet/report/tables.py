"""Tables for the terminal, and the cells that the page and Markdown share with them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from fedhet.report.groups import Column, Comparison, Group, Spread
from fedhet.report.run import Run
from fedhet.report.units import (
    ABSENT,
    human_bytes,
    human_seconds,
    percent,
    plus_minus,
    printable,
    score,
)

WHOLE = 30
"""Up to so many clients are listed all; of more, the best and the worst."""
ENDS = 5


@dataclass(frozen=True)
class Cell:
    """A table's cell: what it shows, and the number it sorts by where it is one."""

    text: str
    value: float | None = None

    @property
    def key(self) -> float | str:
        """What a sort goes by: the number, or the text."""
        if self.value is None:
            return self.text
        return self.value if math.isfinite(self.value) else ""


@dataclass(frozen=True)
class Cells:
    """A table's headers and rows; `words` of its first columns are text."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    foot: tuple[tuple[str, ...], ...] = ()
    words: int = 1


def client_cells(run: Run) -> Cells:
    """Return a row a client: model, samples, last accuracy under each protocol and kind."""
    with_model, with_samples = bool(run.models), bool(run.samples)
    scores = [run.last(*column) for column in run.columns]
    headers = ["client", *["model"] * with_model, *["samples"] * with_samples]
    rows = []
    for name in run.clients:
        row = [Cell(printable(name)), *[Cell(run.models.get(name, ABSENT))] * with_model]
        if with_samples:
            held = run.samples.get(name)
            row.append(Cell(f"{held:,}" if held is not None else ABSENT, held or 0))
        values = [each.per_client.get(name, math.nan) for each in scores]
        rows.append((*row, *(Cell(score(value), value) for value in values)))
    blank = [""] * (len(headers) - 1)
    foot = tuple(
        (part, *blank, *(score(getattr(each, part)) for each in scores))
        for part in ("mean", "std", "worst")
    )
    titles = (*headers, *(" ".join(column) for column in run.columns))
    return Cells(titles, tuple(rows), foot if scores else (), 1 + with_model)


def final_table(run: Run) -> Table:
    """Return the last round's accuracy of every client, with mean, std and worst at the foot.

    Of more than 30 clients the best and the worst five are shown.
    """
    cells = client_cells(run)
    last = run.last_evaluated.round if run.last_evaluated else run.done
    state = f"last round ({last})" if run.finished else f"unfinished, round {last}"
    title = f"{run.method} on {run.dataset}: {state}"
    table = _table(cells, Text(printable(title)))
    if run.relative:
        table.caption, table.caption_justify = Text(printable(relative_line(run))), "left"
    best, hidden, rest = _ends(cells, run.columns)
    _add(table, best)
    if hidden:
        table.add_section()
        table.add_row(Text(f"… {hidden} not shown", style="dim"))
        table.add_section()
        _add(table, rest)
    return table


def relative_line(run: Run) -> str:
    """Return in words what the clients gained over training alone; "" where nothing tells."""
    if run.relative is None:
        return ""
    protocol, ratio = run.relative
    best, worst = (
        f"{score(value)} ({name})"
        for value, name in ((ratio.best, ratio.best_client), (ratio.worst, ratio.worst_client))
    )
    mean = score(ratio.mean)
    return f"relative to training alone, {protocol}: mean {mean}, best {best}, worst {worst}"


def _table(cells: Cells, title: Text) -> Table:
    """Return an empty table: words may fold, numbers stay whole and stand to the right."""
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, show_footer=bool(cells.foot),
        collapse_padding=True, pad_edge=False,
    )  # fmt: skip
    for number, header in enumerate(cells.headers):
        foot = Text("\n".join(row[number] for row in cells.foot))
        if number < cells.words:
            longest = max((len(row[number].text) for row in cells.rows), default=1)
            table.add_column(Text(header), foot, overflow="fold", min_width=min(longest, 14))
        else:
            stacked = Text(header.replace(" ", "\n", 1), justify="right")
            table.add_column(stacked, foot, justify="right", no_wrap=True)
    return table


def _add(table: Table, rows: Sequence[Sequence[Cell]]) -> None:
    for row in rows:
        table.add_row(*(Text(printable(cell.text).replace(" ± ", "\n± ")) for cell in row))


def _ends(
    cells: Cells, columns: Sequence[Column]
) -> tuple[Sequence[Sequence[Cell]], int, Sequence[Sequence[Cell]]]:
    """Return the best rows, the number of those left out, and the worst."""
    rows = cells.rows
    if len(rows) <= WHOLE or not columns:
        return rows[:WHOLE], len(rows[WHOLE:]), ()
    place = len(cells.headers) - len(columns)
    known = [row for row in rows if isinstance(row[place].key, float)]
    ranked = sorted(known, key=lambda row: -(row[place].value or 0.0))
    best, worst = ranked[:ENDS], ranked[ENDS:][-ENDS:]
    return best, len(rows) - len(best) - len(worst), worst


def comparison_cells(comparison: Comparison) -> Cells:
    """Return a row a group, as `Comparison` orders them."""
    headline = comparison.headline
    headers = [
        "run", "data set", "n", *(" ".join(column) for column in comparison.columns),
        "worst client", "bytes up", "bytes down", f"bytes to {percent(comparison.target)}", "time",
    ]  # fmt: skip
    rows = []
    for group in comparison.groups:
        label = printable(group.label) + ("" if group.finished else " *")
        row = [Cell(label), Cell(printable(group.dataset))]
        row.append(Cell(str(len(group.runs)), len(group.runs)))
        row += [_accuracy(group.score(column)) for column in comparison.columns]
        row.append(_accuracy(group.worst(headline)))
        row += [_sized(group.bytes_up), _sized(group.bytes_down)]
        row.append(_reached(group, comparison))
        row.append(Cell(human_seconds(group.seconds.mean), group.seconds.mean))
        rows.append(tuple(row))
    return Cells(tuple(headers), tuple(rows), words=2)


def _accuracy(spread: Spread) -> Cell:
    return Cell(plus_minus(spread.mean, spread.std), spread.mean)


def _sized(spread: Spread) -> Cell:
    return Cell(human_bytes(spread.mean), spread.mean)


def _reached(group: Group, comparison: Comparison) -> Cell:
    """Say what the target cost, and how many runs reached it where not all did."""
    spread = group.bytes_to(comparison.headline, comparison.target)
    some = f" ({spread.n} of {len(group.runs)})" if 0 < spread.n < len(group.runs) else ""
    return Cell(human_bytes(spread.mean) + some, spread.mean)


def comparison_table(comparison: Comparison) -> Table:
    """Return a comparison for the terminal, its notes below."""
    cells = comparison_cells(comparison)
    title = f"last round, mean ± std over seeds; ordered by {' '.join(comparison.headline)}"
    table = _table(cells, Text(title))
    table.caption = Text("\n".join(printable(note) for note in comparison.notes))
    table.caption_justify = "left"
    _add(table, cells.rows)
    return table
