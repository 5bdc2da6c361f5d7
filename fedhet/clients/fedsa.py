"""FedSA-LoRA, client side: FedAvg's; the factors B and the head are never sent."""

from fedhet.clients.fedavg import FedAvgClient


class FedSaClient(FedAvgClient):
    """Trains adapters and head, and sends the factors A."""
