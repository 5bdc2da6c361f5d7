"""Declaration of FedProx: FedAvg with a proximal term in the clients' loss.

Tian Li, Anit Kumar Sahu, Manzil Zaheer, Maziar Sanjabi, Ameet Talwalkar and Virginia Smith,
Federated Optimization in Heterogeneous Networks, MLSys 2020.
"""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.settings.run import TrainingSettings
from fedhet.settings.schema import NonNegative

EXTENDS = "fedavg"
"""Method whose strategy FedProx uses."""


class FedProxSettings(fedavg.FedAvgSettings):
    """Settings of FedProx."""

    mu: NonNegative = Field(0.01, description="weight mu of the proximal term in Eq. 2")


def damping(settings: FedProxSettings, training: TrainingSettings) -> float:
    """Return the fraction of a weight that weight decay and the proximal term remove per step."""
    first = training.first()
    return float(first.lr * (first.weight_decay + settings.mu))


SPEC = replace(
    fedavg.SPEC,
    sums=replace(fedavg.SPEC.sums, damping=damping),
    title="FedAvg with a proximal term",
    paper="Li et al., Federated Optimization in Heterogeneous Networks",
    paper_model="the averaged model",
    settings=FedProxSettings,
)
