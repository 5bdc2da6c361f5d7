"""Declaration of FML, whose server averages the memes as in FedAvg.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu and Chao Wu,
Federated Mutual Learning, arXiv:2006.16765.

In regression (not in the paper), both models learn the targets with `data.loss`, and each other's
outputs with squared errors, as in `Regression.divergence`.
"""

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS, OWN_MODEL, SUM_OF_WEIGHTS
from fedhet.settings.schema import ModelName
from fedhet.wire.contract import Contract, WeightsField

EXTENDS = "fedavg"
"""Method whose strategy FML uses."""

Share = Annotated[float, Field(ge=0, le=1)]


class FmlSettings(fedavg.FedAvgSettings):
    """Settings of FML."""

    averaged_by: ClassVar[str] = "meme"
    meme: ModelName = Field("cnn2", description="meme model, the same on all clients")
    alpha: Share = Field(
        0.5,
        description="weight alpha of the private model's loss on the labels; its divergence has "
        "weight 1 - alpha",
    )
    beta: Share = Field(
        0.5,
        description="weight beta of the meme's loss on the labels; its divergence has weight "
        "1 - beta",
    )


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="its distillation needs one vector of outputs for each sample",
    title="a private model and a small shared model, which teach each other",
    paper="Shen et al., Federated Mutual Learning",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="the personalized private model; the averaged meme is the kind `global`",
    settings=FmlSettings,
    kinds=("private", "proxy", "ensemble", "global"),
    ensemble=("private", "proxy"),
    one_model=False,
    model_settings={"meme": "model"},
    instructions=Contract((WeightsField("weights", "averaged meme, from which clients start"),)),
    replies=Contract((WeightsField("weights", "meme after training"),)),
    privacy=replace(BOTH_MODELS, models=("meme",)),
    sums=SUM_OF_WEIGHTS,
)
