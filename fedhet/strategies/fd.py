"""FD, server half: Algorithm 1, "Global ensembling phase".

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
    """Averages the probabilities of each class, for each client over all others.

    Of each client its latest reply counts (ours): in the paper all clients answer in every round.
    """

    spec = SPEC
    settings: FdSettings  # type: ignore[assignment]
    vectors: ClassVar[str] = "probabilities"

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the mean over the other clients of each class that they have (line 15)."""
        if not self.latest:
            return Knowledge()
        own = self.latest.get(client.name, {})
        present = own.get("classes", np.zeros(0, np.int64))
        vectors = own.get("probabilities", np.zeros((0, client.classes)))
        classes, means = means_of_others(self._totals, present, vectors)
        return Knowledge({"classes": classes, "probabilities": means})

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the clients' class means; return how many classes are known, and taught."""
        metrics = super().aggregate(round, replies)
        totals = self._totals
        present = [reply.knowledge.tensors["classes"] for reply in replies]
        others = [totals.clients - np.isin(totals.classes, own) for own in present]
        return {**metrics, "classes_taught": float(np.mean([(n > 0).sum() for n in others]))}

    def kept(self, before: Mapping[str, Array] | None, reply: dict[str, Array]) -> dict[str, Array]:
        """Return the reply: the client's latest."""
        return reply

    def _instruct_all(self) -> None:
        """Sum the clients' latest probabilities (line 12), from which each one's are taken out."""
        super()._instruct_all()
        latest = [self.latest[name] for name in sorted(self.latest)]
        parts = [(each["classes"], each["probabilities"]) for each in latest]
        self._totals = sum_by_class(parts, self.task.classes)
