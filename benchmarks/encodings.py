"""Accuracy, bytes and seconds of runs with each encoding of messages.

    python -m benchmarks.encodings --data DIR --out DIR [--datasets digits,fashion-mnist]
        [--methods a,b] [--seeds 3,4,5] [--encodings float32,float16,int8,top-k,top-k:0.1]
        [--rounds 15,10]

The datasets are digits (all 1,797 images) and 2,000 images of Fashion-MNIST in
DIR/FashionMNIST/raw. Four clients with a Dirichlet(0.5) partition train for one epoch per round.
`top-k:0.1` sets 'wire.keep' to 0.1. Existing runs in --out are reused, so that the script can be
stopped and restarted.

The columns contain the mean accuracy of the method's main model on the common test set, over the
last three rounds and the seeds; the paired difference from float32, with its standard error; the
bytes of all messages (training and evaluation) and of replies, as fractions of the bytes with
float32; and the seconds of a run, relative to float32.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.timing import kept_run
from fedhet import report

CLIENTS = 4
LAST = 3
"""Number of rounds at the end of a run over which the accuracy is averaged."""
JUDGED = {
    "felo": "global",
    "fedavg": "global",
    "fedtype": "private",
    "fedgems": "server",
}
"""Kind of model that is evaluated, by method."""
PLAIN = "float32"


@dataclass(frozen=True)
class Found:
    """Results of a run."""

    accuracy: float
    bytes: float
    bytes_up: float
    seconds: float


def settings(method: str, dataset: str, encoding: str, data: str) -> dict[str, Any]:
    """Return the settings of a run other than its method and seed."""
    name, _, keep = encoding.partition(":")
    chosen: dict[str, Any] = {
        "models.pool": ["cnn2"] if method == "fedavg" else ["mlp", "cnn2"],
        "data.data-dir": data,
        "training.local-epochs": 1,
        "engine.precision": "float32",
        "wire.encoding": name,
    }
    if keep:
        chosen["wire.keep"] = float(keep)
    if dataset != "digits":
        chosen |= {"data.max-samples": 2000, "data.max-test-samples": 1000}
    if method == "fedgems":
        chosen["fedgems.server-model"] = "cnn2"
    return chosen


def made(given: argparse.Namespace, method: str, dataset: str, encoding: str, seed: int) -> Found:
    """Return the results of a run. The run is executed unless it exists."""
    rounds = dict(zip(given.datasets.split(","), given.rounds.split(","), strict=False))[dataset]
    folder = given.out / f"{method}-{dataset}-{encoding.replace(':', '-')}-{rounds}-s{seed}"
    records = kept_run(
        folder, method, dataset=dataset, clients=CLIENTS, rounds=int(rounds), seed=seed,
        settings=settings(method, dataset, encoding, given.data),
    )  # fmt: skip
    kind = JUDGED[method]
    last = [float(r["accuracy"]["common"][kind]["mean"]) for r in records[-LAST:]]
    sums = {
        name: sum(float(record[name]) for record in records)
        for name in ("bytes_up", "bytes_down", "bytes_evaluation")
    }
    seconds = sum(float(record["seconds"]["total"]) for record in records)
    return Found(fmean(last), sum(sums.values()), sums["bytes_up"], seconds)


def row(encoding: str, plain: list[Found], found: list[Found]) -> str:
    """Format a row of the table. Each list contains one item per seed."""
    accuracies = [100 * each.accuracy for each in found]
    pairs = [100 * (one.accuracy - other.accuracy) for one, other in zip(found, plain, strict=True)]
    error = stdev(pairs) / sqrt(len(pairs)) if len(pairs) > 1 else 0.0
    shares = [
        fmean(
            getattr(one, name) / getattr(other, name)
            for one, other in zip(found, plain, strict=True)
        )
        for name in ("bytes", "bytes_up", "seconds")
    ]
    spread = f" ± {stdev(accuracies):.1f}" if len(accuracies) > 1 else ""
    difference = "" if encoding == PLAIN else f"{fmean(pairs):+.1f} ± {error:.1f}"
    cells = [encoding, f"{fmean(accuracies):.1f}{spread}", difference]
    return " | ".join([*cells, *(f"{share:.2f}" for share in shares)])


def main() -> None:
    """Execute the runs, and print a table for each dataset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--datasets", default="digits,fashion-mnist")
    parser.add_argument("--methods", default=",".join(JUDGED))
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--encodings", default="float32,float16,int8,top-k")
    parser.add_argument("--rounds", default="15,10", help="for each data set")
    given = parser.parse_args()
    for name in ("write_figures", "write_report"):  # These functions take longer than a small run.
        assert hasattr(report, name), name
        setattr(report, name, lambda run: None)
    seeds = [int(each) for each in given.seeds.split(",")]
    for dataset in given.datasets.split(","):
        print(f"\n{dataset}, {len(seeds)} seeds\n")
        print("| method | encoding | accuracy | difference | bytes | of replies | seconds |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for method in given.methods.split(","):
            plain = [made(given, method, dataset, PLAIN, seed) for seed in seeds]
            for encoding in given.encodings.split(","):
                found = [made(given, method, dataset, encoding, seed) for seed in seeds]
                print(f"| {method} | {row(encoding, plain, found)} |", flush=True)


if __name__ == "__main__":
    main()
