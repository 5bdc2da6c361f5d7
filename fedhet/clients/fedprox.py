"""FedProx client: Algorithm 2, line 6."""

from __future__ import annotations

from fedhet.algorithms.local_models import LocalModel, ProximalModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedprox import FedProxSettings
from fedhet.wire.knowledge import Knowledge


class FedProxClient(FedAvgClient):
    """Client that minimizes F_k(w) + mu / 2 ||w - w^t||^2 (Eq. 2) for a fixed number of epochs."""

    settings: FedProxSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the model, with the proximal term added to its loss."""
        return ProximalModel(self.network, self.anchor(), self.settings.mu)
