"""Ditto client: Algorithm 1, updates of the global and of the personal model."""

from __future__ import annotations

import copy

from fedhet.algorithms.local_models import LocalModel, ProximalModel
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.ditto import DittoSettings
from fedhet.wire.knowledge import Knowledge


class DittoClient(FedAvgClient):
    """Client that trains the received model as in FedAvg, and a personal model that stays close.

    The kind "private" is the personal model v_k.
    """

    settings: DittoSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train both models, and return the weights of the first.

        - w_k <- w^t, trained on F_k;
        - v_k <- v_k - eta (grad F_k(v_k) + lambda (v_k - w^t)), where w^t are the received weights.

        The reply does not depend on v_k, which no message contains.
        """
        model = self._joined(copy.deepcopy(self.network), knowledge.group("weights"))
        anchor = {name: p.detach().clone() for name, p in model.named_parameters()}
        received = LocalModel(model, anchor)
        self._learn(round, received)
        personal = ProximalModel(self.network, anchor, self.settings.lambda_)
        self._learn(round, personal, "personal", epochs=self.settings.personal_epochs)
        return Knowledge(self.reply(received))
