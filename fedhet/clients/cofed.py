"""CoFED client: local training, predictions on the public set, and update training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedhet.algorithms.consensus import undecided
from fedhet.base.seeding import numpy_rng, seeded
from fedhet.clients.base import HetClient
from fedhet.data.dataset import Split, concatenate
from fedhet.data.spec import stratified
from fedhet.learning.training import CrossEntropy, Evaluation, evaluate, logits_of, train_epochs
from fedhet.methods.cofed import CofedSettings
from fedhet.models import Evaluations, Refitted, evaluate_models
from fedhet.runs.records import EVALUATED
from fedhet.settings.run import TrainingSettings
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.knowledge import Knowledge

FOUND_OPTIMIZER, FOUND_RATE, FOUND_DECAY, FOUND_FACTOR = (
    f"search.{name}" for name in ("optimizer", "lr", "decay", "update")
)
"""Metadata keys of the hyperparameters found by the search."""
MIN_TO_SEARCH = 3
"""Minimum number of samples for the search: two for training and one held-out sample."""


class CofedClient(HetClient):
    """Client that sends its predictions on the public set and learns from the pseudolabels.

    The server needs neither the model nor its architecture, so clients may use models without
    gradients.
    """

    settings: CofedSettings

    @cached_property
    def public(self) -> Tensor:
        """Public samples [N, ...] on the device."""
        return self.compute.to_device(self.public_set(labeled=False).x)

    def sizes(self) -> Sizes:
        """Return the sizes of axes C (classes), L (prediction values), N (public instances)."""
        classes = self.info.classes
        return Sizes({"C": classes, "L": classes + 1, "N": len(self.public)})

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run the steps of Section 4.1 that are due.

        In its first round, the client trains on its own data (step 1). If the server has sent
        pseudolabels, it runs the update training (step 4). If requested, it then predicts the
        public set (step 2).
        """
        if self.state.participations == 0:
            self._train_locally(round)
        if "labels" in knowledge.tensors:
            labels = torch.from_numpy(knowledge.tensors["labels"].astype(np.int64))
            self.state.tensors["labels"] = labels
            self._update(round)
        return self._predictions() if knowledge.scalars["predict"] else Knowledge()

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the client's data and the pseudolabeled set R_i, if it has been received."""
        if not self._has_pseudolabels:
            return self.x, self.y
        labels = self.state.tensors["labels"].to(self.compute.device)
        rows = (labels < self.info.classes).nonzero().flatten()
        x = concatenate(self.x, self.public[rows])
        return x, torch.cat([self.y, labels[rows]])

    def evaluation(self, knowledge: Knowledge) -> Evaluations:
        """Return the scores of the current model, and of the model after local training.

        The scores after local training are stored. Both scores are equal before the first update
        training.
        """
        measured = super().evaluation(knowledge) if self._has_pseudolabels else {}
        kinds = ("local",) if self._has_pseudolabels else ("local", "private")
        metadata = self.state.metadata
        return measured | {
            (protocol, kind): Evaluation(float(metadata[f"local.{protocol}"]), math.nan)
            for protocol in EVALUATED
            for kind in kinds
            if f"local.{protocol}" in metadata
        }

    @property
    def training(self) -> TrainingSettings:
        """Training settings, with the hyperparameters found by the search."""
        metadata, training = self.state.metadata, super().training
        if FOUND_RATE not in metadata:
            return training
        rate = float(metadata[FOUND_RATE]) * float(metadata.get(FOUND_FACTOR, 1.0))
        return training.model_copy(update={"optimizer": metadata[FOUND_OPTIMIZER], "lr": rate})

    @property
    def _decay(self) -> float:
        return float(self.state.metadata.get(FOUND_DECAY, 1.0))

    @property
    def _has_pseudolabels(self) -> bool:
        """Whether the client has received pseudolabels, and thus has run an update training."""
        return "labels" in self.state.tensors

    def _train_locally(self, round: int) -> None:
        """Train on the client's data, and store the scores as the baseline."""
        is_network = not isinstance(self.private, Refitted)
        searches = self.settings.search == "grid" and is_network
        if searches and len(self.y) >= MIN_TO_SEARCH:
            best = GridSearch(self, round).local()
            self.state.metadata |= {
                FOUND_OPTIMIZER: best.optimizer,
                FOUND_RATE: best.lr,
                FOUND_DECAY: best.decay,
            }
        self.fit_private(self.generator(round, "batches"), decay=self._decay)
        models, metrics = {"local": self.private}, self.run.metrics
        for (protocol, _), score in evaluate_models(
            models, self.tests, self.compute, metrics
        ).items():
            self.state.metadata[f"local.{protocol}"] = score.accuracy

    def _update(self, round: int) -> None:
        """Train on the client's data and R_i (step 4)."""
        if FOUND_RATE in self.state.metadata:
            self.state.metadata[FOUND_FACTOR] = GridSearch(self, round).update()
        self.fit_private(
            self.generator(round, "update"),
            epochs=self.settings.update_epochs,
            batch_size=self.settings.update_batch_size,
            decay=self._decay,
        )

    def _predictions(self) -> Knowledge:
        """Predict the class of each public instance, where C denotes an abstention."""
        classes, margin, model = self.info.classes, self.settings.margin, self.private
        logits = logits_of(model, self.public, self.compute)
        predictions = logits.argmax(1).cpu().numpy()
        if margin:
            probabilities = logits.softmax(1)
            if isinstance(model, Refitted):
                probabilities = model.probabilities(self.compute.to_inputs(self.public))
            predictions[undecided(probabilities.cpu().numpy(), margin)] = classes
        space = self.space.cpu().numpy().astype(smallest_uint(classes))
        values = classes + (margin > 0)
        return Knowledge({"predictions": predictions.astype(smallest_uint(values)), "space": space})


class GridSearch:
    """Hyperparameter search from Section 5.2, evaluated on held-out data of the client.

    The search changes neither the client's models nor its random numbers. The held-out samples are
    the same in every round. The final training uses all samples.
    """

    def __init__(self, client: CofedClient, round: int) -> None:
        self.client, self.settings, self.round = client, client.settings, round
        labels = client.y.cpu().numpy()
        count = min(max(1, int(self.settings.search_share * len(labels))), len(labels) - 2)
        rng = numpy_rng(client.run.seed, client.info.name, "search")
        held_out = stratified(labels, count, rng)
        remaining = np.setdiff1d(np.arange(len(labels)), held_out)
        parts = (torch.from_numpy(part).to(client.y.device) for part in (remaining, held_out))
        self.train_part, self.held_out = (Split(client.x[r], client.y[r]) for r in parts)

    def local(self) -> Candidate:
        """Return the best configuration of the grid for local training."""
        return find_best(grid(self.settings), lambda each: self._score(self._trained(each)))

    def update(self) -> float:
        """Return the best factor by which to multiply the learning rate in update training.

        The models are trained from scratch, because the client's model has seen the held-out data.
        """
        metadata = self.client.state.metadata
        local = Candidate(
            str(metadata[FOUND_OPTIMIZER]),
            float(metadata[FOUND_RATE]),
            float(metadata[FOUND_DECAY]),
        )
        model, factors = self._trained(local), self.settings.search_updates
        candidates = [replace(local, lr=local.lr * factor) for factor in factors]
        best = find_best(candidates, lambda each: self._score(self._updated(deepcopy(model), each)))
        return factors[candidates.index(best)]

    def _trained(self, candidate: Candidate) -> nn.Module:
        """Return a new model after local training without the held-out data."""
        model = self.client.compute.place(self.client.setup()["private"])
        within, training = self.client.samples.within_space(model), self.client.training
        self._fit(
            within,
            candidate,
            self.train_part,
            training.local_epochs,
            training.batch_size,
            "batches",
        )
        return within

    def _updated(self, model: nn.Module, candidate: Candidate) -> nn.Module:
        """Return the model after update training without the held-out data."""
        x, y = self.client.training_set()
        start = len(self.client.y)  # R_i follows the client's own samples.
        own = self.train_part
        data = Split(concatenate(own.x, x[start:]), torch.cat([own.y, y[start:]]))
        settings, training = self.settings, self.client.training
        epochs = settings.update_epochs or training.local_epochs
        size = settings.update_batch_size or training.batch_size
        self._fit(model, candidate, data, epochs, size, "update")
        return model

    def _fit(
        self, model: nn.Module, candidate: Candidate, data: Split, epochs: int, size: int, use: str
    ) -> None:
        client, recipe = self.client, self.client.recipe
        update = {"optimizer": candidate.optimizer, "lr": candidate.lr, "keep_optimizer": False}
        settings, device = client.training.model_copy(update=update), client.compute.device
        recipe.begin(self.round)
        with seeded(client.run.seed, client.info.name, self.round, "search", device=device):
            optimizing = client.optimization(model.parameters(), settings=settings)
            train_epochs(
                data.x,
                data.y,
                CrossEntropy(model.train()),
                optimizing,
                epochs=epochs,
                batch_size=size,
                generator=client.generator(self.round, use),
                compute=replace(client.compute, compiles=False),
                before_epoch=optimizing.decay_schedule(candidate.decay),
                augment=recipe.augment,
            )
        recipe.begin(self.round)

    def _score(self, model: nn.Module) -> Evaluation:
        return evaluate(model, self.held_out.x, self.held_out.y, self.client.compute)


@dataclass(frozen=True)
class Candidate:
    """Hyperparameters to try: the optimizer, the learning rate, and its decay factor per epoch."""

    optimizer: str
    lr: float
    decay: float


def grid(settings: CofedSettings) -> list[Candidate]:
    """Return all combinations of hyperparameters to try (Section 5.2).

    Learning rates are multiplied by 10 for sgd, as in the authors' published script.
    """
    return [
        Candidate(optimizer, rate * (10.0 if optimizer == "sgd" else 1.0), decay)
        for optimizer in settings.search_optimizers
        for rate in settings.search_rates
        for decay in settings.search_decays
    ]


def find_best(
    candidates: Iterable[Candidate], score_of: Callable[[Candidate], Evaluation]
) -> Candidate:
    """Return the candidate with the highest accuracy.

    Ties are resolved in favor of the lowest loss, then by order. Losses that are not finite count
    as infinite.
    """

    def rank(candidate: Candidate) -> tuple[float, float]:
        score = score_of(candidate)
        return score.accuracy, -score.loss if math.isfinite(score.loss) else -math.inf

    return max(candidates, key=rank)
