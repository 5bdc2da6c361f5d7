"""SCAFFOLD strategy (Algorithm 1): averages of weights, and of changes of control variates.

Sai Praneeth Karimireddy, Satyen Kale, Mehryar Mohri, Sashank Reddi, Sebastian Stich and Ananda
Theertha Suresh, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedhet.algorithms.weights import average_weights, interpolate
from fedhet.base.arrays import Array, group, grouped
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

    def init(self) -> None:
        """Build the initial model, with c = 0 as the mean over all members."""
        self.counted: dict[str, int] = {}
        """Training round of the last reply that is part of c, by client."""
        self.absent: set[str] = set()
        """Members that do not count in N, because they fail and never contributed to c."""
        super().init()

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the weights, c, and the client's last round whose change is part of c.

        Otherwise, c would permanently differ from the mean of the clients' control variates after
        a lost or rejected reply, because its client has already updated c_i.
        """
        counted = self.counted.get(client.name, 0)
        if counted not in self._instructions:
            self._instructions[counted] = replace(self.instruction, scalars={"counted": counted})
        return self._instructions[counted]

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
        trained = {n: round - r.age for r in replies for n in r.clients or (r.client.name,)}
        self.counted |= trained
        control = self._control_without(self.absent - trained.keys())
        fraction = np.float32(len(trained) / self._total())
        self._set_averages(
            {
                "weights": interpolate(before, average, self.settings.global_lr),
                "control": {name: c + fraction * changes[name] for name, c in control.items()},
            }
        )
        return {}

    def forget(self, client: str) -> None:
        """Exclude a client from N, unless it contributed to c; its share of c is unknown."""
        if client in self.members and client not in self.counted:
            control = self._control_without(self.absent | {client})
            self._set_averages({"weights": self.averaged["weights"], "control": control})

    def state_dict(self) -> dict[str, Array]:
        """Return the weights and c, and the clients that are part of c or do not count in N."""
        counted = {name: np.array(round) for name, round in self.counted.items()}
        absent = {name: np.array(True) for name in sorted(self.absent)}
        return {
            **super().state_dict(), **grouped("counted", counted), **grouped("absent", absent),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.counted = {name: int(round) for name, round in group(state, "counted").items()}
        self.absent = {*group(state, "absent")}
        super().load_state_dict(state)

    def _total(self) -> int:
        """Return N, the number of clients over which c is a mean."""
        return max(1, len({*self.members, *self.counted} - self.absent))

    def _control_without(self, absent: set[str]) -> dict[str, Array]:
        """Set the members that do not count in N, and return c as a mean over the other clients."""
        before = self._total()
        self.absent = absent
        factor = np.float32(before / self._total())
        return {name: factor * c for name, c in self.averaged["control"].items()}

    def _set_averages(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Store the averages, and build the instructions for training and for evaluation."""
        super()._set_averages({"weights": averaged["weights"]})
        self._eval_instruction = self.instruction
        super()._set_averages(averaged)
        self._instructions: dict[int, Knowledge] = {}
