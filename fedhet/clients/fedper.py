"""FedPer, client half: FedAvg's; the head, its personalization layer, stays (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedPerClient(FedAvgClient):
    """Trains the whole model, and sends the base layers (the extractor)."""
