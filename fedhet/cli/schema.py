"""The command that writes the schema of a table: `schema`."""

from __future__ import annotations

from datetime import date, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedhet.cli.options import say

if TYPE_CHECKING:
    from fedhet.data.tables import Column


def schema_command(
    table: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV, TSV or Parquet file.")],
    target: Annotated[str, typer.Option(help="The column of the class.")],
    columns: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME…",
            help="The columns that are features, comma-separated.",
            show_default="all but the target",
        ),
    ] = "",
    categories: Annotated[
        str,
        typer.Option(
            metavar="NAME,NAME…",
            help="Columns whose numbers are words, such as codes.",
            show_default="none",
        ),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the schema goes.")] = Path(
        "schema.toml"
    ),
) -> None:
    """Write what a table's columns become: the sites of a deployment need the same file."""
    from fedhet.data import DataSpec
    from fedhet.data.tables import found_schema, read_table
    from fedhet.disk.folder import write_text

    named, words = (
        tuple(name.strip() for name in given.split(",") if name.strip())
        for given in (columns, categories)
    )
    spec = DataSpec(target=target, columns=named, categories=words)
    schema = found_schema(read_table(table, spec), spec)
    write_text(out, schema.to_toml())
    for column in schema.columns:
        said = ", ".join(column.categories) or _spread(column)
        say(f"{column.name}: {column.kind}, {said}{', may be missing' * column.missing}")
    say(
        f"{len(schema.columns)} columns, {sum(schema.widths)} features; classes: "
        f"{', '.join(schema.classes)}"
    )
    say(f"schema: {out}")


def _spread(column: Column) -> str:
    """Return the mean and the standard deviation of a number or a date."""
    if column.kind == "date":
        mean = date(1970, 1, 1) + timedelta(days=round(column.mean))
        return f"mean {mean} ± {column.deviation:.4g} days"
    return f"mean {column.mean:.4g} ± {column.deviation:.4g}"
