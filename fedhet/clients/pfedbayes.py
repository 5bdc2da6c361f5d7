"""pFedBayes client: Algorithm 1, ClientUpdate.

The value of zeta and the initial scale are from the paper's experiments. Adam and the number of
personal steps follow a third-party implementation that reports the paper's accuracy
(github.com/AllenBeau/pFedBayes). Unlike in that implementation, an epoch passes over all batches,
and the state of Adam is reset in each round.
"""

from __future__ import annotations

import torch

from fedhet.algorithms.local_models import LocalizedModel, LocalModel
from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.seeding import derive
from fedhet.base.transfer import all_to_device
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.pfedbayes import PFedBayesSettings
from fedhet.models import HetModel, to_host_arrays
from fedhet.wire.knowledge import Knowledge

PERSONAL = "scale"
"""State key for the personal standard deviations."""


class PFedBayesClient(FedAvgClient):
    """Client that trains a personal and a localized weight distribution, and sends the latter.

    Both distributions are Gaussian. The private model's weights are the personal means.
    """

    settings: PFedBayesSettings

    def start(self, weights: Arrays) -> HetModel:
        """Start from the server's means in the first round, and later from the personal means."""
        return self.network if self.state.participations else super().start(weights)

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the model for local training of the personal and the localized distribution."""
        mean, scale = (
            all_to_device(
                {name: torch.tensor(value) for name, value in knowledge.group(part).items()},
                self.compute.device,
            )
            for part in ("weights", "scale")
        )
        return LocalizedModel(
            self.network,
            mean,
            scale,
            self.settings.zeta / len(self.y),
            derive(self.run.seed, self.info.name, round, "weights"),
            personal=group(self.state.tensors, PERSONAL) or scale,
            lr=self.training.lr,
            noise=self.settings.noise,
        )

    def steps(self) -> int:
        """Return the number of steps per batch on the personal distribution."""
        return self.settings.steps

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Store the personal standard deviations, and return the localized distribution."""
        assert isinstance(local, LocalizedModel)
        self.state.tensors |= grouped(PERSONAL, local.scale())
        return super().reply(local) | grouped("scale", to_host_arrays(local.local_scale()))
