"""LG-FedAvg, server half: FedAvg's, of the heads alone.

Paul Pu Liang, Terrance Liu, Liu Ziyin, Nicholas B. Allen, Randy P. Auerbach, David Brent, Ruslan
Salakhutdinov and Louis-Philippe Morency, Think Locally, Act Globally: Federated Learning with Local
and Global Representations, arXiv:2001.01523.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedhet.models.parts import Part
from fedhet.settings.schema import Count
from fedhet.strategies.fedavg import FedAvgSettings, FedAvgStrategy


class LgFedAvgSettings(FedAvgSettings):
    """Settings of LG-FedAvg."""

    part: ClassVar[Part] = "head"
    feature_dim: Count = Field(64, description="width of the features, which all heads share")

    @property
    def width(self) -> int:
        """Return the width of the features before the head."""
        return self.feature_dim


class LgFedAvgStrategy(FedAvgStrategy):
    """Averages the heads by samples; the extractors, which may differ, stay at the clients."""

    spec = replace(
        FedAvgStrategy.spec,
        title="one head for all extractors, averaged by samples",
        paper="Liang et al., Think Locally, Act Globally",
        headline="personal",
        settings=LgFedAvgSettings,
        one_model=False,
        default_model="",
        table_model="",
    )
