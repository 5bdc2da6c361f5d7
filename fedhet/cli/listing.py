"""Plain tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text


def listing(*headers: str, rows: Iterable[Iterable[str]] = (), words: int | None = None) -> Table:
    """Return a table without lines; columns after the first `words` are right-aligned."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for place, header in enumerate(headers):
        left = words is None or place < words
        table.add_column(Text(header), overflow="fold", justify="left" if left else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
