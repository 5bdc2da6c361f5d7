"""RHFL client: FedMD's client with a symmetric loss, which also sends its loss."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fedhet.algorithms.distillation import digest_losses
from fedhet.algorithms.noisy_labels import symmetric_loss
from fedhet.clients.fedmd import Consensus, FedMdClient
from fedhet.learning.training import BatchLoss, SupervisedLoss, logits_of
from fedhet.methods.rhfl import RhflSettings
from fedhet.wire.knowledge import Knowledge


class RhflClient(FedMdClient):
    """Client that learns from the other clients' predictions, and then from its noisy labels."""

    settings: RhflSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train as in FedMD, and return probabilities and the mean loss on the client's samples."""
        reply = super().train(round, knowledge)
        if not self.settings.eta:
            return reply
        logits = logits_of(self.private, self.x, self.compute)
        loss = self._symmetric_loss(logits, self.y.to(logits.device)).item()
        return Knowledge(reply.tensors, {"loss": loss})

    def own_loss(self) -> BatchLoss:
        """Return the symmetric loss (SL) of the private model."""
        return SupervisedLoss(self.private, self._symmetric_loss)

    def consensus_loss(self, consensus: Consensus, x: Tensor, rows: Tensor) -> Tensor:
        """Return the cross-entropy with the other clients' weighted probabilities.

        Its gradient equals the gradient of sum_k W_k KL(p_k || p), because the entropies of the
        other clients' probabilities p_k are constant.
        """
        target = consensus.scores[rows]
        return digest_losses("cross-entropy", self.network(x), target, "probabilities").mean()

    @property
    def _symmetric_loss(self) -> BatchLoss:
        ce, rce = self.settings.ce_weight, self.settings.rce_weight
        return partial(symmetric_loss, ce_weight=ce, rce_weight=rce)
