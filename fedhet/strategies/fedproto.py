"""FedProto strategy: global prototypes (Algorithm 1, Eq. 6).

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang and Chengqi Zhang, FedProto:
Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from fedhet.algorithms.classwise import cap_counts
from fedhet.base.arrays import Array
from fedhet.methods.fedproto import SPEC, FedProtoSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedhe import FedHeStrategy
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedProtoStrategy(FedHeStrategy):
    """Strategy that averages each class's latest prototypes over the clients that have the class.

    Eq. 6 additionally divides the weighted mean by the number of these clients, which would shrink
    the prototypes toward zero. This division is omitted.
    """

    spec = SPEC
    settings: FedProtoSettings  # type: ignore[assignment]
    averaged_field: ClassVar[str] = "features"

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the prototypes, if they exist."""
        return self.instruct(round, client) if self.latest else None

    def merge(
        self, before: Mapping[str, Array] | None, reply: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the latest reply, to replace the client's earlier replies."""
        return reply

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply, with class counts capped at the client's number of samples."""
        counts = cap_counts(reply.knowledge.tensors["counts"], reply.samples)
        return reply.with_knowledge(reply.knowledge.replacing({"counts": counts}))

    def weights(self, tensors: Mapping[str, Array]) -> Array:
        """Return the client's number of samples per class (Eq. 6), or equal weights."""
        by_samples = self.settings.weighting == "samples"
        weights = super().weights(tensors)
        return tensors["counts"] * weights if by_samples else weights
