"""Commands that train on this machine: `run` and `sweep`.

They check all settings before they import PyTorch; `fedhet.cli.training` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from decimal import Decimal, InvalidOperation
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from fedhet.base.errors import SettingsError
from fedhet.cli.options import (
    NONE,
    TRUST,
    Backend,
    Clients,
    ConfigFile,
    Dataset,
    Method,
    Models,
    Out,
    Pairs,
    Preset,
    Rounds,
    Strict,
    complete_method,
    gather,
    loading,
    read_seeds,
    say,
)
from fedhet.config.sources import Given, full_name, of_method, settings_of, validated
from fedhet.engines.connection import starting
from fedhet.settings.text import as_text, read_text


def run_command(
    *,
    method: Method = None,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Dataset = None,
    clients: Clients = None,
    models: Models = None,
    rounds: Rounds = None,
    set_: Pairs = None,
    backend: Backend = None,
    strict: Strict = None,
    out: Out = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default=NONE,
            help="Resume the run in DIR after its last complete round.",
        ),
    ] = None,
    trust: Annotated[str | None, TRUST] = None,
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
            autocompletion=complete_method,
        ),
    ] = None,
) -> None:
    """Train a federation on this machine; end with a table and a report."""
    values = gather(
        method, preset, config, set_, resume, trust, dataset=dataset, clients=clients,
        models=models, rounds=rounds, backend=backend, strict=strict, out=out,
    )  # fmt: skip
    if "method" not in values:
        raise SettingsError("METHOD is missing: `fedhet methods` lists the methods")
    if seeds is not None and seed is not None:
        raise SettingsError("--seed cannot be combined with --seeds")
    if seeds is not None and values.get("resume"):
        raise SettingsError("--seeds cannot be combined with --resume, which resumes one run")
    if seed is not None:
        values["seed"] = seed
    several = [] if seeds is None else read_seeds(seeds)
    given = validated(values)
    runs = [validated({**values, "seed": each}) for each in several]
    if against is not None:
        if against == values["method"]:
            raise SettingsError(f"--against {against} is the run's own method: name another one")
        validated(of_method(values, against))
    _say_first(given, f", {len(several)} seeds" if several else "")
    on_own_ray = given.run.engine.backend == "ray" and not given.run.engine.ray_address
    with starting() if on_own_ray else nullcontext():  # Ray starts while PyTorch is imported
        with loading():
            from fedhet.cli import training

        if runs:
            training.train_seeds(runs, against)
        else:
            training.train_one(given, against)


def _say_first(given: Given, more: str) -> None:
    """Say what is started, because the imports that follow take seconds."""
    run = given.run
    clients = f"{run.clients} client{'s' * (run.clients != 1)}"
    rounds = f"{run.rounds} round{'s' * (run.rounds != 1)}"
    what = f"{given.method.name} on {run.data.dataset}: {clients}, {rounds}{more}"
    say(f"starting {what}, backend {run.engine.backend}")


def sweep_command(
    *,
    method: Method,
    preset: Preset = None,
    config: ConfigFile = None,
    dataset: Dataset = None,
    clients: Clients = None,
    models: Models = None,
    rounds: Rounds = None,
    set_: Pairs = None,
    backend: Backend = None,
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
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, backend=backend,
    )  # fmt: skip
    refuse_of_each_run(values.keys() & {"out", "resume"})
    swept = read_grid(over, str(values["method"]))
    given = validated(values)
    several = read_seeds(seeds) if seeds is not None else [given.run.seed]
    runs = {
        point: [
            validated({**values, **dict(zip(swept, point, strict=True)), "seed": seed})
            for seed in several
        ]
        for point in product(*swept.values())
    }
    if len(set(map(point_name, runs))) < len(runs):
        raise SettingsError("two values of the sweep would have the same folder")
    _say_first(given, f", {len(runs) * len(several)} runs")
    with loading():
        from fedhet.cli import training

    training.train_sweep(tuple(swept), runs, figures, out, jobs)


# --- the values that a sweep gives to settings

MAX_VALUES = 1000
OF_EACH_RUN = {
    "seed": "give its seeds by --seeds",
    "out": "give its directory by --out",
    "resume": "finished runs are kept, and interrupted ones continue",
}
"""The settings that a command of many runs gives to each of them itself."""


def refuse_of_each_run(names: Iterable[str]) -> None:
    """Raise SettingsError for a setting that a command of many runs gives to each itself."""
    for name in names:
        if name in OF_EACH_RUN:
            raise SettingsError(f"the setting '{name}' is each run's own: {OF_EACH_RUN[name]}")


def read_sweep(text: str, method: str) -> tuple[str, list[object]]:
    """Return the setting and values of "KEY=a,b,c" or "KEY=START:STOP:STEP", both ends included.

    Raises SettingsError for another form, an unknown setting, or a repeated value.
    """
    name, sign, spelled = text.partition("=")
    known = settings_of(method)
    if not sign or not spelled:
        raise SettingsError(f"expected KEY=START:STOP:STEP or KEY=a,b,c, got '{text}'")
    name = full_name(name.strip(), known)
    if name not in known:
        raise SettingsError(f"setting '{name}' is not one of {method}, the run's method")
    refuse_of_each_run([name])
    parts = spelled.split(",")
    if ":" in spelled:
        try:  # in decimal arithmetic: 0.3 is exactly 0.3
            start, stop, step = (Decimal(end.strip()) for end in spelled.split(":"))
            if not all(each.is_finite() for each in (start, stop, step)):
                raise ValueError(text)
        except (ValueError, InvalidOperation):
            raise SettingsError(f"sweep '{text}': START:STOP:STEP must be three numbers") from None
        if not (step > 0 and start <= stop and (stop - start) / step < MAX_VALUES):
            raise SettingsError(f"sweep '{text}' must ascend, by 1 to {MAX_VALUES} values")
        parts = [str(start + n * step) for n in range(int((stop - start) / step) + 1)]
    read = [read_text(name, known[name], part.strip()) for part in parts]
    # A list of one stands for its value, which the setting accepts too.
    values = [each[0] if isinstance(each, tuple) and len(each) == 1 else each for each in read]
    if len(set(map(str, values))) != len(values):
        raise SettingsError(f"sweep '{text}' gives a value twice")
    return name, values


def read_grid(texts: Sequence[str], method: str) -> dict[str, list[object]]:
    """Return the settings of a sweep with their values, of which it runs all combinations.

    Raises SettingsError as `read_sweep` does, for a setting that is given twice, and for more
    points than a sweep may have.
    """
    grid: dict[str, list[object]] = {}
    for text in texts:
        name, values = read_sweep(text, method)
        if name in grid:
            raise SettingsError(f"sweep '{text}' gives '{name}' a second time")
        grid[name] = values
    if (points := math.prod(map(len, grid.values()))) > MAX_VALUES:
        raise SettingsError(f"a sweep has at most {MAX_VALUES} points; this one has {points}")
    return grid


def point_name(point: Sequence[object]) -> str:
    """Return a combination of values as a valid folder name."""
    texts = [as_text(value) if isinstance(value, tuple) else str(value) for value in point]
    kept = ["".join(c if c.isalnum() or c in "._-" else "-" for c in text) for text in texts]
    return "_".join(text.lstrip("._-")[:60] or "empty" for text in kept)
