"""FedBN, server half: FedAvg's, of all tensors but those of batch norms.

Xiaoxiao Li, Meirui Jiang, Xiaofei Zhang, Michael Kamp and Qi Dou, FedBN: Federated Learning on
Non-IID Features via Local Batch Normalization, ICLR 2021.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from fedhet.models.parts import Part
from fedhet.strategies.fedavg import FedAvgSettings, FedAvgStrategy


class FedBnSettings(FedAvgSettings):
    """Settings of FedBN: it has none of its own."""

    part: ClassVar[Part] = "all-but-norms"


class FedBnStrategy(FedAvgStrategy):
    """Averages all tensors but those of batch norms by samples."""

    spec = replace(
        FedAvgStrategy.spec,
        title="FedAvg in which each client keeps its batch norms",
        paper="Li et al., FedBN: Federated Learning on Non-IID Features",
        headline="personal",
        settings=FedBnSettings,
    )
