"""The server's peak memory as a multiple of the payload, for more and more clients.

python -m benchmarks.server_memory [--mb 20] [--clients 2,10,50] [--methods fedavg,felo,fedtype]

The whole: --mb 45 --clients 10,100,500; the replies of a round lie on disk, 22 GB of them.

Each figure is that of a process of its own, in which the server trains with clients that answer in
turn what a real one has answered in another process. What the process holds before the server
starts is not counted. MALLOC_MMAP_THRESHOLD_ is set, because glibc otherwise keeps what is freed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    GetPropertiesRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
    parameters_to_ndarrays,
)
from torch import nn

from fedhet._generated import knowledge_pb2 as wire
from fedhet.client_runtime.node import read_node
from fedhet.config.resolve import Config, resolve
from fedhet.engines.backend import InlineProxy
from fedhet.models import shapes
from fedhet.server.app import FederationServer, components

MB = 1_000_000
LAYERS = 10
MODEL = "benchmarks.server_memory:stack"


def stack(shape: tuple[int, ...], classes: int) -> tuple[nn.Module, nn.Module]:
    """Return an extractor of LAYERS equal layers with FEDHET_BENCH_MB megabytes, and a head."""
    width = int((float(os.environ["FEDHET_BENCH_MB"]) * MB / 4 / LAYERS) ** 0.5)
    pooled = nn.Sequential(nn.Flatten(), nn.AdaptiveAvgPool1d(width))
    layers = (nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
    return nn.Sequential(*pooled, *layers), nn.Linear(width, classes)


def federation(method: str, clients: int, out: Path) -> Config:
    """Return two rounds of a method whose clients send a model of that size."""
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


class Recording(InlineProxy):
    """A real client whose description and first answers are written to a folder."""

    def __init__(self, config: Config, folder: Path) -> None:
        node_config = {"partition-id": 0, "num-partitions": config.run.clients}
        super().__init__(config, read_node(node_config, config.run, str(folder / "state")))
        self.folder = folder

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the real client, and keep what it answers first."""
        result = super().call(name, instruction, timeout)
        said = result.properties if name == "get_properties" else result.metrics
        if not (path := self.folder / f"{name}.json").exists():
            path.write_text(json.dumps(said))
        if name == "fit":
            for number, part in enumerate(result.parameters.tensors):
                (self.folder / f"{number:04d}.npy").write_bytes(part)
        return result


class Repeating(InlineProxy):
    """A client that answers what the recorded one has answered, in its own name."""

    def __init__(self, config: Config, folder: Path, number: int, run: str) -> None:
        node_config = {"partition-id": number, "num-partitions": config.run.clients}
        super().__init__(config, read_node(node_config, config.run, ""))
        self.folder, self.run, self.round = folder, run, 0

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Answer what is in the folder."""
        said = json.loads((self.folder / f"{name}.json").read_text())
        done = Status(Code.OK, "")
        if name == "get_properties":
            return GetPropertiesRes(done, {**said, "name": self.cid})
        if name == "evaluate":
            return EvaluateRes(done, 0.0, 1, said)
        self.round += 1
        return FitRes(done, self._payload(), 1, said)

    def _payload(self) -> Parameters:
        manifest, *tensors = [path.read_bytes() for path in sorted(self.folder.glob("*.npy"))]
        return Parameters([_signed(manifest, self), *tensors], "numpy.ndarray")


def _signed(part: bytes, client: Repeating) -> bytes:
    """Return a manifest as it is, but of another client, and of its run and round."""
    (manifest,) = parameters_to_ndarrays(Parameters([part], ""))
    read = wire.Manifest()
    read.ParseFromString(manifest.tobytes())
    read.run, read.sender, read.round = client.run, client.cid, client.round
    data = np.frombuffer(read.SerializeToString(deterministic=True), np.uint8)
    signed: bytes = ndarrays_to_parameters([data]).tensors[0]
    return signed


def record(method: str, clients: int, folder: Path) -> None:
    """Let a real client train, and write what it answers into a folder."""
    config = federation(method, clients, folder / "recorded")
    one = resolve({**config.flat(), "clients": 1, "rounds": 1})
    server = components(one, folder / "recorded", workers=1, watchers=[]).server
    assert isinstance(server, FederationServer)
    server.client_manager().register(Recording(config, folder))
    server.set_max_workers(1)
    server.fit(1, None)


def measure(method: str, clients: int, folder: Path) -> None:
    """Print the payload in MB and the growth of this process's peak memory, over the payload."""
    config = federation(method, clients, folder / "run")
    server = components(config, folder / "run", workers=1, watchers=[]).server
    assert isinstance(server, FederationServer)
    name = json.loads((folder / "run" / "run.json").read_text())["run"]
    payload = sum(path.stat().st_size for path in folder.glob("*.npy"))
    # PyTorch imports its compiler, some 150 MB, when the shapes of a built-in model are looked up.
    shapes("mlp", (1, 8, 8), 10)
    before = psutil.Process().memory_info().rss
    for number in range(clients):
        server.client_manager().register(Repeating(config, folder, number, name))
    server.set_max_workers(1)
    server.fit(2, None)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    last = (folder / "run" / "metrics.jsonl").read_text().splitlines()[-1]
    assert len(json.loads(last)["answered"]) == clients
    print(f"{payload / MB:.1f} {(peak - before) / payload:.2f}")


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
                _in_a_process("record", method, clients, folder)
                payload, times = _in_a_process("measure", method, clients, folder).split()[-2:]
            print(f"{method}, {clients} clients: {payload} MB, peak {times} x that", flush=True)


def _in_a_process(step: str, method: str, clients: int, folder: str) -> str:
    called = f"from benchmarks import server_memory as b; from pathlib import Path; b.{step}"
    code = f"{called}({method!r}, {clients}, Path({folder!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
