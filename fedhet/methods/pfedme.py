"""pFedMe: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import Protection
from fedhet.settings.schema import Count, Positive


class PFedMeSettings(fedavg.FedAvgSettings):
    """Settings of pFedMe."""

    strength: Positive = Field(15.0, description="lambda, the strength of the Moreau envelope")
    rate: Positive = Field(0.005, description="eta, the rate of the local copy")
    steps: Count = Field(5, description="K, steps on the personal model per batch")
    beta: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the new average in the server's model"
    )


SPEC = replace(
    fedavg.SPEC,
    title="personal models near local copies, which are averaged",
    paper="T. Dinh et al., Personalized Federated Learning with Moreau Envelopes",
    headline="personal",
    settings=PFedMeSettings,
    privacy=Protection(unsupported="it takes several steps on each batch"),
)
