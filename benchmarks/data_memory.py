"""Memory of 1, 2 and 8 Ray workers with a dataset of CIFAR-10's size.

    python -m benchmarks.data_memory [--workers 1,2,8] [--images 50000]

Ten clients with synthetic images [3, 32, 32] train an `mlp` for one epoch. A worker's memory is its
proportional set size, in which a page mapped by several processes is divided among them. For
comparison, the benchmark also measures workers in a run with only a few images.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.timing import apart
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.runs.log import Watcher
from fedhet.runs.records import RoundRecord

CLIENTS, FEW = 10, 500
IMAGES = "FEDHET_BENCHMARK_IMAGES"


def images() -> dict[str, Any]:
    """Return FEDHET_BENCHMARK_IMAGES uint8 training images, and 100 test images."""
    rng = np.random.default_rng(0)
    counts = {"train": int(os.environ[IMAGES]), "test": 100}
    return {
        part: (rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10)
        for part, count in counts.items()
    }


class WorkersMemory(Watcher):
    """Watcher that measures the memory of all workers at the end of each round."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []

    def round_finished(self, record: RoundRecord) -> None:
        """Measure the memory of each worker on this machine, in MB."""
        every = psutil.Process().children(recursive=True)
        workers = [each for each in every if " ".join(each.cmdline()).startswith("ray::Worker")]
        self.megabytes = [each.memory_full_info().pss / 1e6 for each in workers]


def measured(workers: int, count: int) -> list[float]:
    """Run a federation with `count` images, and return the memory of each worker in MB."""
    os.environ[IMAGES] = str(count)
    memory = WorkersMemory()
    with tempfile.TemporaryDirectory() as name:
        config = resolve(
            {
                "method": "local",
                "clients": CLIENTS,
                "rounds": 2,
                "data.dataset": "python:benchmarks.data_memory:images",
                "data.partition": "iid",
                "models.pool": "mlp",
                "training.local-epochs": 1,
                "engine.backend": "ray",
                "engine.cpus-per-client": (os.cpu_count() or 1) / workers,
            }
        )
        simulate(config, Path(name) / "run", [memory])
    return memory.megabytes


def main() -> None:
    """Print the total memory of all workers, and the part of it that is due to the images."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", default="1,2,8")
    parser.add_argument("--images", type=int, default=50_000)
    chosen = parser.parse_args()
    size = chosen.images * 3 * 32 * 32 / 1e6
    print(f"{chosen.images} images [3, 32, 32]: {size:.0f} MB as bytes, {4 * size:.0f} as float32")
    for workers in map(int, chosen.workers.split(",")):
        whole, without = (apart(measured, workers, n) for n in (chosen.images, FEW))
        more = sum(whole) - sum(without)
        print(
            f"{len(whole)} workers: {sum(whole):.0f} MB together, {sum(without):.0f} without the "
            f"images: {more:.0f} MB, {more / size:.2f} of the images as bytes",
            flush=True,
        )


if __name__ == "__main__":
    main()
