"""FedRep client: Algorithm 1, client updates of the head and of the representation."""

from __future__ import annotations

from fedhet.algorithms.local_models import LocalModel, PartModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.fedrep import FedRepSettings
from fedhet.models import part_names


class FedRepClient(FedAvgClient):
    """Client that trains the head with a fixed extractor, then the extractor with a fixed head."""

    settings: FedRepSettings

    def _learn(
        self, round: int, local: LocalModel, use: str = "batches", *, epochs: int = 0
    ) -> None:
        """Train both parts, each with a new optimizer.

        - h_i <- GRD(f_i(h_i, phi^t), h_i, alpha), for `head-epochs` epochs;
        - phi_i <- GRD(f_i(h_i, phi_i), phi_i, alpha), for `training.local-epochs` epochs.
        """
        head = PartModel(self.network, local.anchor, part_names(self.network, "head"))
        with head.frozen():
            super()._learn(round, head, "head", epochs=self.settings.head_epochs)
        extractor = PartModel(self.network, local.anchor, part_names(self.network, "extractor"))
        with extractor.frozen():
            super()._learn(round, extractor, use, epochs=epochs)
