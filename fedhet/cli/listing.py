"""Plain tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

GAP = 2
"""Columns of the terminal between two columns of a table."""
MAX_HEADER = 20
"""Columns of the terminal from which a header of `listings` is folded."""


def listing(*headers: str, rows: Iterable[Iterable[str]] = (), words: int | None = None) -> Table:
    """Return a table without lines; columns after the first `words` are right-aligned."""
    table = Table(box=None, padding=(0, GAP, 0, 0), header_style="bold")
    for place, header in enumerate(headers):
        left = words is None or place < words
        table.add_column(Text(header), overflow="fold", justify="left" if left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def listings(
    headers: Sequence[str], rows: Sequence[Sequence[str]], words: int, width: int
) -> Iterator[Table]:
    """Yield a listing in as many tables as needed for `width` columns of the terminal.

    Each table has the first `words` columns, and at least one of the other columns.
    """
    sizes = [min(cell_len(header), MAX_HEADER) + GAP for header in headers]
    for row in rows:
        sizes = [max(size, cell_len(text) + GAP) for size, text in zip(sizes, row, strict=True)]
    blocks = [list(range(words))]
    for place in range(words, len(headers)):
        is_full = sum(sizes[each] for each in [*blocks[-1], place]) > width
        if is_full and len(blocks[-1]) > words:
            blocks.append(list(range(words)))
        blocks[-1].append(place)
    for block in blocks:
        parts = [[row[place] for place in block] for row in rows]
        yield listing(*(headers[place] for place in block), rows=parts)
