"""The client half of every method: a Flower NumPyClient around one function that a method writes.

`train` is the method. What surrounds it is here: decode and validate, find the private state,
train, keep the state, measure, encode.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar

import torch
from flwr.client import NumPyClient
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.arrays import group
from fedhet.config.schema import MethodSettings
from fedhet.data import GENERATED, DataSpec, Split, labelled_parts, public_set, refuse_overlap
from fedhet.devices import compute_for
from fedhet.errors import FedhetError, StateError
from fedhet.models import HetModel, Refitted, Within, build, build_any
from fedhet.runs.records import Measured, peak_memory_mb, write_measures
from fedhet.seeding import seeded, torch_generator
from fedhet.storage import ClientStore
from fedhet.training import LossOfBatch, Optimization, Score, evaluate, optimization, train_epoch
from fedhet.wire.contract import Contract
from fedhet.wire.identity import ClientInfo, order_of
from fedhet.wire.knowledge import Envelope, Knowledge, decode, encode, expect

LOG = logging.getLogger("fedhet")
"""Of a node: what it logs stands in the log of Flower's node."""
KEPT = "kept"
"""Under this name, which no model has, a client's state holds what is not of a model."""


class HetClient(NumPyClient):
    """A method's client half.

    A method writes `train`; one that keeps more than the private model says so in `setup` and
    `judged`, and one that receives weights or features says in `dims` and `shapes` what sizes
    they have.
    """

    settings_type: ClassVar[type[MethodSettings]] = MethodSettings
    sends: ClassVar[Contract] = Contract()
    """The fields of what `train` returns."""
    any_model: ClassVar[bool] = False
    """Does the method train its model by `fit_private` alone, so that it needs no gradients?"""

    def __init__(self, config, node) -> None:
        run = config.run
        self.config = config
        self.run = run.model_copy(update={"engine": run.engine.model_copy(update={"device": node.device})})
        self.settings = config.own
        self.receives = config.method.strategy.sends
        self.node = node
        self.compute = compute_for(self.run.engine)
        data = node.load_data(run)
        labelled, rest = labelled_parts(data, run.data.labelled_alpha, run.seed, node.name)
        samples = len(labelled) + len(rest)
        classes, order = len(data.classes), order_of(data.classes)
        self.info = ClientInfo(node.name, node.model, samples, classes, data.shape, order)
        self._left_aside = data.left_aside
        self.x = self.compute.images(labelled.x)
        self.y = labelled.y.to(self.compute.device)
        self.unlabelled = Split(self.compute.images(rest.x), rest.y.to(self.compute.device))
        """Samples whose labels, UNKNOWN at a real site, are there to measure by, never to train on;
        often none."""
        self.tests: dict[str, Split] = {"personal": data.test}
        if data.common is not None:
            self.tests["common"] = data.common
        self.space = torch.tensor(data.space, device=self.compute.device)
        """The classes [P], ascending, that this client tells apart."""
        self.models: dict[str, HetModel] = {}
        self.refitted: Refitted | None = None
        """The private model where it is one without gradients; `models` has none then."""
        self.kept: dict[str, Tensor] = {}
        """Tensors that a method keeps over rounds beside its models."""
        self.facts: dict[str, int | float | str] = {}
        """Small things that a method keeps over rounds."""
        self.loss: float | None = None
        """Mean training loss of the last epoch."""
        self._store: ClientStore | None = None
        self._version = -1
        """Which saved state the models in memory are; -1: none that can be trusted."""
        self._latest = 0
        """Which state was the latest on disk when the models were restored; 0: none."""

    # What a method writes.

    def setup(self) -> dict[str, HetModel]:
        """Return the models that the client keeps, as they are before the first round."""
        return {"private": self.build_model()}

    def train(self, round: int, knowledge: Knowledge) -> Knowledge:
        """Train with the private state; return what the server is told."""
        raise NotImplementedError

    def trains(self, knowledge: Knowledge) -> bool:
        """Tell whether an instruction may change the models, as nearly every one does."""
        return True

    def judged(self, knowledge: Knowledge) -> dict[str, nn.Module]:
        """Return the models to be measured, by kind; `knowledge` is what the server said last."""
        return {"private": self.private}

    def remembered(self) -> dict[tuple[str, str], float]:
        """Return accuracies that are not to be measured anew, by (protocol, kind)."""
        return {}

    def training_set(self) -> tuple[Tensor, Tensor]:
        """Return x [N, ...] and y [N] that a model without gradients was last fitted on.

        Nothing else of it is kept: from a saved state it is fitted again, and is the same.
        """
        return self.x, self.y

    def sizes(self):
        return self.config.method.spec.sizes(self.settings, self.info)

    # What a method uses.

    @property
    def participations(self) -> int:
        """Return in how many rounds this client has trained before."""
        return int(self.facts.get("participations", 0))

    def build_model(self, feature_dim: int | None = None) -> HetModel:
        """Return a new model of the client's architecture; all of one architecture start equal."""
        return build(
            self.node.model,
            self.info.shape,
            self.info.classes,
            seed=self.run.seed,
            feature_dim=feature_dim,
        )

    @property
    def private(self) -> nn.Module:
        """Return the private model, of whichever kind, within the client's label space."""
        if self.refitted is not None:
            return self.refitted
        model = self.models["private"]
        if len(self.space) == self.info.classes:
            return model
        outside = torch.ones(self.info.classes, dtype=torch.bool, device=self.compute.device)
        outside[self.space] = False
        return Within(model, outside)

    def fit_private(
        self, x: Tensor, y: Tensor, *, epochs: int, batch_size: int, generator: torch.Generator
    ) -> None:
        """Train the private model on x [N, ...] and y [N] by cross-entropy.

        A network goes on from where it stands; a model without gradients is fitted anew.
        """
        if self.refitted is not None:
            self.refitted.fit(x, y)
            return
        model = self.private.train()

        def loss_of(part: Tensor, labels: Tensor) -> Tensor:
            return F.cross_entropy(model(part).float(), labels)

        optimizing = self.optimization(model.parameters())
        for _ in range(epochs):
            self.loss = train_epoch(
                x,
                y,
                loss_of,
                optimizing,
                batch_size=batch_size,
                generator=generator,
                compute=self.compute,
            )

    def public_set(self, *, labelled: bool) -> Split:
        """Return the data that no client owns, scaled; `labelled` if its labels are to be used.

        Raises DataError if any sample of this client is in it.
        """
        classes = self.info.classes if labelled else None
        public = public_set(DataSpec.of(self.run), self.info.shape, classes)
        # A share of the run's dataset is apart from the others' by its rows, not from a site's own.
        if self.run.data.public_dataset != GENERATED and (
            self.run.data.public_dataset or self.node.folder
        ):
            for split in (Split(self.x, self.y), self.unlabelled, self.tests["personal"]):
                refuse_overlap(public, split, self.info.name)
        return public

    def scores(self, judged: Mapping[str, nn.Module]) -> dict[tuple[str, str], Score]:
        """Measure models, by kind, on every test split that the client has."""
        return {
            (protocol, kind): evaluate(
                model, split.x, split.y, self.compute, self.run.engine.eval_batch_size
            )
            for protocol, split in self.tests.items()
            for kind, model in judged.items()
        }

    def optimization(self, *parameters: Iterable[nn.Parameter]) -> Optimization:
        """Return a fresh optimiser over all of `parameters`."""
        return optimization([p for group in parameters for p in group], self.run.training, self.compute)

    def generator(self, round: int, use: str) -> torch.Generator:
        """Return the generator of this client's draws in a round for one use."""
        return torch_generator(self.run.seed, self.info.name, round, use)

    def train_epoch(
        self,
        loss_of: LossOfBatch,
        optimizing: Optimization,
        generator: torch.Generator,
        *,
        rows: Tensor | None = None,
        stepped: Callable[[], None] | None = None,
    ) -> None:
        """Train one epoch over the client's own training split, or some rows of it."""
        self.loss = train_epoch(
            self.x if rows is None else self.x[rows],
            self.y if rows is None else self.y[rows],
            loss_of,
            optimizing,
            batch_size=self.run.training.batch_size,
            generator=generator,
            compute=self.compute,
            stepped=stepped,
        )

    def held_bytes(self) -> int:
        """Return the bytes of the tensors that an open client holds in memory."""
        held = [self.x, self.unlabelled.x]
        held += [split.x for name, split in self.tests.items() if name != "common"]
        held += [tensor for model in self.models.values() for tensor in model.state_dict().values()]
        held += self.kept.values()
        return sum(tensor.nbytes for tensor in held)

    # What Flower calls, in the order of a run.

    def get_properties(self, config: dict[str, Scalar]) -> dict[str, Scalar]:
        """Say who this is and what task its data is of."""
        if self._left_aside:
            LOG.warning(
                "%s: %d images without a class are left aside: %s learns from labelled ones alone",
                self.info.name,
                self._left_aside,
                self.run.method,
            )
        return dict(self.info.properties())

    def fit(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[NDArrays, int, dict[str, Scalar]]:
        """Take in the server's knowledge, train, and answer with the client's."""
        try:
            envelope, knowledge = self._open(parameters)
            self._check(knowledge)
            self._restore(envelope.run, before=envelope.round)
            answer, seconds = self._train(envelope, knowledge)
            measured = self._unmeasured(seconds)
            if config.get("evaluate", True):
                measured, _ = self._measure(self.judged(knowledge), seconds)
            reply = Envelope(envelope.run, envelope.method, envelope.round, self.info.name)
            arrays = encode(reply, answer)
        except FedhetError as error:
            return [], 0, {"error": str(error)}
        return arrays, self.info.samples, dict(write_measures(measured))

    def evaluate(
        self, parameters: NDArrays, config: dict[str, Scalar]
    ) -> tuple[float, int, dict[str, Scalar]]:
        """Measure the models as they are."""
        try:
            envelope, knowledge = self._open(parameters)
            if knowledge.tensors or knowledge.scalars:
                self._check(knowledge)
            self._restore(envelope.run, before=envelope.round + 1)
            self.loss = None
            measured, loss = self._measure(self.judged(knowledge), 0.0)
        except FedhetError as error:
            return 0.0, 0, {"error": str(error)}
        return loss, self.info.samples, dict(write_measures(measured))

    # The steps of the above.

    def _open(self, arrays: NDArrays) -> tuple[Envelope, Knowledge]:
        """Return the server's message. Raises KnowledgeError if it is not for this method."""
        envelope, knowledge = decode(arrays, "server")
        expect(envelope, run=None, method=self.run.method, round=None, sender="server")
        return envelope, knowledge

    def _check(self, knowledge: Knowledge) -> None:
        """Raise KnowledgeError unless an instruction to train keeps the method's contract."""
        self.receives.check(
            "server",
            knowledge.tensors,
            knowledge.scalars,
            sizes=self.sizes(),
        )

    def _train(self, envelope: Envelope, knowledge: Knowledge) -> tuple[Knowledge, float]:
        """Return the method's answer and the seconds that its training took; keep the state."""
        self._version = -1
        self.loss = None
        trains = self.trains(knowledge)
        started = time.perf_counter()
        place = (self.info.name, envelope.round)
        with seeded(self.run.seed, *place, device=self.compute.device):
            answer = self.train(envelope.round, knowledge)
        seconds = time.perf_counter() - started
        self._check_finite()
        self.facts["participations"] = self.participations + trains
        self._save(envelope.round)
        return answer, seconds

    def _check_finite(self) -> None:
        """Raise StateError where training has diverged; what was saved before then stands."""
        tensors = [t for model in self.models.values() for t in model.state_dict().values()]
        weights = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point())
        if not weights or (self.loss is not None and not math.isfinite(self.loss)):
            raise StateError(
                f"training diverged (loss {self.loss}): the models of before stand; "
                "a smaller 'lr' may help"
            )

    def _restore(self, run: str, before: int) -> None:
        """Make the models those that the last round `before` another one left, or new ones.

        A server that resumes may ask again for a round that this client has been through.
        """
        store = ClientStore(self.node.state_dir, run, self.info.name)
        rounds = store.rounds()
        last = max((known for known in rounds if known < before), default=None)
        version = 0 if last is None else _version_of(store, last)
        self._latest = _version_of(store, rounds[-1]) if rounds else 0
        if store == self._store and version == self._version:
            return
        self.models, self.facts, self.kept = {}, {}, {}
        self.refitted = self._without_gradients()
        if self.refitted is None:
            self.models = self.setup()
        if last is not None:
            self._load(store, last)
        for model in self.models.values():
            self.compute.place(model)
        if self.refitted is not None and self.participations:
            self.refitted.fit_later(*self.training_set())
        self._store, self._version = store, version

    def _without_gradients(self) -> Refitted | None:
        """Return a new private model if it is one without gradients, and the method takes such."""
        if not self.config.method.spec.any_model:
            return None
        info = self.info
        built = build_any(self.node.model, info.shape, info.classes, seed=self.run.seed)
        return built if isinstance(built, Refitted) else None

    def _load(self, store: ClientStore, round: int) -> None:
        tensors, facts = store.load(round, torch.device("cpu"))
        path = store.path(round)
        for name, value in self._identity().items():
            if facts.get(name) != value:
                raise StateError(
                    f"{path} is of {name} {facts.get(name)!r}, this client's is {value!r}"
                )
        for kind, model in self.models.items():
            try:
                model.load_state_dict(group(tensors, kind))
            except RuntimeError as error:
                raise StateError(f"{path} does not fit the model {kind}: {error}") from None
        self.kept = {k: v.to(self.compute.device) for k, v in group(tensors, KEPT).items()}
        self.facts = {k: v for k, v in facts.items() if k not in {*self._identity(), "version"}}

    def _save(self, round: int) -> None:
        assert self._store is not None
        rounds = self._store.rounds()
        if (_version_of(self._store, rounds[-1]) if rounds else 0) != self._latest:
            raise StateError(
                f"{self._store.folder} was written by another worker meanwhile: round {round} "
                "came too late, and the newer state stands"
            )
        version = self._latest + 1
        tensors = {
            f"{kind}/{name}": tensor
            for kind, model in self.models.items()
            for name, tensor in model.state_dict().items()
        }
        tensors |= {f"{KEPT}/{name}": tensor for name, tensor in self.kept.items()}
        self._store.save(round, tensors, {**self.facts, **self._identity(), "version": version})
        self._version = self._latest = version

    def _identity(self) -> dict[str, str]:
        """Return what a saved state must agree with."""
        task = f"{self.info.classes} classes of shape {list(self.info.shape)}"
        return {"method": self.run.method, "model": self.node.model, "task": task}

    def _unmeasured(self, train_seconds: float) -> Measured:
        return Measured({}, self.loss, train_seconds, 0.0, peak_memory_mb())

    def _measure(
        self, judged: Mapping[str, nn.Module], train_seconds: float
    ) -> tuple[Measured, float]:
        """Return what there is to report, and the private model's loss on its own test split."""
        started = time.perf_counter()
        scores = self.scores(judged)
        seconds = time.perf_counter() - started
        reached = {key: score.accuracy for key, score in scores.items()} | self.remembered()
        own = scores.get(("personal", "private"))
        loss = own.loss if own is not None and math.isfinite(own.loss) else 0.0
        return Measured(reached, self.loss, train_seconds, seconds, peak_memory_mb()), loss


def _version_of(store: ClientStore, round: int) -> int:
    """Return which save the state of `round` was; they are counted over a run, from 1."""
    return int(store.facts(round).get("version", 0))
