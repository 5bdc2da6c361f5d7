"""FedGEMS, server half: Algorithm 1, "ServerExecute".

Sijie Cheng, Jingwen Wu, Yanghua Xiao, Yang Liu and Yang Liu, FedGEMS: Federated Learning of Larger
Server Models via Selective Knowledge Fusion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor, nn

from fedhet.algorithms.schedule import Plateau, rate_factor
from fedhet.algorithms.selective import Targets, fuse, fuse_all, split, taught_loss
from fedhet.arrays import Array, group, grouped
from fedhet.config.methods import MethodSpec
from fedhet.data import refuse_overlap
from fedhet.devices import compute_for
from fedhet.errors import StateError
from fedhet.models import ModelName, build, load_weights, to_arrays
from fedhet.seeding import seeded, torch_generator
from fedhet.settings.schema import Count, MethodSettings
from fedhet.training import Optimization, logits_of, optimization, train_epochs
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge
from strategies.base import HetStrategy, Reply


class FedGemsSettings(MethodSettings):
    """Settings of FedGEMS."""

    server_model: ModelName = Field("gems-resnet56", description="the server's own model")
    epsilon: Annotated[float, Field(ge=0, le=1)] = Field(
        0.75, description="share of cross-entropy in the losses of Eq. 2, 5 and 6"
    )
    selective: bool = Field(
        True, description="learn selectively; false is FedGEM: the mean of all clients' logits"
    )
    server_epochs: Count = Field(1, description="the server's epochs over the public data a round")
    public_epochs: Count = Field(1, description="a client's epochs over the public data a round")


class FedGemsStrategy(HetStrategy):
    """Trains its own model on the public set, and asks clients for logits where it is wrong."""

    spec = MethodSpec(
        title="a larger server model, selective distillation on labelled public data",
        paper="Cheng et al., FedGEMS: Federated Learning of Larger Server Models",
        headline="common",
        settings=FedGemsSettings,
        needs_public=True,
        table_settings={"server_model": "mlp3"},
    )
    settings: FedGemsSettings
    sends = Contract(
        (
            TensorField(
                "logits",
                "float32",
                ("R", "C"),
                "the server's logits on public samples",
                required=False,
            ),
            TensorField(
                "changed",
                "uint8",
                ("B",),
                "a bit a public sample: whose logits these are; absent: all have theirs here",
                required=False,
                needs=("logits",),
            ),
            TensorField(
                "wanted",
                "uint8",
                ("B",),
                "a bit a public sample: are its logits asked for? absent: all are",
                required=False,
            ),
        )
    )

    def init(self) -> None:
        """Build the server's model; the pool of global logits starts empty."""
        # The thread count affects floating-point sums: fix it, as on the clients.
        torch.set_num_threads(self.run.engine.threads)
        self.compute = compute_for(self.run.engine)
        public = self.public_set(labelled=True)
        if self.run.data.public_dataset and (common := self.common_test()):
            refuse_overlap(public, common, "the common test set")
        self.x, self.y = self.compute.images(public.x), public.y.to(self.compute.device)
        self.model = build(
            self.settings.server_model, self.task.shape, self.task.classes, seed=self.run.seed
        )
        self.compute.place(self.model)
        self.pool = Targets.none(len(self.y), self.task.classes, self.compute.device)
        """L_Global: each sample's logits from when it was last classified correctly."""
        self.logits = self._predict()
        """L_s, [N, C]."""
        self.changed = np.zeros(len(self.y), np.int64)
        """The round after which each sample's logits last changed; 0: never sent."""
        self.held: dict[str, int] = {}
        """The round whose logits each client holds."""
        self.plateau = Plateau()
        """The error on the public set, which the schedule `plateau` follows."""
        self.optimizer_state: dict[str, Tensor] = {}
        """What the optimiser of the last round knew, if it is kept."""
        self._prepare()

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C, and Q, the number of samples asked for."""
        return Sizes({"C": client.classes, "Q": int(self.wanted.sum())})

    def eval_models(self) -> dict[str, nn.Module]:
        """Return the server's model."""
        return {"server": self.model}

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send L_s (line 17), or only its changes, and the samples to answer (line 11)."""
        held = self.held.pop(client.name, 0)  # a client that fails to answer may lack the logits
        if held not in self._instructions_by_version:
            self._instructions_by_version[held] = Knowledge(self._logits_since(held))
        return self._instructions_by_version[held]

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train on the clients' logits (lines 4 to 15)."""
        version = int(self.changed.max())
        if version:
            self.held |= {reply.client.name: version for reply in replies}
        answers = np.stack([reply.knowledge.tensors["logits"] for reply in replies])
        targets = self._targets(torch.tensor(answers))
        with seeded(self.run.seed, SERVER, round, device=self.compute.device):
            counts = self._train(round, targets)
        before, self.logits = self.logits, self._predict()
        if not np.isfinite(self.logits).all():
            raise StateError("the server's training diverged; a smaller 'training.lr' may help")
        training = self.run.training
        error = 1 - float((self.logits.argmax(1) == self.y.cpu().numpy()).mean())
        self.plateau = self.plateau.after(error, patience=training.patience, decay=training.decay)
        self.changed[(before != self.logits).any(1) | (version == 0)] = round
        figures = self._figures(counts, targets)
        self._prepare()
        return figures

    def state_dict(self) -> dict[str, Array]:
        """Return the model, the pool, its logits, and which round's logits each client holds."""
        pool = {name: tensor.cpu().numpy() for name, tensor in vars(self.pool).items()}
        held = {client: np.array(round) for client, round in self.held.items()}
        known = {name: tensor.cpu().numpy() for name, tensor in self.optimizer_state.items()}
        return {
            **grouped("model", to_arrays(self.model)),
            **grouped("optimizer", known),
            **grouped("plateau", {k: np.array(v) for k, v in vars(self.plateau).items()}),
            **grouped("pool", pool),
            **grouped("held", held),
            "logits": self.logits,
            "changed": self.changed,
        }

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        load_weights(self.model, group(state, "model"))
        pool = {k: torch.tensor(v) for k, v in group(state, "pool").items()}
        self.pool = Targets(**{k: v.to(self.compute.device) for k, v in pool.items()})
        self.held = {client: int(round) for client, round in group(state, "held").items()}
        self.logits, self.changed = state["logits"], state["changed"].copy()
        kept = group(state, "optimizer")
        self.optimizer_state = {k: torch.tensor(v).to(self.x.device) for k, v in kept.items()}
        self.plateau = Plateau(**{k: v.item() for k, v in group(state, "plateau").items()})
        self._prepare()

    def _prepare(self) -> None:
        """Choose the samples to ask clients about: misclassified, and not in the pool."""
        self.wanted = np.ones(len(self.y), bool)
        if self.settings.selective:
            logits = torch.tensor(self.logits, device=self.compute.device)
            self.wanted = split(logits, self.y, self.pool.known)[2].cpu().numpy()
        self._instructions_by_version: dict[int, Knowledge] = {}
        """The instruction for clients that hold the logits of a given round."""

    def _logits_since(self, held: int) -> dict[str, Array]:
        """Return the logits for a client that holds those of round `held`; 0: none.

        Sends all logits, or only the changed ones if that takes fewer bytes. A server that has not
        trained yet sends none (ours).
        """
        sent: dict[str, Array] = {}
        if self.settings.selective:
            sent["wanted"] = np.packbits(self.wanted)
        if self.changed.any():
            sent["logits"] = self.logits
            new = self.changed > held
            bits = np.packbits(new)
            if held and self.logits[new].nbytes + bits.nbytes < self.logits.nbytes:
                sent |= {"logits": self.logits[new], "changed": bits}
        return sent

    def _targets(self, answers: Tensor) -> Targets:
        """Return the targets of all samples from clients' logits [K, Q, C] on the wanted ones."""
        rows = torch.tensor(self.wanted.nonzero()[0])
        fused = fuse(answers, self.y.cpu()[rows]) if self.settings.selective else fuse_all(answers)
        found = Targets.none(len(self.y), self.task.classes, torch.device("cpu"))
        found.keep(rows, fused.logits, fused.known)
        return Targets(found.logits.to(self.x.device), found.known.to(self.x.device))

    def _train(self, round: int, targets: Targets) -> list[float]:
        """Train the server's epochs; return the sizes of S1, S2 and S3 in the last epoch.

        Each minibatch is split by the model's current predictions (lines 5 to 12).
        """
        model, epsilon = self.model.train(), self.settings.epsilon
        counts = torch.zeros(3, device=self.compute.device)

        def selective(x: Tensor, rows: Tensor) -> Tensor:
            logits, labels = model(x).float(), self.y[rows]
            right, recalled, helped = split(logits, labels, self.pool.known[rows])
            counts.add_(torch.stack([right.sum(), recalled.sum(), helped.sum()]))
            teacher = torch.where(
                recalled.unsqueeze(1), self.pool.logits[rows], targets.logits[rows]
            )
            self.pool.keep(rows, logits.detach(), right)
            taught = recalled | (helped & targets.known[rows])
            return taught_loss(logits, labels, teacher, taught, epsilon)

        def unselective(x: Tensor, rows: Tensor) -> Tensor:
            counts[2] += len(rows)
            teacher, taught = targets.logits[rows], targets.known[rows]
            return taught_loss(model(x), self.y[rows], teacher, taught, epsilon)

        rows = torch.arange(len(self.y), device=self.compute.device)
        optimizing = self._optimization(round)
        train_epochs(
            self.x,
            rows,
            selective if self.settings.selective else unselective,
            optimizing,
            epochs=self.settings.server_epochs,
            batch_size=self.run.training.batch_size,
            generator=torch_generator(self.run.seed, SERVER, round),
            compute=self.compute,
            before_epoch=lambda _: counts.zero_(),
        )
        if self.run.training.keep_optimizer:
            self.optimizer_state = optimizing.state(model)
        return counts.tolist()

    def _optimization(self, round: int) -> Optimization:
        """Return an optimiser at the round's learning rate, with its kept state, if any."""
        training, known = self.run.training, self.optimizer_state
        factor = rate_factor(training, round, self.run.rounds)
        if training.schedule == "plateau":
            factor *= self.plateau.factor
        now = training.model_copy(update={"lr": training.lr * factor})
        made = optimization(self.model.parameters(), now, self.compute)
        made.load_state(self.model, known)
        return made

    def _figures(self, counts: Sequence[float], targets: Targets) -> dict[str, float]:
        """Return the metrics of Fig. 3 and Table 6, and how many samples no client got right."""
        asked = float(self.wanted.sum())
        return {
            "s1": counts[0],
            "s2": counts[1],
            "s3": counts[2],
            "asked": asked,
            "nobody_right": asked - float(targets.known.sum()),
            "upload_ratio": asked / len(self.y),
        }

    def _predict(self) -> Array:
        return logits_of(self.model, self.x, self.compute).cpu().numpy()
