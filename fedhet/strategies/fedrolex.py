"""FedRolex strategy: HeteroFL with submodels that advance by one channel in each round.

Samiul Alam, Luyang Liu, Ming Yan and Mi Zhang, FedRolex: Model-Heterogeneous Federated Learning
with Rolling Sub-Model Extraction, NeurIPS 2022, Algorithm 1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn

from fedhet.algorithms.weights import roll_channels
from fedhet.methods.fedrolex import SPEC
from fedhet.settings.schema import invalid_setting
from fedhet.strategies.base import Reply
from fedhet.strategies.heterofl import HeteroFlStrategy


class FedRolexStrategy(HeteroFlStrategy):
    """Strategy whose submodels start one channel later in each round, and wrap around.

    Instead of the window, the channels of the global model roll. Its function stays the same, and
    a submodel still consists of the leading channels, also in a saved state.
    """

    spec = SPEC

    def init(self) -> None:
        """Build a new model. Raises SettingsError if its function depends on the channels' order.

        Group norms combine neighboring channels, which differ after each round.
        """
        super().init()
        if any(
            isinstance(module, nn.GroupNorm) for module in self.build_model(self.model).modules()
        ):
            expected = "a model without group norms"
            raise invalid_setting("models.pool", list(self.run.models.pool), expected)

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the submodels of the round, and advance the channels by one."""
        metrics = super().aggregate(round, replies)
        client = dataclasses.replace(self.reference_client, model=self.narrowest)
        self._set_weights(roll_channels(self.weights, self.sizes(client).models["weights"]))
        return metrics
