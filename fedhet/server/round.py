"""The current round, as the server records it.

Which clients were asked and replied, their measurements, bytes and seconds: all of it is recorded
here, from any thread, and nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from fedhet.base.errors import (
    DivergedError,
    FedhetError,
    KnowledgeError,
    ReportedError,
    StateError,
    one_line,
    words_of,
)
from fedhet.base.metrics import ACCURACY, in_order, metric_of
from fedhet.runs.measures import Measured, ScoreKey, relative, spread, summarize
from fedhet.runs.records import ByMetric, RoundRecord, Seconds
from fedhet.server.members import ClientHealth, Outcome
from fedhet.server.reply import Magnitudes, medians
from fedhet.settings.run import RunSettings


@dataclass(frozen=True)
class Selection:
    """The clients of a round: those that train, and those that are asked without training."""

    training: tuple[str, ...]
    assisting: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """Return the names of all selected clients, sorted."""
        return sorted((*self.training, *self.assisting))


@dataclass
class Rollback:
    """The server's last state that clients could use, to which it can roll back."""

    usual: dict[str, float] = field(default_factory=dict)
    """The median size of each field of a reply, in the last round that worked."""
    good: int = 0
    """The round of the last state that clients could use; 0 before the first round."""
    formed: int = 0
    """The round of the last state; 0 before the first round."""
    divergences: int = 0
    """The consecutive rounds in which the training of the server's own model diverged."""
    learned_once: bool = False
    """Whether a round's training or averaging on the server has succeeded."""


class RoundState:
    """The record of the current round, and what is known of the clients across rounds."""

    def __init__(
        self, workers: int, notice: Callable[[str], None], health: ClientHealth | None = None
    ) -> None:
        """`workers`: number of clients that train at once; `notice` shows a message to the user."""
        self.record = RoundRecord(0)
        self.selection = Selection(())
        self.needed = 0
        """The replies that the round needs before 'pace.min-replies' is applied."""
        self.arrived: dict[str, int] = {}
        """The late clients whose replies this round has got, and the rounds of the replies."""
        self.health = health or ClientHealth(0, 0, notice)
        self.scores, self.clock = Scoreboard(), RoundClock()
        self.rollback = Rollback()
        self.magnitudes: Mapping[str, Magnitudes] = {}
        """The magnitudes of this round's replies, by client, if they are compared."""
        self.notice = notice
        self._workers = workers
        self._lock = threading.Lock()
        self._losses: dict[str, float] = {}
        self._epsilon: dict[str, float] = {}
        """What the run has cost each client's samples, of those that are protected."""
        self._outcomes: dict[str, Outcome] = {}
        self._peak_memory_mb = 0.0

    def start(self, number: int) -> None:
        """Start a round."""
        with self._lock:
            self.record, self._losses = RoundRecord(number), {}
            self._outcomes, self.magnitudes, self.arrived = {}, {}, {}
            self.clock.start()

    def ask(self, selection: Selection, needed: int = 0, at_work: Collection[str] = ()) -> None:
        """Record the selected clients, of which the round needs some, and those still at work."""
        self.selection, self.record.asked = selection, selection.names
        self.needed, self.record.late = needed, sorted(at_work)

    def closed(
        self,
        late: Iterable[str],
        arrived: Mapping[str, int],
        unasked: Iterable[str],
        clock: float,
        *,
        quiet: bool,
    ) -> None:
        """Record which clients are late, which late ones have replied, and who was not needed.

        Unless `quiet`, notices name the clients that are late since this round, or have replied.
        """
        record = self.record
        record.asked = sorted({*record.asked} - {*unasked})
        record.late, self.arrived, record.clock = sorted(late), dict(arrived), clock
        if quiet:
            return
        if new := [name for name in record.late if name in {*record.asked}]:
            self.notice(
                f"round {record.round} has closed without {', '.join(new)}: late, still at work"
            )
        for name, of in sorted(self.arrived.items()):
            self.notice(f"client {name}'s answer to round {of} has come, in round {record.round}")

    @property
    def expected(self) -> list[str]:
        """The clients whose replies the round has, or would have: those that are not late."""
        late = {*self.record.late}
        return sorted({name for name in self.record.asked if name not in late} | {*self.arrived})

    def age_of(self, name: str) -> int:
        """Return the rounds since a client of this round was asked; 0: it was asked in this one."""
        return self.record.round - self.arrived.get(name, self.record.round)

    def sent(self, size: int, *, training: bool = True) -> None:
        """Count the bytes of a message to a client, to train or to evaluate."""
        with self._lock:
            self.record.bytes_down += size if training else 0
            self.record.bytes_evaluation += 0 if training else size

    def exclusion_reasons(self, names: Collection[str]) -> dict[str, str]:
        """Return why each client that is not asked, of `names` and of the absent, is left out."""
        number, asked = self.record.round, {*self.record.asked}
        found = {name: self.health.left_out(number, name) for name in names if name not in asked}
        away = dict.fromkeys(self.record.absent, "away")
        late = dict.fromkeys(self.record.late, "late")
        return {name: why for name, why in (found | away | late).items() if why}

    def received(self, size: int) -> None:
        """Count the bytes of a message from a client."""
        with self._lock:
            self.record.bytes_up += size

    def present(self, names: Collection[str]) -> list[str]:
        """Return, sorted, the clients in `names` that may be sent a message in this round.

        A client that was silent in the round is left out, and so is one that pauses, unless it was
        asked in the round.
        """
        silent = {name for name, outcome in self._outcomes.items() if outcome == "silent"}
        resting = {n for n in names if self.health.left_out(self.record.round, n)}
        return sorted(set(names) - silent - (resting - set(self.record.asked)))

    def measured(self, name: str, measured: Measured) -> None:
        """Record a client's measurements."""
        with self._lock:
            self.scores.enter(name, measured.scores, measured.majority)
            if measured.loss is not None:
                self._losses[name] = measured.loss
            if measured.epsilon is not None:
                self._epsilon[name] = measured.epsilon
            self.record.seconds.train += measured.train_seconds
            self.record.seconds.evaluate += measured.evaluate_seconds
            self._peak_memory_mb = max(self._peak_memory_mb, measured.memory_mb)

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Record metrics of the method, or of an attack."""
        found = ((name, float(value)) for name, value in metrics.items())
        self.record.method |= {name: value for name, value in found if math.isfinite(value)}

    def drop(self, name: str, reason: str, outcome: Outcome | None) -> None:
        """Drop a client from the round; without an outcome that is no fault of the client."""
        reason = one_line(reason)
        if outcome is not None:
            self._outcomes[name] = outcome
        self.record.failed[name] = reason
        self.notice(f"client {name} is dropped from round {self.record.round}: {reason}")

    def not_evaluated(self, name: str, reason: str, outcome: Outcome | None) -> None:
        """Record that a client could not be evaluated."""
        if outcome is not None:
            self._outcomes.setdefault(name, outcome)
        self.record.unevaluated[name] = one_line(reason)
        self.notice(f"client {name} was not evaluated: {reason}")

    @contextlib.contextmanager
    def not_evaluating(self, name: str) -> Iterator[None]:
        """Record that a client could not be evaluated if the block raises an error about it."""
        try:
            yield
        except KnowledgeError as error:
            self.not_evaluated(name, str(error), _outcome_of(error))

    @contextlib.contextmanager
    def dropping(self, name: str) -> Iterator[None]:
        """Drop a client from the round if the block raises an error about its reply.

        Its content may also be the cause if memory or Python's limits do not suffice.
        """
        try:
            yield
        except KnowledgeError as error:
            self.drop(name, error.reason, _outcome_of(error))
        except FedhetError as error:
            self.drop(name, str(error), "refused")
        except (MemoryError, OverflowError, RecursionError) as error:
            fault = f"cannot be used ({type(error).__name__}: {words_of(error)})"
            self.drop(name, fault, "refused")

    def left_out(self, name: str, average: str) -> None:
        """Record that a reply stands out so that it is left out of a robust average.

        It may be honest all the same: unlike a refused one, it does not count against the client.
        """
        reason = f"its reply stands out from the others ('defense.average' = {average!r})"
        self.record.failed[name] = reason
        self.notice(f"client {name} is left out of round {self.record.round}: {reason}")

    def finalize(self, answered: Sequence[str]) -> bool:
        """Record the clients whose replies were accepted; return whether to roll back.

        The server must if more clients than have replied could not use its instructions, or sent
        an unusable reply, and earlier instructions have worked.
        """
        self.record.answered = list(answered)
        self.record.ages = {name: age for name in answered if (age := self.age_of(name))}
        unable = sum(outcome != "silent" for outcome in self._outcomes.values())
        if unable > len(answered):
            return self.rollback.formed > self.rollback.good
        if answered:
            number, known = self.record.round, self.magnitudes
            self.rollback.good, self.rollback.formed = number - 1, number
            self.rollback.usual |= medians([known[name] for name in answered if name in known])
        return False

    def rolled_back(self) -> None:
        """Record that the server's state is again the last one that worked.

        No client is blamed for this round: the instructions may have been at fault.
        """
        good = self.rollback.good
        state = f"of round {good}" if good else "before the first round"
        self.notice(
            f"most clients could not use the server's instructions of round {self.record.round}: "
            f"it goes back to its state {state}"
        )
        self.rollback.good = self.rollback.formed = self.record.round
        self._outcomes = {n: how for n, how in self._outcomes.items() if how == "silent"}

    def enter_health(self, members: Collection[str]) -> list[str]:
        """Record the clients' outcomes of the round; return whom the method must forget."""
        fared = {name: self._outcomes.get(name) for name in (*self.expected, *self._outcomes)}
        return self.health.enter(self.record.round, fared, members)

    def close(self, *, evaluated: bool) -> RoundRecord:
        """End the round and return its record, with accuracies if it was evaluated.

        Statistics leave out clients whose accuracy is outdated: their models have changed since.
        """
        record = self.record
        if evaluated:
            self.scores.write(record)
        record.loss = spread(self._losses) if self._losses else None
        record.peak_memory_mb = self._peak_memory_mb
        record.epsilon = dict(sorted(self._epsilon.items()))
        self.clock.write(record.seconds, max(1, min(self._workers, len(record.asked))))
        return record

    def to_json(self) -> str:
        """Return what is known of the clients after the round, for its checkpoint."""
        known = {"health": self.health.to_dict(), "epsilon": self._epsilon}
        return json.dumps({**self.scores.to_dict(), **known, **vars(self.rollback)})

    def load_json(self, text: str) -> None:
        """Restore what `to_json` returned. Raises ValueError, KeyError or TypeError."""
        known = json.loads(text)
        self.scores.load_dict(known)
        self.health.load_dict(known["health"])
        self._epsilon = {name: float(each) for name, each in known.get("epsilon", {}).items()}
        self.rollback = Rollback(
            {field: float(size) for field, size in known["usual"].items()},
            int(known["good"]),
            int(known["formed"]),
            int(known["divergences"]),
            bool(known["learned_once"]),
        )


@contextlib.contextmanager
def learning(state: RoundState, run: RunSettings) -> Iterator[None]:
    """Record whether the server learns from the round's replies, or its training diverges.

    The block does so if it raises DivergedError. Raises StateError if the training has diverged in
    'engine.max-divergences' consecutive rounds, or in all rounds up to the last.
    """
    record, known = state.record, state.rollback
    try:
        yield
    except DivergedError as error:
        # No client is blamed: the reply that caused it, if one did, is not known.
        known.divergences += 1
        state.add_metrics({"diverged": 1.0})
        state.notice(
            f"the training of the server's model diverged in round {record.round} ({error}): it "
            f"keeps its earlier weights, and what it learned from {', '.join(record.answered)} in "
            "this round is dropped"
        )
        never = record.round == run.rounds and not known.learned_once
        if never or 0 < run.engine.max_divergences <= known.divergences:
            raise StateError(
                f"the training of the server's model has diverged in {known.divergences} "
                f"consecutive rounds, up to round {record.round} ('engine.max-divergences'); a "
                "smaller 'training.lr', or 'training.clip', may help"
            ) from error
    else:
        known.divergences, known.learned_once = 0, True


def _outcome_of(error: KnowledgeError) -> Outcome | None:
    """Return a client's outcome: it replied with an error of its own, or its reply is refused.

    None: it has no privacy left to spend, which is no fault.
    """
    if not isinstance(error, ReportedError):
        return "refused"
    return None if error.spent else "error"


class RoundClock:
    """The time since a round started, and the part of it in which the server waited."""

    def __init__(self) -> None:
        self._started = self._waiting_since = self._waited = 0.0

    def start(self) -> None:
        """Start a round."""
        self._started, self._waited = time.perf_counter(), 0.0

    def wait(self) -> None:
        """Record that the server is now waiting for the clients."""
        self._waiting_since = time.perf_counter()

    def replied(self) -> None:
        """Record that the replies have arrived."""
        self._waited += time.perf_counter() - self._waiting_since

    def write(self, seconds: Seconds, at_once: int) -> None:
        """Complete a round's seconds, of which `at_once` clients have spent theirs in parallel."""
        seconds.total = time.perf_counter() - self._started
        seconds.server = seconds.total - self._waited
        seconds.overhead = max(self._waited - (seconds.train + seconds.evaluate) / at_once, 0.0)


class Scoreboard:
    """The latest scores of all clients, also of those that were not asked since."""

    def __init__(self) -> None:
        self._scores: ByMetric = {}
        self._outdated: set[str] = set()
        """Clients whose models have changed since their last evaluation."""
        self._majority: dict[str, dict[str, float]] = {}
        """The accuracy of the majority class by protocol and client."""

    def outdate(self, names: Iterable[str]) -> None:
        """Record that these clients' models have changed since their last evaluation."""
        self._outdated |= set(names)

    def is_outdated(self, name: str) -> bool:
        """Return whether a client's models have changed since their last evaluation."""
        return name in self._outdated

    def enter(
        self, name: str, scores: Mapping[ScoreKey, float], majority: Mapping[str, float]
    ) -> None:
        """Record a client's scores, and the majority class's; earlier ones of a model are void."""
        for protocol, share in majority.items():
            self._majority.setdefault(protocol, {})[name] = share
        for known in self._scores.values():
            for _, protocol, kind in scores:
                known.get(protocol, {}).get(kind, {}).pop(name, None)
        for (metric, protocol, kind), value in scores.items():
            kinds = self._scores.setdefault(metric, {}).setdefault(protocol, {})
            kinds.setdefault(kind, {})[name] = value
        if scores:
            self._outdated.discard(name)

    def write(self, record: RoundRecord) -> None:
        """Write the scores of all metrics into a record; statistics leave out outdated ones."""
        record.majority = {protocol: dict(each) for protocol, each in self._majority.items()}
        record.relative = relative(self._scores.get(ACCURACY, {}), without=self._outdated)
        for metric in sorted(self._scores, key=in_order):
            lower = metric_of(metric).lower_is_better
            values, old = self._scores[metric], self._outdated
            record.set_scores(metric, summarize(values, old, lower_is_better=lower))

    def to_dict(self) -> dict[str, Any]:
        """Return the scores for a checkpoint, as JSON has them."""
        outdated = sorted(self._outdated)
        return {"scores": self._scores, "changed": outdated, "majority": self._majority}

    def load_dict(self, known: Mapping[str, Any]) -> None:
        """Restore what `to_dict` returned. Raises ValueError, KeyError or TypeError."""
        self._scores = TypeAdapter(ByMetric).validate_python(known["scores"])
        self._outdated = set(TypeAdapter(list[str]).validate_python(known["changed"]))
        self._majority = TypeAdapter(dict[str, dict[str, float]]).validate_python(
            known.get("majority", {})  # earlier versions did not record it
        )
