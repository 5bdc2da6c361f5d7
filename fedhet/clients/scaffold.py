"""SCAFFOLD client: Algorithm 1, lines 7 to 14, with option II for control variates."""

from __future__ import annotations

import torch

from fedhet.algorithms.local_models import ControlledModel, LocalModel
from fedhet.base.arrays import Array, group, grouped
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.scaffold import ScaffoldSettings
from fedhet.models import to_host_arrays
from fedhet.wire.knowledge import Knowledge


class ScaffoldClient(FedAvgClient):
    """Client that corrects each step by c - c_i. Its control variate c_i is part of its state."""

    settings: ScaffoldSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the model, with corrected steps."""
        # A client in its first round has no control variate, i.e. c_i = 0.
        zeros = {name: torch.zeros_like(p) for name, p in self.network.named_parameters()}
        # If the last change is not part of c, continue with the control variate before it.
        last = self.state.metadata.get("trained", 0)
        kept = "control" if last == knowledge.scalars.get("counted", 0) else "previous"
        self._control, self._round = zeros | group(self.state.tensors, kept), round
        received = knowledge.group("control").items()
        server = {name: torch.from_numpy(value).to(zeros[name]) for name, value in received}
        lr = self.training.lr * self.recipe.rate_factor(self.training)
        return ControlledModel(self.network, self.anchor(), self._control, zeros | server, lr)

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the weights and the change of the control variate, and store the new one."""
        assert isinstance(local, ControlledModel)
        control = local.new_control()
        kept = grouped("control", control) | grouped("previous", self._control)
        self.state.tensors = {**self.state.tensors, **kept}
        self.state.metadata["trained"] = self._round
        change = {name: value - self._control[name] for name, value in control.items()}
        return {**super().reply(local), **grouped("change", to_host_arrays(change))}
