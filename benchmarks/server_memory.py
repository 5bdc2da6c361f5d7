"""Peak memory of the server as a multiple of the payload, by number of clients.

python -m benchmarks.server_memory [--mb 20] [--clients 2,10,50] [--methods fedavg,felo,fedtype]

The full benchmark has the options --mb 45 --clients 10,100,500, and needs 22 GB of disk for the
replies of a round.

Each measurement uses a separate process, in which the clients repeat, one after another, the
replies of a real client. These replies were recorded in another process. Memory in use before the
server starts is not counted. MALLOC_MMAP_THRESHOLD_ is set, because glibc would otherwise keep
freed memory.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
from pathlib import Path

import psutil
from torch import nn

from benchmarks.recorded import parts_in, record, server_with
from benchmarks.timing import apart, records_of
from fedhet.config.resolve import Config, resolve
from fedhet.models import shapes

MB = 1_000_000
LAYERS = 10
MODEL = "benchmarks.server_memory:stack"


def stack(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """Return an extractor with FEDHET_BENCH_MB megabytes in LAYERS equal layers, and a head."""
    width = int((float(os.environ["FEDHET_BENCH_MB"]) * MB / 4 / LAYERS) ** 0.5)
    pooled = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(width))
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*pooled, *layers), nn.Linear(width, classes)


def federation(method: str, clients: int, out: Path) -> Config:
    """Return the settings of two rounds of a method whose clients send the model `stack`."""
    fedtype = {"fedtype.proxy": MODEL, "models.pool": "mlp"}
    own = fedtype if method == "fedtype" else {"models.pool": MODEL}
    return resolve(
        {
            "method": method,
            "clients": clients,
            "rounds": 2,
            "out": str(out),
            "data.max-samples": max(400, 2 * clients),
            "data.min-samples": 1,
            "data.test-fraction": 0.0,
            "data.max-test-samples": 20,
            "data.partition": "iid",
            "training.local-epochs": 1,
            "training.optimizer": "sgd",
            "engine.backend": "inline",
            **own,
        }
    )


def record_client(method: str, clients: int, folder: Path) -> None:
    """Train a real client, and write its replies to `folder`."""
    record(federation(method, clients, folder / "recorded"), folder)


def measure(method: str, clients: int, folder: Path) -> tuple[float, float]:
    """Return the payload in MB, and the growth of peak memory as a multiple of the payload."""
    config = federation(method, clients, folder / "run")
    payload = sum(path.stat().st_size for path in folder.glob("*.npy"))
    # Look up shapes before measuring, because PyTorch then imports its compiler (150 MB).
    shapes("mlp", (1, 8, 8), 10)
    server = server_with(config, folder / "run", folder, lambda: parts_in(folder), [])
    before = psutil.Process().memory_info().rss
    server.set_max_workers(1)
    server.fit(2, None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert len(records_of(folder / "run")[-1]["answered"]) == clients
    return payload / MB, (peak - before) / payload


def main() -> None:
    """Print a line for each method and number of clients."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mb", type=float, default=20.0)
    parser.add_argument("--clients", default="2,10,50")
    parser.add_argument("--methods", default="fedavg,felo,fedtype")
    chosen = parser.parse_args()
    os.environ |= {"FEDHET_BENCH_MB": str(chosen.mb), "OMP_NUM_THREADS": "1"}
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "1000000")
    for method in chosen.methods.split(","):
        for clients in map(int, chosen.clients.split(",")):
            with tempfile.TemporaryDirectory() as folder:
                apart(record_client, method, clients, Path(folder))
                mb, times = apart(measure, method, clients, Path(folder))
            print(f"{method}, {clients} clients: {mb:.1f} MB, peak {times:.2f} x that", flush=True)


if __name__ == "__main__":
    main()
