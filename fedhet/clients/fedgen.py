"""FedGen, client half: LG-FedAvg's, with a head that learns from generated features too."""

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
    """The generator as the server sent it, and how much it counts in the round."""

    generator: Generator
    prior: Tensor
    """p(y) [P] over the client's own classes, or zeros if the federation has none of them."""
    share: float
    """What is left of the weights alpha and beta, for they fall from round to round."""
    draws: torch.Generator


class FedGenClient(FedAvgClient):
    """Trains its extractor and the head, for which the generator stands for the other clients."""

    settings: FedGenSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model. Raises ModelError for a head that is not linear."""
        models = super().setup()
        classifier = models["private"].get_submodule("classifier")
        if not isinstance(classifier, nn.Linear):
            kind = type(classifier).__name__
            raise ModelError(f"fedgen averages heads that are nn.Linear, not {kind}")
        return models

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the private model; what the server teaches is kept for its training."""
        self._teacher: Teacher | None = None  # in the first round there is none
        weights, own = knowledge.group("generator"), self.settings
        if not weights:
            return super().local_model(round, knowledge)
        generator = Generator(self.info.classes, own.noise_dim, own.hidden_dim, own.feature_dim)
        load_weights(generator, weights).eval().requires_grad_(requires_grad=False)
        move(generator, self.compute.device)
        prior = torch.tensor(knowledge.tensors["prior"])[self.space.cpu()]
        draws = self.generator(round, "generated")
        self._teacher = Teacher(generator, prior, own.decay ** (round - 1), draws)
        return super().local_model(round, knowledge)

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the head and, if a setting needs them, the numbers of samples by class."""
        sent = super().reply(local)
        if self.settings.sends_counts:
            classes, counts = np.unique(self.y.cpu().numpy(), return_counts=True)
            sent |= {"classes": classes.astype(np.int64), "counts": counts.astype(np.int64)}
        return sent

    def _learn(self, round: int, local: LocalModel) -> None:
        """Train on cross-entropy, a divergence of own samples, and generated ones (Eq. 5)."""
        if (teacher := self._teacher) is None:
            super()._learn(round, local)
            return
        self.network.train()
        beta = self.settings.beta * teacher.share

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            logits, target = self.own_classes(local.logits(x), y)
            loss = F.cross_entropy(logits.float(), target)
            answer, _ = self.own_classes(self._answer(teacher.generator.drawn(y, teacher.draws)), y)
            return loss + beta * distillation_loss(answer, logits)

        self.train_own(
            loss_of,
            self.private,
            self.optimization(local.parameters()),
            self.generator(round, "batches"),
            penalty=lambda: self._generated_loss(teacher),
        )

    def _answer(self, features: Tensor) -> Tensor:
        """Return the head's logits [N, C] of features [N, D].

        Not by calling the head, which would count generated features as samples of the client's.
        """
        head = self.network.classifier
        assert isinstance(head, nn.Linear)
        return F.linear(features, head.weight, head.bias)

    def _generated_loss(self, teacher: Teacher) -> Tensor | float:
        """Return alpha times the head's cross-entropy on features generated for classes ~ p(y)."""
        if not teacher.prior.any() or not self.settings.alpha:
            return 0.0
        size = self.training.batch_size
        drawn = torch.multinomial(teacher.prior, size, replacement=True, generator=teacher.draws)
        labels = rows_of(self.space, drawn)
        features = teacher.generator.drawn(labels, teacher.draws)
        logits, target = self.own_classes(self._answer(features), labels)
        weight = self.settings.alpha * teacher.share
        return weight * F.cross_entropy(logits.float(), target)
