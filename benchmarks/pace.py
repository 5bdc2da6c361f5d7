"""Simulated time of a federation that waits for all clients, and of three alternatives.

    python -m benchmarks.pace --out DIR [--methods a,b] [--seeds 3,4,5] [--rounds 30]
        [--dataset digits] [--slow 30] [--figure FILE.png]

A round requires half of the twenty clients. Speeds and bandwidths are log-normal (the standard
deviation of the logarithms is 1), and one client is `--slow` times slower than the median. There
are four ways to run a round:

- `all` waits for all sampled clients.
- `k of n` samples 30 % more clients, closes with the required number of replies, and discards late
  replies.
- `late` differs from `k of n` in that late replies are used.
- `asynchronous` creates a version of the model from every five replies.

A row contains the simulated hours until the mean of three evaluations reaches 98 % of the final
accuracy of `all` (the mean of its last fifth of evaluations); these hours as a fraction of the
hours of `all`; the time of all rounds, as a fraction of the time of `all`; and the difference
between the final accuracies. Standard errors are over the seeds. Rounds that do not wait are
shorter, so the other ways execute more rounds. Existing runs in --out are reused, so that the
script can be stopped and restarted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from benchmarks.timing import kept_run, mean_and_error
from fedhet.base.disk import write_text
from fedhet.report import load_run

CLIENTS, SPREAD, MEDIAN_MS, MEDIAN_MBIT = 20, 1.0, 100.0, 5.0
METHODS = ("felo", "fedavg", "fedtype", "fedproto")
WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "k of n": {"pace.over-selection": 0.3, "pace.max-age": 0},
    "late": {"pace.over-selection": 0.3},
    "asynchronous": {"pace.mode": "asynchronous", "pace.min-replies": 5.0},
}
LONGER = {"all": 1, "k of n": 5, "late": 5, "asynchronous": 10}
"""Number of rounds of each way, as a multiple of the number of rounds of `all`."""


def devices(folder: Path, seed: int, slow: float) -> Path:
    """Write the speed and bandwidth of each client to a file, and return its path."""
    rng = np.random.default_rng(seed)
    lines = ["client,sample-ms,mbit"]
    for k in range(CLIENTS):
        speed, bandwidth = np.exp(SPREAD * rng.standard_normal(2))
        ms = MEDIAN_MS * (slow if k == 0 else speed)
        lines.append(f"client-{k:02d},{ms:.6g},{MEDIAN_MBIT * bandwidth:.6g}")
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / f"devices-{seed}.csv", "\n".join(lines) + "\n")
    return folder / f"devices-{seed}.csv"


def made(given: argparse.Namespace, method: str, way: str, seed: int) -> pd.Series:
    """Return the accuracy of a run by simulated hours. The run is executed unless it exists."""
    folder = given.out / f"{method}-{way.replace(' ', '-')}-s{seed}"
    pool = ["cnn2"] if method == "fedavg" else ["cnn2", "mlp", "cnn3"]
    kept_run(
        folder, method, dataset=given.dataset, clients=CLIENTS, seed=seed,
        rounds=given.rounds * LONGER[way],
        settings={
            "models.pool": pool, "fraction": 0.5, "training.local-epochs": 2,
            "evaluate-every": LONGER[way], "engine.precision": "float32",
            "data.partition": "dirichlet", "data.alpha": 0.5,
            "pace.clock": str(devices(given.out, seed, given.slow)), **WAYS[way],
        },
    )  # fmt: skip
    run = load_run(folder)
    means = run.curve(*run.columns[0])["mean"]
    return means.set_axis(run.costs["clock"].loc[means.index] / 3600)


def hours_to(curve: pd.Series, target: float) -> float:
    """Return the hours until the mean of three evaluations reaches a target, or NaN if never."""
    smooth = curve.rolling(3, min_periods=1).mean()
    return float(smooth.index[smooth >= target][0]) if (smooth >= target).any() else math.nan


def level(curve: pd.Series) -> float:
    """Return the mean accuracy of the last fifth of a run's evaluations."""
    return float(curve.iloc[-max(len(curve) // 5, 1) :].mean())


def row(given: argparse.Namespace, method: str, seeds: list[int]) -> list[dict[str, Any]]:
    """Return the times and the accuracy gain of each way with a method, averaged over the seeds."""
    curves = {way: [made(given, method, way, seed) for seed in seeds] for way in WAYS}
    found = []
    for way, each in curves.items():
        pairs = list(zip(curves["all"], each, strict=True))
        hours = [hours_to(curve, 0.98 * level(base)) for base, curve in pairs]
        of_all = [hours_to(base, 0.98 * level(base)) for base in curves["all"]]
        found.append(
            {
                "method": method, "way": way, "seeds": seeds, "hours": mean_and_error(hours),
                "share": mean_and_error([a / b for a, b in zip(hours, of_all, strict=True)]),
                "took": mean_and_error([c.index[-1] / base.index[-1] for base, c in pairs]),
                "gain": mean_and_error([100 * (level(c) - level(base)) for base, c in pairs]),
            }
        )  # fmt: skip
    return found


def draw(given: argparse.Namespace, methods: list[str], seeds: list[int], path: Path) -> None:
    """Plot the accuracy of the first seed against simulated hours, with a panel per method."""
    figure = Figure(figsize=(3.2 * len(methods), 3), layout="constrained")
    for ax, method in zip(figure.subplots(1, len(methods), squeeze=False)[0], methods, strict=True):
        for way in WAYS:
            ax.plot(made(given, method, way, seeds[0]), label=way)
        ax.set_xscale("log")
        ax.set_title(method)
        ax.set_xlabel("simulated hours")
    figure.axes[0].set_ylabel("mean accuracy")
    figure.axes[-1].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Execute the runs, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--slow", type=float, default=30.0)
    parser.add_argument("--figure", type=Path)
    given = parser.parse_args()
    methods, seeds = given.methods.split(","), [int(each) for each in given.seeds.split(",")]
    print(
        "| method | way | hours to 98 % | share of all's | its rounds' time | points at the end |"
    )
    print("|---|---|---|---|---|---|", flush=True)
    found = []
    for method in methods:
        for each in row(given, method, seeds):
            (hours, share, took, gain) = (each[key] for key in ("hours", "share", "took", "gain"))
            print(
                f"| {method} | {each['way']} | {hours[0]:.2f} | {share[0]:.2f} ± {share[1]:.2f}"
                f" | {took[0]:.2f} | {gain[0]:+.1f} ± {gain[1]:.1f} |",
                flush=True,
            )
            found.append(each)
    write_text(given.out / "table.json", json.dumps(found))
    if given.figure:
        draw(given, methods, seeds, given.figure)


if __name__ == "__main__":
    main()
