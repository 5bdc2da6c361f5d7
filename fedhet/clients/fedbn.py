"""FedBN client: FedAvg with local batch norms (Algorithm 1)."""

from fedhet.clients.fedavg import FedAvgClient


class FedBnClient(FedAvgClient):
    """Client that trains the full model and sends all tensors except batch-norm tensors."""
