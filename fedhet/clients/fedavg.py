"""FedAvg client (Algorithm 1, ClientUpdate), and base class for methods that average weights."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.local_models import LocalModel
from fedhet.base.arrays import Array, Arrays, grouped
from fedhet.clients.base import HetClient
from fedhet.learning.training import BatchLoss
from fedhet.methods.fedavg import FedAvgSettings
from fedhet.models import HetModel, load_weights, part_names, to_arrays, to_host_arrays
from fedhet.wire.knowledge import Knowledge


class FedAvgClient(HetClient):
    """Client that trains the averaged weights on its data and returns the resulting weights."""

    settings: FedAvgSettings

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model and, if weights were received, a model with these weights."""
        models = {"private": self.private}
        if weights := knowledge.group("weights"):
            joined = self._joined(self.build_model(self.settings.width), weights)
            models["global"] = self.samples.within_space(self.compute.place(joined))
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, starting from the averaged weights."""
        self.start(knowledge.group("weights"))
        local = self.local_model(round, knowledge)
        self._learn(round, local)
        return Knowledge(self.reply(local))

    def start(self, weights: Arrays) -> HetModel:
        """Load the averaged weights into the private model, and return it."""
        return self._joined(self.network, weights)

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the model and the loss for local training, by default as in FedAvg."""
        return LocalModel(self.network, self.anchor())

    def anchor(self) -> dict[str, Tensor]:
        """Return a copy of the private model's tensors before training."""
        return {k: v.detach().clone() for k, v in self.network.state_dict().items()}

    def steps(self) -> int:
        """Return the number of optimizer steps per batch."""
        return 1

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the tensors to send, as fields of the reply."""
        names = part_names(self.network, self.settings.part)
        sent = {k: v for k, v in local.upload().items() if k in names}
        return grouped("weights", to_host_arrays(sent))

    def _joined(self, model: HetModel, weights: Arrays) -> HetModel:
        """Load `weights` into `model`, and fill in all other tensors from the private model."""
        load_weights(model, {**to_arrays(self.network), **weights})
        return model

    def _learn(
        self, round: int, local: LocalModel, use: str = "batches", *, epochs: int = 0
    ) -> None:
        """Train on the loss of the task plus the method's regularizer.

        `use` names the random order of the samples. `epochs` is the number of epochs, or 0 for
        `training.local-epochs`.
        """
        local.model.train()
        self.train_own(
            LocalObjective(local, self.own_classes, self.task.loss()),
            lambda x: self.samples.own_columns(local.logits(x)),
            self.optimization(local.parameters()),
            self.generator(round, use),
            model=local.model,
            epochs=epochs,
            steps=self.steps(),
            after_batch=local.stepped,
            penalty=local.regularizer,
        )


class LocalObjective(nn.Module):
    """Module that computes the task's loss. Classification is limited to the client's classes."""

    def __init__(
        self,
        local: LocalModel,
        own_classes: nn.Module,
        loss_of: BatchLoss = F.cross_entropy,
    ) -> None:
        super().__init__()
        self.model, self.own_classes, self._loss_of = local.model, own_classes, loss_of
        self._local = local

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of a batch."""
        outputs, term = self._local.logits_and_term(x)
        logits, target = self.own_classes(outputs, y)
        return self._loss_of(logits.float(), target) + term
