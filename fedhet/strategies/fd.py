"""FD strategy: Algorithm 1, "Global ensembling phase".

Eunjeong Jeong, Seungeun Oh, Hyesung Kim, Jihong Park, Mehdi Bennis and Seong-Lyun Kim,
Communication-Efficient On-Device Machine Learning: Federated Distillation and Augmentation under
Non-IID Private Data, NeurIPS 2018 workshop on Machine Learning on the Phone, arXiv:1811.11479.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from fedhet.algorithms.classwise import means_of_others, sum_by_class
from fedhet.base.arrays import Array
from fedhet.methods.fd import SPEC, FdSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedhe import FedHeStrategy
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FdStrategy(FedHeStrategy):
    """Strategy that sends each client the class-wise mean probabilities of all other clients.

    Each client contributes its latest reply. In the paper, all clients reply in every round.
    """

    spec = SPEC
    settings: FdSettings  # type: ignore[assignment]
    averaged_field: ClassVar[str] = "probabilities"

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the class means over all other clients (line 15)."""
        if not self.latest:
            return Knowledge()
        latest = self.latest.get(client.name, {})
        present = latest.get("classes", np.zeros(0, np.int64))
        vectors = latest.get("probabilities", np.zeros((0, client.classes)))
        classes, means = means_of_others(self._totals, present, vectors)
        return Knowledge({"classes": classes, "probabilities": means})

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the class means, and return how many classes were averaged and taught.

        `classes_taught` is the number of classes that a client learns from other clients, averaged
        over the clients that replied.
        """
        metrics = super().aggregate(round, replies)
        totals = self._totals
        present = [reply.knowledge.tensors["classes"] for reply in replies]
        others = [totals.clients - np.isin(totals.classes, classes) for classes in present]
        return {**metrics, "classes_taught": float(np.mean([(n > 0).sum() for n in others]))}

    def merge(
        self, before: Mapping[str, Array] | None, reply: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the latest reply, to replace the client's earlier replies."""
        return reply

    def _build_instruction(self) -> None:
        """Sum the clients' latest probabilities (line 12)."""
        super()._build_instruction()
        latest = [self.latest[name] for name in sorted(self.latest)]
        parts = [(tensors["classes"], tensors["probabilities"]) for tensors in latest]
        self._totals = sum_by_class(parts, self.reference_client.classes)
