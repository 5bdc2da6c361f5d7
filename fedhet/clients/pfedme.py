"""pFedMe client: Algorithm 1, lines 3 to 9."""

from __future__ import annotations

from fedhet.algorithms.local_models import LocalModel, MoreauModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.pfedme import PFedMeSettings
from fedhet.wire.knowledge import Knowledge


class PFedMeClient(FedAvgClient):
    """Client that trains a personal model close to a copy of the server's model and sends the copy.

    For each batch, it takes K steps on the personal model (Eq. 7) and one step on the copy (Eq. 8).
    """

    settings: PFedMeSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the personal model. Steps on this model also update the local copy."""
        return MoreauModel(self.network, self.anchor(), self.settings.strength, self.settings.rate)

    def steps(self) -> int:
        """Return the number K of steps per batch on the personal model."""
        return self.settings.steps
