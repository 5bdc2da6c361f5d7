"""FedPer, server half: FedAvg's, of the base layers (the extractor).

Manoj Ghuhan Arivazhagan, Vinay Aggarwal, Aaditya Kumar Singh and Sunav Choudhary, Federated
Learning with Personalization Layers, arXiv:1912.00818.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedhet.models.parts import Part
from fedhet.strategies.fedavg import FedAvgSettings, FedAvgStrategy


class FedPerSettings(FedAvgSettings):
    """Settings of FedPer: it has none of its own."""

    part: ClassVar[Part] = "extractor"


class FedPerStrategy(FedAvgStrategy):
    """Averages the base layers (the extractor) by samples."""

    spec = replace(
        FedAvgStrategy.spec,
        title="FedAvg of the base layers; each client has a head of its own",
        paper="Arivazhagan et al., Federated Learning with Personalization Layers",
        headline="personal",
        settings=FedPerSettings,
    )
