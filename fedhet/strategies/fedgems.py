"""FedGEMS, server half: Algorithm 1, "ServerExecute".

Sijie Cheng, Jingwen Wu, Yanghua Xiao, Yang Liu and Yang Liu, FedGEMS: Federated Learning of Larger
Server Models via Selective Knowledge Fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms.distillation import (
    Targets,
    fuse,
    fuse_all,
    select_targets,
    selective_loss,
    split,
)
from fedhet.base.arrays import Array, group, grouped
from fedhet.data.store import check_no_overlap
from fedhet.learning.training import BatchLoss
from fedhet.methods.fedgems import SPEC, FedGemsSettings
from fedhet.server.learner import Learner
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedGemsStrategy(HetStrategy):
    """Trains its own model on the public set, and asks clients for logits where it is wrong."""

    spec = SPEC
    settings: FedGemsSettings

    def init(self) -> None:
        """Build the server's model; the pool of global logits starts empty."""
        public = self.public_set(labeled=True)
        if self.run.data.public_dataset and (common := self.common_test()):
            check_no_overlap(public, common, "the common test set")
        self.learner = Learner(self.build_model(self.settings.server_model), self.run)
        compute = self.learner.compute
        self.x, self.y = compute.to_device(public.x), public.y.to(compute.device)
        self.pool = Targets.none(len(self.y), self.task.classes, compute.device)
        """L_Global: each sample's logits from when it was last predicted correctly."""
        self.logits = self.learner.predict(self.x)
        """L_s, [N, C]: those of the self-evaluation before each round."""
        self.changed = np.zeros(len(self.y), np.int64)
        """The round after which each sample's logits last changed; 0: never sent."""
        self.held: dict[str, int] = {}
        """The round whose logits each client holds."""
        self._prepare()

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C, and Q, the number of samples asked for."""
        rows = self.wanted.nonzero()[0]
        return Sizes({"C": client.classes, "Q": len(rows)}, rows={"Q": rows})

    def eval_models(self) -> dict[str, nn.Module]:
        return {"server": self.learner.model}

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send L_s (line 17), or only its changes, and the samples to answer (line 11)."""
        held = self.held.pop(client.name, 0)  # a client that fails to answer may lack the logits
        if held in self._instructions_by_version:
            return self._instructions_by_version[held]
        sent: dict[str, Array] = {}
        if self.settings.selective:
            sent["wanted"] = np.packbits(self.wanted)
        if self.changed.any():  # a server that has not trained yet sends no logits (ours)
            sent["logits"] = self.logits
            new = self.changed > held
            bits = np.packbits(new)
            # Only the changed ones, if that takes fewer bytes.
            if held and self.logits[new].nbytes + bits.nbytes < self.logits.nbytes:
                sent |= {"logits": self.logits[new], "changed": bits}
        self._instructions_by_version[held] = Knowledge(sent)
        return self._instructions_by_version[held]

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on the clients' logits (lines 4 to 15). Raises DivergedError."""
        version = int(self.changed.max())
        if version:
            self.held |= {reply.client.name: version for reply in replies}
        answers = torch.tensor(np.stack([r.knowledge.tensors["logits"] for r in replies]))
        rows = torch.tensor(self.wanted.nonzero()[0])
        weighted = self.settings.teachers == "weighted"
        of_wanted = fuse(answers, self.y.cpu()[rows]) if weighted else fuse_all(answers)
        found = Targets.none(len(self.y), self.task.classes, torch.device("cpu"))
        found.keep(rows, of_wanted.logits, of_wanted.known)
        fused = Targets(found.logits.to(self.x.device), found.known.to(self.x.device))
        before, asked = self.logits, float(self.wanted.sum())
        counts, self.logits = self._train(round, fused)
        self.changed[(before != self.logits).any(1) | (version == 0)] = round
        self._prepare()
        return {  # of Fig. 3 and Table 6, and how many samples no client got right
            **dict(zip(("s1", "s2", "s3"), counts, strict=True)),
            "asked": asked,
            "nobody_right": asked - float(fused.known.sum()),
            "upload_ratio": asked / len(self.y),
        }

    def state_dict(self) -> dict[str, Array]:
        """Return the model, the pool, its logits, and which round's logits each client holds."""
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

    def _prepare(self) -> None:
        """Split the samples by the self-evaluation; choose those to ask clients about, S3."""
        self.right = torch.tensor(self.logits, device=self.x.device).argmax(1) == self.y
        """The samples that the server predicts correctly, bool [N]."""
        self.parts = self._split(self.right, self.pool.known)
        """S1, S2 and S3, bool [N] each."""
        self.wanted = self.parts[2].cpu().numpy() & (self.settings.teachers != "none")
        self._instructions_by_version: dict[int, Knowledge] = {}
        """The instruction for clients that hold the logits of a given round."""

    def _split(self, right: Tensor, pooled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return S1, S2 and S3 according to the settings; in FedGEM all samples are in S3."""
        own = self.settings
        return split(
            right,
            pooled,
            self_training=own.selective and own.self_training,
            self_distillation=own.selective and own.self_distillation,
        )

    def _train(self, round: int, fused: Targets) -> tuple[list[float], Array]:
        """Train for the server's epochs; return the last sizes of S1, S2 and S3, and the new L_s.

        Raises DivergedError with the model, the pool and the optimizer's state as they were.
        """
        pool, labels = self.pool.copy(), self.y.cpu().numpy()
        counts = torch.zeros(3, device=self.x.device)
        by_batch = self.settings.split == "batch"
        lesson = self._lesson_by_batch if by_batch else self._lesson_by_round
        logits = self.learner.train(
            round,
            self.x,
            torch.arange(len(self.y), device=self.x.device),
            lesson(fused, pool, counts),
            epochs=self.settings.server_epochs,
            before_epoch=(lambda _: counts.zero_()) if by_batch else None,
            error_of=lambda logits: float((logits.argmax(1) != labels).mean()),
        )
        self.pool = pool
        return counts.tolist(), logits

    def _lesson_by_round(self, fused: Targets, pool: Targets, counts: Tensor) -> BatchLoss:
        """Return the loss by the split of the self-evaluation, whose right logits enter `pool`.

        `counts` becomes the sizes of S1, S2 and S3.
        """
        counts.copy_(torch.stack([part.sum() for part in self.parts]))
        taught = select_targets(self.parts, self.pool, fused)
        logits = torch.tensor(self.logits, device=self.x.device)
        pool.keep(torch.arange(len(self.y), device=self.x.device), logits, self.right)

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            teacher, known = taught.logits[rows], taught.known[rows]
            return selective_loss(
                self.learner.model(x), self.y[rows], teacher, known, self.settings.epsilon
            )

        return loss_of

    def _lesson_by_batch(self, fused: Targets, pool: Targets, counts: Tensor) -> BatchLoss:
        """Return the loss by a split of each minibatch, whose right logits enter `pool`.

        The split is by the predictions of the training step itself (lines 5 to 12). To `counts` are
        added the sizes of S1, S2 and S3.
        """

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits, labels = self.learner.model(x).float(), self.y[rows]
            right = logits.argmax(1) == labels
            recalled = Targets(pool.logits[rows], pool.known[rows])
            parts = self._split(right, recalled.known)
            counts.add_(torch.stack([part.sum() for part in parts]))
            helped = Targets(fused.logits[rows], fused.known[rows])
            taught = select_targets(parts, recalled, helped)
            pool.keep(rows, logits.detach(), right)
            return selective_loss(
                logits, labels, taught.logits, taught.known, self.settings.epsilon
            )

        return loss_of
