"""Declaration of FedPer: FedAvg of the base layers; the heads stay on the clients.

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav Choudhary, Federated
Learning with Personalization Layers, arXiv:1912.00818.
"""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, SUM_OF_WEIGHTS

EXTENDS = "fedavg"
"""Method whose strategy and client FedPer uses."""


class FedPerSettings(fedavg.FedAvgSettings):
    """Settings of FedPer, identical to the settings of FedAvg."""

    part: ClassVar[Part] = "extractor"


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="models of this task have no head",
    title="FedAvg of the base layers, with personal heads",
    paper="Arivazhagan et al., Federated Learning with Personalization Layers",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's model, with its own head",
    settings=FedPerSettings,
    sums=SUM_OF_WEIGHTS,
)
