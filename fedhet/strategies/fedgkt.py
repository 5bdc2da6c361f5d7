"""FedGKT, server half: a large model trained on the features that edge models extract.

Chaoyang He, Murali Annavaram and Salman Avestimehr, Group Knowledge Transfer: Federated Learning of
Large CNNs at the Edge, NeurIPS 2020, Algorithm 1, "ServerExecute". Features are vectors of one
width, which every edge model has (ours): the paper's are feature maps of one architecture.
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
"""The smallest number of samples in a reply: training needs as many."""


class FedGktStrategy(HetStrategy):
    """Trains its model on the clients' features, and sends each client the logits of its samples.

    The model that is judged is an edge extractor followed by the server's model. So the server
    sends its model for evaluation, and each client evaluates it after its own extractor: the kind
    `server`.
    """

    spec = SPEC
    settings: FedGktSettings

    def init(self) -> None:
        """Build the server's model; no client has sent anything yet."""
        name, width = self.settings.server_model, self.settings.feature_dim
        model = build(name, (width,), self.task.classes, seed=self.run.seed)
        self.learner = Learner(model, self.run)
        self.logits: dict[str, Array] = {}
        """The server's logits of each client's samples, as of its last round."""
        self._judged: Knowledge | None = None
        """The server's model as it is sent for evaluation, since the last aggregation."""

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send a client the server's logits of its samples."""
        known = self.logits.get(client.name)
        return Knowledge({} if known is None else {"logits": known})

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the server's model."""
        if self._judged is None:
            self._judged = Knowledge(grouped("server", to_arrays(self.learner.model)))
        return self._judged

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply. Raises KnowledgeError if it has too few samples, or too many.

        Too many are more than its weight in averages ('engine.samples-cap'): no client can make the
        server train on more samples than others may.
        """
        samples, most = len(reply.knowledge.tensors["labels"]), reply.samples
        if MIN_SAMPLES <= samples <= most:
            return reply
        fault = f"of {samples} samples, must be of {MIN_SAMPLES} at least"
        if samples > most:
            fault = f"of {samples} samples, the client counts with {most}"
        raise KnowledgeError(reply.client.name, "labels", fault)

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on the round's features, logits and labels. Raises DivergedError."""
        self._judged = None
        sent = [reply.knowledge.tensors for reply in replies]
        device = self.learner.compute.device
        features, edge, labels = (
            torch.from_numpy(np.concatenate([tensors[name] for tensors in sent])).to(device)
            for name in ("features", "logits", "labels")
        )
        own, labels = self.settings, labels.long()

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = self.learner.model(x).float()
            divergence = distillation_loss(edge[rows], logits, own.temperature)
            return F.cross_entropy(logits, labels[rows]) + own.alpha * divergence

        numbers = torch.arange(len(labels), device=labels.device)
        logits = self.learner.train(round, features, numbers, loss_of, epochs=own.server_epochs)
        ends = np.cumsum([len(tensors["labels"]) for tensors in sent])
        parts = np.split(logits, ends[:-1])
        self.logits |= {r.client.name: part for r, part in zip(replies, parts, strict=True)}
        return {"server_accuracy": float((logits.argmax(1) == labels.cpu().numpy()).mean())}

    def forget(self, client: str) -> None:
        """Drop the logits of a client's samples; what the model has learned stays."""
        self.logits.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the server's model, and its logits of each client's samples."""
        return self.learner.state_dict() | grouped("logits", self.logits)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._judged = None
        self.learner.load_state_dict(state)
        self.logits = group(state, "logits")
