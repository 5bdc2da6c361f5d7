"""pFedMe strategy: Algorithm 1, lines 10 to 12.

Canh T. Dinh, Nguyen H. Tran and Tuan Dung Nguyen, Personalized Federated Learning with Moreau
Envelopes, NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedhet.algorithms.weights import interpolate
from fedhet.base.arrays import Array
from fedhet.methods.pfedme import SPEC, PFedMeSettings
from fedhet.strategies.fedavg import FedAvgStrategy


class PFedMeStrategy(FedAvgStrategy):
    """Strategy that averages the clients' local copies; the personal models stay on the clients."""

    spec = SPEC
    settings: PFedMeSettings

    def server_update(
        self, before: Mapping[str, Array], average: dict[str, Array]
    ) -> dict[str, Array]:
        """Return w^{t+1} = (1 - beta) w^t + beta average (line 12)."""
        return interpolate(before, average, self.settings.beta)
