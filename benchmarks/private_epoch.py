"""Time of an epoch with DP-SGD, relative to an epoch without privacy, by model.

    python -m benchmarks.private_epoch [--models mlp,cnn2-gn] [--repeats 7]

The epochs use 512 random images [3, 32, 32], batches of 64, and one thread. Both kinds of epoch
alternate, and the table contains the median and the range of the ratios.
"""

from __future__ import annotations

import argparse
from functools import partial
from statistics import median

import torch

from benchmarks.timing import seconds
from fedhet import models
from fedhet.learning.devices import CPU
from fedhet.learning.training import CrossEntropy, Optimization, optimization_for, train_epochs
from fedhet.privacy.sgd import dp_sgd
from fedhet.settings.run import TrainingSettings

SAMPLES, BATCH, SHAPE, CLASSES = 512, 64, (3, 32, 32), 10
MODELS = "mlp,cnn2-gn,cnn3-gn,cnn4-gn,lenet5,gems-resnet11-gn,resnet10-gn"


def main() -> None:
    """Print a row for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, *SHAPE, generator=rng)
    y = torch.randint(CLASSES, (SAMPLES,), generator=rng)
    print("| model | plain, ms | private over plain | range |\n|---|---|---|---|")
    for name in given.models.split(","):
        model = models.build(name, SHAPE, CLASSES, seed=0).train()
        plain = optimization_for(model.parameters(), TrainingSettings(), CPU)

        def epoch(chosen: Optimization) -> None:
            train_epochs(
                x, y, CrossEntropy(model), chosen,  # noqa: B023
                epochs=1, batch_size=BATCH, generator=rng, compute=CPU,
            )  # fmt: skip

        pairs = []
        for _ in range(given.repeats):
            without = seconds(partial(epoch, plain))
            with dp_sgd(plain, [model], 1.0, 1.0, BATCH) as private:
                pairs.append((without, seconds(partial(epoch, private))))
        ratios = sorted(after / before for before, after in pairs[1:])
        first = 1000 * median(before for before, _ in pairs[1:])
        spread = f"{ratios[0]:.1f} to {ratios[-1]:.1f}"
        print(f"| `{name}` | {first:.0f} | {median(ratios):.1f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
