"""Client of LG-FedAvg: FedAvg of the head, with a local extractor (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class LgFedAvgClient(FedAvgClient):
    """Trains extractor and head together, and sends the head."""
