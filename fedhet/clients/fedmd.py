"""FedMD client: transfer learning, then "Digest", "Revisit" and "Communicate" in each round.

`fedhet.strategies.fedmd` explains which steps belong to which round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedhet.algorithms import ScoreKind
from fedhet.algorithms.distillation import digest_losses
from fedhet.client_runtime.samples import placed_public
from fedhet.clients.base import HetClient
from fedhet.data.dataset import Split, concatenate
from fedhet.learning.training import BatchLoss, Optimization, SupervisedLoss, logits_of
from fedhet.methods.fedmd import ConsensusSettings
from fedhet.models import Refitted
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge

ROWS, TARGETS = "rows", "targets"
"""Names of the stored public samples [R] and targets [R, K] of a regressor without gradients."""


@dataclass(frozen=True)
class Consensus:
    """Consensus scores [R, C] for public samples x [R, ...]."""

    x: Tensor
    scores: Tensor

    def numbers(self) -> Tensor:
        """Return the row numbers 0 to R - 1 on the device."""
        return torch.arange(len(self.scores), device=self.scores.device)


class FedMdClient(HetClient):
    """Client that trains on the consensus and on its own data, and sends scores for public samples.

    The scores cover all classes, even if the client's label space is smaller, because the task is
    the union of all label spaces, as in CoFED's comparison with FedMD.
    """

    settings: ConsensusSettings

    @cached_property
    def public(self) -> Split:
        """Public set on the device."""
        public = self.public_set(labeled=self.settings.public_epochs > 0)
        return placed_public(public, self.compute, self.node.data)

    def sizes(self) -> Sizes:
        """Return the sizes of axes C (classes) and N (public samples)."""
        unused = self.settings.unused_in(self.task)
        return Sizes({"C": self.info.classes, "N": len(self.public)}, unused=unused)

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train on the consensus and on the client's data, and return scores for public samples.

        If `public-epochs` is set, a client's first round starts with transfer learning on the
        labeled public data.
        """
        exchanged = self.settings.exchanged_in(self.task)
        if isinstance(self.private, Refitted):
            self._refit(round, knowledge, exchanged)
        else:
            self._train_network(round, knowledge, exchanged)
        logits = logits_of(
            self.models["private"], self._public_images(knowledge, "asked"), self.compute
        )
        return Knowledge({exchanged: self.scores_of(logits).cpu().numpy()})

    def scores_of(self, logits: Tensor) -> Tensor:
        """Return the scores [R, C] that the client sends for public samples with these logits."""
        exchanged = self.settings.exchanged_in(self.task)
        return logits.softmax(1) if exchanged == "probabilities" else logits

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the client's data and, for a regressor without gradients, its public targets."""
        stored = self.state.tensors
        if TARGETS not in stored:
            return self.x, self.y
        x = concatenate(self.x, self.public.x[stored[ROWS]])
        return x, torch.cat([self.y, stored[TARGETS]])

    def _refit(self, round: int, knowledge: Knowledge, exchanged: ScoreKind) -> None:
        """Fit a regressor to both the client's data and the consensus (not in the paper).

        A refitted model forgets its previous fit, so "Digest" and "Revisit" cannot follow each
        other. Before the first consensus, the labels of the public data take its place if
        `public-epochs` is set.
        """
        device, stored = self.compute.device, self.state.tensors
        if exchanged in knowledge.tensors:
            rows = knowledge.tensors["rows"].astype("int64")
            stored[ROWS] = torch.from_numpy(rows).to(device)
            stored[TARGETS] = torch.tensor(knowledge.tensors[exchanged], device=device)
        elif self.state.participations == 0 and self.settings.public_epochs:
            stored[ROWS] = torch.arange(len(self.public), device=device)
            stored[TARGETS] = self.public.y
        self.fit_private(self.generator(round, "batches"))

    def _train_network(self, round: int, knowledge: Knowledge, exchanged: ScoreKind) -> None:
        """Train on public labels (in the first round), the consensus, and the client's data."""
        optimizing = self.optimization(self.network.train().parameters())
        if self.state.participations == 0 and self.settings.public_epochs:
            x, y, epochs = self.public.x, self.public.y, self.settings.public_epochs
            loss_of = SupervisedLoss(self.network, self.task.loss())
            generator = self.generator(round, "labels")
            self.train_epochs(x, y, loss_of, optimizing, generator, epochs=epochs)
        consensus = None
        if exchanged in knowledge.tensors:  # The fields are absent before the first replies.
            scores = torch.tensor(knowledge.tensors[exchanged], device=self.compute.device)
            consensus = Consensus(self._public_images(knowledge, "rows"), scores)
        self.learn(round, consensus, optimizing)

    def learn(self, round: int, consensus: Consensus | None, optimizing: Optimization) -> None:
        """Train on the consensus ("Digest"), if it exists, and on the client's data."""
        if consensus is not None:
            self.train_epochs(
                consensus.x,
                consensus.numbers(),
                lambda x, rows: self.consensus_loss(consensus, x, rows),
                optimizing,
                self.generator(round, "public"),
                epochs=self.settings.digest_epochs,
                augment=False,
            )
        self._revisit(round, optimizing)

    def consensus_loss(self, consensus: Consensus, x: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of samples x [B, ...] against rows [B] of the consensus."""
        logits, target = self.network(x), consensus.scores[rows]
        exchanged = self.settings.exchanged_in(self.task)
        return digest_losses(self.settings.loss, logits, target, exchanged).mean()

    def _revisit(self, round: int, optimizing: Optimization) -> None:
        """Train for the local epochs on the client's data, within its label space ("Revisit")."""
        generator = self.generator(round, "batches")
        self.train_own(self.own_loss(), self.private, optimizing, generator)

    def own_loss(self) -> BatchLoss:
        """Return the loss function of a batch of the client's samples, by default the task's."""
        return SupervisedLoss(self.private, self.task.loss())

    def _public_images(self, knowledge: Knowledge, field: str) -> Tensor:
        """Return the public samples whose indices are in the given field of a message."""
        numbers = torch.from_numpy(knowledge.tensors[field].astype("int64"))
        return self.public.x[numbers.to(self.compute.device)]
