"""CPU time of a client's full round, relative to a plain PyTorch loop on the same tensors.

    python -m benchmarks.client_round [--models cnn2,cnn3] [--precision float32] [--rounds 8]

A round restores the client's state, trains for one epoch on 640 synthetic images of 28 x 28 pixels
in batches of 64, saves the state, and evaluates 128 images. The plain loop has scaled images in
memory, in the same format, and uses neither states nor messages. Round and loop alternate in one
thread, and the first two rounds are excluded. Goal: a ratio of at most 1.15.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch.nn import functional as F

from benchmarks.timing import again_as_a_worker, open_client, seconds, write_images
from fedhet.clients.base import HetClient
from fedhet.config.resolve import resolve
from fedhet.models import build
from fedhet.wire.knowledge import Knowledge

SHAPE, CLASSES, SAMPLES, BATCH, GOAL = (1, 28, 28), 10, 640, 64, 1.15


def client_of(model: str, precision: str, folder: Path) -> HetClient:
    """Return a client of the method `local`."""
    config = resolve(
        {
            "method": "local", "clients": 1, "data.dataset": f"npz:{folder / 'data'}",
            "models.pool": model, "training.local-epochs": 1, "training.batch-size": BATCH,
            "engine.precision": precision,
        }
    )  # fmt: skip
    return open_client(config, folder / model)


def parts_of(client: HetClient, round: int) -> dict[str, Callable[[], object]]:
    """Return the steps of a client's round, by name."""
    return {
        "restore": lambda: client.state.restore("benchmark", round),
        "train": lambda: client._train("benchmark", round, Knowledge()),
        "save": lambda: client.state.save(round),
        "evaluate": lambda: client.evaluation(Knowledge()),
    }


def plain(client: HetClient, name: str) -> Callable[[], None]:
    """Return a function that runs the same epoch and evaluation in a plain PyTorch loop."""
    model = client.compute.place(build(name, SHAPE, CLASSES, seed=0))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    test = client.tests["personal"]
    x, y = client.compute.to_inputs(client.x), client.y
    test_x, test_y = client.compute.to_inputs(test.x), test.y

    def work() -> None:
        model.train()
        for index in torch.split(torch.randperm(len(y)), BATCH):
            optimizer.zero_grad()
            with client.compute.autocast():
                loss = F.cross_entropy(model(x[index]).float(), y[index])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        model.eval()
        with torch.inference_mode(), client.compute.autocast():
            for images, labels in zip(
                torch.split(test_x, BATCH), torch.split(test_y, BATCH), strict=True
            ):
                (model(images).argmax(1) == labels).sum().item()

    return work


def compare(chosen: argparse.Namespace) -> None:
    """Print the ratios, and the milliseconds of each step of a round."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        write_images(Path(name) / "data", 1, SAMPLES, SHAPE)
        for model in chosen.models.split(","):
            client = client_of(model, chosen.precision, Path(name))
            loop, spent = plain(client, model), []
            for round in range(1, chosen.rounds + 1):
                work = parts_of(client, round) | {"loop": loop}
                spent.append({k: seconds(each, time.process_time) for k, each in work.items()})
            found = sorted((sum(s.values()) - s["loop"]) / s["loop"] for s in spent[2:])
            parts = ", ".join(f"{k} {1000 * median(s[k] for s in spent[2:]):.1f}" for k in spent[0])
            print(f"{model}, {chosen.precision}: {median(found):.3f} ({found[0]:.3f} to "
                  f"{found[-1]:.3f}), goal {GOAL}; ms: {parts}", flush=True)  # fmt: skip


def main() -> None:
    """Print the ratios, measured in a process with the memory settings of Ray's workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="cnn2,cnn3,cnn4,cofed-cnn1")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        compare(chosen)
        return
    again_as_a_worker("benchmarks.client_round")


if __name__ == "__main__":
    main()
