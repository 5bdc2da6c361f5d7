"""HeteroFL client: local training of a submodel (Algorithm 1, Section 3).

With static batch norm, the statistics of batch norms are computed after training, from the client's
training data, and are never sent. The paper queries all clients for the statistics of the global
model. Here, each client uses its own statistics for each model that it evaluates.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedhet.algorithms.local_models import LocalModel
from fedhet.algorithms.weights import query_statistics, scaling
from fedhet.base.arrays import Array
from fedhet.base.errors import MissingSamplesError
from fedhet.clients.fedavg import FedAvgClient
from fedhet.learning.training import LabelSpace, frozen_statistics
from fedhet.methods.heterofl import HeteroFlSettings
from fedhet.models import base_and_width, is_registered, narrow_name
from fedhet.wire.knowledge import Knowledge


class HeteroFlClient(FedAvgClient):
    """Client that trains a submodel with the width of its level."""

    settings: HeteroFlSettings

    def prepare(self) -> None:
        """Select the submodel of the client's level, unless the site has configured a submodel."""
        narrow = narrow_name(self.info.model, self.settings.width_of(self.node.partition))
        # Otherwise, the site has configured a submodel, or a model that the server rejects.
        if is_registered(narrow):
            self.info = replace(self.info, model=narrow)
        self.absent = torch.ones(self.info.classes, dtype=torch.bool, device=self.compute.device)
        """Mask [C] of the classes without samples on the client."""
        if self.settings.masked:
            self.absent[self.y] = False

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train the submodel, and compute the statistics of its batch norms."""
        rate = self._rate()
        narrow = self.settings.scaler and rate < 1
        scaler = scaling(self.network.extractor, rate) if narrow else contextlib.nullcontext()
        with scaler, frozen_statistics(self.network):
            reply = super().train(round, knowledge)
        self._query(self.network)
        return reply

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the model after training, and the client's part of the global model.

        At the widest level, this part is the full global model, which the paper evaluates; it is
        also returned as the kind "server".
        """
        models = super().eval_models(knowledge)
        if "global" in models:
            self._query(models["global"])
            if self._rate() == 1:
                models["server"] = models["global"]
        return models

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the trained tensors, and the client's classes if `masked` is set."""
        sent = super().reply(local)
        if self.settings.masked:
            sent["labels"] = (~self.absent).nonzero().flatten().cpu().numpy()
        return sent

    @property
    def own_classes(self) -> LabelSpace:
        """Module that restricts losses to the unmasked classes, or to the client's label space."""
        return MaskedClasses(self.absent) if self.settings.masked else super().own_classes

    def _rate(self) -> float:
        """Return the width of the client's model relative to the global model."""
        return base_and_width(self.info.model)[1] / max(self.settings.widths)

    def _query(self, model: nn.Module) -> None:
        if not len(self.x) and any(isinstance(part, _BatchNorm) for part in model.modules()):
            raise MissingSamplesError(
                f"{self.info.name}: the statistics of batch norms require the training samples"
            )
        query_statistics(model, self.x, self.compute, self.generator(0, "statistics"))


class MaskedClasses(LabelSpace):
    """Loss restriction that masks the logits of classes absent from the client."""

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, C] with 0 for absent classes, and y [N] unchanged.

        Masked logits have no gradient, and contribute exp(0) to the softmax denominator.
        """
        return logits.masked_fill(self.space, 0.0), y
