"""Privacy mechanism of a client: differential privacy, withheld measurements, or none.

All uses of the client's samples pass through the mechanism: training, class means, measurements and
error messages. `DifferentialPrivacy` also stores each reply, so that a repeated request does not
consume the privacy budget twice.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property

import torch
from flwr.common import NDArrays, Scalar
from torch import Tensor, nn

from fedhet.algorithms.classwise import ClassMeans, ClassSums
from fedhet.base.errors import (
    DataError,
    DropOutError,
    FedhetError,
    MaskingError,
    PrivacyError,
    SettingsError,
    StateError,
    UserModelError,
)
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.client_runtime.state import ReplyStore
from fedhet.config.resolve import Config
from fedhet.learning.devices import Compute, evaluation_batch
from fedhet.learning.training import Optimization, evaluating
from fedhet.models import Evaluations, HetModel
from fedhet.privacy.accounting import (
    Noise,
    Plan,
    Release,
    calibrate_noise,
    combined_noise,
    epoch,
    epsilon_of,
)
from fedhet.privacy.ledger import Entry, Ledger, digest_of
from fedhet.privacy.noise import ClippedClassSums, SecretNoise
from fedhet.privacy.sgd import dp_sgd
from fedhet.runs.measures import BUDGET_EXHAUSTED, Measured
from fedhet.runs.records import VALIDATION
from fedhet.wire.identity import MIN_SAMPLES, ClientInfo
from fedhet.wire.knowledge import Knowledge

LOG = logging.getLogger("fedhet")
REDACTED = "{} at a private client; see the client's log for details"
FromLogits = Callable[[Tensor], Tensor]
"""Function from logits [N, C] to the values [N, C] that a method averages by class."""
Evaluate = Callable[[Knowledge], Evaluations]
"""Function that evaluates the client's models, given the latest instruction."""


class NoPrivacy:
    """Mechanism without protection: samples and results are used unchanged."""

    is_on = False
    """Whether training is differentially private."""
    hides_scores = False
    """Whether measurements on the client's own samples stay at the client."""

    def __init__(self, config: Config, node: Node, samples: ClientSamples) -> None:
        self._config, self._node, self._samples = config, node, samples
        self._min_samples = config.run.engine.min_samples_per_class
        self._ledger = Ledger(node.state_dir, node.name)
        self._run, self._round = "", 0
        # Compute the digest now, because a method may split the samples later.
        own, is_needed = samples.own, self.is_on or node.is_site
        self._digest = digest_of(own.x, own.y) if is_needed else ""

    def public_info(self, info: ClientInfo) -> ClientInfo:
        """Return the part of the client's description that may be sent."""
        return info

    def begin(self, run: str, round: int, charged: int = 0) -> None:
        """Begin a round. A site records the round in its ledger before it trains or replies."""
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
        """Yield the optimizer for training `models` on `rows` samples of the client."""
        yield optimizing

    def class_means(
        self, sums: ClassSums, model: HetModel, from_logits: FromLogits | None = None
    ) -> ClassMeans:
        """Return the class means to send, from the sums accumulated while `model` trained.

        `from_logits` transforms logits before they are averaged.
        """
        return sums.means(self._min_samples)

    def filter_reply(self, reply: Knowledge) -> Knowledge:
        """Return the part of a reply that may be sent."""
        return reply

    def filter_measurements(self, measured: Measured) -> Measured:
        """Return the part of the measurements that may be sent."""
        return measured

    def stored_reply(self) -> NDArrays | None:
        """Return this round's stored reply if the reply must be sent again, otherwise None."""
        return None

    def store_reply(self, arrays: NDArrays) -> None:
        """Store this round's reply before it is sent, if the mechanism needs it."""

    def error_report(self, error: FedhetError) -> dict[str, Scalar]:
        """Return metrics that report an error to the server."""
        return {"error": str(error)}

    def evaluate(self, evaluate: Evaluate, instruction: Knowledge) -> Evaluations:
        """Evaluate the client's models."""
        return evaluate(instruction)

    def handle_overlap(self, error: DataError) -> None:
        """Raise `error`, which reports that the public set contains samples of the client."""
        raise error

    @contextlib.contextmanager
    def redacting_errors(self) -> Iterator[None]:
        """Remove private information from errors raised in the block."""
        yield


class Withholding(NoPrivacy):
    """Mechanism that keeps measurements, numbers of samples, and error messages at the client.

    Secure aggregation requires this mechanism, because the server must only learn sums over the
    clients.
    """

    hides_scores = True

    def public_info(self, info: ClientInfo) -> ClientInfo:
        """Return the description without properties of the samples.

        The number of samples is a constant, so every client has the same weight. The format of the
        samples is left out, because it depends on their values.
        """
        return replace(info, samples=MIN_SAMPLES, stored="given")

    def filter_reply(self, reply: Knowledge) -> Knowledge:
        """Remove the scalars from a reply, because they are metrics computed on the samples."""
        return Knowledge(reply.tensors)

    def filter_measurements(self, measured: Measured) -> Measured:
        """Return the scores on the common test set, and epsilon.

        The scores on the client's personal test split and on its validation samples, and the loss,
        are only logged locally.
        """
        for (metric, protocol, kind), value in measured.scores.items():
            if protocol != "common":
                split = f"{protocol} {'' if protocol == VALIDATION else 'test '}split"
                score = self._node.name, self._round, metric, kind, split, value
                LOG.info("%s: round %d: %s of the %s model, %s: %.4f", *score)
        if measured.loss is not None:
            loss = measured.loss
            LOG.info("%s: round %d: training loss %.4f", self._node.name, self._round, loss)
        common = {key: value for key, value in measured.scores.items() if key[1] == "common"}
        majority = {name: each for name, each in measured.majority.items() if name == "common"}
        tested = {name: each for name, each in measured.tested.items() if name == "common"}
        return Measured(common, epsilon=self.epsilon(), majority=majority, tested=tested)

    def epsilon(self) -> float | None:
        """Return the epsilon consumed by the run so far, or None without differential privacy."""
        return None

    def error_report(self, error: FedhetError) -> dict[str, Scalar]:
        """Return metrics that report an error without revealing anything about the samples."""
        LOG.warning("%s: %s", self._node.name, error)
        if isinstance(error, PrivacyError):
            return {"error": str(error), BUDGET_EXHAUSTED: True}
        if isinstance(error, MaskingError):
            return {"error": str(error)}
        return {"error": REDACTED.format(type(error).__name__)}

    def evaluate(self, evaluate: Evaluate, instruction: Knowledge) -> Evaluations:
        """Evaluate the client's models, or return no evaluations if an error occurs.

        A site's test samples must not affect anything that the site sends, not even whether it
        replies.
        """
        try:
            return evaluate(instruction)
        except Exception:
            LOG.exception("%s: round %d: evaluation failed", self._node.name, self._round)
            return Evaluations()

    def handle_overlap(self, error: DataError) -> None:
        """Log the error and continue, because a failure would reveal the overlap to the server."""
        LOG.warning("%s", error)

    @contextlib.contextmanager
    def redacting_errors(self) -> Iterator[None]:
        """Replace unexpected errors with a StateError that names only the type of the error."""
        try:
            yield
        except DropOutError:
            raise
        except Exception as error:
            if isinstance(error, FedhetError) and not isinstance(error, UserModelError):
                raise
            LOG.exception("%s: round %d", self._node.name, self._round)
            raise StateError(REDACTED.format(type(error).__name__)) from None


class DifferentialPrivacy(Withholding):
    """Differential privacy for a client's samples, within the budgets of the run and the site."""

    is_on = True

    def __init__(
        self, config: Config, node: Node, samples: ClientSamples, compute: Compute
    ) -> None:
        """Create the mechanism. Raises PrivacyError unless delta is below 1 / samples.

        At a site with a budget, the check uses the budget's delta, because a server could vary the
        run's delta to find out the number of samples. At all sites, the check uses the accounted
        number of samples.
        """
        super().__init__(config, node, samples)
        self._charged = 0
        self._settings, self._compute = config.run.privacy, compute
        if node.source:  # Hide the classes of the site's samples.
            samples.space = torch.arange(samples.info.classes, device=compute.device)
        if node.declared and (fault := node.declared.rows_fault(len(samples.own.y))):
            LOG.warning("%s", fault)
        rows, declared = len(samples.own.y), node.declared
        self._rows = rows = rows if declared is None else declared.accounted_rows(rows)
        """Number of rows from which the noise, the sampling rate, and the steps are computed.

        For a client of a simulation, this is the number of its training samples. A site uses its
        declared number, or else the largest power of two that is at most the number of its samples.
        With secure aggregation, the number must be declared (`Declaration.check`). The privacy
        guarantee holds for any number, because the accounting uses the sampling rate with which the
        rows are drawn. The exact number of rows thus affects neither the noise nor the consumed
        budget, and a server cannot infer it from the round in which the budget is exhausted. A
        method may later hold out samples, but a fraction that a run chooses must not change it.
        """
        name, delta = "setting 'privacy.delta'", self._settings.delta
        if node.budget is not None:
            name, delta = "node-config 'privacy': delta", node.budget.delta
        if delta * rows >= 1:
            raise PrivacyError(
                f"{name} must be below 1 / samples = {1 / rows:.2g} for {rows} samples, "
                f"got {delta:g}"
            )

    def begin(self, run: str, round: int, charged: int = 0) -> None:
        """Begin a round, and charge its steps to the round `charged`, if given.

        Logs a warning at the start of a run if any earlier run had no privacy, even if the digest
        of the samples has changed. The digest also changes if the same data is read or split
        differently, or if only a few samples change.
        """
        if run != self._run:
            self.__dict__.pop("noise", None)
            past = self._ledger.entries()
            void = dict.fromkeys(e.run for e in past if not e.is_private)
            if void and run not in {e.run for e in past}:
                LOG.warning(
                    "%s: run %s has no privacy guarantee, because earlier runs without privacy "
                    "used this site's data: %s. `fedhet privacy %s` lists all runs.",
                    *(self._node.name, run, ", ".join(void), self._ledger.path),
                )
        self._run, self._round, self._charged = run, round, charged or round

    @cached_property
    def noise(self) -> Noise:
        """Noise multipliers that satisfy both the run's epsilon and the site's remaining budget."""
        noise = calibrate_noise(self._settings, self.plan, self._settings.epsilon)
        if self._node.budget is None:
            return noise
        entries = self._ledger.entries()
        past = tuple(e.release for e in entries if e.run != self._run and e.is_private)
        site_settings = self._settings.model_copy(update={"delta": self._node.budget.delta})
        consumed = epsilon_of(past, site_settings.delta)
        try:
            site_noise = calibrate_noise(site_settings, self.plan, self._node.budget.epsilon, past)
        except SettingsError:
            raise PrivacyError(
                "privacy budget exhausted: this site's limit is epsilon = "
                f"{self._node.budget.epsilon:g} at delta = {site_settings.delta:g}, and earlier "
                f"runs consumed {consumed:.3g}. The remaining budget does not cover the rounds of "
                "this run. No data was released."
            ) from None
        return site_noise if site_noise.gradients > noise.gradients else noise

    @property
    def plan(self) -> Plan:
        """Planned releases of the client, assuming that it is sampled in every round."""
        config, protection = self._config, self._config.method.spec.privacy
        rounds = config.run.rounds + config.method.spec.learns_last
        passes = protection.passes(config.method_settings, self._node.training, rounds)
        return Plan(self._rows, passes, rounds, protection.vectors)

    @contextlib.contextmanager
    def training(
        self,
        optimizing: Optimization,
        models: Iterable[nn.Module],
        rows: int,
        epochs: int,
        batch_size: int,
    ) -> Iterator[Optimization]:
        """Charge the budget for all steps, and then yield a DP-SGD optimizer."""
        noise, norm = self.noise.gradients, self._settings.max_grad_norm
        # Some methods train on additional public rows.
        rows = self._rows + max(0, rows - len(self._samples.own.y))
        steps = epoch(rows, batch_size, noise)
        self._charge(replace(steps, count=steps.count * epochs))
        info = self._samples.info
        with dp_sgd(
            optimizing, models, noise, norm, min(batch_size, rows), info.kind, info.shape, rows
        ) as private:
            yield private

    @torch.no_grad()
    def class_means(
        self, sums: ClassSums, model: HetModel, from_logits: FromLogits | None = None
    ) -> ClassMeans:
        """Compute class means from clipped and noised sums, in a separate pass over the samples.

        Sums accumulated during training are not used, because each batch used different weights.
        The batch size of the pass, which a server may choose, does not affect the guarantee.
        """
        protection = self._config.method.spec.privacy
        norm = min(self._settings.class_clip, protection.norm)
        self._charge(
            Release(combined_noise(self.noise.sums, self.noise.counts, protection.vectors))
        )
        own, clipped = self._samples.own, ClippedClassSums(len(sums.counts), norm)
        with evaluating(model):
            size = evaluation_batch(model, own.x, self._compute)
            for x, y in zip(torch.split(own.x, size), torch.split(own.y, size), strict=True):
                features, logits = model.features_and_logits(self._compute.to_inputs(x))
                clipped.add(features, from_logits(logits) if from_logits else logits, y)
        required: list[int] = []
        if (peers := self._node.peers) is not None:
            # Noised counts must not determine which sites' rows are in a sum.
            required = [int(label) for label in peers.peer(self._node.name).classes]
        return clipped.noised_means(self.noise, self._min_samples, SecretNoise(), required)

    def epsilon(self) -> float | None:
        """Return the epsilon that the run has consumed so far, at the run's delta."""
        consumed = [each.release for each in self._ledger.entries() if each.run == self._run]
        return epsilon_of(consumed, self._settings.delta)

    def stored_reply(self) -> NDArrays | None:
        """Return the stored reply of this round, or None if no reply is stored.

        A new reply would consume more budget.
        """
        return self._replies.get(self._round)

    def store_reply(self, arrays: NDArrays) -> None:
        """Store the reply of this round."""
        self._replies.put(self._round, arrays)

    @property
    def _replies(self) -> ReplyStore:
        return ReplyStore(self._node.state_dir, self._run, self._node.name, "answer")

    def _charge(self, release: Release) -> None:
        """Charge a release to the budget. Raises PrivacyError if it would exceed the budget."""
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
        if (budget := self._node.budget) is not None:
            all_runs = [each.release for each in past if each.is_private]
            limits.append(("this site's 'privacy'", budget.epsilon, budget.delta, all_runs))
        for name, epsilon, delta, consumed in limits:
            total = epsilon_of([*consumed, release], delta)
            if math.isinf(total):
                raise PrivacyError(
                    f"cannot guarantee {name}: the ledger contains entries with infinite "
                    "epsilon. For example, an attacker can remove the noise added by earlier "
                    "versions. `fedhet privacy LEDGER` counts these entries. No further data was "
                    "released."
                )
            if epsilon and total > epsilon * (1 + 1e-9):
                raise PrivacyError(
                    f"privacy budget exhausted: the limit of {name} is epsilon = {epsilon:g} at "
                    f"delta = {delta:g}, and round {self._charged} would raise the consumed "
                    f"epsilon from {epsilon_of(consumed, delta):.3g} to {total:.3g}. "
                    "No further data was released."
                )


@contextlib.contextmanager
def redact_errors() -> Iterator[None]:
    """Log each error in the block, and replace it with a StateError that names only its type."""
    try:
        yield
    except Exception as error:
        LOG.warning("%s: %s", type(error).__name__, error)
        raise StateError(REDACTED.format(type(error).__name__)) from None


def privacy_mechanism(
    config: Config, node: Node, samples: ClientSamples, compute: Compute
) -> NoPrivacy:
    """Create a client's privacy mechanism, as configured in the run."""
    if config.run.privacy.is_on:
        return DifferentialPrivacy(config, node, samples, compute)
    if config.run.privacy.secure_aggregation:
        return Withholding(config, node, samples)
    return NoPrivacy(config, node, samples)
