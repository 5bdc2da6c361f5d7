"""A client's promise of differential privacy: what it trains and sends by, and what that costs.

A client without it uses `NoPrivacy`, which changes nothing. Everything that touches the client's
samples passes through this module: training, class means, measurements, errors, and cached replies
that are sent again instead of being computed twice.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from fedhet.algorithms.classwise import ClassMeans, ClassSums
from fedhet.base.disk import Folder
from fedhet.base.errors import (
    DataError,
    FedhetError,
    PrivacyError,
    SettingsError,
    StateError,
    UserModelError,
)
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.config.resolve import Config
from fedhet.learning.devices import Compute, evaluation_batch
from fedhet.learning.training import Optimization, evaluating
from fedhet.models import Evaluations, HetModel
from fedhet.privacy.accounting import Noise, Plan, Release, combined, epoch, epsilon_of, solved
from fedhet.privacy.ledger import Entry, Ledger, digest_of
from fedhet.privacy.noise import SecretNoise, clipped, noised_means
from fedhet.privacy.sgd import privately
from fedhet.runs.measures import SPENT, Measured
from fedhet.runs.storage import KEPT_STATES
from fedhet.wire.identity import MIN_SAMPLES, ClientInfo
from fedhet.wire.knowledge import Knowledge

LOG = logging.getLogger("fedhet")
REPLY, REPLIES = "answer-{:06d}.npz", "answer-*.npz"
FAULT = "{} at a private client, whose own log says more"
FromLogits = Callable[[Tensor], Tensor]
"""Logits [N, C] -> what a method averages of them by class, [N, C]."""
Evaluate = Callable[[Knowledge], Evaluations]
"""Evaluates the client's models, given the latest instruction."""


class NoPrivacy:
    """No promise: samples are used, and what is measured is sent, as it is."""

    is_on = False

    def __init__(self, config: Config, node: Node, samples: ClientSamples) -> None:
        self._config, self._node, self._samples = config, node, samples
        self._least = config.run.engine.min_samples_per_class
        self._ledger = Ledger(node.state_dir, node.name)
        self._run, self._round = "", 0
        # Computed here because a method may split the samples later.
        own, is_needed = samples.own, self.is_on or node.is_site
        self._digest = digest_of(own.x, own.y) if is_needed else ""

    def described(self, info: ClientInfo) -> ClientInfo:
        """Return what the client says of itself."""
        return info

    def begin(self, run: str, round: int, charged: int = 0) -> None:
        """Begin a round. At a site, it is recorded before anything is trained or sent."""
        if self._node.is_site and (run, round) != (self._run, self._round):
            method, client = self._config.method.name, self._node.name
            self._ledger.record_unprotected(run, round, method, client, self._digest)
        self._run, self._round = run, round

    @contextlib.contextmanager
    def training(
        self,
        optimizing: Optimization,
        models: Iterable[nn.Module],
        rows: int,
        epochs: int,
        batch_size: int,
    ) -> Iterator[Optimization]:
        """Yield the optimizer for training `models` on `rows` own samples."""
        yield optimizing

    def class_means(
        self, gathered: ClassSums, model: HetModel, from_logits: FromLogits | None = None
    ) -> ClassMeans:
        """Return the class means that may be sent: those `gathered` while `model` trained.

        `from_logits` returns what was gathered in place of logits, if it is not these.
        """
        return gathered.means(self._least)

    def sent(self, reply: Knowledge) -> Knowledge:
        """Return what may be sent of a method's reply."""
        return reply

    def measured(self, found: Measured) -> Measured:
        """Return what may be sent of the client's measurements."""
        return found

    def sent_before(self) -> NDArrays | None:
        """Return the reply of this round, if it was sent before and must be sent again."""
        return None

    def keep(self, arrays: NDArrays) -> None:
        """Do what has to be done before the round's reply is sent."""

    def fault(self, error: FedhetError) -> dict[str, Scalar]:
        """Return what the server is told of an error."""
        return {"error": str(error)}

    def evaluated(self, evaluate: Evaluate, instruction: Knowledge) -> Evaluations:
        """Return the evaluations of the client's models."""
        return evaluate(instruction)

    def overlap(self, error: DataError) -> None:
        """Handle a public set that contains samples of the client: raise `error`."""
        raise error

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the block; what is raised may be told to the server."""
        yield


class DifferentialPrivacy(NoPrivacy):
    """The promise of `[privacy]`, within the client's own budget."""

    is_on = True

    def __init__(
        self, config: Config, node: Node, samples: ClientSamples, compute: Compute
    ) -> None:
        """Raise PrivacyError if delta is not below 1 / samples.

        At a site with a budget it is the delta of the budget: the run's could be chosen to find
        out the number of samples.
        """
        super().__init__(config, node, samples)
        self._charged = 0
        self._settings, self._compute = config.run.privacy, compute
        if node.folder:  # otherwise the classes of its own samples
            samples.space = torch.arange(samples.info.classes, device=compute.device)
        rows = len(samples.own.y)
        name, delta = "setting 'privacy.delta'", self._settings.delta
        if node.budget is not None:
            name, delta = "delta in node-config 'privacy'", node.budget.delta
        if delta * rows >= 1:
            raise PrivacyError(
                f"{name} = {delta:g} means nothing for {rows} samples: it must be below "
                f"{1 / rows:.2g}"
            )

    def described(self, info: ClientInfo) -> ClientInfo:
        """Return the description without the number of samples: every client counts alike."""
        return replace(info, samples=MIN_SAMPLES)

    def begin(self, run: str, round: int, charged: int = 0) -> None:
        """Begin a round, whose steps are charged to `run`, and to the round `charged` if given.

        Logs a warning at the start of a run if an earlier run had no privacy. The digests of the
        two runs do not matter: they differ if a run without privacy reads or splits the same data
        in another way, or if a few samples have changed.
        """
        if run != self._run:
            self.__dict__.pop("noise", None)
            past = self._ledger.entries()
            void = dict.fromkeys(e.run for e in past if not e.is_private)
            if void and run not in {e.run for e in past}:
                LOG.warning(
                    "%s: run %s has no privacy guarantee, because earlier runs without privacy "
                    "used data of this site: %s. `fedhet privacy %s` lists all runs.",
                    *(self._node.name, run, ", ".join(void), self._ledger.path),
                )
        self._run, self._round, self._charged = run, round, charged or round

    @cached_property
    def noise(self) -> Noise:
        """The noise of the run: enough for its own epsilon, and for what the site has left."""
        noise = solved(self._settings, self.plan, self._settings.epsilon)
        if self._node.budget is None:
            return noise
        entries = self._ledger.entries()
        past = tuple(e.release for e in entries if e.run != self._run and e.is_private)
        within = self._settings.model_copy(update={"delta": self._node.budget.delta})
        spent = epsilon_of(past, within.delta)
        try:
            own = solved(within, self.plan, self._node.budget.epsilon, past)
        except SettingsError:
            raise PrivacyError(
                f"nothing is released: this site's 'privacy' is {self._node.budget.epsilon:g} at "
                f"delta {within.delta:g}, and after earlier runs, which spent {spent:.3g}, too "
                "little is left for the rounds of this one"
            ) from None
        return own if own.gradients > noise.gradients else noise

    @property
    def plan(self) -> Plan:
        """What the client does in the run if it is asked in every round."""
        config, protection = self._config, self._config.method.spec.privacy
        rounds = config.run.rounds + config.method.spec.learns_last
        passes = protection.passes(config.own, self._node.training, rounds)
        return Plan(len(self._samples.own.y), passes, rounds, protection.vectors)

    @contextlib.contextmanager
    def training(
        self,
        optimizing: Optimization,
        models: Iterable[nn.Module],
        rows: int,
        epochs: int,
        batch_size: int,
    ) -> Iterator[Optimization]:
        """Yield the optimizer as DP-SGD, which is paid for before it begins."""
        noise, norm = self.noise.gradients, self._settings.max_grad_norm
        one = epoch(rows, batch_size, noise)
        self._charge(replace(one, count=one.count * epochs))
        info = self._samples.info
        with privately(
            optimizing, models, noise, norm, min(batch_size, rows), info.kind, info.shape
        ) as private:
            yield private

    @torch.no_grad()
    def class_means(
        self, gathered: ClassSums, model: HetModel, from_logits: FromLogits | None = None
    ) -> ClassMeans:
        """Return class means of clipped and noised sums, in a pass of their own.

        Of what was gathered only the shape is used: its features are of many models, one a batch.
        """
        protection = self._config.method.spec.privacy
        norm = min(self._settings.class_clip, protection.norm)
        self._charge(Release(combined(self.noise.sums, self.noise.counts, protection.vectors)))
        own, sums = self._samples.own, gathered
        sums.clear()
        with evaluating(model):
            size = evaluation_batch(model, own.x, self._compute)
            for x, y in zip(torch.split(own.x, size), torch.split(own.y, size), strict=True):
                features, logits = model.features_and_logits(self._compute.to_inputs(x))
                views = features, from_logits(logits) if from_logits else logits
                features, logits = (clipped(view.float(), norm) for view in views)
                sums.add(features, logits, y)
        found = sums.features, sums.logits, sums.counts
        return noised_means(*found, self.noise, norm, self._least, SecretNoise())

    def sent(self, reply: Knowledge) -> Knowledge:
        """Return the reply's tensors: its scalars are metrics of the samples."""
        return Knowledge(reply.tensors)

    def measured(self, found: Measured) -> Measured:
        """Return the scores on the shared test set, and epsilon.

        The scores on the client's own test split, and its loss, are in its own log.
        """
        for (metric, protocol, kind), value in found.scores.items():
            if protocol != "common":
                about = self._node.name, self._round, metric, kind, protocol, value
                LOG.info("%s: round %d: %s of the %s model, %s test split: %.4f", *about)
        if found.loss is not None:
            LOG.info("%s: round %d: training loss %.4f", self._node.name, self._round, found.loss)
        shared = {place: value for place, value in found.scores.items() if place[1] == "common"}
        majority = {name: each for name, each in found.majority.items() if name == "common"}
        return Measured(shared, epsilon=self.epsilon(), majority=majority)

    def epsilon(self) -> float:
        """Return epsilon of the run so far, at the run's delta."""
        spent = [each.release for each in self._ledger.entries() if each.run == self._run]
        return epsilon_of(spent, self._settings.delta)

    def sent_before(self) -> NDArrays | None:
        """Return the reply of this round, if it was sent before: a second one would cost anew."""
        path = self._folder.path / REPLY.format(self._round)
        if not path.is_file():
            return None
        with np.load(path, allow_pickle=False) as found:
            return [found[name] for name in found.files]

    def keep(self, arrays: NDArrays) -> None:
        """Store the round's reply, with those of a few rounds before.

        Those of later rounds are of a server that has resumed from an earlier one.
        """
        folder, name = self._folder, REPLY.format(self._round)
        with folder.replacing(name, private=True) as path, path.open("wb") as file:
            np.savez(file, *arrays)
        stored = sorted(path.name for path in folder.path.glob(REPLIES))
        kept = [each for each in stored if each <= name][-KEPT_STATES:]
        folder.remove([each for each in stored if each not in kept])

    def fault(self, error: FedhetError) -> dict[str, Scalar]:
        """Return what the server is told of an error: nothing that depends on the samples."""
        LOG.warning("%s: %s", self._node.name, error)
        if isinstance(error, PrivacyError):
            return {"error": str(error), SPENT: True}
        return {"error": FAULT.format(type(error).__name__)}

    def evaluated(self, evaluate: Evaluate, instruction: Knowledge) -> Evaluations:
        """Return the evaluations of the client's models, or none if they fail.

        The test samples of a site decide nothing, not even whether the site replies.
        """
        try:
            return evaluate(instruction)
        except Exception:
            LOG.exception("%s: round %d: evaluation", self._node.name, self._round)
            return Evaluations()

    def overlap(self, error: DataError) -> None:
        """Log that a public set contains samples of the client, and use the set nevertheless.

        A refusal would tell the server which samples the client has.
        """
        LOG.warning("%s", error)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Run the block; of an error that is not ours the server is told the type alone."""
        try:
            yield
        except Exception as error:
            if isinstance(error, FedhetError) and not isinstance(error, UserModelError):
                raise
            LOG.exception("%s: round %d", self._node.name, self._round)
            raise StateError(FAULT.format(type(error).__name__)) from None

    @property
    def _folder(self) -> Folder:
        """The client's folder of the run."""
        root = self._node.state_dir
        return Folder(root / self._run / self._node.name, root, private=True)

    def _charge(self, release: Release) -> None:
        """Pay for a release before it begins. Raises PrivacyError if that is too much."""
        self._ledger.charge(
            [release],
            lambda past: self._check(past, release),
            run=self._run,
            round=self._charged,
            method=self._config.method.name,
            client=self._node.name,
            data=self._digest,
        )

    def _check(self, past: list[Entry], release: Release) -> None:
        settings = self._settings
        of_run = [each.release for each in past if each.run == self._run]
        limits = [("the run's 'privacy.epsilon'", settings.epsilon, settings.delta, of_run)]
        if (own := self._node.budget) is not None:
            everything = [each.release for each in past if each.is_private]
            limits.append(("this site's 'privacy'", own.epsilon, own.delta, everything))
        for name, epsilon, delta, spent in limits:
            cost = epsilon_of([*spent, release], delta)
            if math.isinf(cost):
                raise PrivacyError(
                    f"nothing more is released: {name} cannot be kept, because the ledger has "
                    "entries of infinite epsilon, such as those of versions whose noise can be "
                    "removed. `fedhet privacy LEDGER` counts these entries."
                )
            if epsilon and cost > epsilon * (1 + 1e-9):
                raise PrivacyError(
                    f"nothing more is released: {name} is {epsilon:g} at delta {delta:g}, and "
                    f"round {self._charged} would raise what is spent from "
                    f"{epsilon_of(spent, delta):.3g} to {cost:.3g}"
                )


@contextlib.contextmanager
def redact_errors() -> Iterator[None]:
    """Replace an error of the block, which reads private samples; the site's log has it whole."""
    try:
        yield
    except Exception as error:
        LOG.warning("%s: %s", type(error).__name__, error)
        raise StateError(FAULT.format(type(error).__name__)) from None


def privacy_mechanism(
    config: Config, node: Node, samples: ClientSamples, compute: Compute
) -> NoPrivacy:
    """Return the promise that a run and a node make for a client's samples."""
    if config.run.privacy.is_on:
        return DifferentialPrivacy(config, node, samples, compute)
    return NoPrivacy(config, node, samples)
