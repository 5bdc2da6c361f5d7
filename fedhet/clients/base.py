"""The client half of every method: a Flower NumPyClient that calls the hooks a method implements.

`fit` shows the order of a round: read and check the server's instruction, restore the client's
state, `train`, encode the reply, save the state, evaluate. A method's paper is cited by its server
half.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Unpack

import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from fedhet.base.errors import FedhetError, UserModelError
from fedhet.base.seeding import seeded, torch_generator
from fedhet.client_runtime.codec import ClientCodec
from fedhet.client_runtime.local_training import FixMatch, LocalTrainer, Predict, injected_faults
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.privacy import privacy_mechanism
from fedhet.client_runtime.samples import (
    ClientRecord,
    ClientSamples,
    load_samples,
    public_samples,
    write_record,
)
from fedhet.client_runtime.state import ClientState
from fedhet.config.resolve import Config
from fedhet.data.spec import Split
from fedhet.kinds import KINDS
from fedhet.learning.devices import compute_for
from fedhet.learning.training import (
    Augment,
    CrossEntropy,
    Epochs,
    LossOfBatch,
    Optimization,
    OwnClasses,
    train_epochs,
)
from fedhet.models import (
    Allocation,
    Evaluations,
    HetModel,
    Refitted,
    build,
    build_any,
    judge_all,
)
from fedhet.runs.measures import LACKS, Measured, peak_memory_mb, placed, timed, write_measures
from fedhet.runs.records import HELD_OUT, HELD_OUT_EPOCH
from fedhet.settings.run import TrainingSettings
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge, LackingError


class HetClient(NumPyClient):
    """Base class of a method's client half: implement the hooks."""

    def __init__(self, config: Config, node: Node, samples: ClientSamples | None = None) -> None:
        engine = config.run.engine.model_copy(update={"device": node.device})
        self.config = config.replacing(engine=engine, training=node.training)
        self.run, self.settings, self.node = self.config.run, config.own, node
        self.compute = compute_for(engine)
        if self.run.privacy.is_on:
            # Opacus reads a convolution's input as if it were contiguous: its per-sample gradients
            # are wrong in channels_last format.
            self.compute = replace(self.compute, channels_last=False)
        self.samples = samples or load_samples(config, node, self.compute)
        self.privacy = privacy_mechanism(self.config, node, self.samples, self.compute)
        self.info, self.space = self.privacy.described(self.samples.info), self.samples.space
        self.unlabeled, self.tests = self.samples.unlabeled, self.samples.tests
        self.loss: float | None = None
        """Mean training loss of the last epoch."""
        self.metrics: dict[str, float] = {}
        """What `training.semi` made of the unlabeled samples in the round."""

        def new_models() -> dict[str, nn.Module]:
            with Allocation(node.max_model_bytes):
                return self.setup()

        task = f"{self.info.classes} classes of shape {list(self.info.shape)}"
        self.state = ClientState(
            node.state_dir,
            node.name,
            {"method": self.run.method, "model": node.model, "task": task},
            self.compute,
            setup=new_models,
            training_set=self.training_set,
        )
        self.codec = ClientCodec(self.config, node, self.state)
        self.recipe = LocalTrainer(self.run, self.info, self.state, self.compute)
        self._recorded_in = ""
        """The run in whose folder the client's record is."""
        self.prepare()

    # The hooks: what a method implements.

    def prepare(self) -> None:
        """Do what has to be done once, before any round; a client to be used has no samples."""

    def setup(self) -> dict[str, nn.Module]:
        """Return the client's models, by kind, as they are before the first round.

        By default the private model, with the width of features that a setting `feature_dim` gives.
        """
        if not self.config.method.spec.any_model:
            return {"private": self.build_model(getattr(self.settings, "feature_dim", None))}
        info, seed = self.info, self.run.seed
        model = build_any(info.model, info.shape, info.classes, kind=info.kind, seed=seed)
        return {"private": model}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train as the server's instruction says; return the reply."""
        raise NotImplementedError

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return x [N, ...] and y [N], the data that `fit_private` trains on.

        A model without gradients is not saved: after a restart it is fitted again on this data.
        """
        return self.x, self.y

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the models to evaluate, by kind; `knowledge` is the latest instruction."""
        return {"private": self.private}

    def evaluation(self, knowledge: Knowledge) -> Evaluations:
        """Return the evaluations of the models on all of the client's test splits."""
        return judge_all(self.eval_models(knowledge), self.tests, self.compute, self.run.metrics)

    def sizes(self) -> Sizes:
        """Return the sizes that the fields of the server's messages must have."""
        return self.config.method.spec.sizes(self.settings, self.info)

    # Helpers for methods.

    @property
    def x(self) -> Tensor:
        """The client's own labeled training samples [N, ...], on the device."""
        return self.samples.own.x

    @property
    def y(self) -> Tensor:
        """The classes [N] of `x`."""
        return self.samples.own.y

    @property
    def training(self) -> TrainingSettings:
        """What this client trains with, of the values that the run or its node gives."""
        return self.run.training

    @property
    def models(self) -> dict[str, nn.Module]:
        """Return the client's models by kind."""
        return self.state.models

    @property
    def network(self) -> HetModel:
        """Return the private model as a network, which it is unless the method sets `any_model`."""
        model = self.models["private"]
        assert isinstance(model, HetModel), "any_model: only fit_private can train it"
        return model

    @property
    def private(self) -> nn.Module:
        """Return the private model, of any kind, restricted to the client's label space."""
        model = self.models["private"]
        return model if isinstance(model, Refitted) else self.samples.within_space(model)

    def build_model(self, feature_dim: int | None = None, *, name: str = "") -> HetModel:
        """Return a new network for the client's samples; all start with equal weights.

        It is of the architecture `name`, by default of the client's.
        """
        info, seed, chosen = self.info, self.run.seed, name or self.info.model
        return build(
            chosen, info.shape, info.classes, kind=info.kind, seed=seed, feature_dim=feature_dim
        )

    def public_set(self, *, labeled: bool) -> Split:
        """Return the public set, scaled; set `labeled` if the method uses its labels.

        Raises DataError if it contains any sample of this client, unless the client is private.
        """
        public, overlap = public_samples(self.config, self.node, self.samples, labeled=labeled)
        if overlap is not None:
            self.privacy.overlap(overlap)
        return public

    def generator(self, round: int, use: str) -> torch.Generator:
        """Return this client's random generator for one use in a round."""
        return torch_generator(self.run.seed, self.info.name, round, use)

    def optimization(self, *parameters: Iterable[nn.Parameter]) -> Optimization:
        """Return an optimizer over all of `parameters`, at the round's learning rate."""
        return self.recipe.round_optimization(self.training, chain(*parameters))

    def train_epochs(
        self,
        x: Tensor,
        y: Tensor,
        loss_of: LossOfBatch,
        optimizing: Optimization,
        generator: torch.Generator,
        *,
        augment: bool | Augment = True,
        **options: Unpack[Epochs],
    ) -> None:
        """Train as `fedhet.learning.training.train_epochs` does, by default for the local epochs.

        `augment` changes the samples: as `training.augment` says, or as a function does. Unset it
        where the targets belong to the unchanged images. The client's own samples: `train_own`.
        """
        chosen = self.recipe.options(self.training, len(y), augment, options)
        self.loss = train_epochs(x, y, loss_of, optimizing, generator=generator, **chosen)

    def train_own(
        self,
        loss_of: LossOfBatch,
        predict: Predict,
        optimizing: Optimization,
        generator: torch.Generator,
        labeled: Split | None = None,
        **options: Unpack[Epochs],
    ) -> None:
        """Train on the client's own samples: on `training_set`, and as `training.semi` says.

        `labeled` replaces `training_set`. `loss_of` is the loss of a labeled batch; `predict`
        returns the logits of the model that learns from unlabeled images.
        """
        own = labeled or Split(*self.training_set())
        x, y, semi, training = own.x, own.y, None, self.training
        augment: bool | Augment = True
        if training.semi != "none":
            semi = FixMatch(
                own,
                self.unlabeled,
                KINDS[self.info.kind],
                self.info.shape,
                self.network,
                training,
                self.compute,
                self.recipe.draws,
            )
            x, y, augment, options["batch_size"] = semi.x, semi.y, semi.augment, semi.batch_size
            loss_of = semi.joined_with(loss_of, options.pop("penalty", None), predict)
        chosen = self.recipe.options(training, len(y), augment, options)
        steps = chosen["epochs"], chosen["batch_size"]
        with self.privacy.training(optimizing, self.models.values(), len(y), *steps) as promised:
            self.loss = train_epochs(x, y, loss_of, promised, generator=generator, **chosen)
        if semi is not None:
            self.metrics = semi.metrics()

    @property
    def own_classes(self) -> OwnClasses:
        """What restricts logits [N, C] and classes [N] to the client's label space in a loss."""
        return OwnClasses(self.space)

    def fit_private(
        self, generator: torch.Generator, *, decay: float = 1.0, **options: Unpack[Epochs]
    ) -> None:
        """Train the private model on `training_set` with cross-entropy.

        A network continues from its current weights, and its learning rate falls by the factor
        `decay` after each epoch; a model without gradients is fitted again.
        """
        model = self.private
        if isinstance(model, Refitted):
            model.fit(*self.training_set())
            return
        loss_of, optimizing = CrossEntropy(model.train()), self.optimization(model.parameters())
        options["before_epoch"] = optimizing.decaying(decay)
        self.train_own(loss_of, model, optimizing, generator, **options)

    def record(self, run: str) -> ClientRecord:
        """Return the record by which the client's models can be used after a run."""
        return ClientRecord.of(run, self.config, self.node, self.samples)

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that the client holds in memory."""
        return sum(t.nbytes for t in chain(self.samples.held_tensors(), self.state.held_tensors()))

    # Flower's interface, in the order of a run.

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the client's name, model and task."""
        self.samples.warn_of_left_aside(self.run.method)
        return dict(self.info.properties())

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train as the server's instruction says, and return the reply."""
        best = config.get("best", 0)
        evaluate = self.evaluation if config.get("evaluate", True) else lambda _: Evaluations()
        try:
            with self.state.resting(), self.privacy.guarded():
                envelope, instruction = self.codec.read(parameters, self.sizes)
                run, round = envelope.run, envelope.round
                self.privacy.begin(run, round)
                arrays, train_seconds = self.privacy.sent_before(), 0.0
                if arrays is not None:  # what must not be computed again is the same reply
                    self.state.restore(run, before=round + 1)
                else:
                    self.state.restore(run, before=round)
                    with injected_faults(self.run, self.info.name, round):
                        reply, train_seconds = self._train(round, instruction)
                    arrays = self.codec.encode(envelope, instruction, self.privacy.sent(reply))
                    self.state.save(round, best if isinstance(best, int) else 0)
                    if self._recorded_in != run:
                        write_record(self.state.folder, self.record(run))
                        self._recorded_in = run
                    self.privacy.keep(arrays)
                scores, seconds = timed(self.privacy.evaluated, evaluate, instruction)
                measured = _measured(scores, train_seconds, seconds, self.loss, self.metrics)
                metrics = write_measures(self.privacy.measured(measured)) | self.recipe.counted()
        except UserModelError:
            raise
        except FedhetError as error:
            return [], 0, self._fault(error)
        return arrays, self.info.samples, dict(metrics)

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the current models; the instruction may be empty.

        If the method `learns_last`, a client that has ever trained trains on it before. A client
        with which nobody trains evaluates the model that it is offered, unless training is private:
        nothing noises its local epoch.
        """
        try:
            with self.state.resting(), self.privacy.guarded():
                envelope, instruction = self.codec.read(parameters, self.sizes, may_be_empty=True)
                run, round = envelope.run, envelope.round
                self.privacy.begin(run, round, charged=round + 1)
                self.state.restore(run, before=round + 1)
                learns = self.config.method.spec.learns_last and instruction.tensors
                if learns and self.state.participations > 0:
                    self._train(round + 1, instruction)
                    self.state.save(round + 1)
                unseen = (
                    config.get("unseen")
                    and self.run.data.held_out_clients
                    and not self.privacy.is_on
                )
                evaluate = partial(self._evaluate_unseen, round) if unseen else self.evaluation
                scores, seconds = timed(self.privacy.evaluated, evaluate, instruction)
                measured = self.privacy.measured(_measured(scores, 0.0, seconds))
        except UserModelError:
            raise
        except FedhetError as error:
            return 0.0, 0, self._fault(error)
        own = scores.get(("personal", "private"))
        hidden = own is None or not math.isfinite(own.loss) or self.privacy.is_on
        loss = 0.0 if own is None or hidden else own.loss
        return loss, self.info.samples, dict(write_measures(measured))

    def _train(self, round: int, instruction: Knowledge) -> tuple[Knowledge, float]:
        """Return the method's reply and the training time in seconds.

        Raises StateError if training diverged; the state saved before remains.
        """
        self.state.begin_round()
        self.recipe.begin(round)
        self.loss, self.metrics = None, {}
        with seeded(self.run.seed, self.info.name, round, device=self.compute.device):
            reply, seconds = timed(self.train, round, instruction)
        self.recipe.end(self.training, None if self.privacy.is_on else self.loss)
        self.state.metadata["participations"] = self.state.participations + 1
        return reply, seconds

    def _evaluate_unseen(self, round: int, instruction: Knowledge) -> Evaluations:
        """Return the scores of the model that the method offers to a client that never trained.

        As it is, and after a copy has trained for one epoch on the client's own samples, of which
        nothing is kept. No scores if the method has sent no such model.
        """
        model = self.eval_models(instruction).get(self.config.method.spec.offers)
        if model is None:
            return Evaluations()
        learner, own = copy.deepcopy(model).train(), self.samples.own
        draw = self.info.name, round, "unseen"
        self.recipe.begin(round)
        optimizing = self.recipe.round_optimization(self.run.training, learner.parameters())
        options = self.recipe.options(self.run.training, len(own), True, {"epochs": 1})
        options["generator"] = torch_generator(self.run.seed, *draw)
        with seeded(self.run.seed, *draw, device=self.compute.device):
            train_epochs(own.x, own.y, CrossEntropy(learner), optimizing, **options)
        offered = {HELD_OUT: model, HELD_OUT_EPOCH: learner}
        return judge_all(offered, self.tests, self.compute, self.run.metrics)

    def _fault(self, error: FedhetError) -> dict[str, Scalar]:
        """Return what the server is told of an error, and whether it must send weights again."""
        lacks: dict[str, Scalar] = {LACKS: True} if isinstance(error, LackingError) else {}
        return self.privacy.fault(error) | lacks


def _measured(
    scores: Evaluations,
    train_seconds: float,
    eval_seconds: float,
    loss: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Measured:
    """Return a client's measurements; `loss` is the training loss."""
    return Measured(
        placed(scores),
        loss,
        train_seconds,
        eval_seconds,
        peak_memory_mb(),
        dict(metrics or {}),
        majority={
            protocol: score.majority
            for (protocol, _), score in scores.items()
            if not math.isnan(score.majority)
        },
    )
