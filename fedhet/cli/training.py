"""What the commands `run` and `sweep` do: train on this machine, and show the results.

What draws the results is imported after the training, which need not wait for it.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fedhet.base.errors import FedhetError, StateError
from fedhet.cli.interrupt import ending_at_once
from fedhet.cli.jobs import counted, fault_of, jobs_that_fit, side_by_side
from fedhet.cli.options import console, say
from fedhet.cli.sweep import point_name
from fedhet.config.resolve import Config, resolve
from fedhet.engines.simulate import baseline_of, settled_for, simulate
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.units import plural
from fedhet.server.app import run_directory
from fedhet.settings.text import as_text

if TYPE_CHECKING:
    from fedhet import report


def train_one(values: Mapping[str, object], against: str | None = None) -> None:
    """Make one run, and a run of the method `against` beside it; show it."""
    config = resolve(values)
    directory = run_directory(config)
    beside = _beside(config, directory, against)
    run = _run(config, directory, begun=_process_begun())
    from fedhet import report
    from fedhet.cli.shown import show_run

    for baseline in _to_be_made(beside):
        _run(baseline.config, baseline.directory, baseline.label)
    show_run(report.write(directory) if beside else run)


def train_seeds(
    values: Mapping[str, object], seeds: Sequence[int], against: str | None = None
) -> None:
    """Make a run for each seed, each with one of the method `against` beside it; compare them."""
    parent = run_directory(resolve({**values, "seed": seeds[0]}))
    if (parent / "config.toml").exists():
        raise StateError(f"{parent} already contains a run: give another directory with --out")
    runs = [
        _one_of_several(f"seed {seed}", parent / f"seed-{seed}", {**values, "seed": seed})
        for seed in seeds
    ]
    every = [each for run in runs for each in (run, *_beside(run.config, run.directory, against))]
    begun: float | None = _process_begun()
    for run in _to_be_made(every):
        _run(run.config, run.directory, begun=begun)
        begun = None  # the next begins when this one has ended
    from fedhet import report
    from fedhet.cli.shown import show_comparison

    for run in runs if against else ():
        report.write(run.directory)
    show_comparison(report.compare([run.directory for run in every]), parent)


def _beside(config: Config, directory: Path, against: str | None) -> list[OneOfSeveral]:
    """Return the baseline of a run: the same experiment with the method `against`, if there is one.

    Raises SettingsError if that method cannot be run so.
    """
    if against is None:
        return []
    label = f"baseline {against}, seed {config.run.seed}"
    found = baseline_of(config, directory, against)
    return [OneOfSeveral(label, Path(found.run.out), found)]


@dataclass(frozen=True)
class OneOfSeveral:
    """A run of several: what its lines are called, where it goes, and its settings."""

    label: str
    directory: Path
    config: Config


def _one_of_several(label: str, directory: Path, values: Mapping[str, object]) -> OneOfSeveral:
    """Return a run, which resumes what is in its directory. Raises SettingsError."""
    place = directory.resolve()
    return OneOfSeveral(label, place, resolve({**values, "out": str(place), "resume": True}))


def _to_be_made(runs: Sequence[OneOfSeveral]) -> list[OneOfSeveral]:
    """Return the runs that are not complete, and say which are.

    Raises StateError, before any is made, if a directory holds a run of another experiment.
    """
    complete = [
        run for run in runs if is_complete(settled_for(run.config, run.directory), run.directory)
    ]
    for run in complete:
        say(f"{run.label}: complete, not run again")
    return [run for run in runs if run not in complete]


def train_sweep(
    values: Mapping[str, object],
    swept: Mapping[str, Sequence[object]],
    seeds: Sequence[int],
    figures: str,
    out: Path,
    jobs: int,
) -> None:
    """Make a run for each point of the grid `swept` and each seed, and show them together.

    `jobs` runs train at once; 0: as many as the processors allow.
    """
    points = {
        point: [
            _one_of_several(
                _label(chosen, seed, several=len(seeds) > 1),
                out / point_name(point) / f"seed-{seed}",
                {**values, **chosen, "seed": seed},
            )
            for seed in seeds
        ]
        for point in product(*swept.values())
        for chosen in [dict(zip(swept, point, strict=True))]
    }
    runs = [run for some in points.values() for run in some]  # all are checked by now
    todo = _to_be_made(runs)
    at_once = jobs or jobs_that_fit(runs[0].config)
    if min(at_once, len(todo)) <= 1:
        one_by_one = (_run(run.config, run.directory, run.label) for run in todo)
        for number, (left, _) in enumerate(counted(one_by_one, len(todo)), 1):
            say(f"{number} of {len(todo)}{left}")
    else:
        _make_side_by_side(todo, at_once)
    from fedhet import report

    directories = {point: [run.directory for run in some] for point, some in points.items()}
    found = report.sweep(tuple(swept), directories)
    page = report.write_sweep(found, out, figures)
    console.print(report.sweep_table(found, figures))
    say(f"page: {page}")


def _make_side_by_side(runs: Sequence[OneOfSeveral], jobs: int) -> None:
    """Make runs in processes of their own, with a line for each that ends.

    Raises FedhetError, after all of them, if some did not.
    """
    faults = []
    with ending_at_once(lambda: "the finished runs are complete"):
        made = counted(side_by_side(runs, jobs, _made), len(runs))
        for number, (left, (run, fault)) in enumerate(made, 1):
            say(f"{number} of {len(runs)}  {run.label}{': ' if fault else ''}{fault}{left}")
            faults += [f"{run.label}: {fault}"] if fault else []
    if faults:
        raise FedhetError(f"{plural(len(faults), 'run')} failed: {'; '.join(faults)}")


def _made(run: OneOfSeveral) -> str:
    return fault_of(run.config, run.directory)


def _label(chosen: Mapping[str, object], seed: int, *, several: bool) -> str:
    """Return the run's values of the swept settings, with its seed where there are several."""
    point = ", ".join(f"{name}={as_text(value)}" for name, value in chosen.items())
    return f"{point}, seed {seed}" if several else point


def _process_begun() -> float:
    """Return when this process was started, by `time.perf_counter`."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def _run(
    config: Config, directory: Path, label: str = "", begun: float | None = None
) -> report.Run:
    with display_on(console, label) as display, ending_at_once(lambda: _how_to_go_on(directory)):
        return simulate(config, directory, [display], begun=begun)


def _how_to_go_on(directory: Path) -> str:
    """Return what can be done with a run that is interrupted now."""
    resume = f"`fedhet run --resume {directory}`"
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return f"{resume} resumes it; `fedhet report {directory}` shows what it has recorded"
    if (directory / "run.json").exists() and (directory / "config.toml").exists():
        return f"no round was finished; {resume} starts again from the first"
    return "nothing was trained yet"
