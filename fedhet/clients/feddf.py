"""FedDF, client half: local training from the fused model of the client's architecture."""

from fedhet.clients.fedavg import FedAvgClient


class FedDfClient(FedAvgClient):
    """Trains as in FedAvg; in the first round, when the server has no model, from a new one."""
