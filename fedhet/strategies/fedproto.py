"""FedProto, server half: global prototypes (Algorithm 1; Eq. 6).

Yue Tan, Guodong Long, Lu Liu, Tianyi Zhou, Qinghua Lu, Jing Jiang and Chengqi Zhang, FedProto:
Federated Prototype Learning across Heterogeneous Clients, AAAI 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from fedhet.arrays import Array
from fedhet.methods.registry import MethodSpec
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.strategies.base import Reply
from fedhet.strategies.fedhe import FedHeStrategy
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedProtoSettings(MethodSettings):
    """Settings of FedProto."""

    lambda_: NonNegative = Field(1.0, description="weight of the distance to the prototypes")
    feature_dim: Count = Field(64, description="width of the features and prototypes, D")
    weighting: Literal["samples", "clients"] = Field(
        "samples",
        description="does a client count by its samples of a class in the class's prototype, as in "
        "Eq. 6, or once, as in the authors' code?",
    )


def prototype_sizes(settings: FedProtoSettings, client: ClientInfo) -> Sizes:
    """Return the axes C and D (feature width)."""
    return Sizes({"C": client.classes, "D": settings.feature_dim})


class FedProtoStrategy(FedHeStrategy):
    """Averages each class's prototypes over the clients that have it, each client's latest.

    Eq. 6 divides the mean by the number of these clients once more, which would draw prototypes to
    zero; it is read as the mean weighted by samples.
    """

    spec = MethodSpec(
        title="class prototypes: mean features, to which all clients' features are drawn",
        paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients",
        headline="personal",
        settings=FedProtoSettings,
        sizes=prototype_sizes,
        kinds=("private", "prototype"),
    )
    settings: FedProtoSettings
    sends = Contract(
        (
            TensorField(
                "classes",
                "int64",
                ("P",),
                "the classes with a prototype",
                required=False,
                ids="C",
                needs=("features",),
            ),
            TensorField(
                "features",
                "float32",
                ("P", "D"),
                "global prototype of each",
                required=False,
                needs=("classes",),
            ),
        )
    )
    vectors: ClassVar[str] = "features"

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the last round's prototypes; earlier, clients evaluate those they trained with."""
        last = round == self.run.rounds and self.latest
        return self.instruct(round, client) if last else None

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply, with counts that sum to no more samples than its client counts with."""
        return reply.with_counts_capped()

    def weights(self, tensors: Mapping[str, Array]) -> Array:
        """Return the client's samples of each class (Eq. 6), or 1."""
        by_samples = self.settings.weighting == "samples"
        return tensors["counts"] if by_samples else super().weights(tensors)
