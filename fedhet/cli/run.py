"""Commands that train on this machine: `run`, `sweep` and `table`."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli import completion
from fedhet.cli.options import NONE, loading, read_seeds, say, with_settings
from fedhet.cli.show import list_tables
from fedhet.cli.sweep import check_names, read_grid, refuse_of_each_run
from fedhet.config.sources import of_method, parse_pairs
from fedhet.config.values import Given, validated
from fedhet.engines.ray.connection import starting

GIVEN = ("preset", "config", "dataset", "clients", "models", "rounds")


@with_settings("method", *GIVEN, "set_", "backend", "strict", "out", "resume", "trust")
def run_command(
    values: dict[str, object],
    seed: Annotated[
        int | None,
        typer.Option(metavar="INT", show_default="0", help="The seed of every random draw."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(
            metavar="INT,INT…",
            show_default=NONE,
            help="One run for each seed; they are compared.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            show_default=NONE,
            help="A baseline to train as well and to show beside the run, such as local.",
            autocompletion=completion.methods,
        ),
    ] = None,
) -> None:
    """Train a federation on this machine; end with a table and a report."""
    if "method" not in values:
        raise SettingsError("METHOD is missing: `fedhet methods` lists the methods")
    if seeds is not None and seed is not None:
        raise SettingsError("--seed cannot be combined with --seeds")
    if seeds is not None and values.get("resume"):
        raise SettingsError("--seeds cannot be combined with --resume, which resumes one run")
    if seed is not None:
        values["seed"] = seed
    several = None if seeds is None else read_seeds(seeds)
    given = validated(values)
    engine = given.run.engine
    if against is not None:
        _check_baseline(values, against)
    _say_first(given, "" if several is None else f", {len(several)} seeds")
    on_own_ray = engine.backend == "ray" and not engine.ray_address
    with starting() if on_own_ray else nullcontext():  # Ray starts while PyTorch is imported
        with loading():
            from fedhet.cli import training

        if several is None:
            training.train_one(values, against)
        else:
            training.train_seeds(values, several, against)


def _say_first(given: Given, more: str) -> None:
    """Say what is started, because the imports that follow take seconds."""
    run = given.run
    clients = f"{run.clients} client{'s' * (run.clients != 1)}"
    rounds = f"{run.rounds} round{'s' * (run.rounds != 1)}"
    what = f"{given.method.name} on {run.data.dataset}: {clients}, {rounds}{more}"
    say(f"starting {what}, backend {run.engine.backend}")


def _check_baseline(values: dict[str, object], against: str) -> None:
    """Raise SettingsError unless `against` is another method, which takes the run's settings."""
    if against == values["method"]:
        raise SettingsError(f"--against {against} is the run's own method: name another one")
    validated(of_method(values, against))


@with_settings("method", *GIVEN, "set_", "backend")
def sweep_command(
    values: dict[str, object],
    over: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES…",
            help="START:STOP:STEP, both ends included, or a,b,c; several make a grid.",
        ),
    ],
    seeds: Annotated[
        str | None,
        typer.Option(metavar="INT,INT…", show_default="0", help="Seeds of each value's runs."),
    ] = None,
    figures: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME]",
            show_default="the first",
            help="The method's metrics to draw besides the accuracy.",
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="The directory of the runs and of the page.")
    ] = Path("runs/sweep"),
    jobs: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of runs at once, each in a process; 0 = as many as the processors allow "
            "(one on Ray, which uses all of them).",
        ),
    ] = 1,
) -> None:
    """Run all combinations of several values of settings; end with a table and a page."""
    refuse_of_each_run(values.keys() & {"out", "resume"})
    swept = read_grid(over, str(values["method"]))
    for point in product(*swept.values()):
        validated({**values, **dict(zip(swept, point, strict=True))})
    check_names(swept)
    several = read_seeds(seeds) if seeds is not None else [validated(values).run.seed]
    runs = len(several) * math.prod(map(len, swept.values()))
    _say_first(validated(values), f", {runs} runs")
    with loading():
        from fedhet.cli import training

    training.train_sweep(values, swept, several, figures, out, jobs)


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
        list_tables()
        return
    with loading():
        from fedhet.cli import claims, field, making, table

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
    if name == "claims":
        claims.show_claims(out, TABLES, as_json=as_json)
    elif name == "field":
        field.make_field(_words(methods), wanted)
    else:
        table.make_tables(name, _words(rows), wanted)


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
