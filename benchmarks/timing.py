"""Timing two things against each other, in turn, so that a drifting machine hurts both alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

Clock = Callable[[], float]


def seconds(work: Callable[[], object], clock: Clock = time.perf_counter) -> float:
    """Return how long `work` takes, in seconds of a clock."""
    started = clock()
    work()
    return clock() - started


def ratios(
    ours: Callable[[], object],
    theirs: Callable[[], object],
    pairs: int,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Return ours over theirs, pair by pair, after one warm-up of each; sorted."""
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
    verdict = ""
    if bound is not None:
        verdict = f"  bound {bound:.2f} {'holds' if median <= bound else 'DOES NOT HOLD'}"
    print(f"{name:<44} median {median:.3f}  (min {values[0]:.3f}, max {values[-1]:.3f}){verdict}")
