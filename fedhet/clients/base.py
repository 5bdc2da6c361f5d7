"""Base class for clients: a Flower NumPyClient that calls the hooks of a method.

A call to `fit` reads and checks the instruction, restores the client's state, calls `train`,
encodes the reply, saves the state, and evaluates. The docstring of each strategy, or of the
declaration of a method without its own strategy, cites the method's paper.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Unpack

import torch
from flwr.client import Client, NumPyClient
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from fedhet.base.errors import (
    FedhetError,
    KnowledgeError,
    MaskingError,
    StateError,
    UserModelError,
    definition_of,
)
from fedhet.base.seeding import seeded, torch_generator
from fedhet.client_runtime.local_training import FixMatch, LocalTrainer, Predict, injected_faults
from fedhet.client_runtime.masking import Masking
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.privacy import privacy_mechanism
from fedhet.client_runtime.samples import (
    ClientRecord,
    ClientSamples,
    load_samples,
    public_samples,
    write_record,
)
from fedhet.client_runtime.state import ClientCodec, ClientState, MessageClient
from fedhet.client_runtime.steps import Exchange, steps_of
from fedhet.config.resolve import Config
from fedhet.data.dataset import Split
from fedhet.kinds import KINDS
from fedhet.learning.devices import compute_for
from fedhet.learning.training import (
    Augment,
    BatchLoss,
    LabelSpace,
    Optimization,
    SupervisedLoss,
    TrainOptions,
    optimization_for,
    train_epochs,
)
from fedhet.methods.spec import ENSEMBLE
from fedhet.models import (
    AllocationLimit,
    Ensemble,
    Evaluations,
    HetModel,
    Refitted,
    build,
    build_any,
    check_task,
    evaluate_models,
    prepare_base,
)
from fedhet.runs.measures import (
    MISSING_BASE,
    Measured,
    by_score_key,
    count_tested,
    peak_memory_mb,
    timed,
    write_measures,
)
from fedhet.runs.records import COMMON, HELD_OUT, HELD_OUT_EPOCH, Headline
from fedhet.settings.run import TrainingSettings
from fedhet.wire.contract import Sizes
from fedhet.wire.knowledge import Knowledge, MissingBaseError
from fedhet.wire.masking import REVEAL

LOG = logging.getLogger("fedhet")


class HetClient(NumPyClient):
    """Base class for clients. A client is the client side of a method.

    A subclass implements the hooks. Only `train` is required.

    Example:
        A method that trains the private model and sends its weights::

            class WeightsClient(HetClient):
                def train(self, round, knowledge):
                    self.fit_private(self.generator(round, "train"))
                    return Knowledge(grouped("weights", to_arrays(self.network)))
    """

    def __init__(self, config: Config, node: Node, samples: ClientSamples | None = None) -> None:
        engine = config.run.engine.model_copy(update={"device": node.device})
        self.config = config.replacing(engine=engine)
        self.run, self.settings, self.node = self.config.run, config.method_settings, node
        self.compute = compute_for(engine)
        if self.run.privacy.is_on:
            # Opacus assumes that a convolution's input is contiguous, so it computes wrong
            # per-sample gradients for the channels_last format.
            self.compute = replace(self.compute, channels_last=False)
        config.method.spec.check_training(node.training, "node-config ")
        self.samples = samples or load_samples(config, node, self.compute)
        self.privacy = privacy_mechanism(self.config, node, self.samples, self.compute)
        self.info, self.space = self.privacy.public_info(self.samples.info), self.samples.space
        self.masking: Masking | None = None
        """Masking of replies, or None in runs without secure aggregation and for inference."""
        if self.run.privacy.secure_aggregation and node.peers:
            self.masking = Masking(config, node, self.samples.info)
        self.unlabeled, self.tests = self.samples.unlabeled, self.samples.tests
        self.loss: float | None = None
        """Mean training loss over the last epoch."""
        self.metrics: dict[str, float] = {}
        """Metrics from semi-supervised training in the current round."""

        def new_models() -> dict[str, nn.Module]:
            with AllocationLimit(node.max_model_bytes):
                models = self.setup()
            for model in models.values():
                prepare_base(model, self.run.engine)
            return models

        task = self.samples.format.task
        check_task(node.model, task)
        self.task = task.for_sample_gradients() if self.run.privacy.is_on else task
        """Task of the run (loss, predictions and scores)."""
        described = f"{self.info.classes} {self.task.noun} of shape {list(self.info.shape)}"
        self.state = ClientState(
            node.state_dir,
            node.name,
            {"method": self.run.method, "model": node.model, "task": described},
            self.compute,
            setup=new_models,
            training_set=self.training_set,
        )
        self.codec = ClientCodec(self.config, node, self.state)
        self.recipe = LocalTrainer(self.run, self.info, self.state, self.compute)
        self._recorded_in = ""
        """Name of the run for which the client's record has been written, or ""."""
        self.prepare()

    # Hooks that a method implements.

    def prepare(self) -> None:
        """Prepare the client before its first round.

        If the client is loaded for inference, it has no samples.
        """

    def setup(self) -> dict[str, nn.Module]:
        """Build the client's initial models.

        The default builds the private model. If the method has a setting `feature_dim`, this
        setting is the width of the features before the head.

        Returns:
            The models by kind, including the kind "private".
        """
        if self.config.method.spec.any_model not in self.task.properties:
            return {"private": self.build_model(getattr(self.settings, "feature_dim", None))}
        info, seed = self.info, self.run.seed
        model = build_any(
            info.model, info.shape, info.classes, kind=info.kind, seed=seed, task=self.task
        )
        return {"private": model}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train for one round, and return the reply.

        Args:
            round: Round number, starting at 1.
            knowledge: The server's instruction, which satisfies `spec.instructions`.

        Returns:
            Tensors and scalars that satisfy `spec.replies`.

        Example:
            Start from the server's weights, and train for the local epochs::

                load_weights(self.network, knowledge.group("weights"))
                self.fit_private(self.generator(round, "train"))
                return Knowledge(grouped("weights", to_arrays(self.network)))
        """
        raise NotImplementedError(f"{type(self).__name__} must implement train")

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return the samples x [N, ...] and labels y [N] on which `fit_private` trains.

        A model without gradients is not saved. After a restart, it is refitted on these samples.
        """
        return self.x, self.y

    def eval_models(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the models to evaluate, by kind.

        Args:
            knowledge: The latest instruction; empty if the server sent no instruction for the
                evaluation.
        """
        return {"private": self.private}

    def evaluation(self, knowledge: Knowledge) -> Evaluations:
        """Evaluate the models from `eval_models`, and their ensemble, on all test splits."""
        models = dict(self.eval_models(knowledge))
        if members := self.config.method.spec.ensemble:
            models[ENSEMBLE] = Ensemble([models[kind] for kind in members], self.task)
        return evaluate_models(models, self.tests, self.compute, self.run.metrics, self.task)

    def sizes(self) -> Sizes:
        """Return the axis sizes and weight shapes that instructions must have."""
        return self.config.method.spec.sizes(self.settings, self.info)

    # Helpers that methods may call.

    @property
    def x(self) -> Tensor:
        """The client's labeled training samples, of shape [N, ...], on the device."""
        return self.samples.own.x

    @property
    def y(self) -> Tensor:
        """The class labels [N] of `x`, or the targets [N, K] in tasks other than classification."""
        return self.samples.own.y

    @property
    def training(self) -> TrainingSettings:
        """Training settings of this client.

        `run.training` may contain lists of values, and other values than the client's own.
        """
        return self.node.training

    @property
    def models(self) -> dict[str, nn.Module]:
        """The client's models by kind."""
        return self.state.models

    @property
    def network(self) -> HetModel:
        """The private model as a network.

        Available only if the private model has gradients. Methods with `any_model` also support
        models without gradients, which only `fit_private` can train.
        """
        model = self.models["private"]
        assert isinstance(model, HetModel), "only fit_private can train this model"
        return model

    @property
    def private(self) -> nn.Module:
        """The private model, restricted to the client's label space."""
        model = self.models["private"]
        return model if isinstance(model, Refitted) else self.samples.within_space(model)

    def build_model(self, feature_dim: int | None = None, *, name: str = "") -> HetModel:
        """Build a new network for the client's samples.

        Networks of the same architecture and width start with equal weights on all clients.

        Args:
            feature_dim: Width of the features before the head, or None for the model's default.
            name: Name of the model, or "" for the client's architecture.
        """
        info, seed, model = self.info, self.run.seed, name or self.info.model
        return build(
            model, info.shape, info.classes, kind=info.kind, seed=seed, feature_dim=feature_dim
        )

    def public_set(self, *, labeled: bool) -> Split:
        """Return the public set, scaled like the client's samples.

        Args:
            labeled: Whether the method uses the labels.

        Raises:
            DataError: If the public set contains a sample of this client. With `[privacy]`, the
                overlap is only logged.
        """
        public, overlap = public_samples(self.config, self.node, self.samples, labeled=labeled)
        if overlap is not None:
            self.privacy.handle_overlap(overlap)
        return public

    def generator(self, round: int, use: str) -> torch.Generator:
        """Return a random generator seeded from the run, the client, the round, and `use`."""
        return torch_generator(self.run.seed, self.info.name, round, use)

    def optimization(
        self, *parameters: Iterable[nn.Parameter], settings: TrainingSettings | None = None
    ) -> Optimization:
        """Create an optimizer for `parameters` with the current round's learning rate.

        Args:
            *parameters: Parameters of the trained models.
            settings: Settings of the optimizer, or None for `training`.
        """
        settings = settings or self.training
        factor = self.recipe.rate_factor(settings)
        optimizing = optimization_for(chain(*parameters), settings, self.compute, factor)
        self.recipe.keep(optimizing, settings)
        return optimizing

    def train_epochs(
        self,
        x: Tensor,
        y: Tensor,
        loss_of: BatchLoss,
        optimizing: Optimization,
        generator: torch.Generator,
        *,
        augment: bool | Augment = True,
        own: bool = False,
        **options: Unpack[TrainOptions],
    ) -> None:
        """Train on samples that are not the client's own, such as public data.

        For the client's own samples, use `train_own`, which applies `[privacy]`.

        Args:
            x: Samples [N, ...].
            y: Labels or row numbers [N], passed to `loss_of` with each batch.
            loss_of: Function that takes a batch of x and y, and returns the loss, a scalar.
            optimizing: Optimizer from `optimization`.
            generator: Random generator that shuffles the samples, from `generator`.
            augment: Whether to augment samples according to `training.augment`, or a function that
                augments a batch. Use False if the targets belong to the unchanged samples.
            own: Whether the samples contain the client's own, so that the epochs count as epochs
                of the client.
            **options: Options of `fedhet.learning.training.train_epochs`. The default number of
                epochs is `training.local-epochs`.
        """
        kwargs = self.recipe.options(self.training, len(y), augment, options, float(own))
        self.loss = train_epochs(x, y, loss_of, optimizing, generator=generator, **kwargs)

    def train_own(
        self,
        loss_of: BatchLoss,
        predict: Predict,
        optimizing: Optimization,
        generator: torch.Generator,
        labeled: Split | None = None,
        model: nn.Module | None = None,
        **options: Unpack[TrainOptions],
    ) -> None:
        """Train on the client's own samples.

        If `training.semi` is set, also trains on the unlabeled samples. With `[privacy]`, training
        is differentially private.

        Args:
            loss_of: Function that takes a batch of samples and labels, and returns the loss, a
                scalar.
            predict: Function that returns the logits [N, C] of the model that learns from unlabeled
                samples.
            optimizing: Optimizer from `optimization`.
            generator: Random generator that shuffles the samples, from `generator`.
            labeled: Labeled samples, or None for `training_set`.
            model: Model that predicts pseudo-labels and, with `[privacy]`, a trained model that is
                not in `models`. None for the private model.
            **options: Options of `fedhet.learning.training.train_epochs`. The default number of
                epochs is `training.local-epochs`.
        """
        data = labeled or Split(*self.training_set())
        x, y, semi, training = data.x, data.y, None, self.training
        own = min(1.0, len(y) / max(1, len(self.y)))  # A part, or more if public data is added.
        augment: bool | Augment = True
        if training.semi != "none":
            semi = FixMatch(
                data,
                self.unlabeled,
                KINDS[self.info.kind],
                self.info.shape,
                model or self.network,
                training,
                self.compute,
                self.recipe.draws,
            )
            x, y, augment, options["batch_size"] = semi.x, semi.y, semi.augment, semi.batch_size
            loss_of = semi.combined_loss(loss_of, options.pop("penalty", None), predict)
        kwargs = self.recipe.options(training, len(y), augment, options, own)
        steps = kwargs["epochs"], kwargs["batch_size"]
        models = {id(m): m for m in (*self.models.values(), model) if m is not None}.values()
        with self.privacy.training(optimizing, models, len(y), *steps) as protected:
            self.loss = train_epochs(x, y, loss_of, protected, generator=generator, **kwargs)
        if semi is not None:
            self.metrics = semi.metrics()

    @property
    def own_classes(self) -> LabelSpace:
        """Module that restricts the logits [N, C] and labels [N] in a loss to the label space."""
        return self.task.restriction(self.space)

    def fit_private(
        self, generator: torch.Generator, *, decay: float = 1.0, **options: Unpack[TrainOptions]
    ) -> None:
        """Train the private model on `training_set` with the loss of the task.

        A network continues from its current weights. A model without gradients is refitted.

        Args:
            generator: Random generator that shuffles the samples, from `generator`.
            decay: Factor by which a network's learning rate is multiplied after each epoch.
            **options: Options of `fedhet.learning.training.train_epochs`.
        """
        model = self.private
        if isinstance(model, Refitted):
            model.fit(*self.training_set())
            self.recipe.epochs += 1
            return
        loss_of = SupervisedLoss(model.train(), self.task.loss())
        optimizing = self.optimization(model.parameters())
        options["before_epoch"] = optimizing.decay_schedule(decay)
        self.train_own(loss_of, model, optimizing, generator, **options)

    def record(self, run: str) -> ClientRecord:
        """Return the record needed to load the client's models after a run."""
        return ClientRecord.for_client(run, self.config, self.node, self.samples)

    def held_bytes(self) -> int:
        """Return the size of the client's tensors in memory, in bytes."""
        return sum(t.nbytes for t in chain(self.samples.held_tensors(), self.state.held_tensors()))

    # Flower's interface, in the order of a run.

    def to_client(self) -> Client:
        """Return the interface that Flower calls."""
        return MessageClient(self)

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Return the client's name, model and task, or the shares that unmask a sum."""
        if self.masking and REVEAL in config:
            try:
                return self.masking.revealed(config)
            except FedhetError as error:
                return self.privacy.error_report(error)
        self.samples.warn_of_unused_unlabeled(self.run.method)
        claimed = {"samples": self.samples.claimed} if self.samples.claimed else {}
        return {**self.info.properties(), **claimed}

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Train for one round, evaluate if requested, and return the reply."""
        evaluate = self.evaluation if config.get("evaluate", True) else lambda _: Evaluations()
        try:
            with self.state.offloading(), self.privacy.redacting_errors():
                envelope, instruction = self.codec.decode_instruction(parameters, self.sizes)
                run, round, train_seconds = envelope.run, envelope.round, 0.0
                if self.run.privacy.secure_aggregation and self.masking is None:
                    raise MaskingError("node-config 'peers': not set, expected a peers file")
                exchange = Exchange(envelope, instruction, config)
                own = self.privacy, self.masking, self.info.model, self.codec, self.state
                steps = steps_of(*own, self._save)
                for step in steps:
                    step.receive(exchange)
                if not exchange.arrays:  # Otherwise, the request was repeated.
                    with injected_faults(self.run, self.info.name, round):
                        exchange.reply, train_seconds = self._train(run, round, instruction)
                    for step in reversed(steps):
                        step.send(exchange)
                scores, seconds = timed(self.privacy.evaluate, evaluate, instruction)
                self._keep_confusion(scores)
                measured = _measured(scores, train_seconds, seconds, self.loss, self.metrics)
                measured = replace(measured, epochs=self.recipe.epochs)
                measured = self.privacy.filter_measurements(measured)
                metrics = write_measures(measured) | self.recipe.work_metrics()
        except UserModelError:
            raise
        except FedhetError as error:
            return [], 0, self._fault(error)
        return exchange.arrays, self.info.samples, dict(metrics)

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Evaluate the current models. The instruction may be empty.

        If the method sets `learns_last`, a client that has taken part in training first trains on
        this instruction. A held-out client evaluates the model that the method offers to it, except
        with `[privacy]`, because the client's local epoch would not be protected.
        """
        try:
            with self.state.offloading(), self.privacy.redacting_errors():
                envelope, instruction = self.codec.decode_instruction(
                    parameters, self.sizes, may_be_empty=True
                )
                run, round = envelope.run, envelope.round
                self.privacy.begin(run, round, charged=round + 1)
                self.state.restore(run, before=round + 1)
                learns = self.config.method.spec.learns_last and instruction.tensors
                epochs = 0.0
                if learns and self.state.participations > 0:
                    self._train(run, round + 1, instruction)
                    self.state.save(round + 1)
                    epochs = self.recipe.epochs
                held_out = (
                    config.get("unseen")
                    and self.run.data.held_out_clients
                    and not self.privacy.hides_scores
                )
                evaluate = partial(self._evaluate_held_out, round) if held_out else self.evaluation
                scores, seconds = timed(self.privacy.evaluate, evaluate, instruction)
                self._keep_confusion(scores)
                measured = replace(_measured(scores, 0.0, seconds), epochs=epochs)
                measured = self.privacy.filter_measurements(measured)
        except UserModelError:
            raise
        except FedhetError as error:
            return 0.0, 0, self._fault(error)
        score = scores.get(("personal", "private"))
        hidden = score is None or not math.isfinite(score.loss) or self.privacy.hides_scores
        loss = 0.0 if score is None or hidden else score.loss
        return loss, self.info.samples, dict(write_measures(measured))

    def _save(self, exchange: Exchange) -> None:
        """Save the state after a round and, once per run, the client's record."""
        run, best = exchange.envelope.run, exchange.config.get("best", 0)
        self.state.save(exchange.envelope.round, best if isinstance(best, int) else 0)
        if self._recorded_in != run:
            write_record(self.state.folder, self.record(run))
            self._recorded_in = run

    def _train(self, run: str, round: int, instruction: Knowledge) -> tuple[Knowledge, float]:
        """Train for one round, and return the reply and the training time in seconds.

        Raises StateError if training diverged; the previously saved state is kept. With secure
        aggregation, restores the previous state instead: a server could choose weights for which
        training diverges if the site has a certain sample, or a certain number of samples.
        """
        self.state.begin_round()
        self.recipe.begin(round)
        self.loss, self.metrics = None, {}
        with seeded(self.run.seed, self.info.name, round, device=self.compute.device):
            reply, seconds = timed(self.train, round, instruction)
            if not isinstance(reply, Knowledge):
                raise TypeError(f"train must return Knowledge, got {reply!r:.100}")
            self._check_names(reply)
        hides_loss = self.privacy.is_on or self.masking is not None
        try:
            self.recipe.end(self.training, None if hides_loss else self.loss)
        except StateError as error:
            if self.masking is None:
                raise
            LOG.warning("%s: round %d: %s", self.info.name, round, error)
            self.state.restore(run, before=round)
        self.state.metadata["participations"] = self.state.participations + 1
        return reply, seconds

    def _check_names(self, reply: Knowledge) -> None:
        """Raise ValueError if `train` misspells a field of the reply, or omits a required field.

        The server also checks the reply, but cannot name the function that caused the error.
        """
        method, sender = self.config.method, self.node.name
        contract, unused = method.spec.replies, self.sizes().unused
        try:
            contract.check_names(sender, reply.tensors, reply.scalars, unused)
        except KnowledgeError as error:
            raise ValueError(
                f"the reply of {definition_of(type(self).train)} violates MethodSpec.replies of "
                f"the method '{method.name}': {error.reason}"
            ) from None

    def _keep_confusion(self, scores: Evaluations) -> None:
        """Write the headline model's confusion matrix on the common test set, in simulations only.

        The matrix is not part of any message, so that nothing more leaves a site.
        """
        if self.node.is_site:
            return
        counts = {kind: each.confusion for (place, kind), each in scores.items() if place == COMMON}
        kinds = Headline.declared_by(self.config.method.spec).ordered_kinds(COMMON, counts)
        if kinds and (confusion := counts[kinds[0]]) is not None:
            self.state.write_confusion(confusion)

    def _evaluate_held_out(self, round: int, instruction: Knowledge) -> Evaluations:
        """Evaluate the model that the method offers to held-out clients.

        Evaluates the unchanged model, and a temporary copy after one epoch on the client's samples.
        Returns no scores if the instruction contains no such model.
        """
        model = self.eval_models(instruction).get(self.config.method.spec.offered_kind)
        if model is None:
            return Evaluations()
        adapted, own = copy.deepcopy(model).train(), self.samples.own
        draw = self.info.name, round, "unseen"
        self.recipe.begin(round)
        optimizing = self.optimization(adapted.parameters())
        options = self.recipe.options(self.training, len(own), True, {"epochs": 1})
        options["generator"] = torch_generator(self.run.seed, *draw)
        with seeded(self.run.seed, *draw, device=self.compute.device):
            loss_of = SupervisedLoss(adapted, self.task.loss())
            train_epochs(own.x, own.y, loss_of, optimizing, **options)
        models = {HELD_OUT: model, HELD_OUT_EPOCH: adapted}
        return evaluate_models(models, self.tests, self.compute, self.run.metrics, self.task)

    def _fault(self, error: FedhetError) -> dict[str, Scalar]:
        """Return metrics that report an error, including a request for full weights if needed."""
        report = self.privacy.error_report(error)
        return report | ({MISSING_BASE: True} if isinstance(error, MissingBaseError) else {})


def _measured(
    scores: Evaluations,
    train_seconds: float,
    eval_seconds: float,
    loss: float | None = None,
    metrics: Mapping[str, float] | None = None,
) -> Measured:
    """Collect a client's measurements, including its training loss."""
    return Measured(
        by_score_key(scores),
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
        tested=count_tested(scores),
    )
