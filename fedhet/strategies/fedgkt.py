"""FedGKT strategy: a large server model trained on features from edge models.

Chaoyang He, Murali Annavaram and Salman Avestimehr, Group Knowledge Transfer: Federated Learning of
Large CNNs at the Edge, NeurIPS 2020, Algorithm 1, ServerExecute. The paper's features are feature
maps of one architecture. Here, features are vectors of the same width for all edge models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms.distillation import distillation_loss
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.config.resolve import Config
from fedhet.methods.fedgkt import SPEC, FedGktSettings
from fedhet.models import build, to_arrays
from fedhet.server.learner import Learner
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

MIN_SAMPLES = 2
"""Minimum number of samples in a reply that the server can train on."""


class FedGktStrategy(HetStrategy):
    """Strategy that trains the server model on the clients' features and returns its logits.

    Each client receives the server's logits for its own training samples. The evaluated model (kind
    "server") consists of a client's extractor and the server model, so clients receive the server
    model for evaluation.
    """

    spec = SPEC
    settings: FedGktSettings

    def init(self) -> None:
        """Build the server model."""
        name, width = self.settings.server_model, self.settings.feature_dim
        model = build(name, (width,), self.reference_client.classes, seed=self.run.seed)
        self.learner = Learner(model, self.run)
        self.logits: dict[str, Array] = {}
        """Server logits for each client's samples, from the client's last round."""
        self._eval_instruction: Knowledge | None = None
        """Cached evaluation instruction with the server model; an aggregation resets it to None."""

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the server's logits for the client's samples, if they exist."""
        logits = self.logits.get(client.name)
        return Knowledge({} if logits is None else {"logits": logits})

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the server model, which clients evaluate on top of their extractors."""
        if self._eval_instruction is None:
            weights = grouped("server", to_arrays(self.learner.model))
            self._eval_instruction = Knowledge(weights)
        return self._eval_instruction

    def accept(self, round: int, reply: Reply) -> Reply:
        """Check the number of samples, and return the reply.

        Raises KnowledgeError if the reply has too few samples, or more samples than the client
        reported when it joined (limited by `engine.samples-cap`). Without this check, a client
        could dominate the training of the server model.
        """
        samples = len(reply.knowledge.tensors["labels"])
        limit = self.members[reply.client.name].info.samples
        if MIN_SAMPLES <= samples <= limit:
            return reply
        fault = f"expected {MIN_SAMPLES} to {limit} samples, got {samples}"
        raise KnowledgeError(reply.client.name, "labels", fault)

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train the server model on the features, logits and labels received in the round.

        Raises DivergedError if training diverged.
        """
        self._eval_instruction = None
        sent = [reply.knowledge.tensors for reply in replies]
        device = self.learner.compute.device
        features, edge, labels = (
            torch.from_numpy(np.concatenate([tensors[name] for tensors in sent])).to(device)
            for name in ("features", "logits", "labels")
        )
        settings, labels = self.settings, labels.long()

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.learner.model(x).float()
            divergence = distillation_loss(edge[rows], logits, settings.temperature)
            return F.cross_entropy(logits, labels[rows]) + settings.alpha * divergence

        numbers = torch.arange(len(labels), device=labels.device)
        epochs = settings.server_epochs
        logits = self.learner.train(round, features, numbers, loss_of, epochs=epochs)
        ends = np.cumsum([len(tensors["labels"]) for tensors in sent])
        parts = np.split(logits, ends[:-1])
        self.logits |= {r.client.name: part for r, part in zip(replies, parts, strict=True)}
        return {"server_accuracy": float((logits.argmax(1) == labels.cpu().numpy()).mean())}

    def forget(self, client: str) -> None:
        """Discard the logits for a client's samples."""
        self.logits.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the server model and its logits for each client's samples."""
        return self.learner.state_dict() | grouped("logits", self.logits)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._eval_instruction = None
        self.learner.load_state_dict(state)
        self.logits = group(state, "logits")

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the server model, which maps features of an edge model."""
        settings: Any = config.method_settings
        weights, name = group(state, "model"), settings.server_model
        return {"server": ServerModel(weights, name, field="server", needs_extractor=True)}
