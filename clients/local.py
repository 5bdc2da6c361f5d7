"""Each client trains alone: the yardstick of every table."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from clients.base import HetClient
from fedhet.knowledge import Knowledge


class LocalClient(HetClient):
    """Cross-entropy on the client's own data, the same number of epochs as in a method."""

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs; tell the server nothing."""
        model = self.models["private"].train()

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(model(x).float(), y)

        optimizing, generator = (
            self.optimization(model.parameters()),
            self.generator(round, "batches"),
        )
        for _ in range(self.run.local_epochs):
            self.train_epoch(loss_of, optimizing, generator)
        return Knowledge()
