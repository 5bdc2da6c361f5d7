"""FD client: Algorithm 1, "Local training phase"."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedhet.algorithms.classwise import (
    MIN_PROBABILITY,
    Teacher,
    class_cross_entropy,
    nearest_distributions,
)
from fedhet.base.arrays import Array
from fedhet.clients.fedhe import FedHeClient, FedHeObjective
from fedhet.methods.fd import FdSettings
from fedhet.wire.knowledge import Knowledge


class FdObjective(FedHeObjective):
    """Module that computes FD's training loss and accumulates class sums of probabilities."""

    settings: FdSettings  # type: ignore[assignment]

    def averaged_output(self, logits: Tensor) -> Tensor:
        """Return the probabilities F(w, b) [N, C], with 0 for classes outside the label space."""
        restricted = self.own_classes.columns(logits.detach().float()).softmax(1)
        if restricted.shape == logits.shape:
            return restricted
        probabilities = torch.zeros_like(logits, dtype=restricted.dtype)
        probabilities[:, self.own_classes.space] = restricted
        return probabilities

    def distillation(self, logits: Tensor, labels: Tensor, teacher: Teacher) -> Tensor:
        """Return gamma times the distillation regularizer (line 5)."""
        return self.settings.gamma * class_cross_entropy(logits, labels, teacher).mean()


class FdClient(FedHeClient):
    """Client that trains on labels and on other clients' class means, and sends its class means."""

    settings: FdSettings  # type: ignore[assignment]
    objective: ClassVar[type[FedHeObjective]] = FdObjective
    all_epochs: ClassVar[bool] = True

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return class means of the probabilities in all epochs."""
        means = self._learn(round, self.read_teacher(knowledge))
        probabilities = nearest_distributions(means.logits)
        return Knowledge({"classes": means.classes, "probabilities": probabilities})

    def entries(self, knowledge: Knowledge) -> Array:
        """Return the logarithm of the other clients' class-wise mean probabilities, as logits."""
        logs: Array = np.log(np.maximum(knowledge.tensors["probabilities"], MIN_PROBABILITY))
        return logs
