"""Centralised training: one model on all clients' data, the upper bound of every table.

No paper; the rows "Centralized", "Centralized-All" and, for the server, "Stand-Alone" of FedGEMS'
Table 2 (Cheng et al., FedGEMS: Federated Learning of Larger Server Models via Selective Knowledge
Fusion) are its three choices of data.

It is no federated method, and runs in a simulation alone, where a client's data is a pure function
of the run's settings: the first client, the trainer, reads the training samples of all and trains
on them as it would with `local` (ours). So every setting of training means what it means elsewhere,
and with one client the method is `local`. The other clients only evaluate the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field, field_validator
from torch import nn

from fedhet.arrays import Array, group, grouped
from fedhet.data import client_name
from fedhet.devices import compute_for
from fedhet.errors import ModelError
from fedhet.methods.registry import MethodSpec
from fedhet.models import build, check_name, deal, load_weights, shapes, to_arrays
from fedhet.settings.run import RunSettings
from fedhet.settings.schema import MethodSettings
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class CentralSettings(MethodSettings):
    """Settings of centralised training."""

    trains_on: Literal["clients", "clients+public", "public"] = Field(
        "clients",
        description="what is trained on: all clients' training samples, the labelled public data "
        "beside them, or the public data alone",
    )
    model: str = Field("", description="the one model; empty = that of the first client")

    @field_validator("model")
    @classmethod
    def _is_known(cls, name: str) -> str:
        try:
            if name:
                check_name(name)
        except ModelError as error:
            raise ValueError(str(error)) from None
        return name

    def uses_public(self) -> bool:
        """Tell whether public data is trained on."""
        return self.trains_on != "clients"

    def model_in(self, run: RunSettings) -> str:
        """Return the name of the model in a run."""
        return self.model or deal(run.models.names, run.clients, run.seed, run.models.deal)[0]

    def sizes_in(self, run: RunSettings, client: ClientInfo) -> Sizes:
        """Return the axis C, and the tensor shapes of the model in a run."""
        model = shapes(self.model_in(run), client.shape, client.classes)
        return Sizes({"C": client.classes}, {"weights": model})


def trainer(run: RunSettings) -> str:
    """Return the name of the client that trains: the first."""
    return client_name(0, run.clients)


class CentralStrategy(HetStrategy):
    """Lets one client train, and all evaluate what it has trained."""

    spec = MethodSpec(
        title="one model on all clients' data, in a simulation: the upper bound of every table",
        paper="no paper",
        headline="common",
        settings=CentralSettings,
        kinds=("global",),
        simulation_only=True,
    )
    settings: CentralSettings
    sends = Contract((WeightsField("weights", "the model, to be evaluated", required=False),))

    def init(self) -> None:
        """Start from a new model."""
        # The thread count affects floating-point sums: fix it, as on the clients.
        torch.set_num_threads(self.run.engine.threads)
        task, name = self.task, self.settings.model_in(self.run)
        self.model = build(name, task.shape, task.classes, seed=self.run.seed)
        compute_for(self.run.engine).place(self.model)
        self._keep(to_arrays(self.model))

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axis C, and the shapes of the one model, whatever the client's own is."""
        return self.settings.sizes_in(self.run, client)

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the trainer; it is evaluated with all others, after the round."""
        found = [member.name for member in members if member.name == trainer(self.run)]
        return Selection((), tuple(found))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send an empty instruction."""
        return Knowledge()

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the model."""
        return self._instruction

    def eval_models(self) -> Mapping[str, nn.Module]:
        """Return the model, as the server's own."""
        return {"server": self.model}

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Take over the trainer's model."""
        weights = replies[0].knowledge.group("weights")
        self._keep({name: value.copy() for name, value in weights.items()})
        return {}

    def state_dict(self) -> dict[str, Array]:
        """Return the model."""
        return dict(self._instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        self._keep(group(state, "weights"))

    def _keep(self, weights: Mapping[str, Array]) -> None:
        """Build the one instruction that all clients share."""
        self._instruction = Knowledge(grouped("weights", weights))
        load_weights(self.model, weights)
