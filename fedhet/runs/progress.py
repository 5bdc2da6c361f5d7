"""What a display shows of a running run, and the words for it.

`Progress` follows the run's events. The terminal, plain lines and a notebook draw it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean

from fedhet.config.resolve import Config
from fedhet.runs.log import Watcher
from fedhet.runs.records import KINDS, NAN, PROTOCOLS, RoundRecord, Score, Summary
from fedhet.runs.units import human_bytes, human_seconds, natural, plural, position, time_left

RECENT = 5
"""Number of rounds from whose duration the time left is estimated."""
MOST_NOTICES = 6
"""How many of the last notices a display keeps in view."""
MOST_NAMES = 10
"""How many clients of one state a line names."""


class State(IntEnum):
    """A client's state in the current round, in the order in which clients are shown."""

    FAILED = 0
    TRAINING = 1
    WAITING = 2
    LATE = 3
    """It is still at work, although its round has closed."""
    DONE = 4
    NOT_ASKED = 5
    RESTING = 6
    """It is asked only now and then, since it was silent."""
    EXCLUDED = 7
    AWAY = 8
    """It has joined before, and is not connected."""

    @property
    def words(self) -> str:
        """The state in words."""
        return self.name.lower().replace("_", " ")


@dataclass(frozen=True)
class ClientProgress:
    """A client as it is shown; numbers are NaN as long as they are not known."""

    name: str
    model: str = ""
    state: State = State.WAITING
    accuracy: float = NAN
    loss: float = NAN
    seconds: float = NAN
    """For how long it trained when it last answered; see `Progress.seconds_of`."""
    began: float = NAN
    """When it began to train."""
    line: str = ""
    """Its last answer, or why there was none."""


def _show_nothing(line: str) -> None:
    pass


def _unwatched() -> None:
    pass


class Progress(Watcher):
    """Follows a run through its events.

    Another thread may draw it at the same time: a client is replaced as a whole.
    """

    def __init__(
        self,
        show: Callable[[str], None] = _show_nothing,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = _unwatched,
    ) -> None:
        """`show` is called after each event of the run with its line, or ""; not for clients'.

        `changed` is called after every event.
        """
        self._say, self._clock, self._changed = show, clock, changed
        self.phase = "starting"
        """What the run waits for before its first round."""
        self.title = ""
        self.method = ""
        self.directory: Path | None = None
        self.clients: dict[str, ClientProgress] = {}
        self.round = 0
        """The current round; 0 before the first."""
        self.rounds = 0
        self.asked = 0
        """Number of clients asked in this round."""
        self.protocol = "common"
        """The protocol under which the clients' accuracies are shown if there is a choice."""
        self.ended: RoundRecord | None = None
        """The record of the last round that has ended."""
        self.last: RoundRecord | None = None
        """The last record that holds accuracies."""
        self.means: list[float] = []
        """The mean accuracy of each round that was evaluated."""
        self.notices: list[str] = []
        """The last notices."""
        self.summary: Summary | None = None
        """The run's summary, once it has ended."""
        self.bytes_moved = 0
        """Bytes sent to train and replied, in all rounds of the run that have ended."""
        self.fault = ""
        """Why the run has failed."""
        self._began = NAN
        """When the current round began; NaN between two rounds."""
        self._durations: list[float] = []
        self._aside: dict[str, State] = {}

    # The run's events.

    def waiting(self, what: str) -> None:
        """Take note of what the run waits for before its first round."""
        self.phase = what
        self._show(what)

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Begin a run with the clients of `models`."""
        self.title, self.directory = title(config, models, dataset), directory
        self.method, self.rounds = config.method.name, config.run.rounds
        self.protocol, self.notices = config.method.spec.headline, []
        self.clients = {name: ClientProgress(name, model) for name, model in models.items()}
        self._show(f"{self.title} -> {directory}")

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """Count the bytes and accuracies of earlier rounds, so that totals are the whole run's."""
        self.bytes_moved = sum(record.bytes_up + record.bytes_down for record in records)
        found = [shown_scores(record, self.protocol)[1] for record in records]
        self.means = [next(iter(kinds.values())).mean for kinds in found if kinds]

    def run_failed(self, reason: str) -> None:
        """Take note of why the run has failed."""
        self.fault = reason
        self._changed()

    def set_aside(self, clients: Mapping[str, str]) -> None:
        """Take note of the clients that the next round leaves out, and why."""
        self._aside = {name: State[why.upper()] for name, why in clients.items()}

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Begin a round with the clients `asked`, which wait for their turn."""
        self.round, self.asked, self._began, self.phase = number, len(asked), self._clock(), ""
        new = {name: ClientProgress(name) for name in asked if name not in self.clients}
        chosen, all_clients = {*asked}, {**self.clients, **new}
        self.clients = {
            name: replace(
                client,
                state=State.WAITING if name in chosen else self._aside.get(name, State.NOT_ASKED),
                began=client.began if self._aside.get(name) is State.LATE else NAN,
            )
            for name, client in all_clients.items()
        }
        self._show("")

    def client_started(self, client: str) -> None:
        """Mark a client as training."""
        self._change(client, state=State.TRAINING, began=self._clock())
        self._changed()

    def client_answered(self, client: str, error: str) -> None:
        """Mark a client as done or failed."""
        seconds = self.seconds_of(self.clients[client]) if client in self.clients else NAN
        state = State.FAILED if error else State.DONE
        line = f"round {self.round}: {error or 'answered'}"
        self._change(client, state=state, seconds=seconds, began=NAN, line=line)
        self._changed()

    def round_finished(self, record: RoundRecord) -> None:
        """Take over a round's results; a client without an accuracy keeps the one it had."""
        self.round, self.ended = record.round, record
        self.bytes_moved += record.bytes_up + record.bytes_down
        self._durations.append(record.seconds.total)
        self._began = NAN
        for name, reason in record.failed.items():
            line = f"round {record.round}: {reason}"
            self._change(name, state=State.FAILED, began=NAN, line=line)
        for name in record.late:
            self._change(name, state=State.LATE, line=f"round {record.round}: still at work")
        for name, age in record.ages.items():
            line = f"round {record.round}: answered round {record.round - age}"
            self._change(name, state=State.DONE, began=NAN, line=line)
        for name, loss in (record.loss.per_client if record.loss else {}).items():
            self._change(name, loss=loss)
        _, kinds = shown_scores(record, self.protocol)
        for score in list(kinds.values())[:1]:
            self.last = record
            self.means.append(score.mean)
            for name, accuracy in score.per_client.items():
                self._change(name, accuracy=accuracy)
        self._show(round_line(record, self.protocol))

    def notice(self, text: str) -> None:
        """Keep the notice in view."""
        self.notices = [*self.notices, text][-MOST_NOTICES:]
        self._show(f"note: {text}")

    def run_finished(self, summary: Summary) -> None:
        """Take over the run's summary."""
        self.summary = summary
        self._show(duration(summary))

    # What a display asks.

    def _show(self, line: str) -> None:
        self._say(line)
        self._changed()

    def _change(self, name: str, **changes: object) -> None:
        if name in self.clients:
            self.clients[name] = replace(self.clients[name], **changes)  # type: ignore[arg-type]

    def seconds_of(self, client: ClientProgress) -> float:
        """Return for how long a client has been training, or trained last; NaN if unknown."""
        return client.seconds if math.isnan(client.began) else self._clock() - client.began

    def count(self, state: State) -> int:
        """Return the number of clients in a state."""
        return sum(client.state is state for client in [*self.clients.values()])

    @property
    def goes_on(self) -> bool:
        """Whether a round has begun and not ended."""
        return not math.isnan(self._began)

    @property
    def seconds_a_round(self) -> float:
        """The mean duration of the last rounds, NaN before the first has ended."""
        return fmean(self._durations[-RECENT:]) if self._durations else NAN

    @property
    def seconds_left(self) -> float:
        """The estimated time until the last round ends, NaN before the first has ended."""
        if not self.goes_on:
            return (self.rounds - self.round) * self.seconds_a_round
        spent = min(self._clock() - self._began, self.seconds_a_round)
        return (self.rounds - self.round + 1) * self.seconds_a_round - spent

    def in_words(self) -> str:
        """Return the round's clients by what they do: "round 3 of 20: done a · training b, c"."""
        names: dict[State, list[str]] = {}
        for client in sorted(self.clients.values(), key=lambda c: natural(c.name)):
            names.setdefault(client.state, []).append(client.name)
        parts = [f"{state.words} {_first(names[state])}" for state in State if state in names]
        left = self.seconds_left
        parts += [time_left(left)] if math.isfinite(left) else []
        return f"round {self.round} of {self.rounds}: {' · '.join(parts)}"

    def in_view(self, room: int) -> list[ClientProgress]:
        """Return the clients to show in `room` rows: all if they fit.

        Otherwise failed clients, those that train, the worst and the slowest take turns; they are
        ordered by state and accuracy.
        """
        clients = list(self.clients.values())
        if len(clients) <= room:
            return clients
        slow = sorted(clients, key=lambda c: _last(-self.seconds_of(c)))
        worst = sorted(clients, key=lambda c: _last(c.accuracy))
        failed = [c for c in worst if c.state is State.FAILED]
        training = [c for c in slow if c.state is State.TRAINING]
        turns = chain.from_iterable(zip_longest(failed, training, worst, slow))
        chosen = {c.name: c for c in turns if c is not None}
        shown = list(chosen.values())[: max(room, 0)]
        return sorted(shown, key=lambda c: (c.state, _last(c.accuracy), natural(c.name)))


def _first(names: Sequence[str]) -> str:
    """Return the first names of a list, and how many more there are."""
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _last(value: float) -> float:
    """Return a sort key that puts NaN after every number."""
    return math.inf if math.isnan(value) else value


def shown_scores(record: RoundRecord | None, protocol: str) -> tuple[str, dict[str, Score]]:
    """Return the protocol to show, and its scores by kind of model, the private models' first.

    It is `protocol`, or another one if only that was evaluated; without scores the dict is empty.
    """
    found = record.accuracy if record else {}
    shown = next((p for p in (protocol, *PROTOCOLS) if found.get(p)), protocol)
    kinds = found.get(shown, {})
    order = sorted(kinds, key=lambda kind: (kind == "local", position(kind, KINDS)))
    return shown, {kind: kinds[kind] for kind in order}


def title(config: Config, models: Mapping[str, str], dataset: str) -> str:
    """Return a one-line title of a run."""
    counts = [
        plural(len(models), "client"),
        plural(len(set(models.values())), "architecture"),
        plural(config.run.rounds, "round"),
        f"seed {config.run.seed}",
    ]
    return f"{config.method.name} on {dataset}: {', '.join(counts)}"


def duration(summary: Summary) -> str:
    """Return how long a run took, with its start and its rounds apart."""
    seconds = summary.seconds
    text = f"{plural(summary.rounds, 'round')} in {seconds.total:.1f} s"
    rounds = [past.seconds for past in summary.history if math.isfinite(past.seconds)]
    if math.isnan(seconds.start) or not rounds:
        return text
    return f"{text}: {seconds.start:.1f} s to start, {fmean(rounds):.1f} s per round"


def round_line(record: RoundRecord, protocol: str) -> str:
    """Return a round's headline numbers in one line."""
    in_time = len(record.answered) - len(record.ages)
    answered = f"{in_time}/{len(record.asked)} clients"
    answered += f" + {len(record.ages)} late" if record.ages else ""
    bytes_moved = human_bytes(record.bytes_up + record.bytes_down)
    loss = f"train loss {record.loss.mean:.4f}  " if record.loss else ""
    clock = "" if math.isnan(record.clock) else f"{human_seconds(record.clock)} simulated  "
    spent = f"ε {max(record.epsilon.values()):.3g}  " if record.epsilon else ""
    return (
        f"round {record.round:>3}  {accuracies_of(record, protocol)}  {loss}{spent}{answered}  "
        f"{bytes_moved}  {clock}{record.seconds.total:.1f} s"
    )


def accuracies_of(record: RoundRecord, protocol: str) -> str:
    """Return a text that shows the mean accuracy of each kind of model, of the first in full.

    The private models come first if there are any. The protocol is `protocol`, or the other one if
    only that was evaluated.
    """
    shown, kinds = shown_scores(record, protocol)
    if not kinds:
        return "not evaluated"
    (kind, scores), *others = kinds.items()
    named = shown if kind == "private" else f"{shown}, {kind}"
    text = f"accuracy ({named}) {scores.mean:.4f} ± {scores.std:.4f}, worst {scores.worst:.4f}"
    return "".join([text, *(f", {name} {each.mean:.4f}" for name, each in others)])
