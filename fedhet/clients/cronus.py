"""Cronus client: training on the union of private data and softly labeled public data."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms.distillation import digest_losses
from fedhet.clients.fedmd import Consensus, FedMdClient
from fedhet.data.dataset import Split, concatenate
from fedhet.learning.training import Optimization
from fedhet.methods.cronus import CronusSettings


class CronusClient(FedMdClient):
    """Client that trains on the union of its own data and the softly labeled public data.

    Until it receives the first consensus, it trains only on its own data (the paper's
    initialization phase).
    """

    settings: CronusSettings

    def learn(self, round: int, consensus: Consensus | None, optimizing: Optimization) -> None:
        """Train for the local epochs on the union, or on the client's data if no consensus exists.

        The targets of the client's samples are their classes. The target of the public sample in
        row r of the consensus is -1 - r.
        """
        if consensus is None:
            self._revisit(round, optimizing)
            return
        union = Split(
            concatenate(self.x, consensus.x), torch.cat([self.y, -1 - consensus.numbers()])
        )

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            return self._loss(self.network(x), y, consensus)

        generator = self.generator(round, "batches")
        self.train_own(loss_of, self.private, optimizing, generator, labeled=union)

    def _loss(self, logits: Tensor, y: Tensor, consensus: Consensus) -> Tensor:
        """Return the mean loss of logits [B, C] against targets [B] in the union label space."""
        is_own = y >= 0
        columns, classes = self.own_classes(logits, y)
        classes = classes.where(is_own, -1)
        hard = F.cross_entropy(columns.float(), classes, ignore_index=-1, reduction="sum")
        target = consensus.scores[(-1 - y).clamp(min=0)]
        soft = digest_losses(self.settings.loss, logits, target, self.settings.exchanged)
        return (hard + (soft * ~is_own).sum()) / len(y)
