"""Size of Felo's class knowledge in a client's reply, relative to the size of the weights.

    python -m benchmarks.knowledge_share

Bound: 0.05 % for ResNet-18 with ten classes and its default 512 features (Section 4.3 of the paper:
"smaller than 0.05% of the overheads in FedAvg"). FedAvg's messages contain only the weights.
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
"""Models with their feature width D: models of the paper's pools, and the demo's smallest model."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of the class knowledge (features, logits and counts) and of the weights in a reply."""

    knowledge: int
    weights: int

    @property
    def share(self) -> float:
        """Bytes of the class knowledge, as a fraction of the bytes of the weights."""
        return self.knowledge / self.weights


def reply_sizes(model: str, shape: tuple[int, ...], classes: int, width: int) -> Sizes:
    """Return the sizes of a reply that contains all classes, with `width` features."""
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
    """Return the size of a message with the given tensors in bytes, including its manifest."""
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
