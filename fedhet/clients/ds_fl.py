"""DS-FL client: FedMD with probabilities on unlabeled public data."""

from fedhet.clients.fedmd import FedMdClient


class DsFlClient(FedMdClient):
    """Client that trains on the consensus ("Distillation") and then on its data ("Update")."""
