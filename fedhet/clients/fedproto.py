"""FedProto client: Algorithm 1, LocalUpdate."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms import PrototypeDistance
from fedhet.algorithms.classwise import (
    ClassMeans,
    ClassSums,
    Teacher,
    class_feature_loss,
    class_mean_distance,
)
from fedhet.algorithms.feature_models import NearestPrototype
from fedhet.clients.base import HetClient
from fedhet.learning.devices import evaluation_batch
from fedhet.learning.training import evaluating
from fedhet.methods.fedproto import PrototypeSettings
from fedhet.models import HetModel
from fedhet.wire.knowledge import Knowledge


class FedProtoClient(HetClient):
    """Client that trains its features toward the global prototypes and sends local prototypes."""

    settings: PrototypeSettings

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model and, if prototypes were sent, a nearest-prototype classifier."""
        models: dict[str, nn.Module] = {"private": self.private}
        if teacher := self.read_prototypes(knowledge):
            nearest = NearestPrototype(self.network.extractor, teacher.features, teacher.known)
            models["prototype"] = self.samples.within_space(nearest)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return the prototypes of the trained model (Eq. 3)."""
        teacher = self.read_prototypes(knowledge)
        self._learn(round, teacher)
        means = self._means()
        parts = {"classes": means.classes, "features": means.features, "counts": means.counts}
        return Knowledge(parts)

    def read_prototypes(self, knowledge: Knowledge) -> Teacher | None:
        """Return the global prototypes as a teacher, or None if the server sent none."""
        parts = knowledge.tensors
        if "classes" not in parts:
            return None
        device = self.compute.device
        return Teacher.from_tensors(
            parts["classes"], parts["features"], None, self.info.classes, device
        )

    def _learn(self, round: int, teacher: Teacher | None) -> None:
        """Train on cross-entropy plus, if prototypes exist, the distance from them (Eq. 7)."""
        model = self.network.train()
        pull: tuple[float, PrototypeDistance] = (0.0, "mse")
        if teacher is not None:
            pull = self.settings.pull
        objective = PrototypeObjective(model, self.own_classes, teacher, *pull)
        optimizing = self.optimization(model.parameters())
        self.train_own(objective, self.private, optimizing, self.generator(round, "batches"))

    @torch.no_grad()
    def _means(self) -> ClassMeans:
        """Return the class means over the client's samples, in evaluation mode."""
        model = self.network
        sums = ClassSums(self.info.classes, self.settings.feature_dim, self.compute.device)
        with evaluating(model), self.compute.autocast():
            batch = evaluation_batch(model, self.x, self.compute)
            for start in range(0, len(self.y), batch):
                part = slice(start, start + batch)
                x = self.compute.to_inputs(self.x[part])
                sums.add(*model.features_and_logits(x), self.y[part])
        return self.privacy.class_means(sums, model)


class PrototypeObjective(nn.Module):
    """Module that computes cross-entropy plus a distance from the prototypes.

    The distance "mse" is the distance in the code of FedProto's authors, where each sample replaces
    its class mean in FedProto's Eq. 7. The distance "euclidean" is the distance in FedTGP's Eq. 11.
    """

    def __init__(
        self,
        model: HetModel,
        own_classes: nn.Module,
        teacher: Teacher | None,
        weight: float,
        distance: PrototypeDistance,
    ) -> None:
        """Create the objective.

        Args:
            model: Model to train.
            own_classes: Module that restricts logits and labels to the client's label space.
            teacher: Global prototypes, or None if there are none.
            weight: Weight of the distance, called lambda in the paper.
            distance: Kind of distance, "mse" or "euclidean".
        """
        super().__init__()
        self.model, self.own_classes, self.teacher = model, own_classes, teacher
        self.weight, self.distance = weight, distance

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.model.features_and_logits(x)
        logits, target = self.own_classes(logits, y)
        loss = F.cross_entropy(logits.float(), target)
        if self.teacher is None:
            return loss
        if self.distance == "euclidean":
            return loss + self.weight * class_mean_distance(features, y, self.teacher)
        return loss + self.weight * class_feature_loss(features, y, self.teacher).mean()
