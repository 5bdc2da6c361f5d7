"""FedHe strategy: class-wise averages of the clients' logits.

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
    """Strategy that averages the logits of each class over the clients that have the class.

    The average includes clients that replied in previous rounds, because the paper's clients train
    asynchronously.
    """

    spec = SPEC
    settings: FedHeSettings
    averaged_field: ClassVar[str] = "logits"
    """Name of the reply's field to average."""

    def init(self) -> None:
        """Start without averages, so that clients first train only on their own data."""
        self.latest: dict[str, dict[str, Array]] = {}
        """Class means of each client, as returned by `merge`."""
        self._build_instruction()

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the clients' class means, and return the number of averaged classes."""
        for reply in replies:
            name = reply.client.name
            tensors = dict(reply.knowledge.tensors)
            if reply.age:
                tensors["weight"] = np.array(reply.freshness)
            self.latest[name] = self.merge(self.latest.get(name), tensors)
        self._build_instruction()
        return {"classes_covered": float(len(self.instruction.tensors["classes"]))}

    def merge(
        self, before: Mapping[str, Array] | None, reply: dict[str, Array]
    ) -> dict[str, Array]:
        """Return a client's class means, from its latest reply or averaged over its replies.

        A late reply has a reduced `weight`.

        Args:
            before: Stored class means of the client, or None before its first reply.
            reply: Tensors of the reply; a late reply includes its weight.
        """
        if self.settings.replies == "latest":
            return reply
        reply["replies"] = np.ones(len(reply["classes"])) * reply.pop("weight", 1.0)
        if before is None:
            return reply
        both = before, reply
        parts = [(means["classes"], means["logits"], means["replies"]) for means in both]
        classes, means = class_average(parts)
        counts = class_totals(classes, [(present, count) for present, _, count in parts])
        return {"classes": classes, "logits": means, "replies": counts}

    def forget(self, client: str) -> None:
        """Discard a client's class means."""
        self.latest.pop(client, None)
        self._build_instruction()

    def state_dict(self) -> dict[str, Array]:
        """Return the clients' class means."""
        state: dict[str, Array] = {}
        for client, tensors in self.latest.items():
            state |= grouped(f"latest/{client}", tensors)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.latest = groups(state, "latest")
        self._build_instruction()

    def weights(self, tensors: Mapping[str, Array]) -> Array:
        """Return the weights [P] of a client's class means in the averages."""
        return np.ones(len(tensors["classes"])) * tensors.get("weight", 1.0)

    def _build_instruction(self) -> None:
        """Build the instruction for all clients. It is empty before the first reply."""
        latest = [self.latest[name] for name in sorted(self.latest)]
        self.instruction = Knowledge()
        if latest:
            parts = [(m["classes"], m[self.averaged_field], self.weights(m)) for m in latest]
            classes, means = class_average(parts)
            self.instruction = Knowledge({"classes": classes, self.averaged_field: means})
