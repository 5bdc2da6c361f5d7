"""pFedBayes, client half: Algorithm 1, "ClientUpdate".

Xu Zhang, Yinchuan Li, Wenpeng Li, Kaiyang Guo and Yunfeng Shao, Personalized Federated Learning via
Variational Bayesian Inference, ICML 2022.
"""

from __future__ import annotations

import torch

from fedhet.algorithms.local_models import LocalModel, VariationalModel
from fedhet.arrays import Array, grouped
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.pfedbayes import PFedBayesSettings
from fedhet.seeding import derive
from fedhet.wire.knowledge import Knowledge


class PFedBayesClient(FedAvgClient):
    """Trains a Gaussian for every weight, and sends its mean and standard deviation.

    The loss of a batch uses one draw of the weights, plus zeta KL(q || server's q) (Eq. 7). The
    private model, which is evaluated, has the means.
    """

    settings: PFedBayesSettings

    def local_model(self, round: int, knowledge: Knowledge) -> LocalModel:
        """Return the private model with a Gaussian for every weight."""
        device = self.compute.device
        scale = {k: torch.tensor(v, device=device) for k, v in knowledge.group("scale").items()}
        seed = derive(self.run.seed, self.info.name, round, "weights")
        return VariationalModel(self.network, self.anchor(), scale, self.settings.zeta, seed)

    def reply(self, local: LocalModel) -> dict[str, Array]:
        """Return the means and the standard deviations."""
        assert isinstance(local, VariationalModel)
        scale = {name: value.cpu().numpy() for name, value in local.scale().items()}
        return super().reply(local) | grouped("scale", scale)
