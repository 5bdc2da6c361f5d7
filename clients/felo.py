"""Felo, client half: Algorithm 1, "Client processes".

Yun-Hin Chan and Edith C. H. Ngai, Exploiting Features and Logits in Heterogeneous Federated
Learning, Computer Networks.
"""

from __future__ import annotations

from torch import Tensor

from clients.base import HetClient
from fedhet.algorithms.classwise import ClassMeans, ClassSums, Teacher, felo_loss
from fedhet.arrays import grouped
from fedhet.models import HetModel
from fedhet.models.weights import load_weights, to_arrays
from fedhet.wire.contract import Contract, TensorField, WeightsField
from fedhet.wire.knowledge import Knowledge
from strategies.felo import FeloSettings


class FeloClient(HetClient):
    """Trains on Eq. 1 and answers with its class means, and its weights if they are shared."""

    settings: FeloSettings
    sends = Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("features", "float32", ("P", "D"), "mean features of each class"),
            TensorField("logits", "float32", ("P", "C"), "mean logits of each class"),
            TensorField("counts", "int64", ("P",), "samples of each class", low=1),
            WeightsField("weights", "the private model's weights", required=False),
        )
    )

    def setup(self) -> dict[str, HetModel]:
        """Build the private model with features of the run's width."""
        return {"private": self.build_model(self.settings.feature_dim)}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run lines 9 to 15 of Algorithm 1.

        A first participation trains on cross-entropy alone (line 10). It starts from the weights
        of its architecture where there are any (ours): else a client that is sampled late would
        replace, rather than join, what its architecture has learned.
        """
        if weights := knowledge.group("weights"):
            load_weights(self.models["private"], weights)
        teacher = None
        if self.participations > 0:
            teacher = self.read_teacher(round, knowledge)
        means = self._learn(round, teacher)
        return self._answer(means)

    def read_teacher(self, round: int, knowledge: Knowledge) -> Teacher | None:
        """Return the server's entries, laid out by class, or None where it has none."""
        parts = knowledge.tensors
        if "classes" not in parts:
            return None
        return Teacher.of(
            parts["classes"],
            parts["features"],
            parts["logits"],
            self.info.classes,
            self.compute.device,
        )

    def _learn(self, round: int, teacher: Teacher | None) -> ClassMeans:
        """Train the local epochs on Eq. 1; return the class means seen during the last one."""
        model = self.models["private"].train()
        sums = ClassSums(self.info.classes, self.settings.feature_dim, self.compute.device)
        gathering = False

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            features, logits = model.features_and_logits(x)
            if gathering:
                sums.add(features, logits, y)
            return felo_loss(features, logits, y, teacher, self.settings.alpha)

        optimizing, generator = (
            self.optimization(model.parameters()),
            self.generator(round, "batches"),
        )
        for epoch in range(self.run.training.local_epochs):
            gathering = epoch == self.run.training.local_epochs - 1
            self.train_epoch(loss_of, optimizing, generator)
        return sums.means()

    def _answer(self, means: ClassMeans) -> Knowledge:
        tensors = dict(vars(means))
        if self.settings.share_weights:
            tensors |= grouped("weights", to_arrays(self.models["private"]))
        return Knowledge(tensors)
