"""Commands that train on this machine: `run` and `sweep`.

Both commands validate all settings before they import PyTorch. `fedhet.cli.training` executes the
runs.
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
from fedhet.cli import options
from fedhet.cli.options import (
    TRUST,
    complete_method,
    loading,
    option,
    point_name,
    read_seeds,
    say,
)
from fedhet.config.sources import (
    GivenSettings,
    full_name,
    gather,
    settings_for_method,
    settings_of,
    validate,
)
from fedhet.engines.connection import starting
from fedhet.settings.schema import read_text


def run_command(
    *,
    method: options.Method = None,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    dataset: options.Dataset = None,
    clients: options.Clients = None,
    models: options.Models = None,
    rounds: options.Rounds = None,
    set_: options.Pairs = None,
    backend: options.Backend = None,
    strict: options.Strict = None,
    out: options.Out = None,
    resume: Annotated[
        Path | None, option("DIR", "Resume the run in DIR after its last complete round.")
    ] = None,
    trust: Annotated[str | None, TRUST] = None,
    seed: options.Seed = None,
    seeds: Annotated[
        str | None,
        option(
            "INT,INT…",
            "Seeds, such as 0,1,2 or 0-2; executes one run per seed, and compares the runs.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        option(
            "METHOD",
            "Baseline method to run and to compare with METHOD, such as local.",
            autocompletion=complete_method,
        ),
    ] = None,
) -> None:
    """Run a simulation on this machine, and write a report."""
    values = gather(
        method, preset, config, set_, resume, trust, dataset=dataset, clients=clients,
        models=models, rounds=rounds, seed=seed, backend=backend, strict=strict, out=out,
    )  # fmt: skip
    if "method" not in values:
        raise SettingsError("METHOD is missing. See `fedhet methods` for the available methods.")
    if seeds is not None and (seed is not None or _sets_seed(set_)):
        raise SettingsError("'seed' cannot be combined with --seeds")
    if seeds is not None and values.get("resume"):
        raise SettingsError("--seeds cannot be combined with --resume, which resumes a single run")
    seed_list = [] if seeds is None else read_seeds(seeds)
    given = validate(values)
    runs = [validate({**values, "seed": each}) for each in seed_list]
    if against is not None:
        if against == values["method"]:
            raise SettingsError(
                f"--against: expected a method other than the run's, got '{against}'"
            )
        validate(settings_for_method(values, against))
    _announce(given, f", {len(seed_list)} seeds" if seed_list else "")
    on_local_ray = given.run.engine.backend == "ray" and not given.run.engine.ray_address
    with starting() if on_local_ray else nullcontext():  # Ray starts while PyTorch is imported.
        with loading():
            from fedhet.cli import training

        if runs:
            training.train_seeds(runs, against)
        else:
            training.train_one(given, against)


def _sets_seed(pairs: list[str] | None) -> bool:
    """Return whether one of the `KEY=VALUE` arguments of `--set` sets the seed."""
    return any(pair.partition("=")[0].strip() == "seed" for pair in pairs or [])


def _announce(given: GivenSettings, suffix: str) -> None:
    """Print a summary of the run before the imports, which take seconds."""
    run = given.run
    clients = f"{run.clients} client{'s' * (run.clients != 1)}"
    number = given.method_settings.fixed_rounds() or run.rounds
    rounds = f"{number} round{'s' * (number != 1)}"
    title = f"{given.method.name} on {run.data.dataset}"
    say(f"preparing {title}: {clients}, {rounds}{suffix}, backend {run.engine.backend}")


def sweep_command(
    *,
    method: options.Method,
    preset: options.Preset = None,
    config: options.ConfigFile = None,
    dataset: options.Dataset = None,
    clients: options.Clients = None,
    models: options.Models = None,
    rounds: options.Rounds = None,
    set_: options.Pairs = None,
    backend: options.Backend = None,
    over: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=VALUES…",
            help="Values: START:STOP:STEP (inclusive) or A,B,C. Several settings form a grid.",
        ),
    ],
    seeds: Annotated[
        str | None,
        option(
            "INT,INT…",
            "Seeds, such as 0,1,2 or 0-2; executes one run per combination of values and seed.",
            default="0",
        ),
    ] = None,
    figures: Annotated[
        str,
        option(
            "NAME[,NAME]",
            "Method-specific metrics to plot in addition to the accuracy.",
            default="the first",
        ),
    ] = "",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Directory for the runs and the report.")
    ] = Path("runs/sweep"),
    jobs: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of runs to execute in parallel, each in its own process; 0 = one per CPU "
            "(with Ray, one).",
        ),
    ] = 1,
) -> None:
    """Execute a run for each combination of setting values, and write a report."""
    values = gather(
        method, preset, config, set_, dataset=dataset, clients=clients, models=models,
        rounds=rounds, backend=backend,
    )  # fmt: skip
    check_sweepable(values.keys() & {"out", "resume"})
    if seeds is not None and _sets_seed(set_):
        raise SettingsError("'seed' cannot be combined with --seeds")
    grid = read_grid(over, str(values["method"]))
    given = validate(values)
    seed_list = read_seeds(seeds) if seeds is not None else [given.run.seed]
    runs = {
        point: [
            validate({**values, **dict(zip(grid, point, strict=True)), "seed": seed})
            for seed in seed_list
        ]
        for point in product(*grid.values())
    }
    if len(set(map(point_name, runs))) < len(runs):
        raise SettingsError("sweep: two values map to the same directory name")
    _announce(given, f", {len(runs) * len(seed_list)} runs")
    with loading():
        from fedhet.cli import training

    training.train_sweep(tuple(grid), runs, figures, out, jobs)


# --- values of a sweep

MAX_VALUES = 1000
PER_RUN_SETTINGS = {
    "seed": "use --seeds",
    "out": "use --out",
    "resume": "interrupted runs always resume",
}
"""Settings that a command sets for each of its runs, with a hint for the user."""


def check_sweepable(names: Iterable[str]) -> None:
    """Raise SettingsError if a swept setting is in `PER_RUN_SETTINGS`."""
    for name in names:
        if name in PER_RUN_SETTINGS:
            hint = PER_RUN_SETTINGS[name]
            raise SettingsError(
                f"setting '{name}': cannot be swept, because this command sets it for each run; "
                f"{hint}"
            )


def read_sweep(text: str, method: str) -> tuple[str, list[object]]:
    """Parse "KEY=A,B,C" or "KEY=START:STOP:STEP" (inclusive) into the setting and its values.

    Raises SettingsError if the text is malformed, the setting is unknown, or a value is duplicate.
    """
    name, sign, value_text = text.partition("=")
    known = settings_of(method)
    if not sign or not value_text:
        raise SettingsError(f"expected KEY=START:STOP:STEP or KEY=A,B,C, got '{text}'")
    name = full_name(name.strip(), known)
    if name not in known:
        raise SettingsError(f"setting '{name}': unsupported by method '{method}'")
    check_sweepable([name])
    parts = value_text.split(",")
    if ":" in value_text:
        try:  # Use decimal arithmetic, in which 0.1 + 0.2 is exactly 0.3.
            start, stop, step = (Decimal(end.strip()) for end in value_text.split(":"))
            if not all(each.is_finite() for each in (start, stop, step)):
                raise ValueError(text)
        except (ValueError, InvalidOperation):
            raise SettingsError(f"sweep '{text}': expected numbers for START:STOP:STEP") from None
        if not (step > 0 and start <= stop and (stop - start) / step < MAX_VALUES):
            raise SettingsError(
                f"sweep '{text}': expected START <= STOP, STEP > 0 and at most {MAX_VALUES} values"
            )
        parts = [str(start + n * step) for n in range(int((stop - start) / step) + 1)]
    parsed = [read_text(name, known[name], part.strip()) for part in parts]
    # Unwrap lists with a single item, because the setting also accepts the item itself.
    values = [each[0] if isinstance(each, tuple) and len(each) == 1 else each for each in parsed]
    if len(set(map(str, values))) != len(values):
        raise SettingsError(f"sweep '{text}': duplicate value")
    return name, values


def read_grid(texts: Sequence[str], method: str) -> dict[str, list[object]]:
    """Parse the swept settings and their values. Each combination of values becomes a run.

    Raises SettingsError if a text is malformed, a setting is duplicate, or there are too many
    combinations.
    """
    grid: dict[str, list[object]] = {}
    for text in texts:
        name, values = read_sweep(text, method)
        if name in grid:
            raise SettingsError(f"sweep '{text}': duplicate setting '{name}'")
        grid[name] = values
    if (points := math.prod(map(len, grid.values()))) > MAX_VALUES:
        raise SettingsError(f"sweep: expected at most {MAX_VALUES} combinations, got {points}")
    return grid
