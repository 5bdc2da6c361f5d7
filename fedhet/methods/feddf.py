"""FedDF: its declaration.

Tao Lin, Lingjing Kong, Sebastian U. Stich and Martin Jaggi, Ensemble Distillation for Robust Model
Fusion in Federated Learning, NeurIPS 2020: Algorithm 1, and its form for several architectures in
the appendix. Adam, cosine annealing over the steps of a round and a new optimiser in each round are
those of the authors' published code; they also stop early on labelled validation data, which this
server does not have (ours).
"""

from __future__ import annotations

from pydantic import Field

from fedhet.methods.fedavg import REPLIES, FedAvgSettings, part_sizes
from fedhet.methods.spec import MethodSpec
from fedhet.settings.schema import Count, CountOrNone, Positive
from fedhet.wire.contract import Contract, WeightsField


class FedDfSettings(FedAvgSettings):
    """Settings of FedDF; the whole model travels."""

    epochs: CountOrNone = Field(
        5,
        description="the server's epochs of distillation over the public data a round; 0 = none, "
        "and each architecture's average stands",
    )
    lr: Positive = Field(1e-3, description="learning rate of the distillation, which Adam does")
    batch_size: Count = Field(128, description="public samples a minibatch of the distillation")


INSTRUCTIONS = Contract(
    (WeightsField("weights", "the fused model of the client's architecture", required=False),)
)
SPEC = MethodSpec(
    title="averages of each architecture, taught by all clients' ensemble on public data",
    paper="Lin et al., Ensemble Distillation for Robust Model Fusion in Federated Learning",
    headline="common",
    settings=FedDfSettings,
    sizes=part_sizes,
    kinds=("private", "global"),
    needs_public=True,
    large_messages=True,
    instructions=INSTRUCTIONS,
    replies=REPLIES,
)
