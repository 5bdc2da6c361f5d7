"""FML client: mutual distillation between the private model and the meme."""

from __future__ import annotations

from torch import Tensor, nn

from fedhet.algorithms.distillation import mutual_loss
from fedhet.base.arrays import grouped
from fedhet.clients.base import HetClient
from fedhet.methods.fml import FmlSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.tasks import Task
from fedhet.wire.knowledge import Knowledge


class FmlClient(HetClient):
    """Client that distills the private model and the meme into each other and sends the meme."""

    settings: FmlSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model, and the meme as the kind "proxy"."""
        return {"private": self.build_model(), "proxy": self._new_meme()}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model, the trained meme and, if received, the averaged meme."""
        models = dict(self.models)
        if weights := knowledge.group("weights"):
            models["global"] = self.compute.place(load_weights(self._new_meme(), weights))
        return {kind: self.samples.within_space(model) for kind, model in models.items()}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Start from the averaged meme, train both models, and return the meme."""
        meme = self.models["proxy"]
        load_weights(meme, knowledge.group("weights"))
        private = self.network.train()
        own_classes, settings = self.own_classes, self.settings
        objective = MutualObjective(private, meme.train(), own_classes, settings, self.task)
        optimizing = self.optimization(private.parameters(), meme.parameters())
        self.train_own(objective, self.private, optimizing, self.generator(round, "batches"))
        return Knowledge(grouped("weights", to_arrays(meme)))

    def _new_meme(self) -> HetModel:
        return self.build_model(name=self.settings.meme)


class MutualObjective(nn.Module):
    """Module that computes the sum of both models' losses. Each model is the other's teacher."""

    def __init__(
        self,
        private: nn.Module,
        meme: nn.Module,
        own_classes: nn.Module,
        settings: FmlSettings,
        task: Task,
    ) -> None:
        super().__init__()
        self.private, self.meme, self.own_classes = private, meme, own_classes
        self.settings, self._losses = settings, (task.loss(), task.divergence())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of a batch."""
        private, target = self.own_classes(self.private(x), y)
        meme, _ = self.own_classes(self.meme(x), y)
        private_loss = mutual_loss(private, meme, target, self.settings.alpha, *self._losses)
        return private_loss + mutual_loss(meme, private, target, self.settings.beta, *self._losses)
