"""FedSA-LoRA client: FedAvg without the factors B and the head, which are never sent."""

from fedhet.clients.fedavg import FedAvgClient


class FedSaClient(FedAvgClient):
    """Client that trains adapters and head, and sends the factors A."""
