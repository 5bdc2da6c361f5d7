"""FedMRL client: shared model G, local model F, and a projector P that fuses their features."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from fedhet.algorithms.feature_models import Projector, matryoshka_losses
from fedhet.base.arrays import grouped
from fedhet.base.seeding import seeded
from fedhet.client_runtime.local_training import EpochMeans
from fedhet.clients.base import HetClient
from fedhet.methods.fedmrl import FedMrlSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.wire.knowledge import Knowledge


class Fusion(nn.Module):
    """Extractor of the private model: the extractors of G and F, followed by the projector P.

    The private model consists of this extractor and the head of F. The shared model G is a part of
    the extractor, including its head, so that all parts are saved and exported as one model. Only
    `shared` is sent.
    """

    def __init__(self, shared: HetModel, local: HetModel) -> None:
        super().__init__()
        self.shared, self.own = shared, local.extractor
        self.projector = Projector(shared.feature_dim, local.feature_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the fused features [N, d2] of samples x [N, ...]."""
        return self.projector.fuse(self.shared.extractor(x), self.own(x))

    def coarse_logits(self, fused: Tensor) -> Tensor:
        """Return the logits [N, C] of G's head on the coarse part of fused features [N, d2]."""
        logits: Tensor = self.shared.classifier(self.projector.coarse(fused))
        return logits


class FedMrlClient(HetClient):
    """Client that trains G, F and the projector on the losses of both heads, and sends G."""

    settings: FedMrlSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the private model.

        The features of F have their default width, or the width of the features of G if it is
        larger.
        """
        local, shared_dim = self.build_model(), self.settings.shared_dim
        if local.feature_dim < shared_dim:
            local = self.build_model(shared_dim)
        with seeded(self.run.seed, "projector"):
            shared = self.build_model(shared_dim, name=self.settings.shared)
            fusion = Fusion(shared, local)
        return {"private": HetModel(fusion, local.classifier, local.feature_dim)}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the private model and, if the server sent the averaged G, a copy with this G."""
        models: dict[str, nn.Module] = {"private": self.private}
        if weights := knowledge.group("weights"):
            averaged = copy.deepcopy(self.network)
            load_weights(fusion_of(averaged).shared, weights)
            models["global"] = self.samples.within_space(averaged)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train all parts, starting from the averaged shared model, and return the shared model.

        The loss is m^F times the loss of the local head plus m^G times the loss of the shared head.
        The means of both losses over the last epoch are sent as metrics.
        """
        model, device = self.network, self.compute.device
        fusion = fusion_of(model)
        load_weights(fusion.shared, knowledge.group("weights"))
        model.train()
        weights = torch.tensor([self.settings.own_weight, self.settings.shared_weight]).to(device)
        means, loss_of_task = EpochMeans(("fine_loss", "coarse_loss"), device), self.task.loss()

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            fused, logits = model.features_and_logits(x)
            fine, target = self.own_classes(logits, y)
            coarse, _ = self.own_classes(fusion.coarse_logits(fused), y)
            losses = matryoshka_losses(fine, coarse, target, loss_of_task)
            means.add(losses, len(y))
            return weights @ losses

        optimizing = self.optimization(model.parameters())
        batches = self.generator(round, "batches")
        self.train_own(loss_of, self.private, optimizing, batches, before_epoch=means.clear)
        return Knowledge(grouped("weights", to_arrays(fusion.shared)), means.by_name())


def fusion_of(model: HetModel) -> Fusion:
    """Return the extractor of the private model."""
    assert isinstance(model.extractor, Fusion)
    return model.extractor
