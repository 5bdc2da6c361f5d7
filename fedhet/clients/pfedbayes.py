"""pFedBayes, client half: Algorithm 1, "ClientUpdate".

zeta and the initial scale are those of the paper's experiments; Adam and the number of personal
steps follow a public implementation that reports the paper's accuracy
(github.com/AllenBeau/pFedBayes), which is not the authors' own. Unlike there, an epoch passes over
all batches, and Adam starts anew in each round (ours).
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
"""The group of the state's tensors that holds the personal standard deviations."""


class PFedBayesClient(FedAvgClient):
    """Trains a personal Gaussian for every weight, and sends a localized one that follows it.

    The private model, which is evaluated, has the personal means.
    """

    settings: PFedBayesSettings

    def start(self, weights: Arrays) -> HetModel:
        """Start from the server's means in the first participation, later from the personal."""
        return self.network if self.state.participations else super().start(weights)

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the personal Gaussians with the localized ones, which are the server's."""
        mean, scale = (self._placed(knowledge.group(name)) for name in ("weights", "scale"))
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
        """Return the number of personal steps per batch."""
        return self.settings.steps

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the localized means and standard deviations; keep the personal ones."""
        assert isinstance(local, LocalizedModel)
        self.state.tensors |= grouped(PERSONAL, local.scale())
        return super().reply(local) | grouped("scale", to_host_arrays(local.local_scale()))

    def _placed(self, arrays: Arrays) -> dict[str, torch.Tensor]:
        return all_to_device({k: torch.tensor(v) for k, v in arrays.items()}, self.compute.device)
