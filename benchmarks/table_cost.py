"""Floating-point operations of the papers' tables, and their hours on a device of given speed.

    python -m benchmarks.table_cost [--size paper] [--seeds 3] [--tflops 10]

The operations of a forward and a backward pass are measured with PyTorch's counter, for every model
of a table's runs. They are multiplied by the number of samples in all passes: the passes of the
private models and of the models that a method adds to clients, and one pass over public samples per
round for each sampled client and for the server's model. Evaluation, other training on the server,
models without gradients, and the tables with pretrained encoders are excluded.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedhet.config.resolve import Config, resolve
from fedhet.experiments.plan import SIZES, PlannedRun, each_once, plan, read_table, table_names
from fedhet.models import DRAWN, WITHOUT_GRADIENTS, build

DATA = {
    "cifar10": (50_000, (3, 32, 32), 10), "cifar100": (50_000, (3, 32, 32), 100),
    "fashion-mnist": (60_000, (1, 28, 28), 10), "imagefolder": (90_000, (3, 32, 32), 10),
    "fed-isic2019": (23_247, (3, 200, 200), 8), "digits": (1_438, (1, 8, 8), 10),
    "npz": (60_000, (1, 28, 28), 62),
    "adult": (25_000, (108,), 2), "breast-cancer": (455, (30,), 2),
    "medmnist:data/pathmnist.npz": (100_000, (3, 28, 28), 9),
    "medmnist:data/organamnist.npz": (41_052, (1, 28, 28), 11),
}  # fmt: skip
"""Training samples, shape and classes of each dataset; `imagefolder` is CINIC-10."""
WITH_ENCODERS = "fedlora-", "fedtype-8"
"""Beginnings of the names of excluded tables, whose models need the files of an encoder."""
BATCH = 8


@cache
def operations(name: str, shape: tuple[int, ...], classes: int) -> float:
    """Return the operations per sample of a forward and a backward pass of a model."""
    if name in WITHOUT_GRADIENTS:
        return 0.0
    if name in DRAWN:
        return _mean(DRAWN[name].models, shape, classes)
    model = build(name, shape, classes, seed=0).train()
    with FlopCounterMode(display=False) as counter:
        scores = model(torch.zeros(BATCH, *shape))
        (scores[-1] if isinstance(scores, tuple) else scores).sum().backward()
    return float(counter.get_total_flops()) / BATCH


def _mean(names: Iterable[str], shape: tuple[int, ...], classes: int) -> float:
    return statistics.mean(operations(name, shape, classes) for name in names)


def of_run(run: PlannedRun) -> float:
    """Return the operations of a run."""
    config = resolve(run.values)
    data = config.run.data
    known = data.dataset if data.dataset in DATA else data.dataset.partition(":")[0]
    samples, shape, classes = DATA[known]
    if data.max_samples:
        samples = min(samples, data.max_samples)
    public = samples * (data.public_fraction or 0.0) if config.method.spec.needs_public else 0.0
    own = (samples - public) * (1 - data.test_fraction)
    passes = sum(
        each.rounds * each.epochs
        for each in config.method.spec.privacy.passes(
            config.method_settings, config.run.training, config.run.rounds
        )
    )
    clients = _mean(config.run.models.pool, shape, classes)
    added, server = _added(config, shape, classes)
    asked = config.run.fraction * config.run.clients
    trained = config.run.fraction * own * passes * (clients + added)
    return trained + config.run.rounds * public * (asked * clients + server)


def _added(config: Config, shape: tuple[int, ...], classes: int) -> tuple[float, float]:
    """Return the operations of the models that a method adds to clients and to the server."""
    named = {
        name: str(getattr(config.method_settings, name))
        for name in config.method.spec.model_settings
    }
    found = {name: operations(model, shape, classes) for name, model in named.items() if model}
    server = found.pop("server_model", 0.0)
    return sum(found.values()), server


def main() -> None:
    """Print a row for each table, and a row for all tables, with shared runs counted once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="paper", choices=SIZES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tflops", type=float, default=10.0, help="sustained, 10^12 a second")
    asked = parser.parse_args()
    names = [name for name in table_names() if not name.startswith(WITH_ENCODERS)]
    plans = [plan(n, read_table(n), asked.size, range(asked.seeds), Path()) for n in names]
    rows = [(found.name, found.runs) for found in plans]
    rows.append(("all", each_once(run for found in plans for run in found.runs)))
    print(f"| table, {asked.size} | runs | 10^15 operations | hours at {asked.tflops:g} TFLOP/s |")
    print("| --- | ---: | ---: | ---: |")
    for name, runs in rows:
        total = sum(map(of_run, runs))
        hours = total / (asked.tflops * 1e12) / 3600
        print(f"| {name} | {len(runs)} | {total / 1e15:,.1f} | {hours:,.1f} |", flush=True)


if __name__ == "__main__":
    main()
