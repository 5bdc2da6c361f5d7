"""FedKD, server half: FedAvg's, of the mentees' changes; the mean change is sent at low rank too.

Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang and Xing Xie, Communication-efficient federated
learning via knowledge distillation, Nature Communications 13, 2022, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from fedhet.algorithms.weights import add_update, energy_kept, factors
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.fedkd import SPEC, FedKdSettings
from fedhet.runs.measures import mean_metrics
from fedhet.strategies.base import Reply
from fedhet.strategies.fedavg import FedAvgStrategy, average_of
from fedhet.wire.factors import packed, unpacked
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedKdStrategy(FedAvgStrategy):
    """Adds the mean of the clients' changes to the mentee, and sends clients that mean.

    A client that has not answered in the last round lacks the mentee to which it would be added:
    it is sent the mentee itself (ours; in the paper all clients take part in all rounds).
    """

    spec = SPEC
    settings: FedKdSettings

    def init(self) -> None:
        """Start from a new mentee."""
        super().init()
        self._change(0, {}, ())

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the last round's change, or the mentee."""
        if round != self.changed_in + 1 or client.name not in self.holders:
            return self.instruction
        self.holders.discard(client.name)  # one that fails to answer may lack the mentee
        return self._update

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the round's change, or the mentee."""
        holds = round == self.changed_in and client.name in self.holders
        return self._update if holds else self.instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Run lines 13 to 22: the mean change, cut to the rank that keeps its energy."""
        own, mentee = self.settings, self.averaged["weights"]
        energy = energy_kept(round, self.run.rounds, own.energy_start, own.energy_end)
        sent = packed(average_of(replies, "update"), partial(factors, energy=energy))
        shapes = self.sizes(self.task).models["update"]
        self._instruct_all({"weights": add_update(mentee, unpacked(sent, shapes))})
        # A late client's mentee is older than the one that this changes.
        self._change(round, sent, [reply.client.name for reply in replies if not reply.age])
        metrics = mean_metrics([reply.knowledge.scalars for reply in replies])
        counts = [sum(value.size for value in part.values()) for part in (sent, mentee)]
        return metrics | {"sent_down": counts[0] / counts[1]}

    def forget(self, client: str) -> None:
        """Drop what is known of a client's mentee."""
        self.holders.discard(client)

    def state_dict(self) -> dict[str, Array]:
        """Return the mentee, its last change, its round, and the clients that can use it."""
        holders = {name: np.array(True) for name in sorted(self.holders)}
        kept = {**super().state_dict(), **grouped("update", self._sent)}
        return {**kept, **grouped("holders", holders), "changed_in": np.array(self.changed_in)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        self._change(int(state["changed_in"]), group(state, "update"), group(state, "holders"))

    def _change(
        self, round: int, sent: dict[str, Array], holders: Sequence[str] | Mapping[str, Array]
    ) -> None:
        """Build the instruction for clients that hold the mentee as it was before the change."""
        self.changed_in = round
        """The round of the last change; 0: none."""
        self.holders = set(holders)
        """The clients that hold the mentee with which that round began."""
        self._sent = sent
        self._update = Knowledge(grouped("update", sent), {"base": round})
