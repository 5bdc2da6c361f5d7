"""State of the current round on the server: clients, replies, measurements and durations."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.common import EvaluateIns
from pydantic import TypeAdapter

from fedhet.base.errors import (
    DivergedError,
    FedhetError,
    KnowledgeError,
    StateError,
    error_text,
    one_line,
)
from fedhet.base.metrics import ACCURACY, in_order, metric_of
from fedhet.runs.measures import Measured, relative, spread, summarize
from fedhet.runs.records import VALIDATION, ByMetric, Headline, RoundRecord, Seconds
from fedhet.server.calls import CallOutcome, Failure, RoundResults
from fedhet.server.members import ClientHealth
from fedhet.server.open_calls import OpenCalls
from fedhet.server.reply import Magnitudes, medians
from fedhet.settings.run import RunSettings


@dataclass(frozen=True)
class Selection:
    """Clients selected to train in a round, and clients selected to assist without training."""

    training: tuple[str, ...]
    assisting: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of all selected clients, sorted."""
        return sorted((*self.training, *self.assisting))


@dataclass
class Rollback:
    """Information about the server's last usable state, to which it can roll back."""

    usual: dict[str, float] = field(default_factory=dict)
    """Median magnitude of each part of the replies in the last successful round."""
    good: int = 0
    """Round that produced the last usable state; 0 before the first round."""
    formed: int = 0
    """Round that produced the newest state; 0 before the first round."""
    divergences: int = 0
    """Number of consecutive rounds in which the server's own training has diverged."""
    learned_once: bool = False
    """Whether the server's training or averaging has succeeded in any round."""


@dataclass
class OpenRound:
    """A round whose evaluation is part of the next round's messages."""

    record: RoundRecord
    evaluations: dict[str, EvaluateIns]
    """Instructions to evaluate after the round, by client."""


class RoundState:
    """The record of the current round, and the history of the clients across rounds.

    It records all events in a round: selected clients, replies, measurements, bytes and durations.
    Methods that are called from other threads are synchronized.
    """

    def __init__(
        self,
        workers: int,
        notice: Callable[[str], None],
        health: ClientHealth | None = None,
        headline: Headline | None = None,
        calls: OpenCalls | None = None,
    ) -> None:
        """Create the state.

        Args:
            workers: Number of clients that train at the same time.
            notice: Function that shows a message to the user.
            health: Counts of the clients' failures, or None to exclude no client.
            headline: Headline that the method declares, or None for the default.
            calls: Open calls of the run, or None if no reply can be late.
        """
        self.record = RoundRecord(0)
        self.selection = Selection(())
        self.needed = 0
        """Number of replies that the round needs, before 'pace.min-replies' is applied."""
        self.calls = calls or OpenCalls()
        self.health = health or ClientHealth(0, 0, notice)
        self.scores, self.clock = Scoreboard(headline or Headline()), RoundClock()
        self.rollback = Rollback()
        self.notice = notice
        self._workers = workers
        self._lock = threading.Lock()
        self._magnitudes: Mapping[str, Magnitudes] = {}
        self._losses: dict[str, float] = {}
        self._epsilon: dict[str, float] = {}
        """Privacy budget epsilon that the run has consumed, for each client with private
        training."""
        self._failures: dict[str, Failure] = {}
        """Failures in the current round, by client."""
        self._misconduct: set[str] = set()
        """Clients whose replies have made sums useless in the current round."""
        self._peak_memory_mb = 0.0
        self._noticed_metrics: set[str] = set()

    def start(self, number: int) -> None:
        """Start a round."""
        with self._lock:
            self.record, self._losses = RoundRecord(number), {}
            self._failures, self._magnitudes, self._misconduct = {}, {}, set()
            self.calls.start_round()
            self.clock.start()

    def record_selection(
        self,
        selection: Selection,
        needed: int = 0,
        at_work: Collection[str] = (),
        absent: Collection[str] = (),
    ) -> None:
        """Record the clients of the round.

        Args:
            selection: The selected clients.
            needed: Number of replies that the round needs.
            at_work: Clients that are still working on an earlier instruction.
            absent: Former members that are not connected.
        """
        self.selection, self.record.asked, self.needed = selection, selection.names, needed
        self.record.late, self.record.absent = sorted(at_work), sorted(absent)

    def record_results(self, results: RoundResults, *, quiet: bool) -> None:
        """Record the clients that have replied, are late, or were not called in time.

        Unless `quiet` is set, notices list the clients that have become late, and the late replies
        that have arrived.
        """
        record = self.record
        record.asked = sorted({*record.asked} - results.canceled)
        record.late, record.clock = sorted(self.calls.at_work), results.clock
        if quiet:
            return
        if late := [name for name in record.late if name in {*record.asked}]:
            self.notice(
                f"round {record.round} closed without {', '.join(late)} (late: still training)"
            )
        for name, number in sorted(self.calls.late_rounds.items()):
            self.notice(f"client {name}'s reply for round {number} arrived in round {record.round}")

    @property
    def expected(self) -> list[str]:
        """Clients that should have replied in this round, sorted.

        These are the clients called in the round, except late clients, and the clients whose late
        replies have arrived.
        """
        late = {*self.record.late}
        on_time = {name for name in self.record.asked if name not in late}
        return sorted(on_time | {*self.calls.late_rounds})

    def age_of(self, name: str) -> int:
        """Return the age of a client's reply in rounds; 0 if the reply is not late."""
        return self.record.round - self.calls.late_rounds.get(name, self.record.round)

    def count_sent(self, size: int, *, training: bool = True) -> None:
        """Count the bytes of a training or evaluation message to a client."""
        with self._lock:
            self.record.bytes_down += size if training else 0
            self.record.bytes_evaluation += 0 if training else size

    def count_received(self, size: int) -> None:
        """Count the bytes of a message from a client."""
        with self._lock:
            self.record.bytes_up += size

    def exclusion_reasons(self, members: Collection[str]) -> dict[str, str]:
        """Map each client that is excluded from the round to a reason.

        The reason is "late", "offline", or a result of `ClientHealth.exclusion_reason`. Members
        that were simply not selected have no reason.
        """
        number, asked = self.record.round, {*self.record.asked}
        health = {n: self.health.exclusion_reason(number, n) for n in members if n not in asked}
        away = dict.fromkeys(self.record.absent, "offline")
        late = dict.fromkeys(self.record.late, "late")
        return {name: reason for name, reason in (health | away | late).items() if reason}

    def reachable(self, names: Collection[str]) -> list[str]:
        """Return the clients in `names` to which the server may send another message in this round.

        Excludes clients that were silent in the round, and clients that are backing off or
        excluded, unless they were called in the round. The result is sorted.
        """
        silent = {name for name, failure in self._failures.items() if failure == "silent"}
        excluded = {n for n in names if self.health.exclusion_reason(self.record.round, n)}
        return sorted(set(names) - silent - (excluded - set(self.record.asked)))

    def record_measured(
        self, name: str, measured: Measured, record: RoundRecord | None = None
    ) -> None:
        """Record a client's measurements, by default in the record of the current round."""
        record = record or self.record
        with self._lock:
            self.scores.record(name, measured)
            if measured.loss is not None:
                self._losses[name] = measured.loss
            if measured.epsilon is not None:
                self._epsilon[name] = measured.epsilon
            if measured.epochs:
                record.epochs = (record.epochs if record.epochs > 0 else 0.0) + measured.epochs
            record.seconds.train += measured.train_seconds
            record.seconds.evaluate += measured.evaluate_seconds
            self._peak_memory_mb = max(self._peak_memory_mb, measured.memory_mb)

    def record_magnitudes(self, magnitudes: Mapping[str, Magnitudes]) -> None:
        """Record the magnitudes of the round's replies, by client."""
        self._magnitudes = magnitudes

    def add_metrics(
        self, metrics: Mapping[str, float], declared: Collection[str] | None = None
    ) -> None:
        """Record metrics of the method or of an attack, except infinite and NaN values.

        A notice names each metric that is not finite or, if `declared` is given, not declared. Each
        metric is named only once per process.
        """
        values = {name: float(value) for name, value in metrics.items()}
        for name, value in values.items():
            notice = ""
            if not math.isfinite(value):
                notice = f"is {value} in round {self.record.round} and is not recorded"
            elif declared is not None and name not in declared:
                notice = "is not declared in MethodSpec.metrics. Declare it there, with a title."
            if notice and name not in self._noticed_metrics:
                self._noticed_metrics.add(name)
                self.notice(f"the metric {one_line(name)!r} of the method {notice}")
        self.record.method |= {k: value for k, value in values.items() if math.isfinite(value)}

    def drop_client(self, name: str, reason: str, failure: Failure | None) -> None:
        """Drop a client from the round. `failure` is None if the client is not at fault."""
        reason = one_line(reason)
        if failure is not None:
            self._failures[name] = failure
        self.record.failed[name] = reason
        self.notice(f"client {name} is dropped from round {self.record.round}: {reason}")

    @contextlib.contextmanager
    def drop_on_error(self, name: str) -> Iterator[None]:
        """Drop a client from the round if processing its reply in the `with` block raises an error.

        Errors include running out of memory and exceeding Python's limits, because the content of a
        reply may cause both.
        """
        try:
            yield
        except KnowledgeError as error:
            self.drop_client(name, error.reason, "refused")
        except FedhetError as error:
            self.drop_client(name, str(error), "refused")
        except (MemoryError, OverflowError, RecursionError) as error:
            fault = f"its reply cannot be used ({type(error).__name__}: {error_text(error)})"
            self.drop_client(name, fault, "refused")

    def record_misconduct(self, name: str, fault: str) -> None:
        """Count a client's reply as rejected, although its values may already be in a sum."""
        self._misconduct.add(name)
        self.notice(f"round {self.record.round}: {name} {fault}")

    def record_evaluation(self, outcome: CallOutcome, record: RoundRecord | None = None) -> None:
        """Record a client's evaluation, or that the client could not be evaluated.

        Args:
            outcome: Outcome of the evaluation.
            record: Record of the evaluated round, by default the record of the current round.
        """
        record = record or self.record
        name, reason = outcome.client, outcome.error
        if not reason:
            self.record_measured(name, outcome.measured, record)
            return
        if outcome.failure is not None:
            self._failures.setdefault(name, outcome.failure)
        record.unevaluated[name] = one_line(reason)
        self.notice(f"client {name} was not evaluated: {reason}")

    def exclude_outlier(self, name: str, rule: str) -> None:
        """Record that a robust aggregation rule excludes a client's reply from the round.

        Unlike a rejected reply, an outlier has no further consequences, because the client may be
        honest.
        """
        outlier = f"is an outlier ('defense.average' = {rule!r})"
        self.record.failed[name] = f"its reply {outlier}"
        self.notice(
            f"client {name}'s reply is not aggregated in round {self.record.round}: it {outlier}"
        )

    def finalize(self, accepted: Sequence[str], sums: Sequence[str] = ()) -> bool:
        """Record the clients whose replies were accepted, and return whether to roll back.

        The server must roll back if earlier instructions were usable and if more clients failed
        than replied. A client failed if it could not use its instruction or sent an unusable reply.

        Args:
            accepted: Names of the clients.
            sums: Names of the sums of these clients' replies (secure aggregation only).
        """
        self.record.answered = list(accepted)
        self.record.ages = {name: age for name in accepted if (age := self.age_of(name))}
        unable = sum(failure != "silent" for failure in self._failures.values())
        if unable > len(accepted):
            return self.rollback.formed > self.rollback.good
        if accepted:
            number, magnitudes = self.record.round, self._magnitudes
            self.rollback.good, self.rollback.formed = number - 1, number
            self.rollback.usual |= medians(
                [magnitudes[n] for n in (*accepted, *sums) if n in magnitudes]
            )
        return False

    def record_rollback(self) -> None:
        """Record that the server has rolled back to the last usable state.

        No client is blamed for this round, because the instructions may have caused the failures.
        """
        good = self.rollback.good
        state = f"after round {good}" if good else "before the first round"
        self.notice(
            f"most clients could not use the server's instructions of round {self.record.round}: "
            f"the server rolls back to its state {state}"
        )
        self.rollback.good = self.rollback.formed = self.record.round
        self._failures = {
            n: failure for n, failure in self._failures.items() if failure == "silent"
        }

    def update_health(self, members: Collection[str]) -> list[str]:
        """Record the failures of clients in the round.

        Returns:
            The clients whose earlier contributions the method must forget.
        """
        names = (*self.expected, *self._failures)
        failures = {name: self._failures.get(name) for name in names}
        failures |= dict.fromkeys(self._misconduct, "refused")
        return self.health.update(self.record.round, failures, members)

    def finish(self, *, evaluated: bool) -> RoundRecord:
        """End the round and return its record, with accuracies if the round was evaluated.

        The statistics exclude clients whose models have changed since their last evaluation.
        """
        record = self.record
        if evaluated:
            self.scores.write_to(record)
        record.loss = spread(self._losses, lower_is_better=True) if self._losses else None
        record.peak_memory_mb = self._peak_memory_mb
        record.epsilon = dict(sorted(self._epsilon.items()))
        self.clock.complete(record.seconds, max(1, min(self._workers, len(record.asked))))
        return record

    def to_json(self) -> str:
        """Return the history of the clients as JSON, to save in a checkpoint."""
        history = {"health": self.health.to_dict(), "epsilon": self._epsilon}
        return json.dumps({**self.scores.to_dict(), **history, **vars(self.rollback)})

    def load_json(self, text: str) -> None:
        """Restore the state returned by `to_json`.

        Raises ValueError, KeyError or TypeError if the state is invalid.
        """
        saved = json.loads(text)
        self.scores.load_dict(saved)
        self.health.load_dict(saved["health"])
        self._epsilon = {name: float(value) for name, value in saved.get("epsilon", {}).items()}
        self.rollback = Rollback(
            {part: float(size) for part, size in saved["usual"].items()},
            int(saved["good"]),
            int(saved["formed"]),
            int(saved["divergences"]),
            bool(saved["learned_once"]),
        )


@contextlib.contextmanager
def track_divergence(state: RoundState, run: RunSettings) -> Iterator[None]:
    """Record whether training of the server's model in the `with` block diverges.

    A DivergedError raised in the `with` block is recorded and suppressed. Raises StateError if
    training has diverged in 'engine.max-divergences' consecutive rounds, or in all rounds of the
    run.
    """
    record, rollback = state.record, state.rollback
    try:
        yield
    except DivergedError as error:
        # Blame no client, because it is unknown which reply caused the divergence, if any.
        rollback.divergences += 1
        state.add_metrics({"diverged": 1.0})
        state.notice(
            f"the training of the server's model diverged in round {record.round} ({error}): the "
            f"model keeps its earlier weights, and the replies of {', '.join(record.answered)} in "
            "this round are discarded"
        )
        always = record.round == run.rounds and not rollback.learned_once
        if always or 0 < run.engine.max_divergences <= rollback.divergences:
            raise StateError(
                f"the training of the server's model has diverged in {rollback.divergences} "
                f"consecutive rounds, up to round {record.round} ('engine.max-divergences'). "
                "Reduce 'training.lr', or set 'training.clip'."
            ) from error
    else:
        rollback.divergences, rollback.learned_once = 0, True


class RoundClock:
    """Clock for the duration of a round, and for the time spent waiting for clients."""

    def __init__(self) -> None:
        self._started = self._waiting_since = self._waited = 0.0

    def start(self) -> None:
        """Start a round."""
        self._started, self._waited = time.perf_counter(), 0.0

    def start_waiting(self) -> None:
        """Record that the server starts to wait for clients."""
        self._waiting_since = time.perf_counter()

    def stop_waiting(self) -> None:
        """Record that the server no longer waits for clients."""
        self._waited += time.perf_counter() - self._waiting_since

    def complete(self, seconds: Seconds, concurrency: int) -> None:
        """Complete a round's durations, given the number of clients that worked concurrently."""
        seconds.total = time.perf_counter() - self._started
        seconds.server = seconds.total - self._waited
        client_seconds = (seconds.train + seconds.evaluate) / concurrency
        seconds.overhead = max(self._waited - client_seconds, 0.0)


class Scoreboard:
    """Latest scores of all clients, including clients that did not take part in recent rounds."""

    def __init__(self, headline: Headline) -> None:
        self._headline = headline
        self._scores: ByMetric = {}
        self._outdated: set[str] = set()
        """Clients whose models have changed since their last evaluation."""
        self._majority: dict[str, dict[str, float]] = {}
        """Accuracy of always predicting the majority class, by protocol and client."""
        self._tested: dict[str, dict[str, int]] = {}
        """Number of test samples, by protocol and client."""

    def mark_outdated(self, names: Iterable[str]) -> None:
        """Record that the models of some clients have changed since their last evaluation."""
        self._outdated |= set(names)

    def is_outdated(self, name: str) -> bool:
        """Return whether a client's models have changed since their last evaluation."""
        return name in self._outdated

    def record(self, name: str, measured: Measured) -> None:
        """Record a client's scores, majority-class accuracies, and numbers of test samples.

        Removes all earlier scores of the same models, regardless of the metric.
        """
        scores = measured.scores
        for protocol, accuracy in measured.majority.items():
            self._majority.setdefault(protocol, {})[name] = accuracy
        for protocol, count in measured.tested.items():
            self._tested.setdefault(protocol, {})[name] = count
        for by_protocol in self._scores.values():
            for _, protocol, kind in scores:
                by_protocol.get(protocol, {}).get(kind, {}).pop(name, None)
        for (metric, protocol, kind), value in scores.items():
            kinds = self._scores.setdefault(metric, {}).setdefault(protocol, {})
            kinds.setdefault(kind, {})[name] = value
        if scores:
            self._outdated.discard(name)

    def write_to(self, record: RoundRecord) -> None:
        """Write the scores for all metrics to a record. Statistics exclude outdated scores.

        A mean over validation samples estimates the headline score. If the headline belongs to the
        common test set, on which all samples count equally, clients are weighted with their numbers
        of validation samples.
        """
        record.majority = {protocol: dict(each) for protocol, each in self._majority.items()}
        record.tested = {protocol: dict(each) for protocol, each in self._tested.items()}
        record.relative = relative(self._scores.get(ACCURACY, {}), without=self._outdated)
        # Without accuracy (tasks other than classification), keep the order of the scores, in which
        # the headline metric is first.
        by_name = sorted(self._scores, key=in_order) if ACCURACY in self._scores else self._scores
        for metric in by_name:
            lower = metric_of(metric).lower_is_better
            values, old = self._scores[metric], self._outdated
            is_common = (self._headline.column(values) or ("",))[0] == "common"
            weights = self._tested.get(VALIDATION) if is_common else None
            scores = summarize(values, old, lower_is_better=lower, weights=weights)
            record.set_scores(metric, scores)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable scores for a checkpoint."""
        outdated = sorted(self._outdated)
        return {
            "scores": self._scores, "changed": outdated, "majority": self._majority,
            "tested": self._tested,
        }  # fmt: skip

    def load_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `to_dict`.

        Raises ValueError, KeyError or TypeError if the state is invalid.
        """
        self._scores = TypeAdapter(ByMetric).validate_python(saved["scores"])
        self._outdated = set(TypeAdapter(list[str]).validate_python(saved["changed"]))
        self._majority = TypeAdapter(dict[str, dict[str, float]]).validate_python(
            saved.get("majority", {})  # Checkpoints of earlier versions lack this entry.
        )
        self._tested = TypeAdapter(dict[str, dict[str, int]]).validate_python(
            saved.get("tested", {})  # Checkpoints of earlier versions lack this entry.
        )
