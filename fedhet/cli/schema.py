"""The command that writes the schema of a table: `schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedhet.cli.options import say


def schema_command(
    table: Annotated[
        Path, typer.Argument(metavar="FILE", help="A CSV, TSV, JSON lines, or Parquet file.")
    ],
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
            help="Columns whose values are words as they are written, such as codes.",
            show_default="none",
        ),
    ] = "",
    missing: Annotated[
        str,
        typer.Option(
            metavar="MARK,MARK…",
            help="Further marks of missing values, such as -999.",
            show_default="none",
        ),
    ] = "",
    decimal: Annotated[
        str, typer.Option(help="The decimal sign of numbers: auto, point, or comma.")
    ] = "auto",
    date_order: Annotated[
        str, typer.Option(help="The order of dates that are not ISO 8601: auto, dmy, or mdy.")
    ] = "auto",
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the schema goes.")] = Path(
        "schema.toml"
    ),
) -> None:
    """Write what a table's columns become: the sites of a deployment need the same file."""
    from fedhet.base.disk import write_text
    from fedhet.data.spec import DataSpec
    from fedhet.data.tables import found_schema, read_table
    from fedhet.settings.schema import build

    given = {"columns": columns, "categories": categories, "missing": missing}
    named = {
        key: tuple(name.strip() for name in value.split(",") if name.strip())
        for key, value in given.items()
    }
    settings = {"target": target, "decimal": decimal, "date-order": date_order, **named}
    spec = build(DataSpec, settings, prefix="data.")
    schema = found_schema(read_table(table, spec), spec, say)
    write_text(out, schema.to_toml())
    say(
        f"{len(schema.columns)} columns, {sum(schema.widths)} features; classes: "
        f"{', '.join(schema.classes)}"
    )
    say(f"schema: {out}")
