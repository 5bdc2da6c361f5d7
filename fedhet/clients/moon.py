"""MOON client: Algorithm 1, PartyLocalTraining."""

from __future__ import annotations

import copy

from fedhet.algorithms.local_models import ContrastiveModel, LocalModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.moon import MoonSettings
from fedhet.models import HetModel
from fedhet.wire.knowledge import Knowledge


class MoonClient(FedAvgClient):
    """Client that minimizes the loss plus mu times the contrastive loss (Eq. 5).

    The previous model is the private model, as trained in the client's last round.
    """

    settings: MoonSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, starting from the averaged weights."""
        # A client in its first round has no previous model, and trains as in FedAvg.
        is_first = self.state.participations == 0
        self._previous: HetModel | None = None if is_first else copy.deepcopy(self.network)
        return super().train(round, knowledge)

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the model, with the contrastive term added to its loss."""
        settings, previous = self.settings, self._previous
        if previous is None or not settings.mu:
            return super().local_model(round, knowledge)
        terms = settings.mu, settings.temperature
        return ContrastiveModel(self.network, self.anchor(), previous, *terms)
