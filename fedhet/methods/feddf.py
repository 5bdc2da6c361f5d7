"""FedDF: its settings, and the messages between its halves."""

from pydantic import Field

from fedhet.methods.fedavg import REPLIES, FedAvgSettings, part_sizes
from fedhet.methods.spec import DP_SGD, MethodSpec
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, CountOrNone, Positive
from fedhet.wire.contract import Contract, WeightsField


class FedDfSettings(FedAvgSettings):
    """Settings of FedDF; the whole model travels."""

    epochs: CountOrNone = Field(
        5,
        description="the server's epochs of distillation per round, over the public data; 0 = "
        "none, so that each architecture keeps its average",
    )
    lr: Positive = Field(1e-3, description="learning rate of the distillation, with Adam")
    batch_size: Count = Field(128, description="public samples per minibatch of the distillation")


SPEC = MethodSpec(
    title="one average per architecture, distilled from the ensemble on public data",
    paper="Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning",
    headline="common",
    settings=FedDfSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    needs_public=True,
    large_messages=True,
    defenses=CHOOSING,
    instructions=Contract(
        (WeightsField("weights", "the fused model of the client's architecture", required=False),)
    ),
    replies=REPLIES,
    metrics={"distillation_loss": "distillation loss of the fused models"},
    privacy=DP_SGD,
)
