"""FedProto: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from fedhet.algorithms.choices import PrototypeDistance
from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection
from fedhet.settings.defence import ROBUST
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sizes, TensorField, all_or_none
from fedhet.wire.identity import ClientInfo


class PrototypeSettings(MethodSettings):
    """Settings of the clients of FedProto, and of methods that extend it."""

    feature_dim: Count = Field(64, description="width of the features and prototypes, D")

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """The weight of the distance to the prototypes, lambda, and the kind of distance."""
        raise NotImplementedError


class FedProtoSettings(PrototypeSettings):
    """Settings of FedProto."""

    lambda_: NonNegative = Field(
        1.0,
        description="weight of the mean squared error between features and prototypes, lambda",
    )
    weighting: Literal["samples", "clients"] = Field(
        "samples",
        description="does a client count by its samples of a class in the class's prototype, as in "
        "Eq. 6, or once, as in the authors' code?",
    )

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """The weight of the distance to the prototypes, and the distance of the authors' code."""
        return self.lambda_, "mse"


def prototype_sizes(settings: PrototypeSettings, client: ClientInfo) -> Sizes:
    """Return the axes C and D (feature width)."""
    return Sizes({"C": client.classes, "D": settings.feature_dim})


INSTRUCTIONS = Contract(
    all_or_none(
        TensorField("classes", "int64", ("P",), "the classes with a prototype", ids="C"),
        TensorField("features", "float32", ("P", "D"), "global prototype of each"),
    )
)
REPLIES = Contract(
    (
        TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
        TensorField("features", "float32", ("P", "D"), "prototype of each: mean features"),
        TensorField("counts", "int64", ("P",), "samples of each class", low=1),
    )
)
SPEC = MethodSpec(
    title="class prototypes: mean features, to which all clients' features are drawn",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients",
    headline="personal",
    late="averaged",
    settings=FedProtoSettings,
    sizes=prototype_sizes,
    kinds=("private", "prototype"),
    defences=ROBUST,
    instructions=INSTRUCTIONS,
    replies=REPLIES,
    privacy=Protection(CLASS_SUMS, vectors=1),
)
