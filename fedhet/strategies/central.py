"""Centralized training: one model on the data of all clients, as an upper bound.

The three values of `trains-on` correspond to the rows "Centralized", "Centralized-All" and the
server's "Stand-Alone" in Table 2 of FedGEMS (Cheng et al., FedGEMS: Federated Learning of Larger
Server Models via Selective Knowledge Fusion).

This is not a federated method. It runs only in simulation, where any process can generate every
client's data. One client, the trainer, reads the training samples of all clients and trains as with
the method `local`, so that all training settings have their usual meaning. The other clients only
evaluate the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from fedhet.base.arrays import Array, group, grouped
from fedhet.config.resolve import Config
from fedhet.learning.devices import compute_for
from fedhet.methods.central import SPEC, CentralSettings, model_in, sizes_in, trainer
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import HetStrategy, Reply, Selection, ServerModel
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class CentralStrategy(HetStrategy):
    """Strategy that trains a model on one client and evaluates it on all clients."""

    spec = SPEC
    settings: CentralSettings

    def init(self) -> None:
        """Build the initial model."""
        self.model = self.build_model(model_in(self.run, self.settings))
        compute_for(self.run.engine).place(self.model)
        self._set_weights(to_arrays(self.model))

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the size of axis C (classes) and the shapes of the trained model's tensors."""
        return sizes_in(self.run, self.settings, client)

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the same sizes as for replies."""
        return self.sizes(client)

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select only the trainer; all clients evaluate after the round."""
        names = [member.name for member in members if member.name == trainer(self.run)]
        return Selection((), tuple(names))

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the trained model's weights."""
        return self._sent

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the trained model, under the kind "server"."""
        return {"server": self.model}

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Replace the model with the trainer's model."""
        weights = replies[0].knowledge.group("weights")
        self._set_weights({name: value.copy() for name, value in weights.items()})
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the trained model's weights."""
        return dict(self._sent.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._set_weights(group(state, "weights"))

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the trained model, which the server and the clients evaluate."""
        settings: Any = config.method_settings
        weights, name = group(state, "weights"), model_in(config.run, settings)
        return {
            "server": ServerModel(weights, name, field=""),
            "global": ServerModel(weights, name),
        }

    def _set_weights(self, weights: Mapping[str, Array]) -> None:
        """Load the weights, and build the evaluation instruction."""
        self._sent = Knowledge(grouped("weights", weights))
        load_weights(self.model, weights)
