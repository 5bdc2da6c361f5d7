"""Clients of one architecture that train as one (`engine.together`), over one after the other.

    python -m benchmarks.together [--models mlp,cnn2] [--clients 4,16] [--pairs 5] [--device cpu]
        [--side 28] [--batch 32]

An epoch of 320 made-up images at each client, in turn: `fedhet.client_runtime.stacking` and
XX
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch

from benchmarks.timing import ratios, show
from fedhet.client_runtime.stacking import Work, together
from fedhet.learning.devices import Compute, compute_for
from fedhet.learning.objective import CrossEntropy
from fedhet.learning.training import optimization, train_epochs
from fedhet.models import build
from fedhet.settings.engine import ComputeSettings
from fedhet.settings.run import TrainingSettings

CLASSES, SAMPLES = 10, 320


def work_of(model_name: str, side: int, batch: int, client: int, compute: Compute) -> Work:
    """Return a client's epoch on images and labels of its own."""
    shape = (1, side, side)
    generator = torch.Generator().manual_seed(client)
    x = torch.randint(0, 256, (SAMPLES, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    model = compute.place(build(model_name, shape, CLASSES, seed=0)).train()
    optimizing = optimization(model.parameters(), TrainingSettings(), compute)
    there = x.to(compute.device), y.to(compute.device)
    return Work(CrossEntropy(model), *there, optimizing, 1, batch, generator, compute)


def one_by_one(works: list[Work]) -> None:
    """Train each client's epoch by itself."""
    for work in works:
        train_epochs(
            work.x,
            work.y,
            work.objective,
            work.optimizing,
            epochs=work.epochs,
            batch_size=work.batch_size,
            generator=work.generator,
            compute=work.compute,
        )


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="mlp,cnn2,resnet10")
    parser.add_argument("--clients", default="4,16")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--side", type=int, default=28)
    parser.add_argument("--batch", type=int, default=32)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = ComputeSettings(device=chosen.device, precision=chosen.precision)
    compute = compute_for(settings)
    clock: Callable[[], float] = time.perf_counter
    if compute.device.type == "cpu":
        clock = time.process_time
    for model, clients in product(chosen.models.split(","), map(int, chosen.clients.split(","))):
        data = chosen.side, chosen.batch
        works = [work_of(model, *data, client, compute) for client in range(clients)]
        found = ratios(
            lambda works=works: together(works),  # type: ignore[misc]
            lambda works=works: one_by_one(works),  # type: ignore[misc]
            chosen.pairs,
            clock,
        )
        show(f"together / one by one, {clients} x {model}", found)


if __name__ == "__main__":
    main()
