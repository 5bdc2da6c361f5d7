"""Time and memory of CoFED's vote (Algorithm 1), and their growth with the problem size.

    python -m benchmarks.voting [--clients 100] [--instances 50000] [--classes 20] [--runs 5]

Bound: 1 s and 500 MB for 100 clients, 50,000 instances and 20 classes on one core, including the
clients' predictions and each client's pseudo-labels. The benchmark then doubles and quadruples the
numbers of clients, instances and classes.
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Callable

import numpy as np

from benchmarks.timing import seconds, verdict
from fedhet.algorithms.consensus import Vote, aggregate, labels_in_space


def draw(clients: int, instances: int, classes: int) -> list[Vote]:
    """Return random votes of clients that have six to eight classes each."""
    rng = np.random.default_rng(0)
    votes = []
    for _ in range(clients):
        space = np.sort(rng.permutation(classes)[: rng.integers(6, 9)])
        predictions = rng.choice(space, instances).astype(np.min_scalar_type(classes - 1))
        votes.append(Vote(predictions, space, float(rng.integers(100, 1000))))
    return votes


def vote(votes: list[Vote], classes: int) -> Callable[[], object]:
    """Return a function that executes the vote and selects the labels for each client."""

    def work() -> None:
        joined = aggregate(votes, classes, 0.3)
        for each in votes:
            labels_in_space(joined, each.space)

    return work


def measure(clients: int, instances: int, classes: int, runs: int) -> tuple[float, float]:
    """Return the median seconds, and the peak memory in MB, including the votes."""
    tracemalloc.start()
    votes = draw(clients, instances, classes)
    work = vote(votes, classes)
    tracemalloc.reset_peak()
    work()
    most = tracemalloc.get_traced_memory()[1] / 1e6
    tracemalloc.stop()
    return statistics.median(seconds(work) for _ in range(runs)), most


def main() -> None:
    """Print the time and the memory for each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--instances", type=int, default=50_000)
    parser.add_argument("--classes", type=int, default=20)
    parser.add_argument("--runs", type=int, default=5)
    chosen = parser.parse_args()
    base = (chosen.clients, chosen.instances, chosen.classes)
    first, most = measure(*base, chosen.runs)
    held = verdict(first < 1 and most < 500)
    print(f"{_row(*base)} {first:7.3f} s  {most:6.1f} MB   bound 1 s, 500 MB {held}")
    for axis in range(3):
        for factor in (2, 4):
            a, b, c = (size * factor if axis == n else size for n, size in enumerate(base))
            took, memory = measure(a, b, c, chosen.runs)
            print(f"{_row(a, b, c)} {took:7.3f} s  {memory:6.1f} MB   x {took / first:.2f}")


def _row(clients: int, instances: int, classes: int) -> str:
    return f"{clients:>4} clients x {instances:>7} instances x {classes:>3} classes"


if __name__ == "__main__":
    main()
