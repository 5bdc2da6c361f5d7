"""FedKD strategy: FedAvg of the mentees' updates, with a low-rank mean update.

Chuhan Wu, Fangzhao Wu, Lingjuan Lyu, Yongfeng Huang and Xing Xie, Communication-efficient federated
learning via knowledge distillation, Nature Communications 13, 2022, Algorithm 1.

In regression (not in the paper), `data.loss` determines the task losses, and the distillation
losses are squared errors, as in `Regression.divergence`. The hidden loss is unchanged.
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
    """Strategy that averages the mentees' updates and sends the mean update to the clients.

    The update applies to the previous mentee. A client that did not reply in the last round lacks
    this base, and receives the full mentee. In the paper, all clients take part in all rounds.
    """

    spec = SPEC
    settings: FedKdSettings

    def init(self) -> None:
        """Build a new mentee."""
        super().init()
        self._set_update(0, {}, ())

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the last mean update if the client has its base, or else the mentee."""
        if round != self.changed_in + 1 or client.name not in self.holders:
            return self.instruction
        self.holders.discard(client.name)  # A client that did not reply may lack the mentee.
        return self._update

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the mean update of the round if the client has its base, or else the mentee."""
        holds = round == self.changed_in and client.name in self.holders
        return self._update if holds else self.instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Apply the mean update, at the lowest rank with the required energy (lines 13 to 22)."""
        settings, mentee = self.settings, self.averaged["weights"]
        energy = energy_kept(round, self.run.rounds, settings.energy_start, settings.energy_end)
        sent = packed(average_of(replies, "update"), partial(factors, energy=energy))
        shapes = self.sizes(self.reference_client).models["update"]
        self._set_averages({"weights": add_update(mentee, unpacked(sent, shapes))})
        # Exclude late clients, because the update does not apply to their older mentee.
        self._set_update(round, sent, [reply.client.name for reply in replies if not reply.age])
        metrics = mean_metrics([reply.knowledge.scalars for reply in replies])
        counts = [sum(value.size for value in part.values()) for part in (sent, mentee)]
        return metrics | {"sent_down": counts[0] / counts[1]}

    def forget(self, client: str) -> None:
        """Record that a client lacks the base and must next receive the full mentee."""
        self.holders.discard(client)

    def state_dict(self) -> dict[str, Array]:
        """Return the mentee, the last update and its round, and the clients that have the base."""
        holders = {name: np.array(True) for name in sorted(self.holders)}
        state = {**super().state_dict(), **grouped("update", self._sent)}
        return {**state, **grouped("holders", holders), "changed_in": np.array(self.changed_in)}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        super().load_state_dict(state)
        round, holders = int(state["changed_in"]), group(state, "holders")
        self._set_update(round, group(state, "update"), holders)

    def _set_update(
        self, round: int, sent: dict[str, Array], holders: Sequence[str] | Mapping[str, Array]
    ) -> None:
        """Build the instruction for clients that have the base of the update."""
        self.changed_in = round
        """Round of the last update, or 0 before the first update."""
        self.holders = set(holders)
        """Clients that have the base of the last update."""
        self._sent = sent
        self._update = Knowledge(grouped("update", sent), {"base": round})
