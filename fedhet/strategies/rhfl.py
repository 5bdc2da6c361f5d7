"""RHFL strategy: FedMD with confidence in clients, for noisy labels.

Xiuwen Fang and Mang Ye, Robust Federated Learning with Noisy and Heterogeneous Clients, CVPR 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.noisy_labels import confidence_weights
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.rhfl import SPEC, RhflSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedmd import FedMdStrategy


class RhflStrategy(FedMdStrategy):
    """Strategy that sends each client the weighted sum of the other clients' probabilities."""

    spec = SPEC
    settings: RhflSettings
    personalized = True

    def init(self) -> None:
        """Start without losses, so that all clients have equal weights."""
        super().init()
        self.losses: dict[str, float] = {}
        """Last reported loss of each client, by client name."""
        self.weights: dict[str, float] = {}
        """Weights of the clients in `scores`, by client name."""

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the probabilities, and compute the clients' weights from the drops of the losses.

        Clients that do not send a loss have a loss of 1, and thus equal weights.
        """
        super().aggregate(round, replies)
        losses = {r.client.name: float(r.knowledge.scalars.get("loss", 1.0)) for r in replies}
        previous = np.array([self.losses.get(name, math.nan) for name in losses])
        weights = confidence_weights(previous, np.array([*losses.values()]), self.settings.eta)
        self.weights = dict(zip(losses, weights.tolist(), strict=True))
        self.losses |= losses
        return {"max_confidence": float(weights.max())}

    def consensus_for(self, client: str, scores: Array) -> Array:
        """Return sum_k W_k p_k [R, C] over the other clients k; its rows do not have the sum 1."""
        names = sorted(self.scores)
        weights = [self.weights[name] if name != client else 0.0 for name in names]
        consensus: Array = np.tensordot(weights, scores, 1).astype(np.float32)
        return consensus

    def forget(self, client: str) -> None:
        """Discard a client's probabilities, losses and weight."""
        super().forget(client)
        self.losses.pop(client, None)
        self.weights.pop(client, None)

    def state_dict(self) -> dict[str, Array]:
        """Return the latest probabilities, losses and weights."""
        losses = {name: np.array(loss) for name, loss in self.losses.items()}
        weights = {name: np.array(weight) for name, weight in self.weights.items()}
        return super().state_dict() | grouped("losses", losses) | grouped("weights", weights)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        self.losses = {name: float(loss) for name, loss in group(state, "losses").items()}
        self.weights = {name: float(weight) for name, weight in group(state, "weights").items()}
