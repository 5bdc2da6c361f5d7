"""FedAvg strategy (Algorithm 1), and base class for methods that average weights.

Brendan McMahan, Eider Moore, Daniel Ramage, Seth Hampson and Blaise Agüera y Arcas,
Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import Array, group, grouped
from fedhet.config.resolve import Config
from fedhet.methods.fedavg import SPEC, FedAvgSettings
from fedhet.models import HetModel, part_arrays
from fedhet.runs.measures import mean_metrics
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedAvgStrategy(HetStrategy):
    """Strategy that averages the clients' tensors, weighted by each client's number of samples."""

    spec = SPEC
    settings: FedAvgSettings

    def init(self) -> None:
        """Build the initial model, by default with the clients' architecture."""
        model = self.build_model(self.settings.averaged, self.settings.width)
        weights = part_arrays(model, self.settings.part)
        self._set_averages({"weights": weights, **self.extra_groups(model)})

    def extra_groups(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return the initial values of additional groups of tensors to average, by group."""
        return {}

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the averaged tensors."""
        return self.instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average each group of tensors: w <- sum_k n_k / n w_k.

        Returns the mean of each scalar in the replies as a metric.
        """
        averaged = {
            name: self.server_update(before, average_of(replies, name) or before)
            for name, before in self.averaged.items()
        }
        self._set_averages(averaged)
        return mean_metrics([reply.knowledge.scalars for reply in replies])

    def server_update(
        self, before: Mapping[str, Array], average: dict[str, Array]
    ) -> dict[str, Array]:
        """Return the server's new tensors, computed from its previous tensors and the average."""
        return average

    def state_dict(self) -> dict[str, Array]:
        """Return the averaged tensors."""
        return dict(self.instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._set_averages({name: group(state, name) for name in self.averaged})

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the averaged model, or the averaged part of the model."""
        settings: Any = config.method_settings
        weights, architecture = group(state, "weights"), settings.averaged or client.model
        return {settings.averaged_kind: ServerModel(weights, architecture, settings.width)}

    def _set_averages(self, averaged: dict[str, dict[str, Array]]) -> None:
        """Store the averaged tensors, and build the instruction for all clients."""
        self.averaged = averaged
        """Averaged tensors by group; the group "weights" contains the model or a part of it."""
        parts = [grouped(name, values) for name, values in averaged.items()]
        self.instruction = Knowledge(
            {name: value for part in parts for name, value in part.items()}
        )


def average_of(replies: Sequence[Reply], group: str) -> dict[str, Array]:
    """Average a tensor group over the replies that contain it, weighted by sample counts."""
    models = [(sent, r.weight) for r in replies if (sent := r.knowledge.group(group))]
    return average_weights(models) if models else {}
