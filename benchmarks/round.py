"""Time of a round of fedhet, of a plain PyTorch script, and of Flower with a minimal client.

    python -m benchmarks.round [--samples 2600] [--pairs 3] [--precision bfloat16]

Twenty clients with four CNN architectures train for one epoch on their own synthetic images of 28 x
28 pixels, and are then evaluated on a fifth as many images. The contenders alternate, each in a
separate process:

    fedhet     the method `local` on Ray, with one PyTorch thread per worker
    script     a loop over the clients with DataLoaders and two PyTorch threads
    flower     Flower's simulation of a minimal NumPyClient with the same loop

Bounds on two cores: a round of fedhet takes at most 0.55 times the wall time of the script and of
Flower, with the given `--precision` and `--channels-last`. In float32, fedhet needs at most as many
core seconds as the script with a single thread. The first round is excluded, because it loads the
data and starts processes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import ArrayRecord, Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.timing import records_of, show, write_images
from fedhet.config.resolve import resolve
from fedhet.engines.simulate import simulate
from fedhet.models import build

MODELS = ("cnn2", "cnn3", "cnn4", "cofed-cnn1")
SHAPE, CLASSES, BATCH = (1, 28, 28), 10, 32
WALL, CORE = 0.55, 1.0


# --- plain PyTorch loop


def loader(folder: Path, name: str, client: int) -> DataLoader[tuple[torch.Tensor, ...]]:
    """Return a DataLoader of a client's images in a split, scaled to [-1, 1]."""
    with np.load(folder / name / f"{client}.npz") as found:
        images = torch.from_numpy(found["x"]).float() / 127.5 - 1
        labels = torch.from_numpy(found["y"])
    return DataLoader(TensorDataset(images, labels), batch_size=BATCH, shuffle=name == "train")


def network(client: int) -> nn.Module:
    """Return a client's new network."""
    return build(MODELS[client % len(MODELS)], SHAPE, CLASSES, seed=client)


def train(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, ...]]) -> None:
    """Train a network for an epoch."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def accuracy(model: nn.Module, batches: DataLoader[tuple[torch.Tensor, ...]]) -> float:
    """Return a network's accuracy."""
    model.eval()
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in batches)
    return right / len(batches.dataset)  # type: ignore[arg-type]


# --- contenders; each function returns the seconds of its rounds


def script(chosen: argparse.Namespace, folder: Path) -> list[float]:
    """Train the clients one after the other in this process."""
    torch.set_num_threads(chosen.threads)
    models = [network(client) for client in range(chosen.clients)]
    data = [
        (loader(folder, "train", client), loader(folder, "test", client))
        for client in range(chosen.clients)
    ]
    seconds = []
    for _ in range(chosen.rounds):
        started = time.perf_counter()
        for model, (training, test) in zip(models, data, strict=True):
            train(model, training)
            accuracy(model, test)
        seconds.append(time.perf_counter() - started)
    return seconds


class BareClient(NumPyClient):
    """Client that trains like the script, and keeps its network in Flower's context."""

    def __init__(self, context: Context, folder: Path) -> None:
        self.context, self.folder = context, folder
        self.client = int(context.node_config["partition-id"])
        self.model = network(self.client)
        if "model" in context.state.array_records:
            kept = context.state.array_records["model"].to_torch_state_dict()
            self.model.load_state_dict(kept)

    def fit(self, parameters: Any, config: Any) -> Any:
        """Train the network for one epoch."""
        training = loader(self.folder, "train", self.client)
        train(self.model, training)
        kept = ArrayRecord(torch_state_dict=self.model.state_dict())
        self.context.state.array_records["model"] = kept
        return [], len(training.dataset), {}  # type: ignore[arg-type]

    def evaluate(self, parameters: Any, config: Any) -> Any:
        """Evaluate the network."""
        test = loader(self.folder, "test", self.client)
        return 0.0, len(test.dataset), {"accuracy": accuracy(self.model, test)}  # type: ignore[arg-type]


class Watched(FedAvg):
    """FedAvg strategy without weights that records the start and the end of each round."""

    def __init__(self, clients: int) -> None:
        super().__init__(
            min_available_clients=clients, initial_parameters=ndarrays_to_parameters([])
        )
        self.moments: list[float] = []

    def configure_fit(self, server_round: int, parameters: Any, client_manager: Any) -> Any:
        """Record the start of a round."""
        self.moments.append(time.perf_counter())
        return super().configure_fit(server_round, parameters, client_manager)

    def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
        """Return no weights, because networks differ. Raises RuntimeError if a client failed."""
        if failures:
            raise RuntimeError(f"a client failed: {failures[0]}")
        return ndarrays_to_parameters([]), {}

    def aggregate_evaluate(self, server_round: int, results: Any, failures: Any) -> Any:
        """Record the end of a round. Raises RuntimeError if a client failed."""
        self.moments.append(time.perf_counter())
        if failures:
            raise RuntimeError(f"a client failed: {failures[0]}")
        return super().aggregate_evaluate(server_round, results, failures)


def flower(chosen: argparse.Namespace, folder: Path) -> list[float]:
    """Train in Flower's simulation, with one CPU per client."""
    from flwr.simulation import run_simulation

    strategy = Watched(chosen.clients)

    def server(context: Context) -> ServerAppComponents:
        return ServerAppComponents(strategy=strategy, config=ServerConfig(chosen.rounds))

    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(lambda context: BareClient(context, folder).to_client()),
        num_supernodes=chosen.clients,
        backend_config={"client_resources": {"num_cpus": 1.0, "num_gpus": 0.0}},
    )
    begins, ends = strategy.moments[::2], strategy.moments[1::2]
    return [end - begin for begin, end in zip(begins, ends, strict=True)]


def fedhet(chosen: argparse.Namespace, folder: Path) -> list[float]:
    """Train with the method `local`. With --core, return the clients' seconds."""
    config = resolve(
        {
            "method": "local", "clients": chosen.clients, "rounds": chosen.rounds,
            "data.dataset": f"npz:{folder}", "models.pool": [*MODELS],
            "training.local-epochs": 1, "training.batch-size": BATCH,
            "engine.precision": chosen.precision, "engine.channels-last": chosen.channels_last,
        }
    )  # fmt: skip
    directory = folder / f"run-{os.getpid()}"
    simulate(config, directory)
    rounds = [record["seconds"] for record in records_of(directory)]
    if chosen.core:
        return [each["train"] + each["evaluate"] for each in rounds]
    return [each["total"] for each in rounds]


CONTENDERS: dict[str, Callable[[argparse.Namespace, Path], list[float]]] = {
    "fedhet": fedhet, "script": script, "flower": flower,
}  # fmt: skip


def measured(chosen: argparse.Namespace, folder: Path, name: str, *options: str) -> float:
    """Return a contender's median round time in a separate process, without the first round."""
    command = [
        sys.executable, "-m", "benchmarks.round", "--only", name, "--data", str(folder),
        "--clients", str(chosen.clients), "--rounds", str(chosen.rounds), *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.strip().splitlines()[-1])
    return median(seconds[1:])


def compare(chosen: argparse.Namespace, folder: Path) -> None:
    """Measure all contenders in turn, and print the ratios."""
    as_given = ("--precision", chosen.precision, "--channels-last", chosen.channels_last)
    of_script, of_flower, of_core = [], [], []
    for _ in range(chosen.pairs):
        ours = measured(chosen, folder, "fedhet", *as_given)
        plain = measured(chosen, folder, "script")
        bare = measured(chosen, folder, "flower")
        core = measured(chosen, folder, "fedhet", "--precision", "float32", "--core")
        single = measured(chosen, folder, "script", "--threads", "1")
        of_script.append(ours / plain)
        of_flower.append(ours / bare)
        of_core.append(core / single)
        print(f"a round: fedhet {ours:.1f} s, script {plain:.1f} s, Flower {bare:.1f} s")
        print(f"core seconds in float32: fedhet {core:.1f}, script {single:.1f}", flush=True)
    show(f"round, {chosen.precision} / script with two threads", sorted(of_script), WALL)
    show(f"round, {chosen.precision} / Flower's bare client", sorted(of_flower), WALL)
    show("core seconds, float32 / script with one thread", sorted(of_core), CORE)


def main() -> None:
    """Print the ratios, or, with --only, the seconds of one contender's rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--samples", type=int, default=2600, help="training images of a client")
    parser.add_argument("--rounds", type=int, default=3, help="the first is left out")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--precision", default="bfloat16")
    parser.add_argument("--channels-last", default="true", choices=("auto", "true", "false"))
    parser.add_argument("--threads", type=int, default=2, help="torch threads of the script")
    parser.add_argument("--core", action="store_true", help="the clients' seconds, not a round's")
    parser.add_argument("--only", choices=CONTENDERS, help="one of them, on data in --data")
    parser.add_argument("--data", type=Path)
    chosen = parser.parse_args()
    if chosen.only:
        print(json.dumps(CONTENDERS[chosen.only](chosen, chosen.data)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder), chosen.clients, chosen.samples, SHAPE)
        compare(chosen, Path(folder))


if __name__ == "__main__":
    main()
