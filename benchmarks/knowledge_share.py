"""Felo's class knowledge next to its weights: bytes of a client's reply, as they are sent.

    python -m benchmarks.knowledge_share

Bound: 0.05 % for ResNet-18, ten classes and its own 512 features (Section 4.3 of the paper:
"smaller than 0.05% of the overheads in FedAvg", whose messages are the weights alone).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from flwr.common import ndarrays_to_parameters

from fedhet.algorithms.classwise import ClassMeans
from fedhet.base.arrays import Array, grouped
from fedhet.models import shapes
from fedhet.wire.knowledge import Envelope, Knowledge, encode, payload_bytes

BOUND = 0.0005
SETUPS = (("resnet18", 512), ("resnet10", 512), ("resnet26", 512), ("resnet50", 512), ("cnn2", 64))
"""Models with the width D of the features: of the paper's pools, and the smallest of the demo's."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of one reply: the features, logits and counts of all classes, and the weights."""

    knowledge: int
    weights: int

    @property
    def share(self) -> float:
        """Return the bytes of the class knowledge over those of the weights."""
        return self.knowledge / self.weights


def reply_sizes(model: str, shape: tuple[int, ...], classes: int, width: int) -> Sizes:
    """Return the bytes of a reply that has all classes, with features of `width`."""
    means = ClassMeans(
        np.arange(classes),
        np.zeros((classes, width), np.float32),
        np.zeros((classes, classes), np.float32),
        np.ones(classes, np.int64),
    )
    weights = {
        name: np.zeros(size, dtype)
        for name, (size, dtype) in shapes(model, shape, classes, width).items()
    }
    return Sizes(_message_bytes(dict(vars(means))), _message_bytes(grouped("weights", weights)))


def _message_bytes(tensors: dict[str, Array]) -> int:
    """Return the bytes of a message with these tensors, its manifest included."""
    arrays = encode(Envelope("run", "felo", 1, "client-0"), Knowledge(tensors))
    return payload_bytes(ndarrays_to_parameters(arrays))


def main() -> None:
    """Print the sizes for each model."""
    for model, width in SETUPS:
        found = reply_sizes(model, (3, 32, 32), 10, width)
        print(
            f"{model}, D = {width}: class knowledge {found.knowledge / 1e3:.1f} kB, weights "
            f"{found.weights / 1e6:.2f} MB: {100 * found.share:.3f} %"
        )
    share = reply_sizes("resnet18", (3, 32, 32), 10, 512).share
    verdict = "within" if share < BOUND else "beyond"
    print(f"resnet18: {100 * share:.4f} %, {verdict} the bound of {100 * BOUND:g} %")


if __name__ == "__main__":
    main()
