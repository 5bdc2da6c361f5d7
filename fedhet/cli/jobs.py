"""Runs side by side, each in one of several processes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

from fedhet.base.errors import FedhetError
from fedhet.config.resolve import Config
from fedhet.engines.environment import for_training, inherited
from fedhet.engines.simulate import simulate, train
from fedhet.runs.log import Watcher
from fedhet.runs.units import time_left

T = TypeVar("T")
RUNS_A_PROCESS = 20
"""Its imports take as long as a small run; then it makes room for a new one, with empty caches."""


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
            yield started[future], _outcome(future)


def _outcome(future: Future[str]) -> str:
    """Return what a call has returned, or why its process has ended without."""
    try:
        return future.result()
    except BrokenProcessPool:
        return "a process has ended, perhaps for want of memory: start again, with fewer --jobs"


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
