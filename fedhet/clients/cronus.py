"""Cronus, client half: trains on its own data and the public soft labels together.

Hongyan Chang, Virat Shejwalkar, Reza Shokri and Amir Houmansadr, Cronus: Robust and Heterogeneous
Collaborative Learning with Black-Box Knowledge Transfer, arXiv:1912.11279.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedhet.clients.fedmd import Consensus, FedMdClient
from fedhet.methods.cronus import CronusSettings
from fedhet.training import Optimization, batches, cross_entropy_of


class CronusClient(FedMdClient):
    """Adds the loss on a batch of public samples to that on each batch of its own.

    In its first participation there are no soft labels: the paper's initialisation phase.
    """

    settings: CronusSettings

    def learn(self, round: int, consensus: Consensus | None, optimizing: Optimization) -> None:
        """Train for the local epochs on both, or on its own data until there is a consensus."""
        if consensus is None:
            self._revisit(round, optimizing)
            return
        own_loss = cross_entropy_of(self.private)
        public = self._public_batches(consensus, self.generator(round, "public"))

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            rows = next(public)
            images = self.compute.images(consensus.x[rows])
            return own_loss(x, y) + self.consensus_loss(consensus, images, rows)

        self.train_own(loss_of, self.private, optimizing, self.generator(round, "batches"))

    def _public_batches(self, consensus: Consensus, generator: torch.Generator) -> Iterator[Tensor]:
        """Yield batches endlessly, of a size at which the passes end with the local epochs."""
        training, samples = self.training, len(consensus.scores)
        steps = training.local_epochs * math.ceil(len(self.y) / training.batch_size)
        size = math.ceil(self.settings.digest_epochs * samples / steps)
        while True:
            yield from batches(samples, size, generator, self.compute.device)
