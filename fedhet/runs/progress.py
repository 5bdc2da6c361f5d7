"""A run in progress, followed through its events: in words, for displays, and as status.json.

The terminal, plain lines and a notebook draw `Progress` (`fedhet.runs.display`). `status_file`
writes it as rounds go on, for `fedhet status` and the pages of `fedhet watch`. Whether the run's
process is still alive is not in the file, which a killed process could not change; the run's lock
tells.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedhet.base.disk import write_text
from fedhet.base.errors import StateError, one_line
from fedhet.config.resolve import Config
from fedhet.runs.directory import is_locked, read_if_exists
from fedhet.runs.log import Watcher
from fedhet.runs.measures import headline_mean, shown_scores
from fedhet.runs.records import LARGEST, NAN, READING, Number, Round, RoundRecord, Summary, Text
from fedhet.runs.units import human_bytes, human_seconds, natural, plural, score, time_left

LONG, SHARE = 0.05, 0.02
"""Seconds from which a call takes long, as what is shown of thousands of clients does, and the most
of the time that such calls may take."""
RECENT = 5
"""Number of rounds from whose duration the time left is estimated."""
MAX_NOTICES = 6
"""How many of the last notices a display keeps in view."""
MAX_NAMES = 10
"""How many clients of one state a line names."""
STATUS_FILE = "status.json"
STATUS_SECONDS = 1.0
"""Between two writings of the file, at least."""
Stage = Literal["starting", "running", "finished", "stopped"]
"""Of a run; it has stopped if its process has ended before its last round."""


class State(StrEnum):
    """A client's state in the current round, in the order in which clients are shown."""

    FAILED = "failed"
    TRAINING = "training"
    WAITING = "waiting"
    LATE = "late"
    """It is still at work, although its round has closed."""
    DONE = "done"
    NOT_ASKED = "not asked"
    RESTING = "resting"
    """It is asked only now and then, since it was silent."""
    EXCLUDED = "excluded"
    AWAY = "away"
    """It has joined before, and is not connected."""


class ClientStatus(BaseModel):
    """A client in the current round; NaN, in the file null, is what is not known."""

    model_config = READING | ConfigDict(frozen=True)

    name: Text
    model: Text = ""
    state: Text = ""
    """A `State`; another version may have others."""
    accuracy: Number = NAN
    loss: Number = NAN
    seconds: Number = NAN
    """For how long it trained last; in the file and of one that trains, for how long it has."""
    line: Text = ""
    """Its last answer, or why there was none."""
    began: Number = Field(default=NAN, exclude=True)
    """When it began to train, by the clock of `Progress`."""


class Status(BaseModel):
    """status.json: where a run is, and what its clients do.

    `Progress` keeps it up to date, but for the stage, the clients and the times.
    """

    model_config = READING | ConfigDict(validate_assignment=True)

    title: Text = ""
    stage: Stage = "starting"
    phase: Text = ""
    """What the run waits for before its first round."""
    round: Round = 0
    """The current round; 0 before the first."""
    rounds: Round = 0
    seconds_left: Number = NAN
    bytes: Number = Field(default=0.0, ge=0)
    """Sent up, and down to train, in all rounds that have ended."""
    mean: Number = NAN
    """The mean accuracy of the last round that was evaluated."""
    clients: list[ClientStatus] = []
    notices: list[Text] = []
    """The last notices."""
    fault: Text = ""
    """Why the run failed."""
    updated: Number = 0.0
    """When this was written, in seconds since 1970."""

    def as_json(self) -> dict[str, Any]:
        """Return the content of status.json, with None for NaN, which JSON does not have."""
        found: dict[str, Any] = json.loads(self.model_dump_json())
        return found

    @property
    def in_words(self) -> str:
        """Where the run is, in one line."""
        if self.stage == "starting":
            return f"starting: {self.phase or 'its clients load data and models'}"
        if self.stage == "stopped" and self.fault:
            where = f" in round {self.round} of {self.rounds}" if self.round else ""
            return f"failed{where}: {self.fault}"
        parts = [f"{self.stage}: round {self.round} of {self.rounds}"]
        if math.isfinite(self.mean):
            parts.append(f"mean accuracy {score(self.mean)}")
        parts.append(f"{human_bytes(self.bytes)} sent")
        if self.stage == "running" and math.isfinite(self.seconds_left):
            parts.append(time_left(self.seconds_left))
        return " · ".join(parts)


class Progress(Watcher):
    """Follows a run through its events.

    Another thread may draw it at the same time: a client is replaced as a whole.
    """

    def __init__(
        self,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`show` is called after each event of the run with its line, or ""; not for clients'.

        `changed` is called after every event.
        """
        self._say, self._clock, self._changed = show, clock, changed
        self.status = Status(phase="starting")
        self.method = ""
        self.directory: Path | None = None
        self.clients: dict[str, ClientStatus] = {}
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
        self.summary: Summary | None = None
        """The run's summary, once it has ended."""
        self._began = NAN
        """When the current round began; NaN between two rounds."""
        self._durations: list[float] = []
        self._aside: dict[str, State] = {}

    # The run's events.

    def waiting(self, what: str) -> None:
        """Take note of what the run waits for before its first round."""
        self.status.phase = what
        self._show(what)

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Begin a run with the clients of `models`."""
        counts = [
            plural(len(models), "client"),
            plural(len(set(models.values())), "architecture"),
            plural(config.run.rounds, "round"),
            f"seed {config.run.seed}",
        ]
        self.status.title = f"{config.method.name} on {dataset}: {', '.join(counts)}"
        self.status.rounds, self.status.notices = config.run.rounds, []
        self.directory, self.method = directory, config.method.name
        self.protocol = config.method.spec.headline
        self.clients = {
            name: ClientStatus(name=name, model=model, state=State.WAITING)
            for name, model in models.items()
        }
        self._show(f"{self.status.title} -> {directory}")

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """Count the bytes and accuracies of earlier rounds, so that totals are the whole run's."""
        self._moved(sum(record.bytes_up + record.bytes_down for record in records))
        means = (headline_mean(record, self.protocol) for record in records)
        self.means = [mean for mean in means if mean is not None]

    def run_failed(self, reason: str) -> None:
        """Take note of why the run has failed."""
        self.status.fault = reason
        self._changed()

    def clients_excluded(self, clients: Mapping[str, str]) -> None:
        """Take note of the clients that the next round leaves out, and why."""
        self._aside = {name: State(why) for name, why in clients.items()}

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Begin a round with the clients `asked`, which wait for their turn."""
        self.asked, self._began = len(asked), self._clock()
        self.status.round, self.status.phase = number, ""
        new = {name: ClientStatus(name=name) for name in asked if name not in self.clients}
        chosen, clients = {*asked}, {**self.clients, **new}
        for name, client in clients.items():
            aside = self._aside.get(name, State.NOT_ASKED)
            began = client.began if aside is State.LATE else NAN
            state = State.WAITING if name in chosen else aside
            clients[name] = client.model_copy(update={"state": state, "began": began})
        self.clients = clients
        self._show("")

    def client_started(self, client: str) -> None:
        """Mark a client as training."""
        self._change(client, state=State.TRAINING, began=self._clock())
        self._changed()

    def client_answered(self, client: str, error: str) -> None:
        """Mark a client as done or failed."""
        seconds = self.seconds_of(self.clients[client]) if client in self.clients else NAN
        state = State.FAILED if error else State.DONE
        line = f"round {self.status.round}: {error or 'answered'}"
        self._change(client, state=state, seconds=seconds, began=NAN, line=line)
        self._changed()

    def round_finished(self, record: RoundRecord) -> None:
        """Take over a round's results; a client without an accuracy keeps the one it had."""
        self.status.round, self.ended = record.round, record
        self._moved(record.bytes_up + record.bytes_down)
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
        for shown in list(shown_scores(record, self.protocol)[1].values())[:1]:
            self.last = record
            self.means.append(shown.mean)
            for name, accuracy in shown.per_client.items():
                self._change(name, accuracy=accuracy)
        self._show(round_line(record, self.protocol))

    def notice(self, text: str) -> None:
        """Keep the notice in view."""
        self.status.notices = [*self.status.notices, text][-MAX_NOTICES:]
        self._show(f"note: {text}")

    def run_finished(self, summary: Summary) -> None:
        """Take over the run's summary."""
        self.summary = summary
        self._show(duration(summary))

    # What a display asks.

    def now(self) -> Status:
        """Return the status of the run, with its clients and times as of now."""
        clients = []
        for client in sorted(self.clients.values(), key=lambda client: natural(client.name)):
            seconds, line = round(self.seconds_of(client), 3), one_line(client.line)
            clients.append(client.model_copy(update={"seconds": seconds, "line": line}))
        stage = "stopped" if self.status.fault else "running" if self.status.round else "starting"
        found = {
            "stage": "finished" if self.summary else stage, "clients": clients,
            "seconds_left": self.seconds_left, "mean": self.means[-1] if self.means else NAN,
            "updated": time.time(),
        }  # fmt: skip
        return self.status.model_copy(update=found)

    def _show(self, line: str) -> None:
        self._say(line)
        self._changed()

    def _moved(self, count: int) -> None:
        self.status.bytes = min(self.status.bytes + count, LARGEST)

    def _change(self, name: str, **changes: object) -> None:
        if name in self.clients:
            self.clients[name] = self.clients[name].model_copy(update=changes)

    def seconds_of(self, client: ClientStatus) -> float:
        """Return for how long a client has been training, or trained last; NaN if unknown."""
        return client.seconds if math.isnan(client.began) else self._clock() - client.began

    def count(self, state: State) -> int:
        """Return the number of clients in a state."""
        return sum(client.state == state for client in [*self.clients.values()])

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
            return (self.status.rounds - self.status.round) * self.seconds_a_round
        spent = min(self._clock() - self._began, self.seconds_a_round)
        return (self.status.rounds - self.status.round + 1) * self.seconds_a_round - spent

    def in_words(self) -> str:
        """Return the round's clients by what they do: "round 3 of 20: done a · training b, c"."""
        names: dict[str, list[str]] = {}
        for client in sorted(self.clients.values(), key=lambda c: natural(c.name)):
            names.setdefault(client.state, []).append(client.name)
        parts = []
        for state in filter(names.__contains__, State):
            more = len(names[state]) - MAX_NAMES
            listed = ", ".join(names[state][:MAX_NAMES])
            parts.append(f"{state} {listed}{f' and {more} more' if more > 0 else ''}")
        if math.isfinite(left := self.seconds_left):
            parts.append(time_left(left))
        return f"round {self.status.round} of {self.status.rounds}: {' · '.join(parts)}"

    def in_view(self, room: int) -> list[ClientStatus]:
        """Return the clients to show in `room` rows: all if they fit.

        Otherwise failed clients, those that train, the worst and the slowest take turns; they are
        ordered by state and accuracy.
        """
        clients = list(self.clients.values())
        if len(clients) <= room:
            return clients
        slow = sorted(clients, key=lambda c: _last(-self.seconds_of(c)))
        worst = sorted(clients, key=lambda c: _last(c.accuracy))
        failed = [c for c in worst if c.state == State.FAILED]
        training = [c for c in slow if c.state == State.TRAINING]
        turns = chain.from_iterable(zip_longest(failed, training, worst, slow))
        chosen = {c.name: c for c in turns if c is not None}
        shown, order = list(chosen.values())[: max(room, 0)], [*State]
        return sorted(
            shown, key=lambda c: (order.index(State(c.state)), _last(c.accuracy), natural(c.name))
        )


def _last(value: float) -> float:
    """Return a sort key that puts NaN after every number."""
    return math.inf if math.isnan(value) else value


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


class Throttled:
    """Calls a function after changes, at most once in so many seconds, in a thread of its own.

    A call that takes long is followed by a rest in proportion.
    """

    def __init__(self, function: Callable[[], None], seconds: float) -> None:
        self._function, self._seconds = function, seconds
        self._changed, self._ended = threading.Event(), threading.Event()
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def trigger(self) -> None:
        """Call the function soon: something has changed."""
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Call the function once more, and no more after that."""
        self._ended.set()
        self._changed.set()
        with self._calling:
            self._function()

    def _repeat(self) -> None:
        rest = self._seconds
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            started = time.thread_time()
            with self._calling:
                if not self._ended.is_set():
                    self._function()
            taken = time.thread_time() - started
            self._ended.wait(rest)
            # From the second call on, as the first also imports.
            rest = max(self._seconds, taken / SHARE if taken > LONG else 0.0)


def status_file(directory: Path) -> Progress:
    """Return a progress that writes status.json as it changes, from a thread of its own."""

    def write() -> None:
        # A folder that cannot be written ends the run where its records are written.
        with contextlib.suppress(StateError, OSError):
            write_text(directory / STATUS_FILE, progress.now().model_dump_json())

    def changed() -> None:
        writing.trigger()
        if progress.summary or progress.status.fault:
            writing.end()

    writing = Throttled(write, STATUS_SECONDS)
    progress = Progress(changed=changed)
    return progress


def read_status(directory: Path) -> Status:
    """Return the status of a run, as of now. Raises StateError."""
    if not (directory / "config.toml").exists():
        raise StateError(f"{directory} holds no run: it has no config.toml")
    status = read_if_exists(directory / STATUS_FILE, Status) or Status()
    if (directory / "summary.json").exists():
        return status.model_copy(update={"stage": "finished"})
    if not is_locked(directory):
        return status.model_copy(update={"stage": "stopped", "seconds_left": math.nan})
    return status
