"""FedSA-LoRA client: FedAvg of the factors A; the factors B and the head are never sent."""

from fedhet.clients.fedavg import FedAvgClient


class FedSaClient(FedAvgClient):
    """Client that trains the adapters and the head, and sends only the factors A."""
