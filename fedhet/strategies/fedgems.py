"""FedGEMS strategy: Algorithm 1, ServerExecute.

Sijie Cheng, Jingwen Wu, Yanghua Xiao, Yang Liu and Yang Liu, FedGEMS: Federated Learning of Larger
Server Models via Selective Knowledge Fusion.

In regression (not in the paper), knowledge is selected by error: a prediction is correct if its
loss (`data.loss`) is at most the setting `tolerance`. Clients are weighted by the reciprocal of the
loss instead of by entropy, and squared errors replace the divergence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms.distillation import (
    Targets,
    fuse,
    fuse_all,
    select_targets,
    split,
)
from fedhet.base.arrays import Array, group, grouped
from fedhet.config.resolve import Config
from fedhet.learning.training import BatchLoss
from fedhet.methods.fedgems import SPEC, FedGemsSettings, selection_for
from fedhet.server.learner import Learner
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedGemsStrategy(HetStrategy):
    """Strategy that trains a server model on public data and on logits from the clients.

    FedGEMS requests logits only for samples that the server model misclassifies. FedGEM requests
    logits for all samples.
    """

    spec = SPEC
    settings: FedGemsSettings

    def init(self) -> None:
        """Build the server model and an empty pool of global logits."""
        self.selection = selection_for(self.settings, self.task)
        public = self.public_set(labeled=True)
        self.learner = Learner(self.build_model(self.settings.server_model), self.run)
        compute = self.learner.compute
        self.x, self.y = compute.to_device(public.x), public.y.to(compute.device)
        self.pool = Targets.none(len(self.y), self.reference_client.classes, compute.device)
        """L_Global: logits of each sample from its last correct prediction."""
        self.logits = self.learner.predict(self.x)
        """L_s [N, C]: logits from the self-evaluation before the current round."""
        self.changed = np.zeros(len(self.y), np.int64)
        """Last round that changed the logits of each sample, or 0 before the first training."""
        self.held: dict[str, int] = {}
        """Round of the logits that each client confirmed last, by client name."""
        self._prepare()

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and Q (requested samples)."""
        rows = self.wanted.nonzero()[0]
        return Sizes({"C": client.classes, "Q": len(rows)}, rows={"Q": rows})

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and B (bytes of a mask over public samples)."""
        return Sizes({"C": client.classes, "B": -(-len(self.y) // 8)})

    def eval_models(self) -> dict[str, nn.Module]:
        return {"server": self.learner.model}

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return L_s or its changed rows (line 17), and the requested samples (line 11)."""
        held = self.held.pop(client.name, 0)  # A client that did not reply may lack the logits.
        if held in self._instructions_by_version:
            return self._instructions_by_version[held]
        sent: dict[str, Array] = {}
        if self.settings.selective:
            sent["wanted"] = np.packbits(self.wanted)
        if self.changed.any():  # Send no logits before the first training.
            sent["logits"] = self.logits
            new = self.changed > held
            bits = np.packbits(new)
            # Send only the changed rows if they need fewer bytes than all rows.
            if held and self.logits[new].nbytes + bits.nbytes < self.logits.nbytes:
                sent |= {"logits": self.logits[new], "changed": bits}
        self._instructions_by_version[held] = Knowledge(sent)
        return self._instructions_by_version[held]

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on the clients' logits (lines 4 to 15).

        Raises DivergedError if training diverged.
        """
        version = int(self.changed.max())
        if version:
            self.held |= {reply.client.name: version for reply in replies}
        logits = torch.tensor(np.stack([r.knowledge.tensors["logits"] for r in replies]))
        rows = torch.tensor(self.wanted.nonzero()[0])
        weighted = self.settings.teachers == "weighted"
        labels = self.y.cpu()[rows]
        requested = fuse(logits, labels, self.selection) if weighted else fuse_all(logits)
        targets = Targets.none(len(self.y), self.reference_client.classes, torch.device("cpu"))
        targets.keep(rows, requested.logits, requested.known)
        fused = Targets(targets.logits.to(self.x.device), targets.known.to(self.x.device))
        before, asked = self.logits, float(self.wanted.sum())
        counts, self.logits = self._train(round, fused)
        self.changed[(before != self.logits).any(1) | (version == 0)] = round
        self._prepare()
        # These are the numbers in Fig. 3 and Table 6, plus the number of samples that no client
        # predicts correctly.
        return {
            **dict(zip(("s1", "s2", "s3"), counts, strict=True)),
            "asked": asked,
            "nobody_right": asked - float(fused.known.sum()),
            "upload_ratio": asked / len(self.y),
        }

    def state_dict(self) -> dict[str, Array]:
        """Return the model, the pool, L_s, and the round of the logits that each client has."""
        pool = {name: tensor.cpu().numpy() for name, tensor in vars(self.pool).items()}
        held = {client: np.array(round) for client, round in self.held.items()}
        return {
            **self.learner.state_dict(),
            **grouped("pool", pool),
            **grouped("held", held),
            "logits": self.logits,
            "changed": self.changed,
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.learner.load_state_dict(state)
        pool = {k: torch.tensor(v) for k, v in group(state, "pool").items()}
        self.pool = Targets(**{k: v.to(self.x.device) for k, v in pool.items()})
        self.held = {client: int(round) for client, round in group(state, "held").items()}
        self.logits, self.changed = state["logits"], state["changed"].copy()
        self._prepare()

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the server model."""
        return {"server": ServerModel.of_learner(config, state)}

    def _prepare(self) -> None:
        """Split the samples according to the self-evaluation, and request the samples in S3."""
        logits = torch.tensor(self.logits, device=self.x.device)
        self.right = self.selection.right(logits, self.y)
        """Mask [N] of the samples that the server predicts correctly."""
        self.parts = self._split(self.right, self.pool.known)
        """Masks [N] of S1, S2 and S3."""
        self.wanted = self.parts[2].cpu().numpy() & (self.settings.teachers != "none")
        """Mask [N] of the requested samples."""
        self._instructions_by_version: dict[int, Knowledge] = {}
        """Instructions, by the round of the logits that the receiving client has."""

    def _split(self, right: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return S1, S2 and S3 according to the settings; with FedGEM, all samples are in S3."""
        settings = self.settings
        return split(
            right,
            pooled,
            self_training=settings.selective and settings.self_training,
            self_distillation=settings.selective and settings.self_distillation,
        )

    def _train(self, round: int, fused: Targets) -> tuple[list[float], Array]:
        """Train the server model, and return the last sizes of S1, S2 and S3, and the new L_s.

        Raises DivergedError if training diverged; model, pool and optimizer are then unchanged.
        """
        pool, labels = self.pool.copy(), self.y.cpu()
        counts = torch.zeros(3, device=self.x.device)
        by_batch = self.settings.split == "batch"
        make_loss = self._loss_by_batch if by_batch else self._loss_by_round
        logits = self.learner.train(
            round,
            self.x,
            torch.arange(len(self.y), device=self.x.device),
            make_loss(fused, pool, counts),
            epochs=self.settings.server_epochs,
            before_epoch=(lambda _: counts.zero_()) if by_batch else None,
            error_of=lambda logits: float(
                (~self.selection.right(torch.from_numpy(logits), labels)).double().mean()
            ),
        )
        self.pool = pool
        return counts.tolist(), logits

    def _loss_by_round(self, fused: Targets, pool: Targets, counts: Tensor) -> BatchLoss:
        """Return a loss function that splits the samples by the self-evaluation before the round.

        Adds the logits of correctly predicted samples to `pool`, and sets `counts` to the sizes of
        S1, S2 and S3.
        """
        counts.copy_(torch.stack([part.sum() for part in self.parts]))
        targets = select_targets(self.parts, self.pool, fused)
        logits = torch.tensor(self.logits, device=self.x.device)
        pool.keep(torch.arange(len(self.y), device=self.x.device), logits, self.right)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            teacher, known = targets.logits[rows], targets.known[rows]
            return self.selection.loss(
                self.learner.model(x), self.y[rows], teacher, known, self.settings.epsilon
            )

        return loss_of

    def _loss_by_batch(self, fused: Targets, pool: Targets, counts: Tensor) -> BatchLoss:
        """Return a loss function that splits each batch by the current predictions (lines 5 to 12).

        The function adds the logits of correctly predicted samples to `pool`, and the sizes of S1,
        S2 and S3 to `counts`.
        """

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits, labels = self.learner.model(x).float(), self.y[rows]
            right = self.selection.right(logits.detach(), labels)
            recalled = Targets(pool.logits[rows], pool.known[rows])
            parts = self._split(right, recalled.known)
            counts.add_(torch.stack([part.sum() for part in parts]))
            fused_rows = Targets(fused.logits[rows], fused.known[rows])
            targets = select_targets(parts, recalled, fused_rows)
            pool.keep(rows, logits.detach(), right)
            return self.selection.loss(
                logits, labels, targets.logits, targets.known, self.settings.epsilon
            )

        return loss_of
