"""Declaration of DS-FL: settings and messages."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import DigestLoss
from fedhet.methods import fedmd
from fedhet.methods.spec import Sums
from fedhet.settings.schema import Count, ModelName, Positive
from fedhet.wire.contract import Sum

EXTENDS = "fedmd"
"""Method whose client DS-FL uses."""


class DsFlSettings(fedmd.SoftLabelSettings, fedmd.DigestSettings):
    """Settings of DS-FL."""

    loss: DigestLoss = Field(
        "cross-entropy",
        description="loss on the consensus: cross-entropy, or mean absolute or squared error "
        "of probabilities",
    )
    aggregation: Literal["era", "sa"] = Field(
        "era",
        description="consensus: entropy reduction aggregation (era), or the plain mean (simple "
        "aggregation, sa)",
    )
    temperature: Positive = Field(
        0.1,
        description="temperature T of entropy reduction, softmax(mean / T); lower values "
        "sharpen more",
    )
    server_model: ModelName = Field("cnn2", description="server model")
    server_epochs: Count = Field(
        5, description="server training epochs on the consensus, per round"
    )


SPEC = replace(
    fedmd.SPEC,
    title="sharpened mean of soft labels on unlabeled public data; server model",
    paper="Itahara et al., Distillation-Based Semi-Supervised Federated Learning (DS-FL)",
    paper_model="the server's model (kind `server`); a client deploys its own model",
    settings=DsFlSettings,
    model_settings={"server_model": "model"},
    without_classes={"loss": ("mse", "mae"), "aggregation": ("sa",), "temperature": (0.1,)},
    instructions=fedmd.instructions("probabilities", "logits"),
    replies=fedmd.replies("probabilities", "logits"),
    sums=Sums(
        (
            Sum(("probabilities",), "clients", distribution=True),
            Sum(("logits",), "clients", distribution=False),
        )
    ),
)
