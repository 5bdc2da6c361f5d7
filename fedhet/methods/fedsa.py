"""Declaration of FedSA-LoRA: settings and messages."""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, SUM_OF_WEIGHTS

EXTENDS = "fedavg"
"""Method whose client FedSA-LoRA uses."""


class FedSaSettings(fedavg.FedAvgSettings):
    """Settings of FedSA-LoRA, identical to the settings of FedAvg."""

    part: ClassVar[Part] = "lora-a"


SPEC = replace(
    fedavg.SPEC,
    title="LoRA adapters whose factor A is shared",
    paper="Guo et al., Selective Aggregation for Low-Rank Adaptation in Federated Learning",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's model, with its own factor B",
    settings=FedSaSettings,
    sums=SUM_OF_WEIGHTS,
)
