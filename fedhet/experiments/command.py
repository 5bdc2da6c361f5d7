"""Command `fedhet table`, available if this package is installed."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli.options import console, listing, loading, option, read_seeds
from fedhet.cli.run import check_sweepable
from fedhet.config.sources import parse_pairs

LIST = resources.files("fedhet.experiments") / "list.json"
"""List of tables, precomputed by `make reference` because counting the runs takes seconds."""
TABLES = Path("runs/tables")


def table_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A table, a paper such as felo (all its tables), all, or field. claims = count "
            "the claims that hold in finished tables. Without a name, the command lists the tables."
        ),
    ] = None,
    size: Annotated[
        str,
        typer.Option(
            metavar="tiny|small|paper",
            help="Size of the runs: tiny = a small dataset such as digits, in minutes; small "
            "= the paper's data or similar data, small networks; paper = the paper's settings.",
        ),
    ] = "tiny",
    seeds: Annotated[str, typer.Option(metavar="INT,INT…", help="Seeds of each cell.")] = "0,1,2",
    out: Annotated[
        Path | None,
        option(
            "DIR",
            "Directory of the runs and tables. For claims and --show: directory of finished "
            "tables; if it contains none, the tables included in fedhet are used.",
            default=str(TABLES),
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="Number of runs to execute in parallel, each in its own process."),
    ] = 1,
    set_: Annotated[
        list[str] | None,
        option(
            "KEY=VALUE",
            "Setting of all runs, such as data.data-dir or engine.backend. Repeatable.",
            "--set",
            "-s",
        ),
    ] = None,
    keep_models: Annotated[
        bool,
        typer.Option(
            "--keep-models", help="Keep the models of finished runs in addition to their metrics."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the runs and their commands without training.")
    ] = False,
    show: Annotated[
        bool,
        typer.Option(
            "--show",
            help="Print finished tables with every comparison and note, without training.",
        ),
    ] = False,
    latex: Annotated[
        bool, typer.Option("--latex", help="Also write the tables as LaTeX, with booktabs rules.")
    ] = False,
    methods: Annotated[
        str,
        option(
            "NAME[,NAME]",
            "Methods of the table field, including custom methods.",
            "--methods",
            default="all",
        ),
    ] = "",
    rows: Annotated[
        str,
        option(
            "WORDS[,WORDS]",
            "Execute only the runs of rows whose names start with one of these words.",
            "--rows",
            default="all",
        ),
    ] = "",
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print the claims as a JSON list of "
            "{paper, table, size, data, claim, bound, verdict}.",
        ),
    ] = False,
) -> None:
    """Reproduce paper tables next to the published numbers, or create the table of all methods.

    Finished runs are kept, and interrupted runs continue.
    """
    over, several = parse_pairs(set_ or []), read_seeds(seeds)
    check_sweepable(over)
    if as_json and name != "claims":
        raise SettingsError(f"'--json': supported only for `fedhet table claims`, got {name!r}")
    if methods and name != "field":
        raise SettingsError(f"'--methods': supported only for `fedhet table field`, got {name!r}")
    if rows and name in (None, "claims", "field"):
        raise SettingsError(f"'--rows': supported only for paper tables, got {name!r}")
    if name is None:
        rows_listed = json.loads(LIST.read_text(encoding="utf-8"))
        console.print(listing("table", "description", "source", "runs per seed", rows=rows_listed))
        return
    if show and name == "claims":
        raise SettingsError(f"'--show': supported only for tables, got {name!r}")
    with loading():
        from fedhet.experiments import making

    wanted = making.Wanted(
        size=size,
        seeds=several,
        out=out or TABLES,
        over=over,
        jobs=jobs,
        keep_models=keep_models,
        dry_run=dry_run,
        latex=latex,
    )
    if show and name == "field":
        making.show_field(out, TABLES)
    elif show:
        making.show_tables(name, out, TABLES)
    elif name == "claims":
        making.show_claims(out, TABLES, as_json=as_json)
    elif name == "field":
        making.make_field(_words(methods), wanted)
    else:
        making.make_tables(name, _words(rows), wanted)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
