"""FedProto, server half: global prototypes (Algorithm 1; Eq. 6).

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
    """Averages each class's prototypes over the clients that have it, each client's latest.

    Eq. 6 divides the mean by the number of these clients once more, which would draw prototypes to
    zero; it is read as the mean weighted by samples.
    """

    spec = SPEC
    settings: FedProtoSettings  # type: ignore[assignment]
    vectors: ClassVar[str] = "features"

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the prototypes, once there are any."""
        return self.instruct(round, client) if self.latest else None

    def kept(self, before: Mapping[str, Array] | None, reply: dict[str, Array]) -> dict[str, Array]:
        """Return the reply: the client's latest."""
        return reply

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply, with `counts` that sum to at most the client's weight in averages."""
        counts = cap_counts(reply.knowledge.tensors["counts"], reply.samples)
        return reply.with_knowledge(reply.knowledge.replacing({"counts": counts}))

    def weights(self, tensors: Mapping[str, Array]) -> Array:
        """Return the client's samples of each class (Eq. 6), or 1."""
        by_samples = self.settings.weighting == "samples"
        alike = super().weights(tensors)
        return tensors["counts"] * alike if by_samples else alike
