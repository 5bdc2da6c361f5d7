"""The command `table`: tables of papers, next to their printed numbers.

`python -m fedhet.cli.table` writes the list of tables that `fedhet table` prints.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fedhet.base.errors import SettingsError
from fedhet.cli.listing import listing
from fedhet.cli.making import Wanted, make_runs, raise_faults, show_plan
from fedhet.cli.options import console, say
from fedhet.cli.show import LIST
from fedhet.config.resolve import resolve
from fedhet.field import plan_field, read_field
from fedhet.field.declaration import NAME
from fedhet.methods.registry import shipped_names
from fedhet.papers import (
    SIZES,
    Plan,
    Results,
    collect,
    each_once,
    overview,
    plan,
    read_table,
    table_names,
    tables_of,
    write_latex,
    write_overview,
    write_results,
)
from fedhet.papers.write import LEGEND, cells, claims
from fedhet.report.tables import Cells
from fedhet.runs.directory import make_parent


def make_tables(word: str, rows: Sequence[str], wanted: Wanted) -> None:
    """Make the missing runs of tables, and show the tables.

    `rows`: only those whose names begin with one of these are made; none means all.
    """
    plans = [_planned(name, wanted) for name in tables_of(word)]
    _check_rows(rows, word, plans)
    for found in plans:
        for notice in found.replaced:
            say(f"{found.name}: {notice}, by --set")
    runs = each_once(run for found in plans for run in found.runs_of(rows))
    for run in runs:
        resolve(run.values)  # all are checked before the first one starts
    if wanted.dry_run:
        show_plan(runs)
        return
    out = wanted.out
    make_parent(out)
    faults = make_runs(f"{word}, {wanted.size}", runs, wanted)
    made = [collect(found) for found in plans]
    for results in made:
        _show(results)
        say(f"table: {write_results(results, out)}")
        if wanted.latex:
            say(f"for a paper: {write_latex(results, out)}")
    if len(made) > 1:
        console.print(printed(overview(made)))
        write_overview(made, out / f"{word}-{wanted.size}.md")
        say(f"all of them: {out / f'{word}-{wanted.size}.md'}")
    raise_faults(faults)


def _planned(name: str, wanted: Wanted) -> Plan:
    table, size = read_table(name), wanted.size
    if size not in SIZES or size not in table.sizes:
        raise SettingsError(f"'--size {size}': table '{name}' has {', '.join(table.sizes)}")
    return plan(name, table, size, wanted.seeds, wanted.runs, wanted.over)


def _check_rows(rows: Sequence[str], word: str, plans: Sequence[Plan]) -> None:
    names = list(dict.fromkeys(cell.row.name for found in plans for cell in found.cells))
    for start in rows:
        if not any(name.startswith(start) for name in names):
            raise SettingsError(f"'--rows {start}': {word} has the rows {'; '.join(names)}")


def tables_listed() -> list[tuple[str, str, str, str]]:
    """Return the rows of the list of tables, with the number of runs that each table takes."""
    rows = []
    for name in table_names():
        table = read_table(name)
        counts = {s: len(plan(name, table, s, [0], Path()).runs) for s in table.sizes}
        sizes = ", ".join(f"{size} {count}" for size, count in counts.items())
        rows.append((name, table.title, table.source, sizes))
    rows.append(_field_listed())
    return rows


def _field_listed() -> tuple[str, str, str, str]:
    table, methods = read_field(), sorted(shipped_names())
    counts = {s: len(plan_field(table, s, methods, [0], Path()).runs) for s in table.sizes}
    sizes = ", ".join(f"{size} {count}" for size, count in counts.items())
    return NAME, table.title, "no paper", sizes


def _show(results: Results) -> None:
    console.print(printed(cells(results)))
    say(LEGEND)
    if results.verdicts:
        console.print(printed(claims(results)))


def printed(found: Cells) -> Table:
    """Return a table for the terminal."""
    rows = [[cell.text for cell in row] for row in found.rows]
    return listing(*found.headers, rows=rows, words=found.words)


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in tables_listed())
    Path(str(LIST)).write_text(f"[\n{lines}\n]\n", encoding="utf-8")
