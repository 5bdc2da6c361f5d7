"""FedProx: its settings, and the messages between its halves."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.settings.schema import NonNegative


class FedProxSettings(fedavg.FedAvgSettings):
    """Settings of FedProx."""

    mu: NonNegative = Field(0.01, description="weight of the proximal term of Eq. 2")


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg with a proximal term",
    paper="Li et al., Federated Optimization in Heterogeneous Networks",
    settings=FedProxSettings,
)
