"""Time of an epoch with FedType's conformal step, relative to symmetric distillation.

    python -m benchmarks.conformal_step [--samples 280] [--pairs 5] [--device cpu]

Bound: the full step (calibration of both models, prediction sets, and eta) increases the time of an
epoch by at most a factor of 1.05. The private model is a ResNet-18 and the proxy a ShuffleNet-V2,
for images of 32 x 32 pixels in batches of 16 and 128. Training and calibration data have the
method's proportion of 7 to 1.

The benchmark measures two ratios. The first is the time of an epoch relative to an epoch of
symmetric distillation, where the two kinds alternate. On a busy machine, the spread of this ratio
exceeds the bound. The second is the time of an epoch relative to the same epoch without the time of
the step. On a CPU, both ratios use the CPU time of one thread. The benchmark also prints the
milliseconds to compute both models' prediction sets and eta, for a batch of 1024 samples with 100
classes.

The last lines are the rows of Table 9 in the paper: the seconds of an epoch of each model, in the
alternating order of the authors' code, for batches of 16. The private model learns with FedType's
loss or with symmetric distillation, and the proxy with FedType's loss or with cross-entropy alone.
The ratios in parentheses are the extremes over the paper's four datasets.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.timing import Clock, open_client, ratios, seconds, show, write_images
from fedhet.algorithms.conformal import Raps, calibrate, consensus, prediction_sets
from fedhet.algorithms.local_models import LocalModel
from fedhet.clients.fedtype import FedTypeClient, Reciprocity
from fedhet.config.resolve import resolve
from fedhet.data.dataset import Split

TABLE_9 = {"private model": ("symmetric distillation", 1.07, 1.16),
           "proxy": ("cross-entropy alone", 1.16, 1.46)}  # fmt: skip
"""Row with which Table 9 compares each model, and the extremes of its ratios in the paper."""


def fedtype_client(
    folder: Path, batch: int, backward: str, device: str, order: str = "joint"
) -> FedTypeClient:
    """Return a FedType client with the images in `folder`."""
    config = resolve(
        {
            "method": "fedtype",
            "clients": 1,
            "data.dataset": f"npz:{folder}",
            "models.pool": "resnet18",
            "training.batch-size": batch,
            "training.local-epochs": 1,
            "engine.device": device,
            "fedtype.proxy": "shufflenet-v2",
            "fedtype.backward": backward,
            "fedtype.order": order,
        }
    )
    client = open_client(config, folder / "state")
    assert isinstance(client, FedTypeClient)
    return client


class TimedReciprocity(Reciprocity):
    """Training that sums the time of the conformal step: calibration and the private loss."""

    clock: Clock
    spent = 0.0

    def calibrate(self) -> None:
        """Calibrate both models, and add the time to `spent`."""
        self.spent += seconds(super().calibrate, self.clock)

    def backward_loss(self, x: Tensor, private: Tensor, proxy: Tensor) -> Tensor:
        """Return the loss, and add its time, without the backward pass, to `spent`."""
        started = self.clock()
        loss = super().backward_loss(x, private, proxy)
        self.spent += self.clock() - started
        return loss


def with_over_without(client: FedTypeClient, epochs: int, clock: Clock) -> list[float]:
    """Return the sorted ratios of epoch times with and without the conformal step."""
    model = client.models["proxy"]
    learning = TimedReciprocity(client, LocalModel(model, model.state_dict()), 1)
    learning.clock = clock
    found = []
    for epoch in range(epochs + 1):
        learning.spent = 0.0
        whole = seconds(lambda: learning.run_epoch(0), clock)
        if epoch:  # the first epoch warms up
            found.append(whole / (whole - learning.spent))
    return sorted(found)


def one_epoch(client: FedTypeClient) -> Callable[[], object]:
    """Return a function that trains a client for one epoch of Algorithm 1."""
    model = client.models["proxy"]
    learning = Reciprocity(client, LocalModel(model, model.state_dict()), 1)
    return lambda: learning.run_epoch(0)


def epochs_of_each_model(
    client: FedTypeClient, symmetric: FedTypeClient
) -> dict[str, tuple[Callable[[], object], Callable[[], object]]]:
    """Return functions that train a model for an epoch: with FedType, and as in `TABLE_9`."""

    def epoch(learning: Reciprocity, loss_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        client, order = learning.client, learning.order
        samples = Split(client.x, client.y)
        client.train_own(loss_of, learning.private, learning.optimizing, order, samples, epochs=1)

    def private(learning: Reciprocity) -> None:
        if learning.settings.backward == "conformal":
            learning.calibrate()
        epoch(learning, learning.private_loss)

    ours, theirs = (
        Reciprocity(each, LocalModel(model, model.state_dict()), 1)
        for each in (client, symmetric)
        for model in [each.models["proxy"]]
    )
    return {
        "private model": (lambda: private(ours), lambda: private(theirs)),
        "proxy": (
            lambda: epoch(ours, ours.proxy_loss),
            lambda: epoch(ours, lambda x, y: ours.supervised(ours.proxy.logits(x), y)),
        ),
    }


def measure_table_9(samples: int, pairs: int, device: str) -> None:
    """Print the rows of Table 9: seconds of an epoch of batches of 16, and ratios of two rows."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "images"
        write_images(folder, 1, samples, (3, 32, 32))
        ours, theirs = (
            fedtype_client(folder, 16, backward, device, order="alternating")
            for backward in ("conformal", "symmetric")
        )
        for model, both in epochs_of_each_model(ours, theirs).items():
            reference, low, high = TABLE_9[model]
            times = [[seconds(work, clock) for work in both] for _ in range(pairs + 1)]
            rows = zip(*times[1:], strict=True)  # the first epochs warm up
            for row, each_time in zip(("FedType", reference), rows, strict=True):
                show(f"{model}, {row}, seconds", sorted(each_time))
            factors = sorted(fedtype / other for fedtype, other in times[1:])
            show(f"{model}, ratio (paper {low} to {high})", factors)


def sets_of_a_batch(device: str) -> float:
    """Return the median milliseconds to compute both prediction sets and eta from logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(2, 1024, 100, generator=generator).to(device)
    labels = torch.randint(0, 100, (1024,), generator=generator).to(device)
    u = torch.rand(1024, generator=generator).to(device)
    model = calibrate(logits[0], labels, u, theta=0.1, raps=Raps())

    def work() -> None:
        sets = [prediction_sets(part, model, u, penalty=0.5, k_reg=5) for part in logits]
        consensus(*sets).sum().item()

    work()
    return 1000 * statistics.median(seconds(work) for _ in range(20))


def measure(samples: int, pairs: int, device: str, batches: Sequence[int] = (16, 128)) -> None:
    """Print the ratios and the milliseconds.

    The time of the step alone is measured only on a CPU, because an accelerator works
    asynchronously.
    """
    print(f"sets and eta, 1024 x 100: {sets_of_a_batch(device):.1f} ms a batch")
    clock = time.process_time if device == "cpu" else time.perf_counter
    for batch in batches:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "images"
            write_images(folder, 1, samples, (3, 32, 32))
            ours = fedtype_client(folder, batch, "conformal", device)
            theirs = fedtype_client(folder, batch, "symmetric", device)
            values = ratios(one_epoch(ours), one_epoch(theirs), pairs, clock)
            show(f"conformal / symmetric epoch, batch {batch}", values)
            if device == "cpu":
                shares = with_over_without(ours, pairs, clock)
                show(f"epoch with / without the step, batch {batch}", shares, 1.05)


def main() -> None:
    """Parse the arguments, and print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=280)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    measure(chosen.samples, chosen.pairs, chosen.device)
    measure_table_9(chosen.samples, chosen.pairs, chosen.device)


if __name__ == "__main__":
    main()
