"""DS-FL, client half: FedMD's round, with probabilities on unlabeled public data."""

from fedhet.clients.fedmd import FedMdClient


class DsFlClient(FedMdClient):
    """Distils the sharpened mean ("Distillation"), trains ("Update"), and predicts."""
