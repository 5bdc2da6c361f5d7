"""FML: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS
from fedhet.settings.schema import ModelName
from fedhet.wire.contract import Contract, WeightsField

Share = Annotated[float, Field(ge=0, le=1)]


class FmlSettings(fedavg.FedAvgSettings):
    """Settings of FML."""

    averaged_by: ClassVar[str] = "meme"
    meme: ModelName = Field("cnn2", description="the meme's model, the same at every client")
    alpha: Share = Field(
        0.5, description="share of cross-entropy in the private model's loss; the meme has the rest"
    )
    beta: Share = Field(
        0.5, description="share of cross-entropy in the meme's loss; the private model has the rest"
    )


SPEC = replace(
    fedavg.SPEC,
    title="private model and small shared model that teach each other",
    paper="Shen et al., Federated Mutual Learning",
    headline="personal",
    settings=FmlSettings,
    kinds=("private", "proxy", "global"),
    one_model=False,
    model_settings={"meme": "model"},
    instructions=Contract(
        (WeightsField("weights", "the averaged meme, from which clients start"),)
    ),
    replies=Contract((WeightsField("weights", "the meme, after training"),)),
    privacy=replace(BOTH_MODELS, models=("meme",)),
)
