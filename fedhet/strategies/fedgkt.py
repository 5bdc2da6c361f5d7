"""Strategy of FedGKT: a large model that is trained on the features of edge models.

Chaoyang He, Murali Annavaram and Salman Avestimehr, Group Knowledge Transfer: Federated Learning of
Large CNNs at the Edge, NeurIPS 2020, Algorithm 1, ServerExecute. The paper's features are feature
maps of one architecture. Here, features are vectors of the same width for all edge models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms.distillation import distillation_loss
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.methods.fedgkt import SPEC, FedGktSettings
from fedhet.models import build, to_arrays
from fedhet.server.learner import Learner
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

MIN_SAMPLES = 2
"""Minimum number of samples in a reply, required for training."""


class FedGktStrategy(HetStrategy):
    """Trains the server model on the clients' features, and sends each client its samples' logits.

    The evaluated model is an edge extractor followed by the server model. For this, the server
    sends its model, and each client evaluates it with its own extractor as the kind "server".
    """

    spec = SPEC
    settings: FedGktSettings

    def init(self) -> None:
        """Build the server model."""
        name, width = self.settings.server_model, self.settings.feature_dim
        model = build(name, (width,), self.task.classes, seed=self.run.seed)
        self.learner = Learner(model, self.run)
        self.logits: dict[str, Array] = {}
        """Server logits of each client's samples, as of the client's last round."""
        self._eval_instruction: Knowledge | None = None
        """Evaluation instruction with the server model; None after an aggregation."""

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the server logits of the client's samples, if they exist."""
        logits = self.logits.get(client.name)
        return Knowledge({} if logits is None else {"logits": logits})

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the server model."""
        if self._eval_instruction is None:
            weights = grouped("server", to_arrays(self.learner.model))
            self._eval_instruction = Knowledge(weights)
        return self._eval_instruction

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply.

        Raises KnowledgeError if it has too few samples, or more than the client's number of
        samples, which `engine.samples-cap` limits. Otherwise a client could dominate the training
        of the server model.
        """
        samples = len(reply.knowledge.tensors["labels"])
        if MIN_SAMPLES <= samples <= reply.samples:
            return reply
        fault = f"expected {MIN_SAMPLES} to {reply.samples} samples, got {samples}"
        raise KnowledgeError(reply.client.name, "labels", fault)

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on the features, logits and labels of the round.

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
        """Discard the logits of a client's samples."""
        self.logits.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the server model, and its logits of each client's samples."""
        return self.learner.state_dict() | grouped("logits", self.logits)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._eval_instruction = None
        self.learner.load_state_dict(state)
        self.logits = group(state, "logits")
