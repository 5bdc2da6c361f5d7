"""UM-pFSSL client: Algorithm 1, lines 5 to 12 and 14 to 24."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from fedhet.algorithms.uncertainty import (
    CANDIDATE,
    FILL,
    REFRESH,
    Helper,
    aggregation_weights,
    certainty,
    entropy,
    filled,
    most_certain,
    predictive,
    ranked,
    refreshed,
    relation,
    replaced,
    semi_supervised_loss,
)
from fedhet.algorithms.uncertainty import to_arrays as list_to_arrays
from fedhet.algorithms.weights import average_weights
from fedhet.base.arrays import Array, grouped
from fedhet.base.errors import KnowledgeError
from fedhet.base.seeding import seeded
from fedhet.clients.base import HetClient
from fedhet.data.dataset import UNKNOWN
from fedhet.learning.training import CrossEntropy, evaluate
from fedhet.methods.um_pfssl import UmPfsslSettings
from fedhet.models import HetModel, load_weights, to_arrays
from fedhet.runs.storage import ModelStore
from fedhet.wire.knowledge import Knowledge

MIN_BATCH = 2
"""Minimum number of training samples, because batch norms need at least two samples."""
LISTS_ON_DISK = 4
"""Number of recent helper lists whose models stay on disk, because a run may roll back."""


class UmPfsslClient(HetClient):
    """Client that averages its helpers' models and trains on labels and pseudo-labels."""

    settings: UmPfsslSettings

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Find and update helpers (lines 7 to 12), and train if requested (lines 14 to 24)."""
        if self.settings.warm_up and not self._own_version:
            self._warm_up(round)
        own = int(knowledge.scalars["own"])
        helpers = self._helpers(own)
        received = self._receive(knowledge)
        helpers = replaced(helpers, received[CANDIDATE], own, self.settings.replace)
        new = {helper.number for helper in received[CANDIDATE]}
        metrics: dict[str, float] = {"replaced": sum(helper.number in new for helper in helpers)}
        helpers = refreshed(helpers, {helper.number: helper for helper in received[REFRESH]})
        if knowledge.scalars["train"]:
            helpers = filled(helpers, received[FILL], self.settings.helpers)
            metrics |= self._learn(round, helpers, own)
            helpers = ranked([self._self(own), *(h for h in helpers if h.number != own)])
        self._store(helpers)
        metrics["relation"] = sum(helper.relation for helper in helpers) / len(helpers)
        tensors = list_to_arrays(helpers)
        # Send the weights if the server's version is older, for example because a reply was lost.
        if self._own_version > int(knowledge.scalars["held"]):
            tensors |= grouped("weights", to_arrays(self.network))
        return Knowledge(tensors, metrics)

    # Methods that train the private model.

    @property
    def _own_version(self) -> int:
        """Round in which the private model was last trained, or 0 if it was never trained."""
        return int(self.state.metadata.get("trained", 0))

    def _warm_up(self, round: int) -> None:
        """Train only on labeled samples (line 5)."""
        self.state.metadata["trained"] = round
        if len(self.y) < MIN_BATCH:
            return
        model, steps = self.network.train(), math.ceil(len(self.y) / self.training.batch_size)
        epochs = max(self.settings.warm_up, math.ceil(self.settings.warm_up_steps / steps))
        optimizing = self.optimization(model.parameters())
        generator, loss_of = self.generator(round, "warm-up"), CrossEntropy(model)
        self.train_epochs(self.x, self.y, loss_of, optimizing, generator, own=True, epochs=epochs)

    def _learn(self, round: int, helpers: list[Helper], own: int) -> dict[str, float]:
        """Average the helpers' models, and train on their pseudo-labels (lines 17 to 23).

        Returns the fraction of wrong pseudo-labels as a metric, if true labels are known.
        """
        weights = [self._weights(helper, own) for helper in helpers]
        predictions = [
            self._predict(self._spare(model), helper)
            for model, helper in zip(weights, helpers, strict=True)
        ]
        pseudo, _ = most_certain(torch.stack(predictions))
        factors = aggregation_weights(torch.tensor([h.relation for h in helpers])).tolist()
        load_weights(self.network, average_weights([*zip(weights, factors, strict=True)]))
        self._train_jointly(round, pseudo if self.settings.pseudo_labels else pseudo[:0])
        self.state.metadata["trained"] = round
        known = self.unlabeled.y != UNKNOWN
        wrong = (pseudo.argmax(1) != self.unlabeled.y)[known]
        return {"pseudo_error": float(wrong.float().mean())} if len(wrong) else {}

    def _train_jointly(self, round: int, pseudo: Tensor) -> None:
        """Train for the local epochs on the loss in Eq. 1, with pseudo-labels [N, C].

        Trains only on labeled samples if there are no pseudo-labels.
        """
        model = self.network.train()
        x = torch.cat([self.x, self.unlabeled.x[: len(pseudo)]])
        if len(x) < MIN_BATCH:
            return
        labeled = torch.arange(len(x), device=self.compute.device) < len(self.y)
        labels = F.pad(self.y, (0, len(pseudo)))
        targets = F.pad(pseudo, (0, 0, len(self.y), 0))
        direction = self.settings.divergence

        def loss_of(x: Tensor, rows: Tensor) -> Tensor:
            logits = model(x)
            return semi_supervised_loss(
                logits, labels[rows], targets[rows], labeled[rows], direction
            )

        optimizing = self.optimization(model.parameters())
        generator = self.generator(round, "batches")
        rows = torch.arange(len(x), device=self.compute.device)
        self.train_epochs(x, rows, loss_of, optimizing, generator, own=True)

    # Methods for the helper list.

    def _helpers(self, own: int) -> list[Helper]:
        """Return the helper list from the last round, without helpers whose models are lost."""
        saved = [Helper(*row) for row in json.loads(str(self.state.metadata.get("helpers", "[]")))]
        others = [
            h for h in saved if h.number != own and (h.number, h.version) in self._helper_store
        ]
        current = [h for h in saved if h.number == own and h.version == self._own_version]
        return ranked([*others, *(current or [self._self(own)])])

    def _store(self, helpers: list[Helper]) -> None:
        """Save the helper list, and delete models that are in no recent list."""
        keys = [[helper.number, helper.version] for helper in helpers]
        recent = [keys, *json.loads(str(self.state.metadata.get("recent", "[]")))][:LISTS_ON_DISK]
        self._helper_store.keep([(number, version) for keys in recent for number, version in keys])
        rows = [[helper.number, helper.version, helper.relation] for helper in helpers]
        self.state.metadata |= {"helpers": json.dumps(rows), "recent": json.dumps(recent)}

    def _receive(self, knowledge: Knowledge) -> dict[int, list[Helper]]:
        """Store the received models on disk, and return their list entries by role."""
        received: dict[int, list[Helper]] = {CANDIDATE: [], FILL: [], REFRESH: []}
        if "numbers" not in knowledge.tensors:
            return received
        rows = zip(*(knowledge.tensors[k] for k in ("numbers", "versions", "roles")), strict=True)
        stacked = knowledge.group("models")
        for row, (number, version, role) in enumerate(rows):
            if int(role) not in received:
                fault = f"must be from {CANDIDATE} to {REFRESH}, got {role}"
                raise KnowledgeError("server", "roles", fault)
            weights = {name: tensor[row] for name, tensor in stacked.items()}
            helper = Helper(int(number), int(version), 0.0)
            self._helper_store.put((helper.number, helper.version), weights)
            received[int(role)].append(self._related(weights, helper))
        return received

    def _self(self, own: int) -> Helper:
        """Return the entry for the client's own model, with its relation to the data (Eq. 13)."""
        entry = Helper(own, self._own_version, 0.0)
        return self._related(to_arrays(self.network), entry)

    def _weights(self, helper: Helper, own: int) -> Mapping[str, Array]:
        if helper.number == own:
            return to_arrays(self.network)
        return self._helper_store.get((helper.number, helper.version))

    def _related(self, weights: Mapping[str, Array], helper: Helper) -> Helper:
        """Return the helper with its relation to the client's data (Eq. 13)."""
        model = self._spare(weights)
        h_bar = certainty(entropy(self._predict(model, helper)), self.info.classes)
        labeled = len(self.y) / (len(self.y) + len(self.unlabeled))
        accuracy = evaluate(model, self.x, self.y, self.compute).accuracy if len(self.y) else 0.0
        corr = relation(h_bar, accuracy, labeled, self.settings.relation)
        return Helper(helper.number, helper.version, corr)

    def _predict(self, model: HetModel, helper: Helper) -> Tensor:
        """Return a helper's predictions [N, C] of the unlabeled samples (Eq. 9).

        The dropout masks depend only on the model, so a model's relation is the same in every
        round.
        """
        place = (self.info.name, "masks", helper.number, helper.version)
        with seeded(self.run.seed, *place, device=self.compute.device):
            return predictive(model, self.unlabeled.x, self.settings.passes, self.compute)

    def _spare(self, weights: Mapping[str, Array]) -> HetModel:
        """Load a helper's weights into the model used for evaluating helpers, and return it."""
        load_weights(self._helper_model, weights)
        return self._helper_model

    @cached_property
    def _helper_model(self) -> HetModel:
        return self.compute.place(self.build_model())

    @property
    def _helper_store(self) -> ModelStore:
        """On-disk store for the helpers' models, next to the client's private state."""
        return ModelStore(self.state.folder / "helpers", self.state.folder.parents[1])
