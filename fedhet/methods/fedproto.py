"""FedProto: its settings, and the messages between its halves."""

from typing import Literal

from pydantic import Field

from fedhet.algorithms import PrototypeDistance
from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.wire.contract import Contract, TensorField, all_or_none


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
        1.0, description="weight of the mean squared error between features and prototypes, lambda"
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


SPEC = MethodSpec(
    title="class prototypes (mean features) that attract all clients' features",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients",
    headline="personal",
    late="averaged",
    settings=FedProtoSettings,
    kinds=("private", "prototype"),
    defenses=ROBUST,
    instructions=Contract(
        all_or_none(
            TensorField("classes", "int64", ("P",), "the classes with a prototype", ids="C"),
            TensorField("features", "float32", ("P", "D"), "global prototype of each"),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("features", "float32", ("P", "D"), "prototype of each: mean features"),
            TensorField("counts", "int64", ("P",), "samples of each class", low=1),
        )
    ),
    privacy=Protection(CLASS_SUMS, vectors=1),
)
