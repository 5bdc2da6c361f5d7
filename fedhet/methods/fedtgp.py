"""FedTGP: its settings, and the messages between its halves."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field

from fedhet.algorithms.choices import Margin
from fedhet.methods import fedproto
from fedhet.settings.schema import Count, NonNegative, Positive
from fedhet.wire.contract import Contract, TensorField


class FedTgpSettings(fedproto.PrototypeSettings):
    """Settings of FedTGP."""

    lambda_: NonNegative = Field(0.1, description="weight of the distance to the prototypes")
    margin: Margin = Field(
        "largest",
        description="the margin between classes: the largest distance of two classes' centres, as "
        "in Eq. 9, or the largest of those to the nearest other class, as in the authors' code",
    )
    most_margin: Positive = Field(100.0, description="the most that the margin can be, tau")
    server_epochs: Count = Field(
        100, description="the server's epochs per round over the clients' prototypes, S"
    )
    server_lr: Positive = Field(0.01, description="learning rate of the server's SGD")
    server_batch_size: Count = Field(10, description="prototypes per minibatch of the server")


REPLIES = Contract(
    (
        TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
        TensorField("features", "float32", ("P", "D"), "prototype of each: mean features"),
    )
)
SPEC = replace(
    fedproto.SPEC,
    title="FedProto with prototypes that the server trains to stay apart",
    paper="Zhang et al., FedTGP: Trainable Global Prototypes",
    late="kept",
    settings=FedTgpSettings,
    replies=REPLIES,
    figures={
        "classes_covered": "classes with a prototype",
        "prototype_loss": "loss of the server's prototypes",
        "margin": "margin between classes",
        "separation": "distance of a prototype to the nearest other, mean over classes",
    },
    together=False,
)
