"""DS-FL: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import DigestLoss
from fedhet.methods import fedmd
from fedhet.settings.schema import Count, ModelName, Positive


class DsFlSettings(fedmd.SoftLabelSettings, fedmd.DigestSettings):
    """Settings of DS-FL."""

    loss: DigestLoss = Field(
        "cross-entropy",
        description="distance from the consensus, for clients and server: cross-entropy with the "
        "soft labels, or mean absolute or squared error of the probabilities",
    )
    aggregation: Literal["era", "sa"] = Field(
        "era", description="the consensus: entropy reduction, or simple aggregation, the plain mean"
    )
    temperature: Positive = Field(
        0.1, description="T of entropy reduction, softmax(mean / T): the lower, the sharper"
    )
    server_model: ModelName = Field("cnn2", description="the server's own model")
    server_epochs: Count = Field(
        5, description="the server's epochs of training on the consensus, per round"
    )


SPEC = replace(
    fedmd.SPEC,
    title="sharpened mean of soft labels on unlabeled public data; server model",
    paper="Itahara et al., Distillation-Based Semi-Supervised Federated Learning (DS-FL)",
    settings=DsFlSettings,
    model_settings={"server_model": "model"},
    instructions=fedmd.instructions("probabilities"),
    replies=fedmd.replies("probabilities"),
)
