"""A client with which nobody has trained, and what a model that it is offered is worth there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from flwr.common import Scalar
from torch import nn

from fedhet.base.seeding import seeded, torch_generator
from fedhet.client_runtime.recipe import Recipe
from fedhet.client_runtime.samples import ClientSamples
from fedhet.learning.devices import Compute
from fedhet.learning.training import cross_entropy_of
from fedhet.models.evaluation import Evaluations, judge_all
from fedhet.runs.records import UNSEEN, UNSEEN_EPOCH
from fedhet.settings.run import RunSettings
from fedhet.wire.knowledge import Knowledge

if TYPE_CHECKING:
    from fedhet.clients.base import HetClient


@dataclass(frozen=True)
class Newcomer:
    """Such a client: nothing of what it does here is kept."""

    run: RunSettings
    samples: ClientSamples
    recipe: Recipe
    compute: Compute

    def judge(self, model: nn.Module, round: int) -> Evaluations:
        """Return what a model scores as it is, and after a copy has trained for a local epoch."""
        learner = copy.deepcopy(model).train()
        self._learn(learner, round)
        offered = {UNSEEN: model, UNSEEN_EPOCH: learner}
        return judge_all(offered, self.samples.tests, self.compute, self.run.metrics)

    def _learn(self, model: nn.Module, round: int) -> None:
        """Train for one epoch on the client's own samples, with cross-entropy."""
        draw = self.samples.info.name, round, "unseen"
        own, training = self.samples.own, self.run.training
        self.recipe.begin(round)
        optimizing = self.recipe.optimization(training, model.parameters())
        loss_of, generator = cross_entropy_of(model), torch_generator(self.run.seed, *draw)
        with seeded(self.run.seed, *draw, device=self.compute.device):
            self.recipe.train_epochs(
                training, own.x, own.y, loss_of, optimizing, generator, True, {"epochs": 1}
            )


def judging(
    client: HetClient, round: int, told: Mapping[str, Scalar]
) -> Callable[[Knowledge], Evaluations]:
    """Return what judges a client's models, or the one offered if it is told to be `unseen`.

    It is not where the run has no such clients, whatever it is told: nothing noises that training.
    """
    unseen = told.get("unseen") and client.run.data.unseen and not client.promise.is_on
    return partial(_judge_offered, client, round) if unseen else client.evaluation


def _judge_offered(client: HetClient, round: int, instruction: Knowledge) -> Evaluations:
    """Return what the model scores that the method offers; nothing if it has sent none."""
    model = client.eval_models(instruction).get(client.config.method.spec.offers)
    newcomer = Newcomer(client.run, client.samples, client.recipe, client.compute)
    return Evaluations() if model is None else newcomer.judge(model, round)
