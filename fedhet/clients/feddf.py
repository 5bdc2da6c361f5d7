"""FedDF client: local training that starts from the fused model of the client's architecture."""

from fedhet.clients.fedavg import FedAvgClient


class FedDfClient(FedAvgClient):
    """Client that trains as in FedAvg, but starts from its own new model in the first round."""
