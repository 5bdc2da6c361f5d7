"""Felo client: Algorithm 1, "Client processes"."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet.algorithms.classwise import ClassSums, Teacher, Terms, felo_loss
from fedhet.base.arrays import grouped
from fedhet.clients.base import HetClient
from fedhet.methods.felo import FeloSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.knowledge import Knowledge


class FeloClient(HetClient):
    """Client that minimizes Eq. 1, and sends class means and, if configured, its weights."""

    settings: FeloSettings

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model and, if received, the average model of its architecture."""
        models: dict[str, nn.Module] = {"private": self.private}
        if weights := knowledge.group("weights"):
            average = load_weights(self.build_model(self.settings.feature_dim), weights)
            models["global"] = self.samples.within_space(self.compute.place(average))
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run lines 9 to 15 of Algorithm 1.

        In its first round, a client trains only with cross-entropy (line 10). Unlike in the paper,
        it then starts from the averaged weights of its architecture, if they exist. Otherwise, a
        client that is first sampled in a late round would undo the progress of its architecture.
        """
        if weights := knowledge.group("weights"):
            load_weights(self.network, weights)
        first = self.state.participations == 0
        teacher = None if first else self.read_teacher(round, knowledge)
        model, last = self.network.train(), self.training.local_epochs - 1
        sums = ClassSums(self.info.classes, self.settings.feature_dim, self.compute.device)
        settings = self.settings
        terms = Terms(
            settings.alpha, settings.feature_weight, settings.logit_weight, settings.feature_norm
        )
        objective = FeloObjective(model, teacher, sums, terms)

        def before_epoch(epoch: int) -> None:  # Class means are computed in the last epoch.
            objective.gathering = epoch == last

        optimizing = self.optimization(model.parameters())
        generator = self.generator(round, "batches")
        self.train_own(objective, self.private, optimizing, generator, before_epoch=before_epoch)
        tensors = dict(vars(self.privacy.class_means(sums, model)))
        if settings.share_weights:
            tensors |= grouped("weights", to_arrays(model))
        return Knowledge(tensors)

    def read_teacher(self, round: int, knowledge: Knowledge) -> Teacher | None:
        """Return the server's averages as a teacher, or None if the server sent none."""
        parts = knowledge.tensors
        if "classes" not in parts:
            return None
        return Teacher.from_tensors(
            parts["classes"],
            parts["features"],
            parts["logits"],
            self.info.classes,
            self.compute.device,
        )


class FeloObjective(nn.Module):
    """Module that computes Felo's training loss (Eq. 1).

    While `gathering` is set, the forward pass also accumulates the class sums of each batch.
    """

    def __init__(
        self, model: HetModel, teacher: Teacher | None, sums: ClassSums, terms: Terms
    ) -> None:
        super().__init__()
        self.model, self.teacher, self.sums = model, teacher, sums
        self.terms, self.gathering = terms, False

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        features, logits = self.model.features_and_logits(x)
        if self.gathering:
            self.sums.add(features, logits, y)
        return felo_loss(features, logits, y, self.teacher, self.terms)
