"""FedAvg, server half: Algorithm 1, and the round of all methods that average weights.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson and Blaise Agüera y Arcas,
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.algorithms.averaging import average_weights
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.fedavg import SPEC, FedAvgSettings
from fedhet.models import HetModel, build
from fedhet.models.het import arrays_of
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedAvgStrategy(HetStrategy):
    """Averages the clients' tensors by samples, and sends all clients the averages."""

    spec = SPEC
    settings: FedAvgSettings

    def init(self) -> None:
        """Start from a new model."""
        task, own = self.task, self.settings
        model = build(
            task.model,
            task.shape,
            task.classes,
            kind=task.kind,
            seed=self.run.seed,
            feature_dim=own.width,
        )
        self._instruct_all({"weights": arrays_of(model, own.part), **self.extra_groups(model)})

    def extra_groups(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return further groups of tensors to send and average, with their initial values."""
        return {}

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the averages."""
        return self._instruction

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the averages."""
        return self._instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average each group of tensors, weighted by samples (w <- sum of n_k / n w_k)."""
        averaged = {
            name: self.mixed(before, average_of(replies, name))
            for name, before in self.averaged.items()
        }
        self._instruct_all(averaged)
        return {}

    def mixed(self, before: Mapping[str, Array], average: dict[str, Array]) -> dict[str, Array]:
        """Return the server's tensors after a round that it began with `before`."""
        return average

    def state_dict(self) -> dict[str, Array]:
        """Return the averages, as they are sent."""
        return dict(self._instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        self._instruct_all({name: group(state, name) for name in self.averaged})

    def _instruct_all(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Build the one instruction that all clients share."""
        self.averaged = averaged
        """The averages by group; the group "weights" is the model's, or a part of it."""
        tensors: dict[str, Array] = {}
        for name, values in averaged.items():
            tensors |= grouped(name, values)
        self._instruction = Knowledge(tensors)


def average_of(replies: Sequence[Reply], group: str) -> dict[str, Array]:
    """Return the average of a group of the replies' tensors, weighted by samples."""
    return average_weights([(reply.knowledge.group(group), reply.weight) for reply in replies])
