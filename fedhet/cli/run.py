"""Commands that train on this machine: `run` and `sweep`."""

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
from fedhet.cli.sweep import check_names, read_grid, refuse_of_each_run
from fedhet.config.sources import Given, of_method, validated
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
