"""Throughput and peak memory for 500 MB in both directions, over gRPC with TLS.

python -m benchmarks.payload [MB]

The benchmark starts a deployment on loopback with one site, and runs Felo with weights. The model
has one wide layer, and is trained on one batch. From the second round on, the weights are sent in
both directions. The time is the duration of a round without training and evaluation. It includes
serialization, validation, averaging, and writing the states of both sides to disk.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from torch import nn

from benchmarks.timing import records_of
from fedhet.config.resolve import resolve
from fedhet.deployment.control import submit
from fedhet.deployment.local import LocalDeployment

MB = 1_000_000
WIDTH = 1000


def wide(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """Return an extractor and a classifier with FEDHET_BENCH_MB megabytes of weights."""
    inputs = 1
    for side in shape:
        inputs *= side
    hidden = int(float(os.environ["FEDHET_BENCH_MB"]) * MB / 4 / WIDTH) - inputs
    extractor = nn.Sequential(
        nn.Flatten(),
        nn.Linear(inputs, WIDTH),
        nn.Linear(WIDTH, hidden),
        nn.AdaptiveAvgPool1d(64),
    )
    return extractor, nn.Linear(64, classes)


def main() -> None:
    """Run the deployment, and print the throughput and the peak memory."""
    size = sys.argv[1] if len(sys.argv) > 1 else "500"
    root = str(Path(__file__).parent.parent)
    os.environ |= {"FEDHET_BENCH_MB": size, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        config = resolve(
            {
                "method": "felo",
                "clients": 1,
                "rounds": 3,
                "out": str(out),
                "data.max-samples": 40,
                "data.max-test-samples": 20,
                "models.pool": "benchmarks.payload:wide",
                "training.local-epochs": 1,
                "training.batch-size": 32,
                "training.optimizer": "sgd",
            }
        )
        deployment = LocalDeployment(Path(folder) / "deployment", nodes=1)
        with deployment, watched() as peaks:
            submit(config, deployment.connection, print)
        records = records_of(out)
    for record in records[1:]:
        seconds = record["seconds"]
        moving = seconds["total"] - seconds["train"] - seconds["evaluate"]
        down, up = record["bytes_down"] / MB, record["bytes_up"] / MB
        print(
            f"round {record['round']}: {down:.0f} MB down, {up:.0f} MB up in {moving:.1f} s: "
            f"{(down + up) / moving:.0f} MB/s"
        )
    for name, peak in sorted(peaks.items()):
        print(f"{name}: peak {peak / MB:.0f} MB, {peak / MB / up:.1f} x the payload")


@contextlib.contextmanager
def watched() -> Iterator[dict[str, float]]:
    """Yield the peak memory of Flower's processes by name, and update it during the block."""
    peaks: dict[str, float] = {}
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(peaks, over))
    watch.start()
    try:
        yield peaks
    finally:
        over.set()
        watch.join()


def _watch(peaks: dict[str, float], over: threading.Event) -> None:
    """Record the peak memory of Flower's processes that hold the payload."""
    while not over.wait(0.1):
        for process in psutil.process_iter(["name", "cmdline", "memory_info"]):
            name = process.info["name"] or ""
            if "fedhet.deployment.worker" in (process.info["cmdline"] or ()):
                name = "flwr-clientapp"
            memory = process.info["memory_info"]
            if name.startswith(("flwr-", "flower-")) and memory is not None:
                peaks[name] = max(peaks.get(name, 0.0), float(memory.rss))
        time.sleep(0)


if __name__ == "__main__":
    main()
