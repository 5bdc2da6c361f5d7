"""Declaration of FedPer: settings and messages."""

from dataclasses import replace
from typing import ClassVar

from fedhet.algorithms import Part
from fedhet.methods import fedavg


class FedPerSettings(fedavg.FedAvgSettings):
    """Settings of FedPer, the same as for FedAvg."""

    part: ClassVar[Part] = "extractor"


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg of the base layers, with personal heads",
    paper="Arivazhagan et al., Federated Learning with Personalization Layers",
    headline="personal",
    settings=FedPerSettings,
)
