"""Time of a table's runs other than training, relative to runs with all evaluations and reports.

    python -m benchmarks.tables [--table felo-2] [--runs 2] [--pairs 3]

The runs of a table evaluate only the required rounds, and write no figures and no reports. The
benchmark checks that both kinds of runs produce the same numbers. Bound: 0.5 times the time other
than training.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.timing import seconds, show
from fedhet.cli.training import RUNS_PER_PROCESS
from fedhet.config.resolve import Config
from fedhet.engines.simulate import simulate, train
from fedhet.experiments.plan import PlannedRun, plan, read_table
from fedhet.runs.directory import read_if_exists
from fedhet.runs.records import FinalScores, Summary

Parts = dict[str, float]
STAGES = ("train", "evaluate", "server", "overhead", "start")


def made(
    run: PlannedRun, folder: Path, work: Callable[[Config, Path], object], **settings: int
) -> tuple[Parts, FinalScores]:
    """Execute a run in a separate directory, and return its seconds by part and its scores."""
    values = {**run.values, **{name.replace("_", "-"): each for name, each in settings.items()}}
    directory = folder / run.directory.parent.name
    config = PlannedRun(run.label, values, directory).config
    whole = seconds(lambda: work(config, directory.resolve()))
    summary = read_if_exists(directory / "summary.json", Summary)
    assert summary
    found = {name: float(getattr(summary.seconds, name)) for name in STAGES}
    return {**found, "report": whole - sum(found.values())}, summary.accuracy


def pair(run: PlannedRun) -> tuple[Parts, Parts]:
    """Execute a run as part of a table and in full, and return the seconds of both by part."""
    with tempfile.TemporaryDirectory() as name:
        before, theirs = made(run, Path(name) / "before", simulate, evaluate_from=1)
        after, ours = made(run, Path(name) / "after", train)
    assert ours == theirs, f"{run.label}: the numbers differ"
    return after, before


def besides(parts: Parts) -> float:
    """Return the seconds that were not spent on training."""
    return sum(parts.values()) - parts["train"]


def main() -> None:
    """Print the seconds by part, and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", default="felo-2")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    runs = plan(asked.table, read_table(asked.table), "tiny", [0], Path()).runs
    chosen = runs[:: max(1, len(runs) // asked.runs)][: asked.runs]
    pair(chosen[0])  # warms up imports and plots
    found = [pair(run) for run in chosen for _ in range(asked.pairs)]
    for name, side in (("after", 0), ("before", 1)):
        sums = {part: statistics.median(each[side][part] for each in found) for part in found[0][0]}
        print(f"{name}, seconds a run: {', '.join(f'{p} {s:.2f}' for p, s in sums.items())}")
    show("not training, after / before", sorted(besides(a) / besides(b) for a, b in found), 0.5)
    show(
        "a whole run, after / before",
        sorted(sum(a.values()) / sum(b.values()) for a, b in found),
    )
    begun = seconds(
        lambda: subprocess.run(
            [sys.executable, "-c", "import fedhet.experiments.making"], check=True
        )
    )
    print(f"start of a process: {begun:.2f} s; {RUNS_PER_PROCESS} runs share it")


if __name__ == "__main__":
    main()
