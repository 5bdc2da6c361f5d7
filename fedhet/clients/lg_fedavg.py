"""LG-FedAvg, client half: FedAvg's; the extractor, a local representation, stays (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class LgFedAvgClient(FedAvgClient):
    """Trains extractor and head together, and sends the head."""
