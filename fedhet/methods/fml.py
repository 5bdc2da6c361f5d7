"""FML: its settings, and the messages between its halves."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS, model_shapes
from fedhet.settings.schema import ModelName
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo

Share = Annotated[float, Field(ge=0, le=1)]


class FmlSettings(fedavg.FedAvgSettings):
    """Settings of FML."""

    meme: ModelName = Field("cnn2", description="the meme's model, the same at every client")
    alpha: Share = Field(
        0.5, description="share of cross-entropy in the private model's loss; the meme has the rest"
    )
    beta: Share = Field(
        0.5, description="share of cross-entropy in the meme's loss; the private model has the rest"
    )


def meme_sizes(settings: FmlSettings, client: ClientInfo) -> Sizes:
    """Return the axis C and the meme's shapes."""
    meme = model_shapes(client, settings.meme)
    return Sizes({"C": client.classes}, {"weights": meme})


INSTRUCTIONS = Contract((WeightsField("weights", "the averaged meme, from which clients start"),))
REPLIES = Contract((WeightsField("weights", "the meme, after training"),))
SPEC = replace(
    fedavg.SPEC,
    title="a private model and a small shared one that teach each other",
    paper="Shen et al., Federated Mutual Learning",
    headline="personal",
    settings=FmlSettings,
    sizes=meme_sizes,
    kinds=("private", "proxy", "global"),
    one_model=False,
    own_models={"meme": "model"},
    instructions=INSTRUCTIONS,
    replies=REPLIES,
    privacy=replace(BOTH_MODELS, models=("meme",)),
)
