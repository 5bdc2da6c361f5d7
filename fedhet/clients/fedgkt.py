"""FedGKT client: Algorithm 1, ClientTrain."""

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
"""Amount by which logits outside the label space are below the lowest logit inside it.

Classes outside the label space then have probabilities of nearly 0, but all values in a message
have a similar magnitude. The paper does not consider label spaces."""


class FedGktClient(HetClient):
    """Client that trains an edge model on labels and server logits, and sends its features."""

    settings: FedGktSettings

    def sizes(self) -> Sizes:
        """Return the axis sizes, and the shapes of the server model's tensors.

        The axes are C (classes), D (features) and N (training samples).
        """
        sizes = super().sizes()
        return Sizes({**sizes.axes, "N": len(self.y)}, sizes.models)

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the edge model and, if received, the server's model on top of the extractor."""
        models = {"private": self.private}
        if weights := knowledge.group("server"):
            name, width = self.settings.server_model, self.settings.feature_dim
            server = build(name, (width,), self.info.classes, seed=self.run.seed)
            server = self.compute.place(load_weights(server, weights))
            joined = HetModel(self.network.extractor, server, width)
            models["server"] = self.samples.within_space(joined)
        return models

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for the local epochs, and return features, logits and labels of all samples.

        In its first round, a client has no logits from the server, so it trains only on labels.
        Images are not augmented, because the logits belong to the unchanged images.
        """
        model, settings = self.network.train(), self.settings
        received = knowledge.tensors.get("logits")
        teacher = None if received is None else torch.tensor(received, device=self.compute.device)
        targets = torch.searchsorted(self.space, self.y)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.samples.own_columns(model(x)).float()
            loss = F.cross_entropy(logits, targets[rows])
            if teacher is None:
                return loss
            target = self.samples.own_columns(teacher[rows])
            return loss + settings.alpha * distillation_loss(target, logits, settings.temperature)

        rows = torch.arange(len(self.y), device=self.compute.device)
        optimizing = self.optimization(model.parameters())
        generator = self.generator(round, "batches")
        self.train_epochs(self.x, rows, loss_of, optimizing, generator, augment=False, own=True)
        features = logits_of(self.network.extractor, self.x, self.compute)
        # `self.private` sets logits outside the label space to -inf.
        logits = logits_of(self.private, self.x, self.compute)
        outside = logits.isinf()
        lowest = logits.masked_fill(outside, torch.inf).amin(1, keepdim=True)
        logits = torch.where(outside, lowest - OUTSIDE, logits)
        labels = self.y.cpu().numpy().astype(smallest_uint(self.info.classes))
        sent = {"features": features.cpu().numpy(), "logits": logits.cpu().numpy()}
        return Knowledge({**sent, "labels": labels})
