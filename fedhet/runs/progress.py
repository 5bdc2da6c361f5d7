"""What is known of a run while it goes on: each client's state, accuracy, loss and seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import chain, zip_longest
from statistics import fmean

from fedhet.runs.records import KINDS, NAN, PROTOCOLS, RoundRecord, Score
from fedhet.runs.units import natural, position

RECENT = 5
"""Number of rounds from whose duration the time left is estimated."""


class State(IntEnum):
    """A client's state in the current round, in the order in which clients are shown."""

    FAILED = 0
    TRAINING = 1
    WAITING = 2
    DONE = 3
    NOT_ASKED = 4

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


class Progress:
    """Follows the clients of a run through its events.

    Another thread may draw them at the same time: a client is replaced as a whole.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.clients: dict[str, ClientProgress] = {}
        self.round = 0
        """The current round; 0 before the first."""
        self.rounds = 0
        self.asked = 0
        """Number of clients asked in this round."""
        self.protocol = "common"
        """The protocol under which the clients' accuracies are shown if there is a choice."""
        self.last: RoundRecord | None = None
        """The last record that holds accuracies."""
        self.bytes_moved = 0
        """Bytes of all rounds seen so far, up and down."""
        self._began = NAN
        """When the current round began; NaN between two rounds."""
        self._durations: list[float] = []

    def run_started(self, rounds: int, protocol: str, models: Mapping[str, str]) -> None:
        """Begin a run of `rounds` rounds with the clients of `models`."""
        self.rounds, self.protocol = rounds, protocol
        self.clients = {name: ClientProgress(name, model) for name, model in models.items()}

    def round_started(self, number: int, asked: Sequence[str]) -> None:
        """Begin a round with the clients `asked`, which wait for their turn."""
        self.round, self.asked, self._began = number, len(asked), self._clock()
        new = {name: ClientProgress(name) for name in asked if name not in self.clients}
        chosen, all_clients = {*asked}, {**self.clients, **new}
        self.clients = {
            name: replace(
                client, state=State.WAITING if name in chosen else State.NOT_ASKED, began=NAN
            )
            for name, client in all_clients.items()
        }

    def client_started(self, name: str) -> None:
        """Mark a client as training."""
        self._change(name, state=State.TRAINING, began=self._clock())

    def client_answered(self, name: str, *, failed: bool) -> None:
        """Mark a client as done or failed."""
        seconds = self.seconds_of(self.clients[name]) if name in self.clients else NAN
        state = State.FAILED if failed else State.DONE
        self._change(name, state=state, seconds=seconds, began=NAN)

    def round_finished(self, record: RoundRecord) -> None:
        """Take over a round's results; a client without an accuracy keeps the one it had."""
        self.round = record.round
        self.bytes_moved += record.bytes_up + record.bytes_down
        self._durations.append(record.seconds.total)
        self._began = NAN
        for name in record.failed:
            self._change(name, state=State.FAILED, began=NAN)
        for name, loss in (record.loss.per_client if record.loss else {}).items():
            self._change(name, loss=loss)
        if record.accuracy:
            self.last = record
        _, kinds = shown_scores(record, self.protocol)
        for name, accuracy in next(iter(kinds.values()), Score()).per_client.items():
            self._change(name, accuracy=accuracy)

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
