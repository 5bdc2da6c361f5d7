"""Client of FedProx: Algorithm 2, line 6."""

from __future__ import annotations

from fedhet.algorithms.local_models import LocalModel, ProximalModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedprox import FedProxSettings
from fedhet.wire.knowledge import Knowledge


class FedProxClient(FedAvgClient):
    """Minimizes F_k(w) + mu / 2 ||w - w^t||^2 (Eq. 2) for a fixed number of epochs."""

    settings: FedProxSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the local training with the proximal term."""
        return ProximalModel(self.network, self.anchor(), self.settings.mu)
