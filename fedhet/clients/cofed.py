"""CoFED, client half: local training, predictions on the public set, update training."""

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
from fedhet.data.spec import Split, concatenated, stratified
from fedhet.learning.training import CrossEntropy, Evaluation, evaluate, logits_of, train_epochs
from fedhet.methods.cofed import CofedSettings
from fedhet.models import Evaluations, Refitted, evaluate_models
from fedhet.runs.records import PROTOCOLS
from fedhet.settings.run import TrainingSettings
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.knowledge import Knowledge

FOUND_OPTIMIZER, FOUND_RATE, FOUND_DECAY, FOUND_FACTOR = (
    f"search.{name}" for name in ("optimizer", "lr", "decay", "update")
)
"""Keys of the client's metadata under which it keeps the result of its search."""
MIN_TO_SEARCH = 3
"""The smallest number of samples to search with: two to train on, and one held out."""


class CofedClient(HetClient):
    """Trains alone, sends its predictions on the public set, and learns from the vote.

    Its model and training stay private: any model with `fit` and `predict` may take part.
    """

    settings: CofedSettings

    @cached_property
    def public(self) -> Tensor:
        """The public samples [N, ...], on the device, without their labels."""
        return self.compute.to_device(self.public_set(labeled=False).x)

    def sizes(self) -> Sizes:
        """Return the axes C (classes), L = C + 1 (C stands for none) and N (public instances)."""
        classes = self.info.classes
        return Sizes({"C": classes, "L": classes + 1, "N": len(self.public)})

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Run steps 1, 4 and 2 of Section 4.1, as far as they are due.

        The client's first participation trains on its own data (step 1). If pseudolabels were sent,
        it runs the update training (step 4). Then, if asked, it predicts the public set (step 2).
        """
        if self.state.participations == 0:
            self._train_locally(round)
        if "labels" in knowledge.tensors:
            labels = torch.from_numpy(knowledge.tensors["labels"].astype(np.int64))
            self.state.tensors["labels"] = labels
            self._update(round)
        return self._predictions() if knowledge.scalars["predict"] else Knowledge()

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the client's own data, plus R_i once it has been sent."""
        if not self._updated:
            return self.x, self.y
        labels = self.state.tensors["labels"].to(self.compute.device)
        given = (labels < self.info.classes).nonzero().flatten()
        x = concatenated(self.x, self.public[given])
        return x, torch.cat([self.y, labels[given]])

    def evaluation(self, knowledge: Knowledge) -> Evaluations:
        """Return the scores of the current model, and of the model after local training.

        The latter were measured at that time; before any update training, both are the same.
        """
        measured = super().evaluation(knowledge) if self._updated else {}
        kinds = ("local",) if self._updated else ("local", "private")
        metadata = self.state.metadata
        return measured | {
            (protocol, kind): Evaluation(float(metadata[f"local.{protocol}"]), math.nan)
            for protocol in PROTOCOLS
            for kind in kinds
            if f"local.{protocol}" in metadata
        }

    @property
    def training(self) -> TrainingSettings:
        """Return the training settings: those that the search has found, if there was one."""
        metadata, own = self.state.metadata, super().training
        if FOUND_RATE not in metadata:
            return own
        rate = float(metadata[FOUND_RATE]) * float(metadata.get(FOUND_FACTOR, 1.0))
        return own.model_copy(update={"optimizer": metadata[FOUND_OPTIMIZER], "lr": rate})

    @property
    def _decay(self) -> float:
        return float(self.state.metadata.get(FOUND_DECAY, 1.0))

    @property
    def _updated(self) -> bool:
        """Return whether the model has had an update training since local training."""
        return "labels" in self.state.tensors

    def _train_locally(self, round: int) -> None:
        """Train on the client's own data, and measure the baseline of relative accuracy."""
        a_network = not isinstance(self.private, Refitted)
        searches = self.settings.search == "grid" and a_network
        if searches and len(self.y) >= MIN_TO_SEARCH:
            found = Trials(self, round).local()
            self.state.metadata |= {
                FOUND_OPTIMIZER: found.optimizer,
                FOUND_RATE: found.lr,
                FOUND_DECAY: found.decay,
            }
        self.fit_private(self.generator(round, "batches"), decay=self._decay)
        models, metrics = {"local": self.private}, self.run.metrics
        for (protocol, _), score in evaluate_models(
            models, self.tests, self.compute, metrics
        ).items():
            self.state.metadata[f"local.{protocol}"] = score.accuracy

    def _update(self, round: int) -> None:
        """Train on the client's own data and R_i, as in local training but for the minibatches."""
        if FOUND_RATE in self.state.metadata:
            self.state.metadata[FOUND_FACTOR] = Trials(self, round).update()
        self.fit_private(
            self.generator(round, "update"),
            epochs=self.settings.update_epochs,
            batch_size=self.settings.update_batch_size,
            decay=self._decay,
        )

    def _predictions(self) -> Knowledge:
        """Return the class of every public instance, or C where the model is undecided."""
        classes, margin, model = self.info.classes, self.settings.margin, self.private
        logits = logits_of(model, self.public, self.compute)
        predictions = logits.argmax(1).cpu().numpy()
        if margin:
            likely = logits.softmax(1)
            if isinstance(model, Refitted):
                likely = model.probabilities(self.compute.to_inputs(self.public))
            predictions[undecided(likely.cpu().numpy(), margin)] = classes
        space = self.space.cpu().numpy().astype(smallest_uint(classes))
        answers = classes + (margin > 0)
        return Knowledge(
            {"predictions": predictions.astype(smallest_uint(answers)), "space": space}
        )


class Trials:
    """The search of Section 5.2: trainings on a part of the client's own data, scored on the rest.

    They do not change the client's models or random draws. The held-out part is the same in every
    round; the final training uses all data.
    """

    def __init__(self, client: CofedClient, round: int) -> None:
        self.client, self.settings, self.round = client, client.settings, round
        labels = client.y.cpu().numpy()
        count = min(max(1, int(self.settings.search_share * len(labels))), len(labels) - 2)
        rng = numpy_rng(client.run.seed, client.info.name, "search")
        held = stratified(labels, count, rng)
        kept = np.setdiff1d(np.arange(len(labels)), held)
        self.own, self.held = (
            Split(client.x[rows], client.y[rows])
            for rows in (torch.from_numpy(part).to(client.y.device) for part in (kept, held))
        )

    def local(self) -> Candidate:
        """Return the best configuration of the grid for local training."""
        return best(grid(self.settings), lambda each: self._score(self._trained(each)))

    def update(self) -> float:
        """Return the best factor for the learning rate found, for update training.

        The model that is trained further has not seen the held-out part either.
        """
        metadata = self.client.state.metadata
        found = Candidate(
            str(metadata[FOUND_OPTIMIZER]),
            float(metadata[FOUND_RATE]),
            float(metadata[FOUND_DECAY]),
        )
        before, factors = self._trained(found), self.settings.search_updates
        tried = [replace(found, lr=found.lr * factor) for factor in factors]
        chosen = best(tried, lambda each: self._score(self._updated(deepcopy(before), each)))
        return factors[tried.index(chosen)]

    def _trained(self, candidate: Candidate) -> nn.Module:
        """Return a new model after local training on all but the held-out part."""
        model = self.client.compute.place(self.client.setup()["private"])
        within, training = self.client.samples.within_space(model), self.client.training
        self._fit(
            within, candidate, self.own, training.local_epochs, training.batch_size, "batches"
        )
        return within

    def _updated(self, model: nn.Module, candidate: Candidate) -> nn.Module:
        """Return the model after update training on all but the held-out part."""
        x, y = self.client.training_set()
        given = len(self.client.y)  # R_i follows the client's own samples
        data = Split(concatenated(self.own.x, x[given:]), torch.cat([self.own.y, y[given:]]))
        epochs = self.settings.update_epochs or self.client.training.local_epochs
        self._fit(model, candidate, data, epochs, self.settings.update_batch_size, "update")
        return model

    def _fit(
        self, model: nn.Module, candidate: Candidate, data: Split, epochs: int, size: int, use: str
    ) -> None:
        client, recipe = self.client, self.client.recipe
        own = {"optimizer": candidate.optimizer, "lr": candidate.lr, "keep_optimizer": False}
        settings, device = client.training.model_copy(update=own), client.compute.device
        recipe.begin(self.round)
        with seeded(client.run.seed, client.info.name, self.round, "search", device=device):
            optimizing = recipe.round_optimization(settings, model.parameters())
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
        return evaluate(model, self.held.x, self.held.y, self.client.compute)


@dataclass(frozen=True)
class Candidate:
    """A training configuration: `decay` is the factor on the rate after each epoch."""

    optimizer: str
    lr: float
    decay: float


def grid(settings: CofedSettings) -> list[Candidate]:
    """Return every combination that a search tries (Section 5.2).

    The rates that sgd tries are ten times as high, as in the authors' published script.
    """
    return [
        Candidate(optimizer, rate * (10.0 if optimizer == "sgd" else 1.0), decay)
        for optimizer in settings.search_optimizers
        for rate in settings.search_rates
        for decay in settings.search_decays
    ]


def best(candidates: Iterable[Candidate], score_of: Callable[[Candidate], Evaluation]) -> Candidate:
    """Return the candidate of the highest accuracy; of equals, the one of the lowest loss.

    If they are equal in both, it is the first. A loss that is not finite is the highest.
    """

    def rank(candidate: Candidate) -> tuple[float, float]:
        score = score_of(candidate)
        return score.accuracy, -score.loss if math.isfinite(score.loss) else -math.inf

    return max(candidates, key=rank)
