"""Declaration of FedDF: settings and messages."""

from pydantic import Field

from fedhet.methods.fedavg import REPLIES, FedAvgSettings, part_sizes
from fedhet.methods.spec import AVERAGED_MODEL, DP_SGD, MethodSpec, Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, CountOrNone, Positive
from fedhet.wire.contract import Contract, WeightsField

EXTENDS = "fedavg"
"""Method whose client FedDF uses."""


class FedDfSettings(FedAvgSettings):
    """Settings of FedDF."""

    epochs: CountOrNone = Field(
        5,
        description="distillation epochs on the public data, per round; 0 = no distillation",
    )
    lr: Positive = Field(1e-3, description="distillation learning rate (Adam)")
    batch_size: Count = Field(128, description="distillation batch size")


SPEC = MethodSpec(
    title="one averaged model per architecture, trained on public data to imitate the ensemble",
    paper="Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="the fused model of each architecture",
    needs_task="outputs",
    only_tasks="its distillation needs one vector of outputs for each sample",
    settings=FedDfSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    needs_public=True,
    large_messages=True,
    defenses=CHOOSING,
    instructions=Contract(
        (WeightsField("weights", "fused model of the client's architecture", required=False),)
    ),
    replies=REPLIES,
    metrics={"distillation_loss": "distillation loss of the fused models"},
    privacy=DP_SGD,
    sums=Sums(unsupported="the server needs the model of each client for its ensemble"),
)
