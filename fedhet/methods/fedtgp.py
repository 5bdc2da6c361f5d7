"""Declaration of FedTGP: settings and messages."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import Margin, PrototypeDistance
from fedhet.methods import fedproto
from fedhet.methods.spec import Sums
from fedhet.settings.schema import Count, NonNegative, Positive
from fedhet.wire.contract import Contract, TensorField


class FedTgpSettings(fedproto.PrototypeSettings):
    """Settings of FedTGP."""

    distance: PrototypeDistance = Field(
        "euclidean",
        description="distance between features and prototypes: euclidean on batch means, or mse "
        "per sample",
    )
    lambda_: Literal["auto"] | NonNegative = Field(
        "auto",
        description="weight lambda of the distance; auto = 0.1 for euclidean, 10 for mse",
    )
    margin: Margin = Field(
        "nearest",
        description="margin between classes: maximum distance from a class center to its nearest "
        "center, or to any center",
    )
    max_margin: Positive = Field(100.0, description="upper bound tau of the margin")
    server_epochs: Count = Field(
        100, description="server training epochs S on the clients' prototypes, per round"
    )
    server_lr: Positive = Field(0.01, description="learning rate for training on the server (SGD)")
    server_batch_size: Count = Field(
        10, description="batch size for training on the server, in prototypes"
    )

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """Weight of the distance from the prototypes, and the kind of distance.

        If `lambda` is "auto", the weight depends on the kind of distance.
        """
        paired = {"euclidean": 0.1, "mse": 10.0}[self.distance]
        return paired if self.lambda_ == "auto" else self.lambda_, self.distance


SPEC = replace(
    fedproto.SPEC,
    title="FedProto with separable prototypes, which the server trains",
    paper="Zhang et al., FedTGP: Trainable Global Prototypes",
    paper_model="the nearest prototype, as in FedProto",
    late="kept",
    settings=FedTgpSettings,
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField(
                "features", "float32", ("P", "D"), "prototype of each class, i.e. its mean features"
            ),
        )
    ),
    metrics={
        "classes_covered": "classes with a prototype",
        "prototype_loss": "training loss of the prototypes",
        "margin": "margin between classes",
        "separation": "distance from a prototype to its nearest neighbor, averaged over classes",
    },
    privacy=replace(
        fedproto.SPEC.privacy,
        needs={"distance": ("mse",)},
        reason="the distance of a class mean affects the gradient of every sample of the class",
    ),
    sums=Sums(unsupported="the server trains on the class means of individual clients"),
)
