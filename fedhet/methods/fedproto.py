"""Declaration of FedProto: settings and messages."""

from typing import Literal

from pydantic import Field

from fedhet.algorithms import PrototypeDistance
from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sum, TensorField, all_or_none


class PrototypeSettings(MethodSettings):
    """Settings shared by FedProto and the methods that extend its clients."""

    feature_dim: Count = Field(64, description="width D of features and prototypes")

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """Weight of the distance from the prototypes (lambda), and the kind of distance."""
        raise NotImplementedError


class FedProtoSettings(PrototypeSettings):
    """Settings of FedProto."""

    lambda_: NonNegative = Field(
        1.0, description="weight lambda of the mean squared error between features and prototypes"
    )
    weighting: Literal["samples", "clients"] = Field(
        "samples",
        description="weights of the clients in a prototype: in proportion to their class counts, "
        "or equal",
    )

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """Weight of the distance from the prototypes, and the authors' kind of distance, "mse"."""
        return self.lambda_, "mse"


SPEC = MethodSpec(
    title="class prototypes (mean features) that attract all clients' features",
    paper="Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients",
    headline="personal",
    deployed={"personal": "prototype", "common": "prototype"},
    paper_model="the nearest prototype (Eq. 4)",
    late="averaged",
    only_tasks="its prototypes are mean features of each class",
    settings=FedProtoSettings,
    kinds=("private", "prototype"),
    defenses=ROBUST,
    instructions=Contract(
        all_or_none(
            TensorField("classes", "int64", ("P",), "classes with a prototype", ids="C"),
            TensorField("features", "float32", ("P", "D"), "global prototype of each class"),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField(
                "features", "float32", ("P", "D"), "prototype of each class, i.e. its mean features"
            ),
            TensorField(
                "counts", "int64", ("P",), "number of samples of each class", low=1, counts=True
            ),
        )
    ),
    metrics={"classes_covered": "classes with a prototype"},
    privacy=Protection(CLASS_SUMS, vectors=1),
    sums=Sums((Sum(("features", "counts"), "classes"),)),
)
