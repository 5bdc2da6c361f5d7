"""KT-pFL client: FedMD's client with soft predictions at a temperature."""

from __future__ import annotations

from torch import Tensor

from fedhet.algorithms.distillation import digest_losses
from fedhet.clients.fedmd import Consensus, FedMdClient
from fedhet.methods.kt_pfl import KtPflSettings


class KtPflClient(FedMdClient):
    """Client that learns from its personalized soft predictions, and then from its own data."""

    settings: KtPflSettings

    def scores_of(self, logits: Tensor) -> Tensor:
        """Return the soft predictions softmax(logits / T)."""
        return super().scores_of(logits / self.settings.temperature)

    def consensus_loss(self, consensus: Consensus, x: Tensor, rows: Tensor) -> Tensor:
        """Return the cross-entropy with the soft predictions.

        Its gradient equals the gradient of KL(sum_m c_m s_m || s_n), because the entropy of the
        combination is constant.
        """
        softened = self.network(x).float() / self.settings.temperature
        target = consensus.scores[rows]
        return digest_losses("cross-entropy", softened, target, "probabilities").mean()
