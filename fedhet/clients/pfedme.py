"""pFedMe, client half: Algorithm 1, lines 3 to 9."""

from __future__ import annotations

from fedhet.algorithms.local_models import LocalModel, MoreauModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.pfedme import PFedMeSettings
from fedhet.wire.knowledge import Knowledge


class PFedMeClient(FedAvgClient):
    """Trains a personal model near a local copy of the server's, and sends the copy.

    Each batch has K steps on the personal model (Eq. 7), and then one of the copy (Eq. 8).
    """

    settings: PFedMeSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the personal model with its local copy."""
        return MoreauModel(self.network, self.anchor(), self.settings.strength, self.settings.rate)

    def steps(self) -> int:
        """Return K."""
        return self.settings.steps
