"""Training by the commands: one run or several, side by side, ended at once by a signal.

What draws the results is imported after the training, which need not wait for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil

from fedhet.base.errors import FedhetError, StateError
from fedhet.cli.options import console, errors, say
from fedhet.cli.results import show_comparison, show_run
from fedhet.cli.run import point_name
from fedhet.config.resolve import Config, completed
from fedhet.config.sources import Given
from fedhet.engines.connection import for_training, inherited
from fedhet.engines.simulate import baseline_of, settled_for, simulate, train
from fedhet.runs.directory import is_complete
from fedhet.runs.display import display_on
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural, time_left
from fedhet.server.app import run_directory
from fedhet.settings.text import as_text

if TYPE_CHECKING:
    from fedhet import report

T = TypeVar("T")
RUNS_A_PROCESS = 20
"""Its imports take as long as a small run; then it makes room for a new one, with empty caches."""
ENDING = {
    signal.SIGINT: "interrupted",
    signal.SIGTERM: "ended by SIGTERM",
    signal.SIGHUP: "ended by SIGHUP",
}
"""The signals that end a command, each with the words for it."""


@dataclass(frozen=True)
class OneOfSeveral:
    """A run of several: what its lines are called, where it goes, and its settings."""

    label: str
    directory: Path
    config: Config


def train_one(given: Given, against: str | None = None) -> None:
    """Make one run, and a run of the method `against` beside it; show it."""
    config = completed(given)
    directory = run_directory(config)
    beside = _beside(config, directory, against)
    run = _run(config, directory, begun=_process_begun())
    from fedhet import report

    for baseline in _to_be_made(beside):
        _run(baseline.config, baseline.directory, baseline.label)
    show_run(report.write(directory) if beside else run)


def train_seeds(several: Sequence[Given], against: str | None = None) -> None:
    """Make runs of several seeds, each with a run of `against` beside it; compare them."""
    parent = run_directory(completed(several[0]))
    if (parent / "config.toml").exists():
        raise StateError(f"{parent} already contains a run: give another directory with --out")
    seeds = [given.run.seed for given in several]
    runs = [
        _one_of_several(f"seed {seed}", parent / f"seed-{seed}", given)
        for seed, given in zip(seeds, several, strict=True)
    ]
    every = [each for run in runs for each in (run, *_beside(run.config, run.directory, against))]
    begun: float | None = _process_begun()
    for run in _to_be_made(every):
        _run(run.config, run.directory, begun=begun)
        begun = None  # the next begins when this one has ended
    from fedhet import report

    for run in runs if against else ():
        report.write(run.directory)
    show_comparison(report.compare([run.directory for run in every]), parent)


def train_sweep(
    swept: tuple[str, ...],
    points: Mapping[tuple[object, ...], Sequence[Given]],
    figures: str,
    out: Path,
    jobs: int,
) -> None:
    """Make the runs of each point, which has a value for each of `swept`; show them together.

    `jobs` runs train at once; 0: as many as the processors allow.
    """
    made: dict[tuple[object, ...], list[OneOfSeveral]] = {}
    for point, several in points.items():
        values = ", ".join(f"{k}={as_text(v)}" for k, v in zip(swept, point, strict=True))
        made[point] = [
            _one_of_several(
                f"{values}, seed {given.run.seed}" if len(several) > 1 else values,
                out / point_name(point) / f"seed-{given.run.seed}",
                given,
            )
            for given in several
        ]
    runs = [run for some in made.values() for run in some]  # all are checked by now
    todo = _to_be_made(runs)
    at_once = jobs or jobs_that_fit(runs[0].config)
    if min(at_once, len(todo)) <= 1:
        one_by_one = (_run(run.config, run.directory, run.label) for run in todo)
        for number, (left, _) in enumerate(counted(one_by_one, len(todo)), 1):
            say(f"{number} of {len(todo)}{left}")
    else:
        faults = []
        with ending_at_once(lambda: "the finished runs are complete"):
            ended = counted(side_by_side(todo, at_once, _made), len(todo))
            for number, (left, (run, fault)) in enumerate(ended, 1):
                say(f"{number} of {len(todo)}  {run.label}{': ' if fault else ''}{fault}{left}")
                faults += [f"{run.label}: {fault}"] if fault else []
        if faults:
            raise FedhetError(f"{plural(len(faults), 'run')} failed: {'; '.join(faults)}")
    from fedhet import report

    directories = {point: [run.directory for run in some] for point, some in made.items()}
    found = report.sweep(swept, directories)
    page = report.write_sweep(found, out, figures)
    console.print(report.sweep_table(found, figures))
    say(f"page: {page}")


def _made(run: OneOfSeveral) -> str:
    return fault_of(run.config, run.directory)


def _beside(config: Config, directory: Path, against: str | None) -> list[OneOfSeveral]:
    """Return the baseline of a run: the same experiment with the method `against`, if there is one.

    Raises SettingsError if that method cannot be run so.
    """
    if against is None:
        return []
    found = baseline_of(config, directory, against)
    label = f"baseline {against}, seed {config.run.seed}"
    return [OneOfSeveral(label, Path(found.run.out), found)]


def _one_of_several(label: str, directory: Path, given: Given) -> OneOfSeveral:
    """Return a run, which resumes what is in its directory. Raises SettingsError."""
    place = directory.resolve()
    return OneOfSeveral(label, place, completed(given).replacing(out=str(place), resume=True))


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


# --- several runs at once


def side_by_side(todo: Sequence[T], jobs: int, make: Callable[[T], str]) -> Iterator[tuple[T, str]]:
    """Yield each item with what `make` returns for it, in the order in which they end.

    `make` is called in processes that are started again: torch's threads do not survive a fork. If
    one of them is ended from outside, those that are not done have this as their outcome.
    """
    new = get_context("spawn")
    with (
        inherited(for_training()),
        ProcessPoolExecutor(jobs, new, max_tasks_per_child=RUNS_A_PROCESS) as pool,
    ):
        started = {pool.submit(make, item): item for item in todo}
        for future in as_completed(started):
            try:
                outcome = future.result()
            except BrokenProcessPool:
                outcome = (
                    "a process has ended, perhaps for want of memory: start again, with fewer "
                    "--jobs"
                )
            yield started[future], outcome


def counted(items: Iterable[T], total: int) -> Iterator[tuple[str, T]]:
    """Yield each item as it is done, with how long the others will take at the same pace."""
    begun = time.monotonic()
    for number, item in enumerate(items, 1):
        left = (time.monotonic() - begun) / number * (total - number)
        yield f"  ({time_left(left)})" if number < total else "", item


def fault_of(
    config: Config, directory: Path, watchers: Sequence[Watcher] = (), *, report: bool = True
) -> str:
    """Make a run, with its `report` or without; return why it failed, or "".

    An error of another kind is shown in full, and the runs after this one are made all the same.
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
    """Return the number of runs that the CPUs allow at once: one on Ray, which uses all CPUs."""
    if config.run.engine.backend == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // config.run.engine.threads)


# --- the end by a signal


@contextlib.contextmanager
def ending_at_once(hint: Callable[[], str]) -> Iterator[None]:
    """End the process at once on Ctrl-C, SIGTERM or SIGHUP, with a line that ends in `hint()`.

    Clusters and containers send SIGTERM, and a closed terminal sends SIGHUP; both stay ignored if
    they already were, as under nohup. Flower's threads would wait for their clients. A separate
    thread reads the signals: Python runs handlers only in the main thread, which may be blocked
    where no signal wakes it.
    """
    heard, sender = socket.socketpair()
    sender.setblocking(False)
    ignored = {each for each in ENDING if signal.getsignal(each) is signal.SIG_IGN}
    caught = ENDING.keys() - (ignored - {signal.SIGINT})
    before = {each: signal.signal(each, lambda *_: None) for each in caught}
    wakeup = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)

    def end() -> None:
        with heard:
            while received := heard.recv(1):
                if (number := received[0]) in ENDING:
                    try:
                        console.show_cursor(True)
                        words = ENDING[signal.Signals(number)]
                        errors.print(f"\nfedhet: {words}; {hint()}", markup=False, soft_wrap=True)
                    finally:  # the terminal may be gone
                        os._exit(128 + number)

    threading.Thread(target=end, daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        for each, handler in before.items():
            signal.signal(each, handler or signal.SIG_DFL)
        sender.close()
