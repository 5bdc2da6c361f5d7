"""FedGen client: LG-FedAvg with a head that is also trained on generated features."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.distillation import distillation_loss
from fedhet.algorithms.feature_models import Generator
from fedhet.algorithms.local_models import LocalModel
from fedhet.base.arrays import Array
from fedhet.base.errors import ModelError
from fedhet.base.transfer import rows_of
from fedhet.clients.fedavg import FedAvgClient
from fedhet.learning.devices import move
from fedhet.methods.fedgen import FedGenSettings
from fedhet.models import load_weights
from fedhet.wire.knowledge import Knowledge


@dataclass(frozen=True)
class Teacher:
    """Generator received from the server, the class probabilities, and the decay of the losses."""

    generator: Generator
    prior: Tensor
    """Prior p(y) [P] of the client's classes; all zeros if no client has reported any of these
    classes."""
    decay: float
    """Factor by which the weights alpha and beta are multiplied in this round."""
    draws: torch.Generator


class FedGenClient(FedAvgClient):
    """Client that trains on its own data and on generated features."""

    settings: FedGenSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model. Raises ModelError if its head is not linear."""
        models = super().setup()
        classifier = models["private"].get_submodule("classifier")
        if not isinstance(classifier, nn.Linear):
            kind = type(classifier).__name__
            raise ModelError(f"fedgen: the classifier must be an nn.Linear, got {kind}")
        return models

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the private model, and store the received generator for use in training."""
        self._teacher: Teacher | None = None  # No generator exists in the first round.
        weights, settings = knowledge.group("generator"), self.settings
        if not weights:
            return super().local_model(round, knowledge)
        generator = Generator(
            self.info.classes, settings.noise_dim, settings.hidden_dim, settings.feature_dim
        )
        load_weights(generator, weights).eval().requires_grad_(requires_grad=False)
        move(generator, self.compute.device)
        prior = torch.tensor(knowledge.tensors["prior"])[self.space.cpu()]
        draws = self.generator(round, "generated")
        self._teacher = Teacher(generator, prior, settings.decay ** (round - 1), draws)
        return super().local_model(round, knowledge)

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the head, and the number of samples per class if a setting requires it."""
        sent = super().reply(local)
        if self.settings.sends_counts:
            classes, counts = np.unique(self.y.cpu().numpy(), return_counts=True)
            sent |= {"classes": classes.astype(np.int64), "counts": counts.astype(np.int64)}
        return sent

    def _learn(
        self, round: int, local: LocalModel, use: str = "batches", *, epochs: int = 0
    ) -> None:
        """Train on the loss in Eq. 5.

        The loss consists of cross-entropy, divergence, and cross-entropy on generated features.
        """
        if (teacher := self._teacher) is None:
            super()._learn(round, local, use, epochs=epochs)
            return
        self.network.train()
        beta = self.settings.beta * teacher.decay

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            logits, target = self.own_classes(local.logits(x), y)
            loss = F.cross_entropy(logits.float(), target)
            generated = teacher.generator.sample(y, teacher.draws)
            target_logits, _ = self.own_classes(self._head_logits(generated), y)
            return loss + beta * distillation_loss(target_logits, logits)

        self.train_own(
            loss_of,
            self.private,
            self.optimization(local.parameters()),
            self.generator(round, use),
            epochs=epochs,
            penalty=lambda: self._generated_loss(teacher),
        )

    def _head_logits(self, features: Tensor) -> Tensor:
        """Return the logits [N, C] that the head computes for features [N, D].

        This does not call the head module, because DP-SGD's hooks would count generated features as
        samples of the client.
        """
        head = self.network.classifier
        assert isinstance(head, nn.Linear)
        return F.linear(features, head.weight, head.bias)

    def _generated_loss(self, teacher: Teacher) -> Tensor | float:
        """Return alpha times the head's cross-entropy on features of classes sampled from p(y)."""
        if not teacher.prior.any() or not self.settings.alpha:
            return 0.0
        size = self.training.batch_size
        columns = torch.multinomial(teacher.prior, size, replacement=True, generator=teacher.draws)
        labels = rows_of(self.space, columns)
        features = teacher.generator.sample(labels, teacher.draws)
        logits, target = self.own_classes(self._head_logits(features), labels)
        weight = self.settings.alpha * teacher.decay
        return weight * F.cross_entropy(logits.float(), target)
