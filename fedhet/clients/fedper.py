"""FedPer, client half: FedAvg's; the head, its personalization layer, stays (Algorithm 1).

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav Choudhary, Federated
Learning with Personalization Layers, arXiv:1912.00818.
"""

from __future__ import annotations

from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedper import FedPerSettings


class FedPerClient(FedAvgClient):
    """Trains the whole model, and sends the base layers (the extractor)."""

    settings: FedPerSettings
