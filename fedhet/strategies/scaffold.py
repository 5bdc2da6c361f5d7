"""SCAFFOLD strategy (Algorithm 1): averages of weights, and of changes of control variates.

Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank Reddi, Sebastian Stich and Ananda
Theertha Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.weights import average_weights, interpolate
from fedhet.base.arrays import Array
from fedhet.methods.scaffold import SPEC, ScaffoldSettings
from fedhet.models import HetModel, part_arrays
from fedhet.strategies.base import Reply
from fedhet.strategies.fedavg import FedAvgStrategy, average_of
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class ScaffoldStrategy(FedAvgStrategy):
    """Strategy that averages weights, and tracks the mean c of the clients' control variates."""

    spec = SPEC
    settings: ScaffoldSettings

    def extra_groups(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return the initial control variate c = 0."""
        trained = part_arrays(model, "trained")
        return {"control": {name: np.zeros_like(value) for name, value in trained.items()}}

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the averaged weights."""
        return self._eval_instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Update the weights and the control variate (lines 16 and 17).

        x <- x + eta_g mean(y_i - x), and c <- c + |S| / N mean(c_i+ - c_i).
        """
        before, average = self.averaged["weights"], average_of(replies, "weights")
        # A late change counts in full, because the client already uses its new control variate.
        changes = average_weights([(r.knowledge.group("change"), r.samples) for r in replies])
        sampled = sum(max(1, len(reply.clients)) for reply in replies)
        fraction = sampled / max(sampled, len(self.members))
        control = self.averaged["control"].items()
        self._set_averages(
            {
                "weights": interpolate(before, average, self.settings.global_lr),
                "control": {name: c + np.float32(fraction) * changes[name] for name, c in control},
            }
        )
        return {}

    def _set_averages(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Store the averages, and build the instructions for training and for evaluation."""
        super()._set_averages({"weights": averaged["weights"]})
        self._eval_instruction = self.instruction
        super()._set_averages(averaged)
