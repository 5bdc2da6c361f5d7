"""Centralized training: one model on all clients' data, the upper bound of every table.

No paper; the rows "Centralized", "Centralized-All" and, for the server, "Stand-Alone" of FedGEMS'
Table 2 (Cheng et al., FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge
Fusion) are its three choices of data.

It is not a federated method, and runs only in a simulation, where a client's data is a pure
function of the run's settings. The first client, the trainer, reads the training samples of all and
trains on them as it would with `local` (ours). So every setting of training has its usual meaning,
and with one client the method is `local`. The other clients only evaluate the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from fedhet.base.arrays import Array, group, grouped
from fedhet.learning.devices import compute_for
from fedhet.methods.central import SPEC, CentralSettings, model_in, sizes_in, trainer
from fedhet.models import load_weights, to_arrays
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class CentralStrategy(HetStrategy):
    """Lets one client train, and all clients evaluate its model."""

    spec = SPEC
    settings: CentralSettings

    def init(self) -> None:
        """Start from a new model."""
        self.model = self.build_model(model_in(self.run, self.settings))
        compute_for(self.run.engine).place(self.model)
        self._keep(to_arrays(self.model))

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axis C, and the shapes of the one model, whatever the client's own is."""
        return sizes_in(self.run, self.settings, client)

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the trainer alone; all clients evaluate after the round."""
        found = [member.name for member in members if member.name == trainer(self.run)]
        return Selection((), tuple(found))

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the model."""
        return self._sent

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the model, as the server's own."""
        return {"server": self.model}

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Adopt the trainer's model."""
        weights = replies[0].knowledge.group("weights")
        self._keep({name: value.copy() for name, value in weights.items()})
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the model."""
        return dict(self._sent.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._keep(group(state, "weights"))

    def _keep(self, weights: Mapping[str, Array]) -> None:
        """Build the instruction with which all clients evaluate."""
        self._sent = Knowledge(grouped("weights", weights))
        load_weights(self.model, weights)
