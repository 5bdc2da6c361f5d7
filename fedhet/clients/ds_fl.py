"""Client of DS-FL: FedMD's round with probabilities on unlabeled public data."""

from fedhet.clients.fedmd import FedMdClient


class DsFlClient(FedMdClient):
    """Trains on the consensus ("Distillation") and on its data ("Update"), and predicts."""
