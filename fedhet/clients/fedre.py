"""FedRE client: local training with the global head, and an entangled representation."""

from __future__ import annotations

import torch

from fedhet.algorithms.entanglement import entangle
from fedhet.clients.fedgh import FedGhClient
from fedhet.methods.fedre import FedReSettings
from fedhet.wire.knowledge import Knowledge


class FedReClient(FedGhClient):
    """Client that trains as in FedGH, and sends a random mixture of its class means."""

    settings: FedReSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train, starting from the global head, and return the entangled representation.

        The weights of the mixture are drawn anew in each round. The reply is empty if no class has
        enough samples to be sent.
        """
        means = super().train(round, knowledge).tensors
        classes = means["classes"]
        if not len(classes):
            return Knowledge()
        # Draw from (0, 1], because a sum of zeros has no normalized weights.
        draws = 1 - torch.rand(len(classes), generator=self.generator(round, "entanglement"))
        mixed = entangle(means["features"], classes, draws.numpy(), self.info.classes)
        return Knowledge(dict(zip(("representation", "labels"), mixed, strict=True)))
