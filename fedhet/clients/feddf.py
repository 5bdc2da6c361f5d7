"""Client of FedDF: local training from the fused model of the client's architecture."""

from fedhet.clients.fedavg import FedAvgClient


class FedDfClient(FedAvgClient):
    """Trains as in FedAvg, starting from a new model in the first round."""
