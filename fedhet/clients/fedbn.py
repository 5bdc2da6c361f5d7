"""FedBN, client half: FedAvg's; batch norms stay at the client (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedBnClient(FedAvgClient):
    """Trains the whole model, and sends all tensors but those of batch norms."""
