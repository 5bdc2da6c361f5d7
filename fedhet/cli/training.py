"""What the commands `run` and `sweep` do: train on this machine, and show the results.

What draws the results is imported after the training, which need not wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from fedhet.cli.interrupt import ending_at_once
from fedhet.cli.options import console, say
from fedhet.cli.sweep import folder_name
from fedhet.config.resolve import Config, resolve
from fedhet.errors import StateError
from fedhet.runs.display import LineDisplay
from fedhet.runs.live import LiveDisplay
from fedhet.runs.log import Watcher
from fedhet.runs.units import setting
from fedhet.server_app import run_directory
from fedhet.simulate import simulate

if TYPE_CHECKING:
    from fedhet import report


def train_one(values: Mapping[str, object]) -> None:
    """Make one run, and show it."""
    config = resolve(values)
    run = _run(config, run_directory(config), begun=_process_begun())
    from fedhet.cli.shown import show_run

    show_run(run)


def train_seeds(values: Mapping[str, object], seeds: Sequence[int]) -> None:
    """Make a run for each seed, and compare them."""
    parent = run_directory(resolve({**values, "seed": seeds[0]}))
    if (parent / "config.toml").exists():
        raise StateError(f"{parent} holds a run already; give another directory with --out")
    runs = [parent / f"seed-{seed}" for seed in seeds]
    configs = [
        resolve({**values, "seed": seed, "out": str(directory)})
        for seed, directory in zip(seeds, runs, strict=True)
    ]
    begun: float | None = _process_begun()
    for config, directory in zip(configs, runs, strict=True):
        _run(config, directory, begun=begun)
        begun = None  # the next begins when this one has ended
    from fedhet import report
    from fedhet.cli.shown import show_comparison

    show_comparison(report.compare(runs), parent)


def train_sweep(
    values: Mapping[str, object],
    name: str,
    swept: Sequence[object],
    seeds: Sequence[int],
    figures: str,
    out: Path,
) -> None:
    """Make a run for each value of the setting `name` and each seed, and show them together."""
    plan = {
        value: {
            out / folder_name(value) / f"seed-{seed}": {**values, name: value, "seed": seed}
            for seed in seeds
        }
        for value in swept
    }
    # All configs are checked before the first run starts.
    configs = {
        directory: (
            _label(name, chosen, seeds),
            resolve({**chosen, "out": str(directory.resolve())}),
        )
        for runs in plan.values()
        for directory, chosen in runs.items()
    }
    for directory, (label, config) in configs.items():
        _run(config, directory.resolve(), label)
    from fedhet import report

    found = report.sweep(name, {value: list(runs) for value, runs in plan.items()})
    figure = report.write_sweep(found, out, figures)
    console.print(report.sweep_table(found, figures))
    say(f"figure: {figure}")


def _label(name: str, chosen: Mapping[str, object], seeds: Sequence[int]) -> str:
    """Return the run's value of the setting `name`, with its seed where there are several."""
    value = f"{name}={setting(chosen[name])}"
    return f"{value}, seed {chosen['seed']}" if len(seeds) > 1 else value


def _process_begun() -> float:
    """Return when this process was started, by `time.perf_counter`."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def _run(
    config: Config, directory: Path, label: str = "", begun: float | None = None
) -> report.Run:
    with _display(label) as display, ending_at_once(lambda: _how_to_go_on(directory)):
        return simulate(config, directory, [display], begun=begun)


def _how_to_go_on(directory: Path) -> str:
    """Return what can be done with a run that is interrupted now."""
    resume = f"`fedhet run --resume {directory}`"
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return f"{resume} goes on with it; `fedhet report {directory}` shows what there is"
    if (directory / "run.json").exists() and (directory / "config.toml").exists():
        return f"no round was finished; {resume} starts with the first"
    return "nothing was trained yet"


@contextlib.contextmanager
def _display(label: str) -> Iterator[Watcher]:
    if not console.is_terminal:
        yield LineDisplay(console, label)
        return
    with LiveDisplay(console, label) as live:
        yield live
