"""FedGH client: local training with the global head, and class means of the features."""

from __future__ import annotations

from torch import nn

from fedhet.base.arrays import Arrays
from fedhet.clients.fedproto import FedProtoClient
from fedhet.methods.fedgh import FedGhSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.knowledge import Knowledge


class FedGhClient(FedProtoClient):
    """Client that starts from the global head, trains its model, and sends class means of features.

    The class means are computed after training, as in FedProto. The only loss is cross-entropy.
    """

    settings: FedGhSettings  # type: ignore[assignment]

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the trained model and, if the server sent a global head, a copy with this head."""
        models: dict[str, nn.Module] = {"private": self.private}
        if head := knowledge.group("weights"):
            joined = self._joined(self.build_model(self.settings.feature_dim), head)
            models["global"] = self.samples.within_space(self.compute.place(joined))
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train, starting from the global head, and return the class means of the features."""
        self._joined(self.network, knowledge.group("weights"))
        self._learn(round, None)
        means = self._means()
        return Knowledge({"classes": means.classes, "features": means.features})

    def _joined(self, model: HetModel, head: Arrays) -> HetModel:
        """Load the head and the private model's extractor into `model`."""
        return load_weights(model, {**to_arrays(self.network), **head})
