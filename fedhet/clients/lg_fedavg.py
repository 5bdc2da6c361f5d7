"""LG-FedAvg client: FedAvg of the head, with a local extractor (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class LgFedAvgClient(FedAvgClient):
    """Client that trains extractor and head together and sends the head."""
