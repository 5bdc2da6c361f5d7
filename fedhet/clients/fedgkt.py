"""FedGKT, client half: trains an edge model, sends features, logits and labels ("ClientTrain")."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.distillation import distillation_loss
from fedhet.clients.base import HetClient
from fedhet.learning.training import logits_of
from fedhet.methods.fedgkt import FedGktSettings
from fedhet.models import HetModel, build, load_weights
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.knowledge import Knowledge

OUTSIDE = 30.0
"""How far the logits of classes outside the label space lie below the lowest inside (ours): their
probability is practically 0, and the numbers in a message keep one magnitude."""


class FedGktClient(HetClient):
    """Learns from its labels and the server's logits of its own training samples."""

    settings: FedGktSettings

    def sizes(self) -> Sizes:
        """Return the axes C, D and N, the client's training samples, and the server model."""
        sizes = super().sizes()
        return Sizes({**sizes.axes, "N": len(self.y)}, sizes.models)

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the edge model and, if its weights came, the server's on the edge's features."""
        models = {"private": self.private}
        if weights := knowledge.group("server"):
            own, width = self.settings, self.settings.feature_dim
            server = build(own.server_model, (width,), self.info.classes, seed=self.run.seed)
            server = self.compute.place(load_weights(server, weights))
            joined = HetModel(self.network.extractor, server, width)
            models["server"] = self.samples.within_space(joined)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, then send what the server learns from.

        Samples keep their order, and images are not augmented: logits belong to the images as they
        are. In its first round a client has no logits of the server's, and learns from labels.
        """
        model, own = self.network.train(), self.settings
        taught = knowledge.tensors.get("logits")
        teacher = None if taught is None else torch.tensor(taught, device=self.compute.device)
        targets = torch.searchsorted(self.space, self.y)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.samples.own_columns(model(x)).float()
            loss = F.cross_entropy(logits, targets[rows])
            if teacher is None:
                return loss
            given = self.samples.own_columns(teacher[rows])
            return loss + own.alpha * distillation_loss(given, logits, own.temperature)

        rows = torch.arange(len(self.y), device=self.compute.device)
        optimizing = self.optimization(model.parameters())
        generator = self.generator(round, "batches")
        self.train_epochs(self.x, rows, loss_of, optimizing, generator, augment=False)
        features = logits_of(self.network.extractor, self.x, self.compute)
        logits = logits_of(self.private, self.x, self.compute)  # -inf outside the label space
        outside = logits.isinf()
        lowest = logits.masked_fill(outside, torch.inf).amin(1, keepdim=True)
        logits = torch.where(outside, lowest - OUTSIDE, logits)
        labels = self.y.cpu().numpy().astype(smallest_uint(self.info.classes))
        sent = {"features": features.cpu().numpy(), "logits": logits.cpu().numpy()}
        return Knowledge({**sent, "labels": labels})
