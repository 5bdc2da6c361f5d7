"""FedSA-LoRA client: FedAvg of the factors A; the factors B and the head are never sent."""

from fedhet.clients.fedavg import FedAvgClient


class FedSaClient(FedAvgClient):
    """Client that trains adapters and head, and sends the factors A."""
