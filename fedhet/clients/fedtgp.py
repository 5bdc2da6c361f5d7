"""FedTGP client (Algorithm 1, lines 5 to 7): like FedProto, but sends no numbers of samples."""

from __future__ import annotations

from fedhet.clients.fedproto import FedProtoClient
from fedhet.methods.fedtgp import FedTgpSettings
from fedhet.wire.knowledge import Knowledge


class FedTgpClient(FedProtoClient):
    """Client that trains toward global prototypes (Eq. 11) and sends local prototypes (Eq. 2)."""

    settings: FedTgpSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train as in FedProto, and return the prototypes without numbers of samples."""
        parts = super().train(round, knowledge).tensors
        return Knowledge({name: parts[name] for name in ("classes", "features")})
