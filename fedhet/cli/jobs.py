"""Runs side by side: a process each."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

from fedhet.config.resolve import Config

T = TypeVar("T")


def side_by_side(todo: Sequence[T], jobs: int, make: Callable[[T], str]) -> Iterator[tuple[T, str]]:
    """Yield each item with what `make` returns for it, in the order in which they end.

    `make` is called in a new process for each item: torch's threads do not survive a fork.
    """
    with ProcessPoolExecutor(jobs, get_context("spawn"), max_tasks_per_child=1) as pool:
        started = {pool.submit(make, item): item for item in todo}
        for future in as_completed(started):
            yield started[future], future.result()


def jobs_that_fit(config: Config) -> int:
    """Return how many runs the processors allow at once: one on Ray, which takes all of them."""
    if config.run.engine.backend == "ray":
        return 1
    return max(1, (os.cpu_count() or 1) // config.run.engine.threads)
