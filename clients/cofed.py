"""CoFED, client half: local training, predictions on the public set, update training.

Xingjian Cao, Zonghang Li, Gang Sun, Hongfang Yu and Mohsen Guizani, Cross-Silo Heterogeneous Model
Federated Multitask Learning.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from clients.base import HetClient
from fedhet.algorithms.voting import undecided
from fedhet.arrays import Array
from fedhet.client.messages import Scores
from fedhet.models import Refitted
from fedhet.runs.records import PROTOCOLS
from fedhet.training import Score, logits_of
from fedhet.wire.contract import Contract, Sizes, TensorField, smallest_uint
from fedhet.wire.knowledge import Knowledge
from strategies.cofed import CofedSettings


class CofedClient(HetClient):
    """Trains alone, sends its predictions on the public set, and learns from the vote of all.

    Its model and training stay private: any model with `fit` and `predict` may take part.
    """

    settings: CofedSettings
    sends = Contract(
        (
            TensorField(
                "predictions",
                "uint",
                ("N",),
                "each public instance's class, in the smallest type; with cofed.margin, C for none",
                required=False,
                numbers="L",
                needs=("space",),
            ),
            TensorField(
                "space",
                "uint",
                ("P",),
                "the label space: the classes that it tells apart",
                required=False,
                ids="C",
                needs=("predictions",),
            ),
        )
    )

    @cached_property
    def public(self) -> Tensor:
        """The public samples [N, ...], on the device, without their labels."""
        return self.compute.images(self.public_set(labelled=False).x)

    def sizes(self) -> Sizes:
        """Return the axes C (classes), L = C + 1 (C stands for none) and N (public instances)."""
        classes = self.info.classes
        return Sizes({"C": classes, "L": classes + 1, "N": len(self.public)})

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run those of steps 1, 4 and 2 of Section 4.1 that are due.

        The client's first participation trains on its own data (step 1). If pseudolabels were sent,
        it runs the update training (step 4). Then, if asked, it predicts the public set (step 2).
        """
        if self.state.participations == 0:
            self._train_locally(round)
        if "labels" in knowledge.tensors:
            labels = torch.from_numpy(knowledge.tensors["labels"].astype(np.int64))
            self.state.tensors["labels"] = labels
            self._update(round)
        return self._predictions() if knowledge.scalars["predict"] else Knowledge()

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the client's own data, plus R_i once it has been sent."""
        if not self._updated:
            return self.x, self.y
        labels = self.state.tensors["labels"].to(self.compute.device)
        given = (labels < self.info.classes).nonzero().flatten()
        return torch.cat([self.x, self.public[given]]), torch.cat([self.y, labels[given]])

    def evaluation(self, knowledge: Knowledge) -> Scores:
        """Return the scores of the current model, and of the model after local training.

        The latter were measured then; until an update training both are the same.
        """
        measured = super().evaluation(knowledge) if self._updated else {}
        kinds = ("local",) if self._updated else ("local", "private")
        facts = self.state.facts
        return measured | {
            (protocol, kind): Score(float(facts[f"local.{protocol}"]), math.nan)
            for protocol in PROTOCOLS
            for kind in kinds
            if f"local.{protocol}" in facts
        }

    @property
    def _updated(self) -> bool:
        """Tell whether the model has had an update training since local training."""
        return "labels" in self.state.tensors

    def _train_locally(self, round: int) -> None:
        """Train on the client's own data, and measure the baseline of relative accuracy."""
        self.fit_private(self.generator(round, "batches"))
        for (protocol, _), score in self.scores({"local": self.private}).items():
            self.state.facts[f"local.{protocol}"] = score.accuracy

    def _update(self, round: int) -> None:
        self.fit_private(
            self.generator(round, "update"),
            epochs=self.settings.update_epochs,
            batch_size=self.settings.update_batch_size,
        )

    def _predictions(self) -> Knowledge:
        """Return the class of every public instance, or C where the model is undecided."""
        classes, margin = self.info.classes, self.settings.margin
        logits = logits_of(self.private, self.public, self.compute, self.run.engine.eval_batch_size)
        predictions = logits.argmax(1).cpu().numpy()
        if margin:
            predictions[undecided(self._probabilities(logits), margin)] = classes
        space = self.space.cpu().numpy().astype(smallest_uint(classes))
        answers = classes + (margin > 0)
        return Knowledge(
            {"predictions": predictions.astype(smallest_uint(answers)), "space": space}
        )

    def _probabilities(self, logits: Tensor) -> Array:
        """Return the class probabilities [N, C] of the public instances, which have `logits`."""
        model = self.private
        if isinstance(model, Refitted):
            return model.probabilities(self.public).cpu().numpy()
        return logits.softmax(1).cpu().numpy()
