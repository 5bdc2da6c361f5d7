"""Client of FedPer: FedAvg with a local head, the personalization layer (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedPerClient(FedAvgClient):
    """Trains the full model, and sends the base layers, i.e. the extractor."""
