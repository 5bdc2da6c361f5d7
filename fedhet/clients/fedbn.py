"""Client of FedBN: FedAvg with local batch norms (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedBnClient(FedAvgClient):
    """Trains the full model, and sends all tensors except the tensors of batch norms."""
