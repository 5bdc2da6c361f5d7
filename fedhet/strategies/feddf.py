"""FedDF strategy: an average model per architecture, trained by distillation from all clients.

Tao Lin, Lingjing Kong, Sebastian U. Stich and Martin Jaggi, Ensemble Distillation for Robust Model
Fusion in Federated Learning, NeurIPS 2020, Algorithm 1, and its variant for several architectures
in the appendix.

As in the authors' code, each round uses a new Adam optimizer with cosine annealing over the steps
of the round. Their code selects the student that is best on labeled validation data. Here, the
student closest to the ensemble on the public data is selected, which requires no labels.

In regression (not in the paper), students learn the ensemble's mean output with squared errors.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from fedhet.algorithms.weights import RunningAverage
from fedhet.base.arrays import Array, Arrays, group, grouped, groups
from fedhet.base.errors import DivergedError, KnowledgeError
from fedhet.base.seeding import seeded, torch_generator
from fedhet.config.resolve import Config
from fedhet.learning.devices import Compute, compute_for
from fedhet.learning.training import (
    BatchLoss,
    all_finite,
    batches,
    logits_of,
    optimization_for,
    train_epochs,
)
from fedhet.methods.feddf import SPEC, FedDfSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.strategies.base import HetStrategy, Reply, ServerModel
from fedhet.wire.contract import MAX_MAGNITUDE
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedDfStrategy(HetStrategy):
    """Strategy that fuses the replies of a round into one model per architecture.

    Each model starts from the average weights of its architecture, and learns the mean logits of
    all clients by distillation. An architecture without replies keeps its model.
    """

    spec = SPEC
    settings: FedDfSettings

    def init(self) -> None:
        """Start without models, so that clients build their own models in the first round."""
        self.compute = compute_for(self.run.engine)
        public = self.public_set(labeled=False)
        self.x = self.compute.to_device(public.x)
        self.divergence = self.task.divergence()
        """Distillation loss, which maps the logits (teacher [N, C], student [N, C]) to a scalar."""
        self._set_models({})
        self._networks: dict[str, HetModel] = {}
        """Networks by architecture. `_network` loads the weights of a model into its network."""
        self._start_averages()

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the fused model of the client's architecture, if it exists."""
        return self._instruction_of.get(client.model, Knowledge())

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the fused model of the client's architecture, if it exists."""
        return self._instruction_of.get(client.model)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Add a client's weights and logits to the round's averages, and drop them from the reply.

        Raises KnowledgeError if the logits on the public data are too large or not finite.
        """
        client, weights = reply.client, reply.knowledge.group("weights")
        network = self._network(client.model, weights)
        logits = logits_of(network, self.x, self.compute).cpu().numpy()
        if not (np.abs(logits) <= MAX_MAGNITUDE).all():  # This comparison is False for NaN.
            fault = "its logits on the public data are too large or not finite"
            raise KnowledgeError(client.name, "weights", fault)
        self._averages[client.model].add(weights, reply.weight)
        self._ensemble.add({"logits": logits}, 1)
        return reply.with_knowledge(Knowledge())

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Train the average model of each architecture on the mean logits of all clients.

        Raises DivergedError if training diverged.
        """
        averages = {name: average.mean() for name, average in sorted(self._averages.items())}
        teacher = torch.tensor(self._ensemble.mean()["logits"], device=self.compute.device)
        self._start_averages()
        if not self.settings.epochs:
            self._set_models(self.models | averages)
            return {}
        losses = []
        for name, average in averages.items():
            with seeded(self.run.seed, SERVER, round, name, device=self.compute.device):
                averages[name], loss = self._distill(round, name, average, teacher)
            losses.append(loss)
        self._set_models(self.models | averages)
        return {"distillation_loss": float(np.mean(losses))}

    def state_dict(self) -> dict[str, Array]:
        """Return the fused models."""
        state: dict[str, Array] = {}
        for name, weights in self.models.items():
            state |= grouped(f"models/{name}", weights)
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self._set_models(groups(state, "models"))

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the fused model of an architecture, if it has one."""
        weights = group(state, f"models/{client.model}")
        return {"global": ServerModel(weights, client.model)} if weights else {}

    def _set_models(self, models: dict[str, dict[str, Array]]) -> None:
        """Store the fused models, and build the instruction for each architecture."""
        self.models = models
        """Tensors of the fused models, by architecture."""
        self._instruction_of = {
            name: Knowledge(grouped("weights", weights)) for name, weights in models.items()
        }

    def _start_averages(self) -> None:
        """Reset the averages of weights (by architecture) and of logits (over all clients)."""
        self._averages: dict[str, RunningAverage] = defaultdict(RunningAverage)
        self._ensemble = RunningAverage()

    def _network(self, name: str, weights: Arrays) -> HetModel:
        """Load weights into the network of an architecture, and return the network."""
        if name not in self._networks:
            self._networks[name] = self.compute.place(self.build_model(name))
        load_weights(self._networks[name], weights)
        return self._networks[name]

    def _distill(
        self, round: int, name: str, average: Arrays, teacher: Tensor
    ) -> tuple[dict[str, Array], float]:
        """Train an architecture's average model on the teacher's logits [N, C].

        The candidates are the average model and the student after each epoch. Returns the weights
        of the candidate closest to the teacher, and the loss of the last epoch. Raises
        DivergedError if training diverged.
        """
        settings, student = self.settings, self._network(name, average).train()
        adam = {"optimizer": "adam", "lr": settings.lr, "weight_decay": 0.0}
        training = self.run.training.first().model_copy(update=adam)
        optimizing = optimization_for(student.parameters(), training, self.compute)
        rows = torch.arange(len(self.x), device=self.compute.device)
        steps = settings.epochs * len(batches(len(rows), settings.batch_size, torch.Generator()))
        annealing = CosineAnnealingLR(optimizing.optimizer, steps)
        closest = _Closest(student, self.x, teacher, self.compute, self.divergence)
        loss = train_epochs(
            self.x,
            rows,
            lambda x, rows: self.divergence(teacher[rows], student(x)),
            optimizing,
            epochs=settings.epochs,
            batch_size=settings.batch_size,
            generator=torch_generator(self.run.seed, SERVER, round, name),
            compute=self.compute,
            after_batch=annealing.step,
            before_epoch=closest.compare,
        )
        if not (math.isfinite(loss) and all_finite(student)):
            raise DivergedError(f"distillation of model {name} diverged: its loss is {loss:.3g}")
        closest.compare(settings.epochs)
        return closest.weights, loss


class _Closest:
    """Record of the student weights that were closest to the teacher on the public data.

    The distance is the loss of the distillation, with the student in evaluation mode.
    """

    def __init__(
        self,
        student: HetModel,
        x: Tensor,
        teacher: Tensor,
        compute: Compute,
        divergence: BatchLoss,
    ) -> None:
        """Start a record, given the teacher's logits [N, C] on the public samples x [N, ...]."""
        self._divergence = divergence
        self._student, self._x, self._teacher, self._compute = student, x, teacher, compute
        self._distance = math.inf
        self.weights: dict[str, Array] = {}

    def compare(self, epochs: int) -> None:
        """Copy the student's weights if they are closer to the teacher than all earlier weights."""
        logits = logits_of(self._student, self._x, self._compute)
        distance = self._divergence(self._teacher, logits).item()
        if distance < self._distance:
            self._distance = distance
            self.weights = {name: array.copy() for name, array in to_arrays(self._student).items()}
