"""FedPer client: FedAvg with a local head, the personalization layer (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedPerClient(FedAvgClient):
    """Client that trains the full model and sends the base layers, i.e. the extractor."""
