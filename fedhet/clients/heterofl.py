"""HeteroFL, client half: local training of a sub-model (Algorithm 1; Section 3).

Static batch norm: the batch norms of a model are given their statistics after training, from the
client's own training data, and these never travel. The paper queries all clients for those of the
global model (ours: each client has its own for every model that it evaluates).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import Tensor, nn

from fedhet.algorithms.local_models import LocalModel
from fedhet.algorithms.weights import query_statistics, scaling
from fedhet.base.arrays import Array
from fedhet.clients.fedavg import FedAvgClient
from fedhet.learning.training import LabelSpace, frozen_statistics
from fedhet.methods.heterofl import HeteroFlSettings
from fedhet.models import base_and_width, is_registered, narrow_name
from fedhet.wire.knowledge import Knowledge


class HeteroFlClient(FedAvgClient):
    """Trains the run's model at the width of its own level."""

    settings: HeteroFlSettings

    def prepare(self) -> None:
        """Narrow the client's model to its level; a site may name a narrow model itself."""
        narrow = narrow_name(self.info.model, self.settings.width_of(self.node.partition))
        if is_registered(narrow):  # otherwise the server refuses the run's model
            self.info = replace(self.info, model=narrow)
        self.absent = torch.ones(self.info.classes, dtype=torch.bool, device=self.compute.device)
        """The classes that the client has no samples of, bool [C]."""
        self.absent[self.y] = False

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train the sub-model, and query the statistics of its batch norms."""
        rate = self._rate()
        narrow = self.settings.scaler and rate < 1
        scaler = scaling(self.network.extractor, rate) if narrow else contextlib.nullcontext()
        with scaler, frozen_statistics(self.network):
            answer = super().train(round, knowledge)
        self._query(self.network)
        return answer

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the model after training, and the client's part of the global model.

        At the widest level that part is the whole, which the paper judges: the kind `server`.
        """
        models = super().eval_models(knowledge)
        if "global" in models:
            self._query(models["global"])
            if self._rate() == 1:
                models["server"] = models["global"]
        return models

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the trained tensors and, for the masked cross-entropy, the client's classes."""
        sent = super().reply(local)
        if self.settings.masked:
            sent["labels"] = (~self.absent).nonzero().flatten().cpu().numpy()
        return sent

    @property
    def own_classes(self) -> LabelSpace:
        """What a loss sees of logits and classes: masked ones, or those of its label space."""
        return MaskedClasses(self.absent) if self.settings.masked else super().own_classes

    def _rate(self) -> float:
        """Return the width of the client's model, as a share of the global model's."""
        return base_and_width(self.info.model)[1] / max(self.settings.widths)

    def _query(self, model: nn.Module) -> None:
        query_statistics(model, self.x, self.compute, self.generator(0, "statistics"))


class MaskedClasses(LabelSpace):
    """All classes, of which the logits of absent ones are masked in a loss."""

    def forward(self, logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [N, C], 0 for the absent classes, which are the space; and y [N] as it is.

        Their outputs get no gradient; in the sum over classes each stands as exp(0).
        """
        return logits.masked_fill(self.space, 0.0), y
