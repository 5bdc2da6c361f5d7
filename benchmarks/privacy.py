"""Accuracy with differential privacy, by method and epsilon.

    python -m benchmarks.privacy --data DIR --out DIR [--methods a,b] [--seeds 3,4,5]
        [--epsilons 0,8,4,2,1] [--samples 6000,30000] [--frozen]

Three clients with a Dirichlet(1.0) partition train on Fashion-MNIST in DIR/FashionMNIST/raw, for
ten rounds of one epoch. Epsilon 0 means training without privacy. All models use group
normalization, even without privacy. `--samples` is the number of training samples of all clients
together. With `--frozen`, the extractor is random and fixed, and only the classifier is trained.
Existing runs in --out are reused, so that the script can be stopped and restarted.

A cell is the accuracy of the method's best client model on the common test set: the mean over the
seeds, with the standard deviation.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

from benchmarks.timing import kept_run
from fedhet.base.errors import FedhetError

CLIENTS = 3
METHODS = ("local", "fedavg", "felo", "fedproto", "fedtype", "fedmd")
OWN: dict[str, dict[str, Any]] = {
    "fedtype": {"fedtype.backward": "symmetric", "fedtype.labels": "all"},
    "fedmd": {"data.public-fraction": 0.1},
}
PROXIES = {"fedtype": "fedtype.proxy"}


class Frozen(nn.Module):
    """Fixed random filters and pooling, [N, C, H, W] -> [N, D]."""

    def __init__(self, shape: tuple[int, ...], filters: int, side: int) -> None:
        super().__init__()
        torch.manual_seed(0)  # The filters depend on no data.
        self.first = nn.Conv2d(shape[0], filters, 5, padding=2).requires_grad_(False)
        self.pool = nn.AdaptiveAvgPool2d(side)
        self.norm = nn.GroupNorm(1, filters, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the pooled filter responses [N, D]."""
        out: torch.Tensor = self.pool(self.norm(self.first(x).relu())).flatten(1)
        return out


def frozen(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """Return a fixed random extractor, and a linear classifier."""
    return Frozen(shape, 32, 5), nn.Linear(32 * 25, classes)


def settings(
    method: str, epsilon: float, samples: int, is_frozen: bool, data: str
) -> dict[str, Any]:
    """Return the settings of a run other than its method and seed."""
    pool = ["benchmarks.privacy:frozen"] if is_frozen else ["cnn2-gn"]
    if method not in ("fedavg", "local") and not is_frozen:
        pool = ["cnn2-gn", "cnn3-gn"]
    own = dict(OWN.get(method, {}))
    if method in PROXIES:
        own[PROXIES[method]] = pool[0]
    if method in ("felo", "fedproto") and is_frozen:
        own[f"{method}.feature-dim"] = 800
    return {
        **own,
        "data.data-dir": data,
        "data.max-samples": samples,
        "data.alpha": 1.0,
        "models.pool": pool,
        "training.local-epochs": 1,
        "training.batch-size": 128 if samples >= 30_000 else 64,
        "training.lr": 2e-3,
        "evaluate-every": 5,
        "engine.device": "cpu",
        "engine.precision": "float32",
        "privacy.epsilon": epsilon,
    }


def made(out: Path, method: str, seed: int, **chosen: Any) -> float | None:
    """Return the accuracy of a run, or None if it fails. The run is executed unless it exists."""
    name = f"{method}-{chosen['epsilon']:g}-{chosen['samples']}-s{seed}"
    folder = out / (f"frozen-{name}" if chosen["is_frozen"] else name)
    try:
        kept_run(
            folder, method, dataset="fashion-mnist", clients=CLIENTS, rounds=10, seed=seed,
            settings=settings(method, **chosen),
        )  # fmt: skip
    except FedhetError as error:
        print(f"{folder.name}: {error}", flush=True)
        return None
    kinds = json.loads((folder / "summary.json").read_text())["accuracy"]["common"]
    return max(float(each["mean"]) for kind, each in kinds.items() if kind != "server")


def main() -> None:
    """Execute the runs, and print a table for each number of samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="3,4,5")
    parser.add_argument("--epsilons", default="0,8,4,2,1")
    parser.add_argument("--samples", default="6000")
    parser.add_argument("--frozen", action="store_true")
    given = parser.parse_args()
    epsilons = [float(each) for each in given.epsilons.split(",")]
    for samples in map(int, given.samples.split(",")):
        print(
            f"{samples} samples, {CLIENTS} clients{', frozen extractor' * given.frozen}", flush=True
        )
        heads = ["none" if each == 0 else f"{each:g}" for each in epsilons]
        print(f"| method | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}", flush=True)
        for method in given.methods.split(","):
            cells = []
            for epsilon in epsilons:
                chosen: dict[str, Any] = {
                    "epsilon": epsilon, "samples": samples, "is_frozen": given.frozen,
                    "data": given.data,
                }  # fmt: skip
                found = [made(given.out, method, int(s), **chosen) for s in given.seeds.split(",")]
                cells.append(_cell([each for each in found if each is not None]))
            print(f"| {method} | {' | '.join(cells)} |", flush=True)


def _cell(values: list[float]) -> str:
    if not values:
        return "–"
    spread = f" ± {100 * stdev(values):.1f}" if len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


if __name__ == "__main__":
    main()
