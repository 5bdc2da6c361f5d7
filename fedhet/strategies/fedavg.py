"""FedAvg, server half: Algorithm 1, and the round of all methods that average weights.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson and Blaise Agüera y Arcas,
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.fedavg import SPEC, FedAvgSettings
from fedhet.models import HetModel, part_arrays
from fedhet.runs.measures import mean_metrics
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedAvgStrategy(HetStrategy):
    """Averages the clients' tensors by samples, and sends all clients the averages."""

    spec = SPEC
    settings: FedAvgSettings

    def init(self) -> None:
        """Start from a new model: the clients', or one that a setting names."""
        model = self.build_model(self.settings.averaged, self.settings.width)
        weights = part_arrays(model, self.settings.part)
        self._instruct_all({"weights": weights, **self.extra_groups(model)})

    def extra_groups(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return further groups of tensors to send and average, with their initial values."""
        return {}

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the averages."""
        return self.instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average each group of tensors, weighted by samples (w <- sum of n_k / n w_k).

        The method's metrics are the means of the scalars that clients send.
        """
        averaged = {
            name: self.mixed(before, average_of(replies, name) or before)
            for name, before in self.averaged.items()
        }
        self._instruct_all(averaged)
        return mean_metrics([reply.knowledge.scalars for reply in replies])

    def mixed(self, before: Mapping[str, Array], average: dict[str, Array]) -> dict[str, Array]:
        """Return the server's tensors after a round that it began with `before`."""
        return average

    def state_dict(self) -> dict[str, Array]:
        """Return the averages, as they are sent."""
        return dict(self.instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._instruct_all({name: group(state, name) for name in self.averaged})

    def _instruct_all(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Build the one instruction that all clients share."""
        self.averaged = averaged
        """The averages by group; the group "weights" is the model's, or a part of it."""
        parts = [grouped(name, values) for name, values in averaged.items()]
        self.instruction = Knowledge(
            {name: value for part in parts for name, value in part.items()}
        )


def average_of(replies: Sequence[Reply], group: str) -> dict[str, Array]:
    """Return the average of a group of tensors, weighted by samples, over replies that have it."""
    models = [(sent, r.weight) for r in replies if (sent := r.knowledge.group(group))]
    return average_weights(models) if models else {}
