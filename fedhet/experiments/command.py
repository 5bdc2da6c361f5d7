"""The command `fedhet table`, which the command line finds if this package is there."""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli.options import NONE, console, listing, loading, read_seeds
from fedhet.cli.run import refuse_of_each_run
from fedhet.config.sources import parse_pairs

LIST = resources.files("fedhet.experiments") / "list.json"
"""The rows of the list of tables. `make reference` counts their runs, which takes seconds."""
TableName = Annotated[
    str | None,
    typer.Argument(
        help="A table, a paper (felo) for all its tables, or all of papers; by default, they are "
        "listed. Or claims: which claims hold in the finished ones."
    ),
]
Size = Annotated[
    str,
    typer.Option(
        metavar="tiny|small|paper",
        help="Digits, in minutes; the paper's federation, small networks; or as in the paper.",
    ),
]
Seeds = Annotated[str, typer.Option(metavar="INT,INT…", help="Seeds of each cell's runs.")]
TABLES = Path("runs/tables")
TablesOut = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        show_default=str(TABLES),
        help="The directory of the runs and of the table. For claims: that of finished tables; by "
        "default, if that has none, those that come with fedhet.",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, help="Number of runs at once, each in a process.")]
Pairs = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        "-s",
        metavar="KEY=VALUE",
        show_default=NONE,
        help="A setting of all runs, such as data.data-dir or engine.backend. Repeatable.",
    ),
]
KeepModels = Annotated[
    bool,
    typer.Option("--keep-models", help="Keep the models of finished runs, not only their numbers."),
]
Show = Annotated[
    bool,
    typer.Option(
        "--show",
        help="Print the finished tables of NAME in full, in every size; train nothing.",
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show the runs and their commands; train nothing.")
]
TableMethods = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="NAME[,NAME]",
        show_default="all",
        help="Of the table field: its methods, also your own.",
    ),
]
TableRows = Annotated[
    str,
    typer.Option(
        "--rows",
        metavar="WORDS[,WORDS]",
        show_default="all",
        help="Of a paper's tables: make only the rows whose names begin so, such as FedAvg.",
    ),
]
Latex = Annotated[
    bool, typer.Option("--latex", help="Write each table in LaTeX too, with booktabs' rules.")
]
TableJson = Annotated[
    bool,
    typer.Option("--json", help="Of claims: print a list of {paper, table, size, claim, verdict}."),
]


def table_command(
    name: TableName = None,
    size: Size = "tiny",
    seeds: Seeds = "0,1,2",
    out: TablesOut = None,
    jobs: Jobs = 1,
    set_: Pairs = None,
    keep_models: KeepModels = False,
    dry_run: DryRun = False,
    show: Show = False,
    latex: Latex = False,
    methods: TableMethods = "",
    rows: TableRows = "",
    as_json: TableJson = False,
) -> None:
    """Make tables: those of papers next to their printed numbers, or "field", of all methods.

    A finished run is kept, and an interrupted one continues. "claims" counts which of the papers'
    claims hold in the finished tables.
    """
    over, several = parse_pairs(set_ or []), read_seeds(seeds)
    refuse_of_each_run(over)
    if as_json and name != "claims":
        raise SettingsError("'--json' is of the claims: `fedhet table claims --json`")
    if methods and name != "field":
        raise SettingsError("'--methods' is of the table field: `fedhet table field`")
    if rows and name in (None, "claims", "field"):
        raise SettingsError("'--rows' is of a paper's tables: `fedhet table NAME --rows FedAvg`")
    if name is None:
        rows_listed = json.loads(LIST.read_text(encoding="utf-8"))
        console.print(listing("table", "what it is", "source", "runs a seed", rows=rows_listed))
        return
    if show and name in ("claims", "field"):
        raise SettingsError(f"'--show': must be used with a paper's table, got '{name}'")
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
    if show:
        making.show_tables(name, out, TABLES)
    elif name == "claims":
        making.show_claims(out, TABLES, as_json=as_json)
    elif name == "field":
        making.make_field(_words(methods), wanted)
    else:
        making.make_tables(name, _words(rows), wanted)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
