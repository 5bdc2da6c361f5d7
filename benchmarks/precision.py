"""CPU time of a round in bfloat16, relative to float32, by method and model.

    python -m benchmarks.precision [--methods felo,local] [--models mlp,cnn2] [--pairs 3]
        [--shape 28] [--samples 640] [--batch 64]

Four clients train for one epoch on synthetic images in this process, with one thread, and are
evaluated. The time includes the server's part of a round. Runs in the two precisions alternate, and
the benchmark compares the median of all rounds but the first. CPU time hardly depends on other load
on the machine. FedType also trains its default proxy.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import median

import numpy as np

from benchmarks.timing import ProcessTimes, again_as_a_worker, show, write_images
from fedhet.config.resolve import resolve
from fedhet.data.store import RunData
from fedhet.engines.simulate import run_inline
from fedhet.methods.registry import find_method
from fedhet.server.app import components

CLIENTS, ROUNDS = 4, 4
METHODS = "felo,fedavg,fedtype,fedgems,local"
MODELS = "cnn2,cnn3,resnet10,mlp"


def round_seconds(
    method: str, model: str, precision: str, batch: int, images: str, public: str
) -> float:
    """Return the median CPU seconds of a round, excluding the first round."""
    times = ProcessTimes()
    needed = {"data.public-dataset": public} if find_method(method).spec.needs_public else {}
    config = resolve(
        {
            "method": method, "clients": CLIENTS, "rounds": ROUNDS,
            "data.dataset": images, **needed,
            "models.pool": model, "training.local-epochs": 1, "training.batch-size": batch,
            "engine.backend": "inline", "engine.precision": precision,
        }
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run, data = Path(folder) / "run", RunData.for_run(config.run)
        parts = components(config, run, workers=1, watchers=[times], data=data)
        run_inline(config, data, Path(folder) / "state", parts, print)
    return float(median(np.diff(times.at[1:])))


def compare(chosen: argparse.Namespace) -> None:
    """Print the ratios of every method and model."""
    logging.getLogger("flwr").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        made = (chosen.samples, (1, chosen.shape, chosen.shape))
        own = write_images(Path(name) / "own", CLIENTS, *made)
        public = write_images(Path(name) / "public", 1, *made)
        for method, model in product(chosen.methods.split(","), chosen.models.split(",")):
            pairs = [
                [round_seconds(method, model, precision, chosen.batch, own, public)
                 for precision in ("bfloat16", "float32")]
                for _ in range(chosen.pairs)
            ]  # fmt: skip
            both = " s, ".join(f"{median(each):.2f}" for each in zip(*pairs, strict=True))
            found = sorted(ours / theirs for ours, theirs in pairs)
            show(f"{method}, {model}: {both} s", found)
            sys.stdout.flush()


def main() -> None:
    """Print the ratios, measured in a process with the memory settings of Ray's workers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default=METHODS)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--shape", type=int, default=28, help="the side of an image")
    parser.add_argument("--samples", type=int, default=640, help="training images of a client")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.here:
        compare(chosen)
        return
    again_as_a_worker("benchmarks.precision")


if __name__ == "__main__":
    main()
