"""Client of FedGH: local training from the global head, and class means of the features."""

from __future__ import annotations

from torch import nn

from fedhet.base.arrays import Arrays
from fedhet.clients.fedproto import FedProtoClient
from fedhet.methods.fedgh import FedGhSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.knowledge import Knowledge


class FedGhClient(FedProtoClient):
    """Starts from the global head, trains the full model, and sends class means of the features.

    The class means are computed after training, as in FedProto. The loss is cross-entropy alone.
    """

    settings: FedGhSettings  # type: ignore[assignment]

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the model after training, and the model with the global head if it was sent."""
        models: dict[str, nn.Module] = {"private": self.private}
        if head := knowledge.group("weights"):
            joined = self._joined(self.build_model(self.settings.feature_dim), head)
            models["global"] = self.samples.within_space(self.compute.place(joined))
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train from the global head, and return the local averaged representations."""
        self._joined(self.network, knowledge.group("weights"))
        self._learn(round, None)
        means = self._means()
        return Knowledge({"classes": means.classes, "features": means.features})

    def _joined(self, model: HetModel, head: Arrays) -> HetModel:
        """Load the head into `model`, and the private model's extractor."""
        return load_weights(model, {**to_arrays(self.network), **head})
