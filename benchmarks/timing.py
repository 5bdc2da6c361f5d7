"""Helpers of the benchmarks: synthetic images, single clients, processes, and timing."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from math import nan, sqrt
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import fedhet
from fedhet.client_runtime.node import read_node
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config
from fedhet.engines.connection import for_training
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord

Clock = Callable[[], float]
T = TypeVar("T")


def seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return the duration of `work` in seconds, measured with a clock."""
    started = clock()
    work()
    return clock() - started


def ratios(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    pairs: int,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Return the sorted ratios of the times of `ours` and `theirs`, after one warm-up of each.

    The two functions alternate, so that a drift of the machine's speed affects both equally.
    """
    ours(), theirs()
    found = []
    for pair in range(pairs):
        if pair % 2:
            reference, own = seconds(theirs, clock), seconds(ours, clock)
        else:
            own, reference = seconds(ours, clock), seconds(theirs, clock)
        found.append(own / reference)
    return sorted(found)


def show(name: str, values: list[float], bound: float | None = None) -> None:
    """Print the median and the extremes of sorted `values`, and whether a bound holds."""
    median = statistics.median(values)
    bounded = "" if bound is None else f"  bound {bound:.2f} {verdict(median <= bound)}"
    print(f"{name:<44} median {median:.3f}  (min {values[0]:.3f}, max {values[-1]:.3f}){bounded}")


def verdict(holds: bool) -> str:
    """Return whether a bound holds, as text."""
    return "holds" if holds else "DOES NOT HOLD"


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return a mean and its standard error, which is NaN for a single value."""
    error = statistics.stdev(values) / sqrt(len(values)) if len(values) > 1 else nan
    return statistics.fmean(values), error


class ProcessTimes(Watcher):
    """CPU seconds of this process at the start of the first round and at the end of each round."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def round_started(self, *args: Any) -> None:
        """Record the start time of the first round."""
        if not self.at:
            self.at.append(time.process_time())

    def round_finished(self, record: RoundRecord) -> None:
        """Record the time. Raises AssertionError if a client failed."""
        assert not record.failed, record.failed
        self.at.append(time.process_time())


def write_images(folder: Path, clients: int, samples: int, shape: tuple[int, ...]) -> str:
    """Write synthetic images [N, *shape] for each client, and a fifth as many test images.

    Returns the name of the dataset.
    """
    for part, count in (("train", samples), ("test", samples // 5)):
        (folder / part).mkdir(parents=True)
        for client in range(clients):
            rng = np.random.default_rng([client, count])
            x = rng.integers(0, 256, (count, *shape), dtype=np.uint8)
            np.savez(folder / part / f"{client}.npz", x=x, y=np.arange(count) % 10)
    return f"npz:{folder}"


def kept_run(folder: Path, method: str, **options: Any) -> list[dict[str, Any]]:
    """Return the records of a run's rounds. The run is executed here unless it exists."""
    if not (folder / "summary.json").exists():
        shutil.rmtree(folder, ignore_errors=True)  # remove an interrupted run
        fedhet.run(method, backend="inline", out=folder, progress=False, **options)
    return records_of(folder)


def records_of(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's rounds."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def open_client(config: Config, folder: Path) -> HetClient:
    """Return the only client of a federation, with new models."""
    node = read_node({"partition-id": 0, "num-partitions": 1}, config.run, str(folder))
    client: HetClient = config.method.client(config, node)
    client.state.restore("benchmark", before=1)
    return client


def apart(work: Callable[..., T], *args: Any) -> T:
    """Call `work` in a separate process, and return its result."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, args)


def again_as_a_worker(module: str) -> None:
    """Run this command again with --here, with the memory settings of Ray's workers."""
    command = [sys.executable, "-m", module, *sys.argv[1:], "--here"]
    raise SystemExit(subprocess.run(command, env={**os.environ, **for_training()}).returncode)
