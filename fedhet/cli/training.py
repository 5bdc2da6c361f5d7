"""Execution of a single run, of runs with several seeds, or of a sweep, for `run` and `sweep`.

The report package is imported only after training, because importing it takes time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from fedhet.base.errors import FedhetError, StateError
from fedhet.base.metrics import CAUSAL_LM
from fedhet.cli.options import console, errors, point_name, say
from fedhet.cli.results import show_comparison, show_run
from fedhet.config.resolve import Config, complete
from fedhet.config.sources import GivenSettings
from fedhet.engines.connection import for_training, inherited
from fedhet.engines.simulate import baseline_of, resolve_auto, simulate, train
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural, time_left
from fedhet.server.app import run_directory
from fedhet.settings.schema import as_text

if TYPE_CHECKING:
    from fedhet import report

T = TypeVar("T")
RUNS_PER_PROCESS = 20
"""Number of runs after which a worker process is replaced, to free its caches.

A lower number would be slower, because the imports of a new process take as long as a small run.
"""
STOP_SIGNALS = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "stopped by SIGTERM",
    signal.SIGHUP: "stopped by SIGHUP",
}
"""Signals that stop a command, with the descriptions to print."""


@dataclass(frozen=True)
class LabeledRun:
    """Planned run, with a label for the output, a directory, and a configuration."""

    label: str
    directory: Path
    config: Config


def train_one(given: GivenSettings, against: str | None = None) -> None:
    """Execute one run and, if `against` is given, a baseline with that method. Show the results.

    A complete run can be resumed to add the baseline.
    """
    config = complete(given)
    directory = run_directory(config)
    baselines = _baselines(config, directory, against)
    run = None
    if not (baselines and config.run.resume) or _incomplete([LabeledRun("run", directory, config)]):
        run = _run(config, directory, begun=_process_begun())
    from fedhet import report

    for baseline in _incomplete(baselines):
        _run(baseline.config, baseline.directory, baseline.label)
    show_run(report.write_all(directory) if baselines or run is None else run)


def train_seeds(by_seed: Sequence[GivenSettings], against: str | None = None) -> None:
    """Execute a run per seed, each with a baseline if `against` is given, and compare the runs."""
    parent = run_directory(complete(by_seed[0]))
    if (parent / "config.toml").exists():
        raise StateError(f"{parent} already contains a run. Set --out to another directory.")
    runs = [
        _planned(f"seed {given.run.seed}", parent / f"seed-{given.run.seed}", given)
        for given in by_seed
    ]
    every = [
        each for run in runs for each in (run, *_baselines(run.config, run.directory, against))
    ]
    begun: float | None = _process_begun()
    for run in _incomplete(every):
        _run(run.config, run.directory, begun=begun)
        begun = None  # Only the first run's duration includes the start of the process.
    from fedhet import report

    for run in runs if against else ():
        report.write_all(run.directory)
    show_comparison(report.compare([run.directory for run in every]), parent)


def train_sweep(
    swept: tuple[str, ...],
    points: Mapping[tuple[object, ...], Sequence[GivenSettings]],
    figures: str,
    out: Path,
    jobs: int,
) -> None:
    """Execute the runs at each point of a grid, and show the results together.

    Args:
        swept: Names of the swept settings.
        points: Settings of the runs at each point, by the values of the swept settings.
        figures: Comma-separated method metrics to plot in addition to the accuracy.
        out: Directory for the runs and the report.
        jobs: Number of runs to execute in parallel; 0 = as many as the CPUs allow.
    """
    by_point: dict[tuple[object, ...], list[LabeledRun]] = {}
    for point, by_seed in points.items():
        values = ", ".join(f"{k}={as_text(v)}" for k, v in zip(swept, point, strict=True))
        by_point[point] = [
            _planned(
                f"{values}, seed {given.run.seed}" if len(by_seed) > 1 else values,
                out / point_name(point) / f"seed-{given.run.seed}",
                given,
                selects=True,
            )
            for given in by_seed
        ]
    # Training starts only after the settings of all runs have been validated above.
    runs = [run for planned in by_point.values() for run in planned]
    todo = _incomplete(runs)
    num_jobs = jobs or jobs_that_fit(runs[0].config)
    if min(num_jobs, len(todo)) <= 1:
        results = (_run(run.config, run.directory, run.label) for run in todo)
        for number, (left, _) in enumerate(with_time_left(results, len(todo)), 1):
            say(f"{number} of {len(todo)}{left}")
    else:
        faults = []
        with exit_on_signal(lambda: "the finished runs are complete"):
            outcomes = with_time_left(run_parallel(todo, num_jobs, _train), len(todo))
            for number, (left, (run, fault)) in enumerate(outcomes, 1):
                say(f"{number} of {len(todo)}  {run.label}{': ' if fault else ''}{fault}{left}")
                faults += [f"{run.label}: {fault}"] if fault else []
        if faults:
            raise FedhetError(f"{plural(len(faults), 'run')} failed: {'; '.join(faults)}")
    from fedhet import report

    directories = {point: [run.directory for run in runs] for point, runs in by_point.items()}
    sweep = report.sweep(swept, directories)
    path = report.write_sweep(sweep, out, figures)
    console.print(report.sweep_table(sweep, figures))
    say(f"report: {path}")


def _train(run: LabeledRun) -> str:
    return error_of(run.config, run.directory)


def _baselines(config: Config, directory: Path, against: str | None) -> list[LabeledRun]:
    """Plan the same experiment with the method `against`, or return [] if `against` is None.

    Raises SettingsError if the method does not support the experiment.
    """
    if against is None:
        return []
    baseline = baseline_of(config, directory, against)
    label = f"baseline {against}, seed {config.run.seed}"
    return [LabeledRun(label, Path(baseline.run.out), baseline)]


def _planned(
    label: str, directory: Path, given: GivenSettings, *, selects: bool = False
) -> LabeledRun:
    """Plan a run that resumes an incomplete run in its directory, if there is one.

    `selects` states whether the scores of several runs select settings. Raises SettingsError if a
    setting is invalid.
    """
    path, config = directory.resolve(), complete(given, selects=selects)
    return LabeledRun(label, path, config.replacing(out=str(path), resume=True))


def _incomplete(runs: Sequence[LabeledRun]) -> list[LabeledRun]:
    """Return the incomplete runs, and print a line for each complete run.

    Raises StateError if a directory contains a run from another experiment.
    """
    complete = [
        run for run in runs if is_complete(resolve_auto(run.config, run.directory), run.directory)
    ]
    for run in complete:
        say(f"{run.label}: already complete")
    return [run for run in runs if run not in complete]


def _process_begun() -> float:
    """Return the start time of this process on the clock of `time.perf_counter`."""
    return time.perf_counter() - (time.time() - psutil.Process().create_time())


def _run(
    config: Config, directory: Path, label: str = "", begun: float | None = None
) -> report.Run:
    with display_on(console, label) as display, exit_on_signal(lambda: _resume_hint(directory)):
        run = simulate(config, directory, [display], begun=begun)
        if config.run.data.task != CAUSAL_LM:
            return run
        from fedhet.inference.generation import add_generated

        return add_generated(run)


def _resume_hint(directory: Path) -> str:
    """Return a hint for continuing an interrupted run."""
    place = shlex.quote(str(directory))
    resume = f"`fedhet run --resume {place}`"
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return f"resume with {resume}, or show the results so far with `fedhet report {place}`"
    if (directory / "run.json").exists() and (directory / "config.toml").exists():
        return f"no round has finished; restart with {resume}"
    return "training had not started"


# --- parallel runs


def run_parallel(
    todo: Sequence[T], jobs: int, function: Callable[[T], str]
) -> Iterator[tuple[T, str]]:
    """Call `function` for each item in worker processes. Yields each item with its result.

    The processes are spawned, because PyTorch's threads do not survive a fork. They end with this
    process. If a worker process is killed, the result of all unfinished items is an error message.
    """
    spawn, size = get_context("spawn"), jobs * RUNS_PER_PROCESS
    # New pools replace the argument `max_tasks_per_child`, with which the pools of Python 3.11 to
    # 3.14 wait forever for a process that has reached its limit (CPython issue 115634).
    for start in range(0, len(todo), size):
        with (
            inherited(for_training()),
            ProcessPoolExecutor(jobs, spawn, _end_with_parent) as pool,
        ):
            futures = {pool.submit(function, item): item for item in todo[start : start + size]}
            for future in as_completed(futures):
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    outcome = (
                        "a worker process was killed, possibly because memory ran out. Run the "
                        "command again with a lower --jobs."
                    )
                yield futures[future], outcome


def _end_with_parent() -> None:
    """Make this worker process end as soon as its parent ends, even if the parent is killed.

    Ignores Ctrl-C, which a terminal sends to all processes, because the parent ends on Ctrl-C.
    """
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=wait, daemon=True).start()


def with_time_left(items: Iterable[T], total: int) -> Iterator[tuple[str, T]]:
    """Yield (text, item) for each item. The text states the estimated time left, if any."""
    begun = time.monotonic()
    for number, item in enumerate(items, 1):
        left = (time.monotonic() - begun) / number * (total - number)
        yield f"  ({time_left(left)})" if number < total else "", item


def error_of(
    config: Config, directory: Path, watchers: Sequence[Watcher] = (), *, report: bool = True
) -> str:
    """Execute a run, and return its error message, or "" if the run succeeds.

    `report` determines whether a report is written. The traceback of an unexpected error is printed
    instead of raised, so that later runs still execute.
    """
    try:
        (simulate if report else train)(config, directory, watchers)
    except FedhetError as error:
        return str(error)
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"
    return ""


def jobs_that_fit(config: Config) -> int:
    """Return the number of parallel runs that the CPUs allow; 1 with Ray, which uses all CPUs."""
    if config.run.engine.backend == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // config.run.engine.threads)


# --- signals


@contextlib.contextmanager
def exit_on_signal(hint: Callable[[], str]) -> Iterator[None]:
    """Exit immediately on Ctrl-C, SIGTERM or SIGHUP, without waiting for Flower's threads.

    Prints a line that ends with `hint()`. Clusters and containers send SIGTERM, and a closed
    terminal sends SIGHUP. Signals that were already ignored, e.g. under nohup, stay ignored. A
    separate thread reads the signals, because Python runs signal handlers only in the main thread,
    which may be blocked.
    """
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    ignored = {each for each in STOP_SIGNALS if signal.getsignal(each) is signal.SIG_IGN}
    caught = STOP_SIGNALS.keys() - (ignored - {signal.SIGINT})
    before = {each: signal.signal(each, lambda *_: None) for each in caught}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def exit_on_receipt() -> None:
        with receiver:
            while received := receiver.recv(1):
                if (number := received[0]) in STOP_SIGNALS:
                    try:
                        console.show_cursor(True)
                        reason = STOP_SIGNALS[signal.Signals(number)]
                        errors.print(f"\nfedhet: {reason}; {hint()}", markup=False, soft_wrap=True)
                    finally:  # Printing fails if the terminal is closed.
                        os._exit(128 + number)

    threading.Thread(target=exit_on_receipt, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)
        sender.close()
