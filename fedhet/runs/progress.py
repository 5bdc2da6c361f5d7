"""Progress of a run, as tracked for displays and for status.json.

Displays on the terminal, in log lines and in notebooks show `Progress` (`fedhet.runs.display`).
`status_file` writes the progress to status.json for `fedhet status` and `fedhet watch`. The run's
lock shows whether the run's process is still alive, because a killed process cannot update the
file.
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
from fedhet.base.metrics import ACCURACY, metric_of
from fedhet.config.resolve import Config
from fedhet.runs.directory import is_locked, read_if_exists
from fedhet.runs.log import Watcher
from fedhet.runs.measures import shown_scores
from fedhet.runs.records import (
    LARGEST,
    NAN,
    READING,
    Headline,
    Number,
    Round,
    RoundRecord,
    Summary,
    Text,
)
from fedhet.runs.units import (
    human_bytes,
    human_seconds,
    natural,
    plural,
    plus_minus,
    score,
    time_left,
)

SLOW_CALL, MAX_LOAD = 0.05, 0.02
"""CPU time in seconds above which `Throttled` treats a call as slow, and maximum fraction of time
for slow calls. Calls are slow with thousands of clients."""
RECENT = 5
"""Number of recent rounds from which the remaining time is estimated."""
MAX_NOTICES = 6
"""Number of recent notices to show in a display."""
MAX_NAMES = 10
"""Maximum number of client names to list per state in a line."""
STATUS_FILE = "status.json"
STATUS_SECONDS = 1.0
"""Minimum interval between two updates of status.json, in seconds."""
Stage = Literal["starting", "running", "finished", "stopped"]
"""Stage of a run; "stopped" if its process ended before the last round."""


class State(StrEnum):
    """States of a client in a round, in display order."""

    FAILED = "failed"
    TRAINING = "training"
    WAITING = "waiting"
    LATE = "late"
    """The client is still training although its round has closed."""
    DONE = "done"
    NOT_SAMPLED = "not sampled"
    BACKING_OFF = "backing off"
    """The client is called less often, because it did not reply."""
    EXCLUDED = "excluded"
    OFFLINE = "offline"
    """The client is registered, but not connected."""


class ClientStatus(BaseModel):
    """Status of a client in the current round. Unknown values are NaN (null in the file)."""

    model_config = READING | ConfigDict(frozen=True)

    name: Text
    model: Text = ""
    state: Text = ""
    """A `State`, or an unknown state from another version of fedhet."""
    accuracy: Number = NAN
    """Last value of the headline metric (see `Status.metric`)."""
    loss: Number = NAN
    seconds: Number = NAN
    """Duration of the client's last training or, in the file, of its current training so far."""
    line: Text = ""
    """Description of the client's last reply or failure."""
    began: Number = Field(default=NAN, exclude=True)
    """Start time of the client's training, on the clock of `Progress`."""


class Status(BaseModel):
    """Status of a run and its clients, as stored in status.json.

    `Progress.now` sets the stage, the clients and the times; `Progress` updates all other fields.
    """

    model_config = READING | ConfigDict(validate_assignment=True)

    title: Text = ""
    stage: Stage = "starting"
    phase: Text = ""
    """Current activity before the first round."""
    round: Round = 0
    """The current round, or 0 before the first round."""
    rounds: Round = 0
    seconds_left: Number = NAN
    bytes: Number = Field(default=0.0, ge=0)
    """Total size of training messages in the rounds that have ended, in bytes."""
    mean: Number = NAN
    """Mean headline score of the last evaluated round."""
    headline: Text = ""
    """Protocol and kind of the headline score, or "" before the first evaluation."""
    metric: Text = metric_of(ACCURACY).title
    """Title of the headline metric."""
    metric_name: Text = ACCURACY
    """Name of the headline metric."""
    clients: list[ClientStatus] = []
    notices: list[Text] = []
    """The most recent notices."""
    fault: Text = ""
    """Reason for the failure of the run."""
    updated: Number = 0.0
    """Time of the update, in seconds since 1970."""

    def as_json(self) -> dict[str, Any]:
        """Return the content of status.json, with None for NaN."""
        content: dict[str, Any] = json.loads(self.model_dump_json())
        return content

    @property
    def description(self) -> str:
        """Status of the run in one line."""
        if self.stage == "starting":
            return f"starting: {self.phase or 'clients are loading data and models'}"
        if self.stage == "stopped" and self.fault:
            where = f" in round {self.round} of {self.rounds}" if self.round else ""
            return f"failed{where}: {self.fault}"
        parts = [f"{self.stage}: round {self.round} of {self.rounds}"]
        if math.isfinite(self.mean):
            model = f" ({self.headline})" if self.headline else ""
            parts.append(f"mean {self.metric}{model} {score(self.mean, self.metric_name)}")
        parts.append(f"{human_bytes(self.bytes)} sent")
        if self.stage == "running" and math.isfinite(self.seconds_left):
            parts.append(time_left(self.seconds_left))
        return " · ".join(parts)


class Progress(Watcher):
    """Watcher that tracks the progress of a run.

    Client statuses are replaced rather than modified, so that another thread can display the
    progress.
    """

    def __init__(
        self,
        show: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        """Start tracking.

        `show` is called with a line of text or "" after each event of the run, except client
        events. `changed` is called after every event.
        """
        self._show_line, self._clock, self._changed = show, clock, changed
        self.status = Status(phase="starting")
        self.method = ""
        self.directory: Path | None = None
        self.clients: dict[str, ClientStatus] = {}
        self.asked = 0
        """Number of clients sampled in this round."""
        self.headline = Headline()
        """Headline that the method declares."""
        self.ended: RoundRecord | None = None
        """Record of the last finished round, or None before the first round has finished."""
        self.last: RoundRecord | None = None
        """Last record with scores, or None before the first evaluation."""
        self._means: dict[tuple[str, str], list[float]] = {}
        """Mean scores in the evaluated rounds, by protocol and kind."""
        self.client_kind = ""
        """Kind of the models whose scores the clients' statuses contain."""
        self.metric = metric_of(ACCURACY)
        """Headline metric."""
        self.summary: Summary | None = None
        """Summary of the run, or None before it has finished."""
        self._began = NAN
        """Start time of the current round; NaN between rounds."""
        self._durations: list[float] = []
        self._excluded: dict[str, State] = {}

    # Methods for events of the run.

    def waiting(self, phase: str) -> None:
        """Set the current activity before the first round."""
        self.status.phase = phase
        self._show(phase)

    def run_started(
        self, config: Config, directory: Path, models: Mapping[str, str], dataset: str
    ) -> None:
        """Set the title, the clients and the number of rounds."""
        counts = [
            plural(len(models), "client"),
            plural(len(set(models.values())), "architecture"),
            plural(config.run.rounds, "round"),
            f"seed {config.run.seed}",
        ]
        self.status.title = f"{config.method.name} on {dataset}: {', '.join(counts)}"
        self.status.rounds, self.status.notices = config.run.rounds, []
        self.directory, self.method = directory, config.method.name
        self.headline = Headline.declared_by(config.method.spec)
        self.metric = metric_of(config.run.metrics[0])
        self.status.metric, self.status.metric_name = self.metric.title, self.metric.name
        self.clients = {
            name: ClientStatus(name=name, model=model, state=State.WAITING)
            for name, model in models.items()
        }
        self._show(f"{self.status.title} -> {directory}")

    def rounds_restored(self, records: Sequence[RoundRecord]) -> None:
        """Add the bytes and accuracies from the rounds before the run was resumed."""
        self._add_bytes(sum(record.bytes_up + record.bytes_down for record in records))
        self._means = {}
        for record in records:
            self._add_means(record)

    def run_failed(self, reason: str) -> None:
        """Set the reason for the failure of the run."""
        self.status.fault = reason
        self._changed()

    def clients_excluded(self, clients: Mapping[str, str]) -> None:
        """Store the clients excluded from the next round, with their states."""
        self._excluded = {name: State(state) for name, state in clients.items()}

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Begin a round and mark the sampled clients as waiting."""
        self.asked, self._began = len(asked), self._clock()
        self.status.round, self.status.phase = number, ""
        new = {name: ClientStatus(name=name) for name in asked if name not in self.clients}
        sampled, clients = {*asked}, {**self.clients, **new}
        for name, client in clients.items():
            other_state = self._excluded.get(name, State.NOT_SAMPLED)
            began = client.began if other_state is State.LATE else NAN
            state = State.WAITING if name in sampled else other_state
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
        line = f"round {self.status.round}: {error or 'replied'}"
        self._change(client, state=state, seconds=seconds, began=NAN, line=line)
        self._changed()

    def round_finished(self, record: RoundRecord) -> None:
        """Update the results; clients that were not evaluated keep their last accuracy."""
        self.ended = record
        if record.round == self.status.round:  # Otherwise, the next round has started.
            self._began = NAN
        self._add_bytes(record.bytes_up + record.bytes_down)
        self._durations.append(record.seconds.total)
        for name, reason in record.failed.items():
            line = f"round {record.round}: {reason}"
            self._change(name, state=State.FAILED, began=NAN, line=line)
        for name in record.late:
            self._change(name, state=State.LATE, line=f"round {record.round}: still training")
        for name, age in record.ages.items():
            line = f"round {record.round}: reply for round {record.round - age} arrived"
            self._change(name, state=State.DONE, began=NAN, line=line)
        for name, loss in (record.loss.per_client if record.loss else {}).items():
            self._change(name, loss=loss)
        self._add_means(record)
        _, shown = shown_scores(record, self.headline)
        if shown:
            self.last = record
        for kind, each in shown.items():
            # If only the server evaluates the headline kind, show the clients' next kind.
            if each.per_client.keys() & self.clients.keys():
                self.client_kind = kind
                for name, accuracy in each.per_client.items():
                    self._change(name, accuracy=accuracy)
                break
        self._show(round_line(record, self.headline))

    def notice(self, text: str) -> None:
        """Add a notice for the user."""
        self.status.notices = [*self.status.notices, text][-MAX_NOTICES:]
        self._show(f"note: {text}")

    def run_finished(self, summary: Summary) -> None:
        """Set the summary of the run."""
        self.summary = summary
        self._show(duration(summary))

    def _add_means(self, record: RoundRecord) -> None:
        for protocol, kind, each in record.each(record.metric):
            self._means.setdefault((protocol, kind), []).append(each.mean)
        self.status.headline = ", ".join(self._column or ())

    # Queries for displays.

    def now(self) -> Status:
        """Return the current status of the run."""
        clients = []
        for client in sorted(self.clients.values(), key=lambda client: natural(client.name)):
            seconds, line = round(self.seconds_of(client), 3), one_line(client.line)
            clients.append(client.model_copy(update={"seconds": seconds, "line": line}))
        stage = "stopped" if self.status.fault else "running" if self.status.round else "starting"
        current = {
            "stage": "finished" if self.summary else stage, "clients": clients,
            "seconds_left": self.seconds_left, "mean": self.means[-1] if self.means else NAN,
            "updated": time.time(),
        }  # fmt: skip
        return self.status.model_copy(update=current)

    @property
    def _column(self) -> tuple[str, str] | None:
        evaluated: dict[str, list[str]] = {}
        for protocol, kind in self._means:
            evaluated.setdefault(protocol, []).append(kind)
        return self.headline.column(evaluated)

    @property
    def means(self) -> list[float]:
        """Mean headline score in each round in which it was evaluated."""
        column = self._column
        return self._means[column] if column else []

    def _show(self, line: str) -> None:
        self._show_line(line)
        self._changed()

    def _add_bytes(self, count: int) -> None:
        self.status.bytes = min(self.status.bytes + count, LARGEST)

    def _change(self, name: str, **changes: object) -> None:
        if name in self.clients:
            self.clients[name] = self.clients[name].model_copy(update=changes)

    def seconds_of(self, client: ClientStatus) -> float:
        """Return the duration of a client's current or last training, or NaN if it is unknown."""
        return client.seconds if math.isnan(client.began) else self._clock() - client.began

    def count(self, state: State) -> int:
        """Return the number of clients in a state."""
        return sum(client.state == state for client in [*self.clients.values()])

    @property
    def is_in_round(self) -> bool:
        """Whether a round is in progress."""
        return not math.isnan(self._began)

    @property
    def seconds_per_round(self) -> float:
        """Mean duration of the recent rounds in seconds, or NaN if no round has finished."""
        return fmean(self._durations[-RECENT:]) if self._durations else NAN

    @property
    def seconds_left(self) -> float:
        """Estimated remaining time of the run in seconds, or NaN if no round has finished."""
        if not self.is_in_round:
            return (self.status.rounds - self.status.round) * self.seconds_per_round
        elapsed = min(self._clock() - self._began, self.seconds_per_round)
        return (self.status.rounds - self.status.round + 1) * self.seconds_per_round - elapsed

    def clients_by_state(self) -> str:
        """Describe the clients in the round, e.g. "round 3 of 20: done a · training b, c"."""
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

    def clients_to_show(self, max_rows: int) -> list[ClientStatus]:
        """Return the clients to show in at most `max_rows` rows.

        If not all clients fit, selects failed, training, least accurate and slowest clients in
        turn, and sorts the selected clients by state and accuracy.
        """
        clients = list(self.clients.values())
        if len(clients) <= max_rows:
            return clients
        slow = sorted(clients, key=lambda c: _nan_last(-self.seconds_of(c)))
        sign = -1 if self.metric.lower_is_better else 1
        worst = sorted(clients, key=lambda c: _nan_last(sign * c.accuracy))
        failed = [c for c in worst if c.state == State.FAILED]
        training = [c for c in slow if c.state == State.TRAINING]
        turns = chain.from_iterable(zip_longest(failed, training, worst, slow))
        selected = {c.name: c for c in turns if c is not None}
        shown, order = list(selected.values())[: max(max_rows, 0)], [*State]
        return sorted(
            shown,
            key=lambda c: (order.index(State(c.state)), worst.index(c), natural(c.name)),
        )


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


def duration(summary: Summary) -> str:
    """Describe the durations of a run, of its startup and of its rounds."""
    seconds = summary.seconds
    text = f"{plural(summary.rounds, 'round')} in {seconds.total:.1f} s"
    rounds = [past.seconds for past in summary.history if math.isfinite(past.seconds)]
    if math.isnan(seconds.start) or not rounds:
        return text
    return f"{text}: {seconds.start:.1f} s to start, {fmean(rounds):.1f} s per round"


def round_line(record: RoundRecord, headline: Headline) -> str:
    """Summarize a round in one line."""
    in_time = len(record.answered) - len(record.ages)
    replies = f"{in_time}/{len(record.asked)} clients"
    replies += f" + {len(record.ages)} late" if record.ages else ""
    sent = human_bytes(record.bytes_up + record.bytes_down)
    loss = f"train loss {record.loss.mean:.4f}  " if record.loss else ""
    clock = "" if math.isnan(record.clock) else f"{human_seconds(record.clock)} simulated  "
    epsilon = f"ε {max(record.epsilon.values()):.3g}  " if record.epsilon else ""
    return (
        f"round {record.round:>3}  {accuracies_of(record, headline)}  {loss}{epsilon}{replies}  "
        f"{sent}  {clock}{record.seconds.total:.1f} s"
    )


def accuracies_of(record: RoundRecord, headline: Headline) -> str:
    """Describe the score of each kind of model, with full statistics for the first kind.

    The kinds are in the order of `shown_scores`, which also selects the protocol.
    """
    shown, kinds = shown_scores(record, headline)
    if not kinds:
        return "not evaluated"
    (kind, scores), *remaining = kinds.items()
    metric, title = record.metric, metric_of(record.metric).title
    spread, worst = plus_minus(scores.mean, scores.std, metric=metric), score(scores.worst, metric)
    text = f"{title} ({shown}, {kind}) {spread}, worst {worst}"
    return "".join([text, *(f", {name} {score(each.mean, metric)}" for name, each in remaining)])


class Throttled:
    """Wrapper that calls a function after changes, at most once per interval, in a separate thread.

    The pause after a slow call is proportional to the duration of the call.
    """

    def __init__(self, function: Callable[[], None], seconds: float) -> None:
        self._function, self._seconds = function, seconds
        self._changed, self._ended = threading.Event(), threading.Event()
        self._calling = threading.Lock()
        self._thread = threading.Thread(target=self._repeat, daemon=True)

    def trigger(self) -> None:
        """Schedule a call of the function."""
        self._changed.set()
        if self._thread.ident is None:
            self._thread.start()

    def end(self) -> None:
        """Call the function one last time, and stop."""
        self._ended.set()
        self._changed.set()
        with self._calling:
            self._function()

    def _repeat(self) -> None:
        pause = self._seconds
        while self._changed.wait() and not self._ended.is_set():
            self._changed.clear()
            started = time.thread_time()
            with self._calling:
                if not self._ended.is_set():
                    self._function()
            taken = time.thread_time() - started
            self._ended.wait(pause)
            # Lengthen the pause only after the second call, because the first call also imports
            # modules.
            pause = max(self._seconds, taken / MAX_LOAD if taken > SLOW_CALL else 0.0)


def status_file(directory: Path) -> Progress:
    """Return a `Progress` that writes status.json after changes, in a separate thread."""

    def write_status() -> None:
        # Ignore a directory that cannot be written, because writing a record reports the error.
        with contextlib.suppress(StateError, OSError):
            write_text(directory / STATUS_FILE, progress.now().model_dump_json())

    def changed() -> None:
        writer.trigger()
        if progress.summary or progress.status.fault:
            writer.end()

    writer = Throttled(write_status, STATUS_SECONDS)
    progress = Progress(changed=changed)
    return progress


def read_status(directory: Path) -> Status:
    """Read the current status of a run.

    Raises StateError if `directory` is not a run directory or a file is invalid.
    """
    if not (directory / "config.toml").exists():
        raise StateError(f"{directory} is not a run directory: config.toml not found")
    status = read_if_exists(directory / STATUS_FILE, Status) or Status()
    if (directory / "summary.json").exists():
        return status.model_copy(update={"stage": "finished"})
    if not is_locked(directory):
        return status.model_copy(update={"stage": "stopped", "seconds_left": math.nan})
    return status
