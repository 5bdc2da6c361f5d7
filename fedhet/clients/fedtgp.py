"""FedTGP, client half: FedProto's, without the numbers of samples (Algorithm 1, lines 5 to 7)."""

from __future__ import annotations

from fedhet.clients.fedproto import FedProtoClient
from fedhet.methods.fedtgp import FedTgpSettings
from fedhet.wire.knowledge import Knowledge


class FedTgpClient(FedProtoClient):
    """Draws its features to the trained prototypes (Eq. 11), and replies with its own (Eq. 2)."""

    settings: FedTgpSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train as in FedProto; return the prototypes alone."""
        parts = super().train(round, knowledge).tensors
        return Knowledge({name: parts[name] for name in ("classes", "features")})
