"""Declaration of pFedMe: settings and messages."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import Protection
from fedhet.settings.schema import Count, Positive


class PFedMeSettings(fedavg.FedAvgSettings):
    """Settings of pFedMe."""

    strength: Positive = Field(15.0, description="strength lambda of the Moreau envelope")
    rate: Positive = Field(0.005, description="learning rate eta of the local copy")
    steps: Count = Field(5, description="number K of steps on the personal model, per batch")
    beta: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="weight beta of the new average in the update of the server's model; "
        "1 = replace the model",
    )


SPEC = replace(
    fedavg.SPEC,
    title="personal models kept close to local copies of the averaged model",
    paper="T. Dinh et al., Personalized Federated Learning with Moreau Envelopes",
    headline="personal",
    settings=PFedMeSettings,
    privacy=Protection(unsupported="clients take several steps on each batch"),
)
