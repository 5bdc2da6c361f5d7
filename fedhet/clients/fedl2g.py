"""FedL2G client: guided training, and the gradient of the guiding vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.algorithms.guiding import Batch, GuidedObjective, guiding_gradient
from fedhet.base.seeding import numpy_rng
from fedhet.base.transfer import rows_of, to_device
from fedhet.clients.base import HetClient
from fedhet.data.dataset import Split
from fedhet.methods.fedl2g import FedL2gSettings
from fedhet.wire.knowledge import Knowledge


class FedL2gClient(HetClient):
    """Client that trains with guiding vectors, and tests their effect on its quiz set.

    The study set contains all training samples that are not in the quiz set. A client with fewer
    than four samples uses all samples in both sets, because batch normalization needs two samples.
    """

    settings: FedL2gSettings

    def prepare(self) -> None:
        """Divide the training samples into a quiz set and a study set, for the complete run."""
        count = len(self.y)
        self._quiz = self._study = self.samples.own
        if count < 4:
            return
        quiz = max(2, min(self.settings.quiz_samples, count // 5))
        order = numpy_rng(self.run.seed, "quiz", self.info.name).permutation(count)
        rows = torch.tensor(order[:quiz].copy()), torch.tensor(order[quiz:].copy())
        self._quiz, self._study = (Split(rows_of(self.x, r), rows_of(self.y, r)) for r in rows)

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model. The setting `feature_dim` applies only to guided features."""
        return {"private": self.build_model(self.settings.width)}

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the study set, on which the client trains."""
        return self._study.x, self._study.y

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return the gradient for each class of a study batch.

        In the warm-up rounds, the model does not change.
        """
        vectors = to_device(torch.tensor(knowledge.tensors["vectors"]), self.compute.device)
        model = self.network.train()
        objective = GuidedObjective(model, self.own_classes, vectors, self.settings.guide)
        if round > self.settings.warm_up_rounds:
            optimizing = self.optimization(model.parameters())
            generator = self.generator(round, "batches")
            self.train_own(objective, self.private, optimizing, generator)

        order = torch.randperm(len(self._study), generator=self.generator(round, "study"))
        chosen = order[: max(2, self.settings.study_samples)]
        study = Split(*(rows_of(values, chosen) for values in self.training_set()))
        batches = self._inputs(study), self._inputs(self._quiz)
        gradient = guiding_gradient(objective.train(), *batches, self.settings.study_lr)
        classes = torch.unique(study.y).cpu()
        rows = gradient.cpu()[classes].float()
        return Knowledge({"classes": classes.numpy(), "gradients": rows.numpy()})

    def _inputs(self, split: Split) -> Batch:
        """Return samples as inputs of the model, and their labels."""
        return self.compute.to_inputs(split.x), split.y
