"""FedHe client: cross-entropy plus a distance from the server's logits for a sample's class."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.classwise import (
    ClassMeans,
    ClassSums,
    Teacher,
    class_feature_loss,
    class_logit_loss,
)
from fedhet.base.arrays import Array
from fedhet.clients.base import HetClient
from fedhet.learning.training import LabelSpace
from fedhet.methods.fedhe import FedHeSettings
from fedhet.models import HetModel
from fedhet.wire.knowledge import Knowledge


class FedHeObjective(nn.Module):
    """Module that computes FedHe's training loss.

    While `gathering` is set, the forward pass also accumulates the class sums of each batch.
    """

    def __init__(
        self,
        model: HetModel,
        own_classes: LabelSpace,
        teacher: Teacher | None,
        sums: ClassSums,
        settings: FedHeSettings,
    ) -> None:
        super().__init__()
        self.model, self.own_classes, self.teacher, self.sums = model, own_classes, teacher, sums
        self.settings, self.gathering = settings, False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.model.features_and_logits(x)
        if self.gathering:
            self.sums.add(features, self.averaged_output(logits), y)
        logits, target = self.own_classes(logits, y)
        loss = F.cross_entropy(logits.float(), target)
        if self.teacher is None:
            return loss
        return loss + self.distillation(logits, target, self.teacher)

    def averaged_output(self, logits: Tensor) -> Tensor:
        """Return the output [N, C] that is averaged per class, by default the logits."""
        return logits

    def distillation(self, logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
        """Return the term that is added to the cross-entropy, a scalar."""
        return self.settings.alpha * self.distance(logits, labels, teacher).mean()

    def distance(self, logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
        """Return the distances [N] of logits [N, C] from the teacher's logits for the true classes.

        The distance is 0 for classes without teacher logits.
        """
        if self.settings.loss == "mse":
            return class_feature_loss(logits, labels, teacher)
        return class_logit_loss(logits, labels, teacher)


class FedHeClient(HetClient):
    """Client that trains on labels and on the server's class logits, and sends its class logits."""

    settings: FedHeSettings
    objective: ClassVar[type[FedHeObjective]] = FedHeObjective
    all_epochs: ClassVar[bool] = False
    """Whether class means are computed over all local epochs instead of only the last epoch."""

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return class means of the logits in the last epoch."""
        means = self._learn(round, self.read_teacher(knowledge))
        return Knowledge({"classes": means.classes, "logits": means.logits})

    def read_teacher(self, knowledge: Knowledge) -> Teacher | None:
        """Return the server's logits as a teacher, or None if the server sent none.

        Rows and columns are restricted to the client's label space (not in the paper), because
        clients with other label spaces have not learned to distinguish these classes.
        """
        if "classes" not in knowledge.tensors:
            return None
        present, space = knowledge.tensors["classes"], self.space.cpu().numpy()
        in_space = np.isin(present, space)
        rows = np.searchsorted(space, present[in_space])
        logits = self.entries(knowledge)[in_space][:, space]
        return Teacher.from_tensors(rows, logits, logits, len(space), self.compute.device)

    def entries(self, knowledge: Knowledge) -> Array:
        """Return the server's logits [P, C] for the classes in the instruction."""
        return knowledge.tensors["logits"]

    def _learn(self, round: int, teacher: Teacher | None) -> ClassMeans:
        """Train for the local epochs, and return the class means."""
        model, last = self.network.train(), self.training.local_epochs - 1
        sums = ClassSums(self.info.classes, model.feature_dim, self.compute.device)
        objective = self.objective(model, self.own_classes, teacher, sums, self.settings)

        def before_epoch(epoch: int) -> None:
            objective.gathering = self.all_epochs or epoch == last

        optimizing = self.optimization(model.parameters())
        generator = self.generator(round, "batches")
        self.train_own(objective, self.private, optimizing, generator, before_epoch=before_epoch)
        return self.privacy.class_means(sums, model, objective.averaged_output)
