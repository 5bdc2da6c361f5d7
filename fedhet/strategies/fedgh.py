"""FedGH strategy: a global head trained on the clients' class means.

Liping Yi, Gang Wang, Xiaoguang Liu, Zhuan Shi and Han Yu, FedGH: Heterogeneous Federated Learning
with Generalized Global Header, ACM Multimedia 2023, arXiv:2303.13137.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms.feature_models import train_head
from fedhet.base.errors import DivergedError
from fedhet.base.seeding import torch_generator
from fedhet.methods.fedgh import SPEC, FedGhSettings
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import Reply
from fedhet.strategies.fedavg import FedAvgStrategy
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.identity import SERVER


class FedGhStrategy(FedAvgStrategy):
    """Strategy that trains a global head on the clients' class means, and sends the head."""

    spec = SPEC
    settings: FedGhSettings

    def init(self) -> None:
        """Build a new head."""
        model = self.build_model(feature_dim=self.settings.width)
        self._head = nn.ModuleDict({"classifier": model.classifier})
        """Template of the head. For training, the current weights are loaded into a copy."""
        self._set_averages({"weights": to_arrays(self._head)})

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train the head on all class means received in the round.

        Raises DivergedError if training diverged; the head is then unchanged.
        """
        sent = [reply.knowledge.tensors for reply in replies]
        features = torch.tensor(np.concatenate([tensors["features"] for tensors in sent]))
        labels = torch.tensor(np.concatenate([tensors["classes"] for tensors in sent]))
        metrics = {"classes_covered": float(len(set(labels.tolist())))}
        if len(labels) < 2:
            return metrics
        return {**metrics, "head_loss": self.train_head(round, train_head, features, labels)}

    def train_head(
        self, round: int, train: Callable[..., float], features: Tensor, labels: Tensor
    ) -> float:
        """Train the head with `train`, and return its loss.

        Raises DivergedError if training diverged; the head is then unchanged.
        """
        settings = self.settings
        head = load_weights(copy.deepcopy(self._head), self.averaged["weights"])
        loss = train(
            head["classifier"],
            features,
            labels,
            epochs=settings.server_epochs,
            batch_size=settings.server_batch_size,
            lr=settings.server_lr,
            generator=torch_generator(self.run.seed, SERVER, round, "head"),
        )
        weights = to_arrays(head)
        if not all((np.abs(value) <= MAX_MAGNITUDE).all() for value in weights.values()):
            raise DivergedError(f"training of the head diverged: its loss is {loss:.3g}")
        self._set_averages({"weights": weights})
        return loss
