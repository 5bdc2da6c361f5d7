"""FedGEMS client: Algorithm 1, ClientTrain and ClientSelect."""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedhet.base.arrays import Array
from fedhet.base.errors import KnowledgeError
from fedhet.client_runtime.samples import placed_public
from fedhet.clients.base import HetClient
from fedhet.data.dataset import Split, concatenate
from fedhet.learning.training import Optimization, SupervisedLoss, logits_of
from fedhet.methods.fedgems import FedGemsSettings, selection_for
from fedhet.models import HetModel, Refitted
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge


class FedGemsClient(HetClient):
    """Client that distills the server's logits, trains on its data, and sends logits."""

    settings: FedGemsSettings

    @cached_property
    def public(self) -> Split:
        """Public set on the device."""
        return placed_public(self.public_set(labeled=True), self.compute, self.node.data)

    def sizes(self) -> Sizes:
        """Return the sizes of axes C (classes) and B (bytes of a mask over public samples)."""
        return Sizes({"C": self.info.classes, "B": -(-len(self.public) // 8)})

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run ClientTrain (lines 19 to 27) and ClientSelect (lines 31 to 33).

        Before the server has sent logits, the client trains only on its private data, as in the
        paper's first step (Section 3.2).
        """
        self._store_logits(knowledge)
        generator, model = self.generator(round, "batches"), self.models["private"]
        if isinstance(model, Refitted):
            self.fit_private(generator)
        else:
            optimizing = self.optimization(self.network.train().parameters())
            if "logits" in self.state.tensors:
                self._distill(self.network, optimizing, round)
            loss_of = SupervisedLoss(model, self.task.loss())
            self.train_own(loss_of, self.private, optimizing, generator)
        rows = torch.tensor(self._rows(knowledge, "wanted"), device=self.compute.device)
        if not len(rows):
            return Knowledge({"logits": np.zeros((0, self.info.classes), np.float32)})
        logits = logits_of(model, self.public.x[rows], self.compute)
        return Knowledge({"logits": logits.cpu().numpy()})

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the client's data and, for a regressor without gradients, the public data.

        The targets of the public data are weighted means of labels and server outputs. They have
        the same minimizer as Eq. 6 with squared errors (not in the paper).
        """
        teacher, epsilon = self.state.tensors.get("logits"), self.settings.epsilon
        if teacher is None or not isinstance(self.models["private"], Refitted):
            return self.x, self.y
        targets = epsilon * self.public.y + (1 - epsilon) * teacher
        return concatenate(self.x, self.public.x), torch.cat([self.y, targets])

    def _store_logits(self, knowledge: Knowledge) -> None:
        """Store the server's logits [N, C]. The message may contain only the rows that changed."""
        if "logits" not in knowledge.tensors:
            return
        rows = self._rows(knowledge, "changed")
        received = torch.tensor(knowledge.tensors["logits"], device=self.compute.device)
        if len(received) != len(rows):
            fault = f"expected {len(rows)} rows, got {len(received)}"
            raise KnowledgeError("server", "logits", fault)
        if len(rows) == len(self.public):
            self.state.tensors["logits"] = received
        elif "logits" not in self.state.tensors:
            raise KnowledgeError("server", "changed", "this client has no previous logits")
        else:
            logits = self.state.tensors["logits"].clone()
            logits[rows] = received
            self.state.tensors["logits"] = logits

    def _distill(self, model: HetModel, optimizing: Optimization, round: int) -> None:
        """Train on the public set with the loss in Eq. 6 (lines 21 to 23)."""
        public, epsilon = self.public, self.settings.epsilon
        teacher = self.state.tensors["logits"]
        numbers = torch.arange(len(public), device=self.compute.device)
        known = torch.ones_like(numbers, dtype=torch.bool)
        selection = selection_for(self.settings, self.task)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            return selection.loss(model(x), public.y[rows], teacher[rows], known[rows], epsilon)

        generator = self.generator(round, "public")
        epochs = self.settings.public_epochs
        self.train_epochs(
            public.x, numbers, loss_of, optimizing, generator, epochs=epochs, augment=False
        )

    def _rows(self, knowledge: Knowledge, field: str) -> Array:
        """Return the sample indices in a bit mask, or all indices if no mask was sent."""
        bits = knowledge.tensors.get(field)
        if bits is None:
            return np.arange(len(self.public))
        return np.flatnonzero(np.unpackbits(bits, count=len(self.public)))
