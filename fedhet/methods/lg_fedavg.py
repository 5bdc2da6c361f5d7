"""Declaration of LG-FedAvg: FedAvg of the heads; the extractors stay on the clients.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan
Salakhutdinov and Louis-Philippe Morency, Think Locally, Act Globally: Federated Learning with Local
and Global Representations, arXiv:2001.01523.
"""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedhet.algorithms import Part
from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, SUM_OF_WEIGHTS
from fedhet.settings.schema import Count

EXTENDS = "fedavg"
"""Method whose strategy and client LG-FedAvg uses."""


class LgFedAvgSettings(fedavg.FedAvgSettings):
    """Settings of LG-FedAvg."""

    part: ClassVar[Part] = "head"
    feature_dim: Count = Field(64, description="width of the features, the same for all heads")

    @property
    def width(self) -> int:
        """Width of the features before the head."""
        return self.feature_dim


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="models of this task have no head",
    title="one head for all extractors, as a weighted average",
    paper="Liang et al., Think Locally, Act Globally",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's extractor and head; for new clients, an ensemble of all models",
    settings=LgFedAvgSettings,
    one_model=False,
    sums=SUM_OF_WEIGHTS,
)
