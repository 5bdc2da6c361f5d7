"""FedMRL: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS
from fedhet.settings.schema import Count, ModelName, NonNegative
from fedhet.wire.contract import Contract, ScalarField, WeightsField


class FedMrlSettings(fedavg.FedAvgSettings):
    """Settings of FedMRL."""

    averaged_by: ClassVar[str] = "shared"
    shared: ModelName = Field("cnn2", description="the shared model G, the same at every client")
    shared_dim: Count = Field(
        32,
        description="width of the shared model's features, d1: the coarse part of the fused "
        "features; 500 in the authors' code, whose models all have 500 features",
    )
    shared_weight: NonNegative = Field(
        1.0, description="weight of the shared head's cross-entropy, m^G"
    )
    own_weight: NonNegative = Field(1.0, description="weight of the own head's cross-entropy, m^F")

    @property
    def width(self) -> int:
        """Return the width of the shared model's features, d1."""
        return self.shared_dim


SPEC = replace(
    fedavg.SPEC,
    title="small shared model and private model, fused by a projector",
    paper="Yi et al., Federated Model Heterogeneous Matryoshka Representation Learning",
    headline="personal",
    settings=FedMrlSettings,
    one_model=False,
    model_settings={"shared": "model"},
    instructions=Contract(
        (WeightsField("weights", "the averaged shared model, from which clients start"),)
    ),
    replies=Contract(
        (
            WeightsField("weights", "the shared model, after training"),
            ScalarField("fine_loss", float, "mean of the own head's", required=False, low=0),
            ScalarField("coarse_loss", float, "mean of the shared head's", required=False, low=0),
        )
    ),
    metrics={
        "fine_loss": "cross-entropy of the own head, on all fused features",
        "coarse_loss": "cross-entropy of the shared head, on the coarse part of them",
    },
    privacy=replace(BOTH_MODELS, models=("shared",)),
)
