"""FedTGP: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import Margin, PrototypeDistance
from fedhet.methods import fedproto
from fedhet.settings.schema import Count, NonNegative, Positive
from fedhet.wire.contract import Contract, TensorField


class FedTgpSettings(fedproto.PrototypeSettings):
    """Settings of FedTGP."""

    distance: PrototypeDistance = Field(
        "euclidean",
        description="distance of features to prototypes: euclidean, of the class means of a batch, "
        "as printed (Eq. 11), or mse, the mean squared error of each sample's features, as in the "
        "authors' code",
    )
    lambda_: Literal["auto"] | NonNegative = Field(
        "auto",
        description="weight of that distance; auto: 0.1 for euclidean, as in the paper, and 10 for "
        "mse, as in the authors' code",
    )
    margin: Margin = Field(
        "nearest",
        description="margin between classes, by the distances of their centers: nearest, the "
        "largest distance of a class to the nearest other one, as in the caption of Fig. 1 and in "
        "the authors' code, or largest, that of any two classes, as in Eq. 9",
    )
    max_margin: Positive = Field(100.0, description="the most that the margin can be, tau")
    server_epochs: Count = Field(
        100, description="the server's epochs per round over the clients' prototypes, S"
    )
    server_lr: Positive = Field(0.01, description="learning rate of the server's SGD")
    server_batch_size: Count = Field(10, description="prototypes per minibatch of the server")

    @property
    def pull(self) -> tuple[float, PrototypeDistance]:
        """The weight of the distance to the prototypes, and the kind of distance.

        The weight is `lambda` or, if that is auto, the one that belongs to the distance.
        """
        paired = {"euclidean": 0.1, "mse": 10.0}[self.distance]
        return paired if self.lambda_ == "auto" else self.lambda_, self.distance


SPEC = replace(
    fedproto.SPEC,
    title="FedProto with prototypes that the server trains to be separable",
    paper="Zhang et al., FedTGP: Trainable Global Prototypes",
    late="kept",
    settings=FedTgpSettings,
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("features", "float32", ("P", "D"), "prototype of each: mean features"),
        )
    ),
    metrics={
        "classes_covered": "classes with a prototype",
        "prototype_loss": "loss of the server's prototypes",
        "margin": "margin between classes",
        "separation": "distance of a prototype to the nearest other, mean over classes",
    },
    privacy=replace(
        fedproto.SPEC.privacy,
        needs={"distance": ("mse",)},
        reason="the distance of a class mean weighs on the gradient of all its samples",
    ),
)
