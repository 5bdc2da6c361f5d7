"""FedHe, server half: the mean of the clients' class logits.

Yun Hin Chan and Edith C. H. Ngai, FedHe: Heterogeneous Models and Communication-Efficient Federated
Learning, MSN 2021, arXiv:2110.09910.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np

from fedhet.algorithms.classwise import class_average, class_totals
from fedhet.base.arrays import Array, grouped, groups
from fedhet.methods.fedhe import SPEC, FedHeSettings
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.knowledge import Knowledge


class FedHeStrategy(HetStrategy):
    """Averages the logits of each class over the clients that have it, for all clients alike.

    A client counts from whichever round: the paper's clients train asynchronously.
    """

    spec = SPEC
    settings: FedHeSettings
    vectors: ClassVar[str] = "logits"
    """The field that is averaged."""

    def init(self) -> None:
        """Start without knowledge: in the first round, clients train on their own data only."""
        self.latest: dict[str, dict[str, Array]] = {}
        """What is kept of each client: the tensors of `kept`."""
        self._instruct_all()

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the clients' class means; return the number of classes that any client has."""
        for reply in replies:
            name = reply.client.name
            tensors = dict(reply.knowledge.tensors)
            if reply.age:
                tensors["weight"] = np.array(reply.freshness)
            self.latest[name] = self.kept(self.latest.get(name), tensors)
        self._instruct_all()
        return {"classes_covered": float(len(self.instruction.tensors["classes"]))}

    def kept(self, before: Mapping[str, Array] | None, reply: dict[str, Array]) -> dict[str, Array]:
        """Return what is kept of a client: its reply, or the mean of all, with their number.

        A late reply counts less in either: `weight` is its factor.
        """
        if self.settings.replies == "latest":
            return reply
        reply["replies"] = np.ones(len(reply["classes"])) * reply.pop("weight", 1.0)
        if before is None:
            return reply
        parts = [(each["classes"], each["logits"], each["replies"]) for each in (before, reply)]
        classes, means = class_average(parts)
        counts = class_totals(classes, [(present, count) for present, _, count in parts])
        return {"classes": classes, "logits": means, "replies": counts}

    def forget(self, client: str) -> None:
        """Drop a client's class means."""
        self.latest.pop(client, None)
        self._instruct_all()

    def state_dict(self) -> dict[str, Array]:
        """Return what is kept of the clients."""
        kept: dict[str, Array] = {}
        for client, tensors in self.latest.items():
            kept |= grouped(f"latest/{client}", tensors)
        return kept

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.latest = groups(state, "latest")
        self._instruct_all()

    def weights(self, tensors: Mapping[str, Array]) -> Array:
        """Return a client's weight [P] in the mean of each class that it has."""
        return np.ones(len(tensors["classes"])) * tensors.get("weight", 1.0)

    def _instruct_all(self) -> None:
        """Build the one instruction that all clients share; it is empty before any reply."""
        latest = [self.latest[name] for name in sorted(self.latest)]
        self.instruction = Knowledge()
        if latest:
            parts = [(each["classes"], each[self.vectors], self.weights(each)) for each in latest]
            classes, means = class_average(parts)
            self.instruction = Knowledge({"classes": classes, self.vectors: means})
