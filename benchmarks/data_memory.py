"""What Ray's workers take of memory for a dataset of CIFAR-10's size: 1, 2 and 8 of them.

    python -m benchmarks.data_memory [--workers 1,2,8] [--images 50000]

Ten clients of synthetic images [3, 32, 32] train an `mlp` for an epoch. A worker's memory is its
proportional set size: a page that several processes map counts in parts. Beside it stands that of
workers that have all that a client needs but the images: of a run of a few images.
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
    """Return synthetic images as bytes, as many as the environment says, and a few to test on."""
    rng = np.random.default_rng(0)
    counts = {"train": int(os.environ[IMAGES]), "test": 100}
    return {
        part: (rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % 10)
        for part, count in counts.items()
    }


class WorkersMemory(Watcher):
    """Measures the workers at the end of each round."""

    def __init__(self) -> None:
        self.megabytes: list[float] = []

    def round_finished(self, record: RoundRecord) -> None:
        """Measure all workers of this machine."""
        every = psutil.Process().children(recursive=True)
        workers = [each for each in every if " ".join(each.cmdline()).startswith("ray::Worker")]
        self.megabytes = [each.memory_full_info().pss / 1e6 for each in workers]


def measured(workers: int, count: int) -> list[float]:
    """Run a federation on a number of workers; return the megabytes of each."""
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
    """Print the memory of all workers together, and what of it the images are."""
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
