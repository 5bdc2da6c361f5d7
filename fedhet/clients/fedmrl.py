"""FedMRL, client half: one model of a shared and an own network, whose features are fused."""

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
    """The extractor of a client's whole model: that of G, that of F, and P, x -> [N, d2].

    The whole model is this and F's head. G is a part of it, with its own head, so that model,
    projector and all are saved, used and exported as one; `shared` alone travels.
    """

    def __init__(self, shared: HetModel, own: HetModel) -> None:
        super().__init__()
        self.shared, self.own = shared, own.extractor
        self.projector = Projector(shared.feature_dim, own.feature_dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the fused representation [N, d2] of x [N, ...]."""
        return self.projector.fuse(self.shared.extractor(x), self.own(x))

    def coarse_logits(self, fused: Tensor) -> Tensor:
        """Return the logits [N, C] of G's head on the coarse part of [N, d2]."""
        logits: Tensor = self.shared.classifier(self.projector.coarse(fused))
        return logits


class FedMrlClient(HetClient):
    """Trains both networks and the projector on the losses of both heads; sends the shared one."""

    settings: FedMrlSettings

    def setup(self) -> dict[str, nn.Module]:
        """Build the whole model; F's features have their native width, or d1 if that is more."""
        own, least = self.build_model(), self.settings.shared_dim
        if own.feature_dim < least:
            own = self.build_model(least)
        with seeded(self.run.seed, "projector"):
            shared = self.build_model(least, name=self.settings.shared)
            fusion = Fusion(shared, own)
        return {"private": HetModel(fusion, own.classifier, own.feature_dim)}

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the whole model after training and, if one came, with the average as its G."""
        models: dict[str, nn.Module] = {"private": self.private}
        if weights := knowledge.group("weights"):
            averaged = copy.deepcopy(self.network)
            load_weights(fusion_of(averaged).shared, weights)
            models["global"] = self.samples.within_space(averaged)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Start from the averaged shared model, train all parts, and return the shared one.

        The loss is m^F times the own head's plus m^G times the shared one's; the means of both over
        the last epoch are metrics.
        """
        model, device = self.network, self.compute.device
        fusion = fusion_of(model)
        load_weights(fusion.shared, knowledge.group("weights"))
        model.train()
        weights = torch.tensor([self.settings.own_weight, self.settings.shared_weight]).to(device)
        means = EpochMeans(("fine_loss", "coarse_loss"), device)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            fused, logits = model.features_and_logits(x)
            fine, target = self.own_classes(logits, y)
            coarse, _ = self.own_classes(fusion.coarse_logits(fused), y)
            losses = matryoshka_losses(fine, coarse, target)
            means.add(losses, len(y))
            return weights @ losses

        optimizing = self.optimization(model.parameters())
        batches = self.generator(round, "batches")
        self.train_own(loss_of, self.private, optimizing, batches, before_epoch=means.clear)
        return Knowledge(grouped("weights", to_arrays(fusion.shared)), means.read())


def fusion_of(model: HetModel) -> Fusion:
    """Return the extractor of a client's whole model."""
    assert isinstance(model.extractor, Fusion)
    return model.extractor
