"""Time of an evaluation with automatic batch sizes, relative to fixed batch sizes.

    python -m benchmarks.evaluation [--pairs 5] [--device cpu]

The automatic batch size depends on the size of the model's activations. The benchmark evaluates
1,024 synthetic images with one PyTorch thread, like a worker. Bound: 1.1 relative to batches of
128.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

from benchmarks.timing import ratios, show
from fedhet.learning.devices import Compute, compute_for, evaluation_batch
from fedhet.learning.training import evaluate
from fedhet.models import build
from fedhet.settings.engine import ComputeSettings

MODELS = {
    "mlp": (1, 28, 28),
    "cnn2": (1, 28, 28),
    "cnn3": (3, 32, 32),
    "resnet10": (1, 28, 28),
}
SAMPLES = 1024
FIXED = (128, 1024)


def compare(name: str, shape: tuple[int, ...], compute: Compute, pairs: int) -> None:
    """Print the ratios of one model."""
    model = build(name, shape, 10, seed=0)
    compute.place(model)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (SAMPLES, *shape), dtype=torch.uint8, generator=generator)
    y = torch.randint(0, 10, (SAMPLES,), generator=generator)
    chosen = evaluation_batch(model.eval(), x, compute)
    for batch in FIXED:
        fixed = replace(compute, eval_batch=batch)
        found = ratios(
            lambda: evaluate(model, x, y, compute),
            lambda fixed=fixed: evaluate(model, x, y, fixed),  # type: ignore[misc]
            pairs,
        )
        show(f"{name}, {chosen} / {batch}", found, 1.1 if batch == FIXED[0] else None)


def main() -> None:
    """Print the ratios of all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    compute = compute_for(ComputeSettings(device=asked.device))
    for name, shape in MODELS.items():
        compare(name, shape, compute, asked.pairs)


if __name__ == "__main__":
    main()
