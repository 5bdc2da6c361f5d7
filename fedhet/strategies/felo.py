"""Felo strategy: Algorithm 1, "Server process".

Yun-Hin Chan and Edith C. H. Ngai, Exploiting Features and Logits in Heterogeneous Federated
Learning, Computer Networks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedhet.algorithms.classwise import ClassMeans, average, cap_counts
from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import Array, Arrays, group, grouped, groups
from fedhet.config.resolve import Config
from fedhet.methods.felo import SPEC, FeloSettings
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FeloStrategy(HetStrategy):
    """Strategy that averages features and logits per class, and weights per architecture."""

    spec = SPEC
    settings: FeloSettings

    def init(self) -> None:
        """Start without averages, so that clients first train only on their own data."""
        self.means: dict[str, ClassMeans] = {}
        """Server dataset: the latest class means of each client."""
        self.freshness: dict[str, float] = {}
        """Weights (below 1) of class means that arrived late, by client."""
        self.weights: dict[str, dict[str, Array]] = {}
        """Averaged weights by architecture."""
        self._instructions_by_model: dict[str, Knowledge] = {}
        """Instructions of the current round by architecture."""

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the class averages, and the weights of the client's architecture (line 6)."""
        if client.model not in self._instructions_by_model:
            weights = grouped("weights", self.weights.get(client.model, {}))
            entries = self.entries() if self.means else {}
            self._instructions_by_model[client.model] = Knowledge(weights | entries)
        return self._instructions_by_model[client.model]

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the instruction, or None if the client's architecture has no averaged weights."""
        return self.instruct(round, client) if client.model in self.weights else None

    def evaluates_after(self, round: int) -> bool:
        """Return whether the clients' weights are averaged."""
        return self.settings.share_weights

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply, with class counts capped at the client's number of samples."""
        counts = cap_counts(reply.knowledge.tensors["counts"], reply.samples)
        return reply.with_knowledge(reply.knowledge.replacing({"counts": counts}))

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the clients' class means, and average weights by architecture (lines 3 to 5)."""
        for reply in replies:
            sent = reply.knowledge.tensors
            self.means[reply.client.name] = ClassMeans(
                sent["classes"], sent["features"], sent["logits"], sent["counts"]
            )
            self.freshness.pop(reply.client.name, None)
            if reply.age:
                self.freshness[reply.client.name] = reply.freshness
        by_model: dict[str, list[tuple[Arrays, float]]] = {}
        for reply in replies:  # Average the weights of each architecture (line 5).
            if weights := reply.knowledge.group("weights"):
                by_model.setdefault(reply.client.model, []).append((weights, reply.weight))
        self.weights |= {model: average_weights(models) for model, models in by_model.items()}
        self._instructions_by_model = {}
        return {"classes_covered": float(len(self.average().classes))}

    def forget(self, client: str) -> None:
        """Discard a client's class means, and the averaged weights of its architecture.

        Clients of this architecture continue from their own weights until the next average.
        """
        self.means.pop(client, None)
        self.freshness.pop(client, None)
        self.weights.pop(self.log.models.get(client, ""), None)
        self._instructions_by_model = {}

    def state_dict(self) -> dict[str, Array]:
        """Return the server dataset and the averaged weights."""
        state: dict[str, Array] = {}
        for client, means in self.means.items():
            state |= grouped(f"means/{client}", dict(vars(means)))
        state |= grouped("freshness", {k: np.array(v) for k, v in self.freshness.items()})
        for model, weights in self.weights.items():
            state |= grouped(f"weights/{model}", weights)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.means = {name: ClassMeans(**parts) for name, parts in groups(state, "means").items()}
        self.freshness = {name: float(value) for name, value in group(state, "freshness").items()}
        self.weights = groups(state, "weights")

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the average of an architecture, if it has one."""
        settings: Any = config.method_settings
        weights = group(state, f"weights/{client.model}")
        width = settings.feature_dim
        return {"global": ServerModel(weights, client.model, width)} if weights else {}

    def average(self) -> ClassMeans:
        """Return the class averages over all clients that have replied so far."""
        names = sorted(self.means)
        latest = [self.means[name] for name in names]
        factors = [self.freshness.get(name, 1.0) for name in names]
        by_samples = self.settings.weighting == "samples"
        return average(latest, by_samples=by_samples, factors=factors)

    def entries(self) -> dict[str, Array]:
        """Return the averaged classes, their features, and their logits.

        This method is called only after the first reply. Velo replaces the features with synthetic
        features.
        """
        mean = self.average()
        return {"classes": mean.classes, "features": mean.features, "logits": mean.logits}
