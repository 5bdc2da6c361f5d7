"""Client of the baseline in which each client trains alone."""

from __future__ import annotations

from fedhet.clients.base import HetClient
from fedhet.wire.knowledge import Knowledge


class LocalClient(HetClient):
    """Trains with cross-entropy on its own data, for the same number of epochs as a method."""

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return an empty reply."""
        self.fit_private(self.generator(round, "batches"))
        return Knowledge()
