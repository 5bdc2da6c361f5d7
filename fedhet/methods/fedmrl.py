"""Declaration of FedMRL, whose server averages the shared models as in FedAvg.

Liping Yi, Han Yu, Chao Ren, Gang Wang, Xiaoguang Liu and Xiaoxiao Li, Federated Model Heterogeneous
Matryoshka Representation Learning, NeurIPS 2024.

In regression (not in the paper), both heads learn the targets with `data.loss`.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS, OWN_MODEL, SUM_OF_WEIGHTS
from fedhet.settings.schema import Count, ModelName, NonNegative
from fedhet.wire.contract import Contract, ScalarField, WeightsField

EXTENDS = "fedavg"
"""Method whose strategy FedMRL uses."""


class FedMrlSettings(fedavg.FedAvgSettings):
    """Settings of FedMRL."""

    averaged_by: ClassVar[str] = "shared"
    averaged_kind: ClassVar[str] = "shared"  # The kind "global" adds a client's own layers.
    shared: ModelName = Field("cnn2", description="shared model G, the same on all clients")
    shared_dim: Count = Field(
        32,
        description="width d1 of the shared model's features",
    )
    shared_weight: NonNegative = Field(1.0, description="weight m^G of the shared head's loss")
    own_weight: NonNegative = Field(1.0, description="weight m^F of the local head's loss")

    @property
    def width(self) -> int:
        """Width d1 of the shared model's features."""
        return self.shared_dim


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="its projection needs one vector of features for each sample",
    title="small shared model and private model, fused by a projector",
    paper="Yi et al., Federated Model Heterogeneous Matryoshka Representation Learning",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's fused model",
    settings=FedMrlSettings,
    one_model=False,
    model_settings={"shared": "model"},
    instructions=Contract(
        (WeightsField("weights", "averaged shared model, from which clients start"),)
    ),
    replies=Contract(
        (
            WeightsField("weights", "shared model after training"),
            ScalarField("fine_loss", float, "mean loss of the local head", required=False, low=0),
            ScalarField(
                "coarse_loss", float, "mean loss of the shared head", required=False, low=0
            ),
        )
    ),
    metrics={
        "fine_loss": "loss of the local head on the fused features",
        "coarse_loss": "loss of the shared head on the coarse part of the fused features",
    },
    privacy=replace(BOTH_MODELS, models=("shared",)),
    sums=SUM_OF_WEIGHTS,
)
