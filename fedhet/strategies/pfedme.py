"""pFedMe, server half: Algorithm 1, lines 10 to 12.

Canh T. Dinh, Nguyen H. Tran and Tuan Dung Nguyen, Personalized Federated Learning with Moreau
Envelopes, NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.algorithms.averaging import moved_towards
from fedhet.arrays import Array
from fedhet.settings.schema import Count, Positive
from fedhet.strategies.fedavg import FedAvgSettings, FedAvgStrategy


class PFedMeSettings(FedAvgSettings):
    """Settings of pFedMe."""

    strength: Positive = Field(15.0, description="lambda, the strength of the Moreau envelope")
    rate: Positive = Field(0.005, description="eta, the rate of the local copy")
    steps: Count = Field(5, description="K, steps on the personal model a batch")
    beta: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the new average in the server's model"
    )


class PFedMeStrategy(FedAvgStrategy):
    """Averages the clients' local copies; their personal models stay with them."""

    spec = replace(
        FedAvgStrategy.spec,
        title="a personal model near a local copy, which is averaged",
        paper="T. Dinh et al., Personalized Federated Learning with Moreau Envelopes",
        headline="personal",
        settings=PFedMeSettings,
    )
    settings: PFedMeSettings

    def mixed(self, before: Mapping[str, Array], average: dict[str, Array]) -> dict[str, Array]:
        """Return w^{t+1} = (1 - beta) w^t + beta times the average (line 12)."""
        return moved_towards(average, before, self.settings.beta)
