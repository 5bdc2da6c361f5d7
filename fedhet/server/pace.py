"""The pace of a run: collects a round's replies until the round closes.

A round closes by this machine's clock or, in a simulation, by a simulated one. A client whose reply
comes after that is late: it is not called while it is at work, and its reply is handed to the round
in which it comes. Flower's own server would wait for all clients.

By the simulated clock, a client's time for a round is its work divided by its speed, plus the bytes
that it receives and sends divided by its bandwidth. It depends on the seed, the client and the
round alone: a resumed run is equal, and so is one on more workers.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.common import EvaluateIns, FitIns, FitRes
from flwr.server.client_proxy import ClientProxy

from fedhet.algorithms.rounds import (
    RECENT,
    Closing,
    closing,
    closing_of_evaluation,
    honest_majority,
)
from fedhet.base.errors import SettingsError, StateError, nearest, one_line
from fedhet.base.seeding import numpy_rng
from fedhet.server.calls import Call, CallPool, ClientFailureError, NamedProxy
from fedhet.server.codec import Codec
from fedhet.server.reply import LateReplies, ReplySpool, SpooledPayload, bytes_of
from fedhet.settings.engine import DRAWN_CLOCK, PaceSettings
from fedhet.settings.run import RunSettings

SAMPLE_MS, MBIT, CLIENT = "sample-ms", "mbit", "client"
COLUMNS = (SAMPLE_MS, MBIT, CLIENT)
MAX_BYTES = 64 * 2**20
"""The largest file of measured devices."""


@dataclass(frozen=True)
class Device:
    """What a client computes and sends with."""

    sample_ms: float
    """Milliseconds per training sample."""
    mbit: float
    """Bandwidth, in Mbit per second, either way."""

    def seconds(self, work: float, size: int) -> float:
        """Return the seconds for `work` samples and for `size` bytes."""
        return work * self.sample_ms / 1e3 + size * 8 / (self.mbit * 1e6)


class SimulatedClock:
    """The devices of a simulation's clients."""

    def __init__(self, pace: PaceSettings, seed: int) -> None:
        """Raises SettingsError if the file of measured devices cannot be used."""
        self._pace, self._seed = pace, seed
        self._rows = [] if pace.clock == DRAWN_CLOCK else read_devices(Path(pace.clock))
        self._named = {name: device for name, device in self._rows if name}

    def seconds(self, client: str, round: int, work: float, size: int) -> float:
        """Return how long a client takes for a round; a straggler, 'pace.slowdown' times as long.

        `work` is the number of training samples, each counted as often as it was used; `size` the
        bytes of the two messages.
        """
        taken, share = self.device(client).seconds(work, size), self._pace.stragglers
        if share > 0 and numpy_rng(self._seed, client, round, "straggler").random() < share:
            taken *= self._pace.slowdown
        return taken

    def device(self, client: str) -> Device:
        """Return a client's device. Raises SettingsError if the file names others only."""
        if self._named:
            if client not in self._named:
                hint = nearest(client, self._named)
                fault = f"{self._pace.clock}: has no row for the client {client!r}{hint}"
                raise SettingsError(fault)
            return self._named[client]
        if self._rows:
            row = int(numpy_rng(self._seed, client, "device").integers(len(self._rows)))
            return self._rows[row][1]
        speed, bandwidth = numpy_rng(self._seed, client, "device").standard_normal(2)
        pace, spread = self._pace, self._pace.spread
        slower, faster = math.exp(spread * speed), math.exp(spread * bandwidth)
        return Device(pace.sample_ms * slower, pace.mbit * faster)


def read_devices(path: Path) -> list[tuple[str, Device]]:
    """Return the devices of a CSV file, each with the client that it names, or "".

    Its header names the columns `sample-ms` and `mbit`, and may name `client`. Raises SettingsError
    that names the line and what is allowed.
    """
    where, rows = f"setting 'pace.clock' = {str(path)!r}", list[tuple[str, Device]]()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise SettingsError(f"{where} is larger than {MAX_BYTES >> 20} MB")
        with path.open(newline="", encoding="utf-8-sig") as file:
            lines = csv.DictReader(file)
            names = lines.fieldnames or ()
            if not {SAMPLE_MS, MBIT} <= set(names) or not set(names) <= set(COLUMNS):
                found = one_line(", ".join(map(str, names)) or "nothing")
                rule = f"{SAMPLE_MS} and {MBIT}, and {CLIENT} if its rows are of named clients"
                raise SettingsError(f"{where} has the columns {found}: it takes {rule}")
            for row in lines:
                numbers = []
                for name in (SAMPLE_MS, MBIT):
                    try:
                        numbers.append(float(row.get(name) or ""))
                    except ValueError:
                        numbers.append(math.nan)
                    if not 0 < numbers[-1] < 1e9:
                        given = f"{name} is {one_line(repr(row.get(name)))}"
                        line = f"{where}, line {lines.line_num}"
                        raise SettingsError(f"{line}: {given}, it takes a number > 0")
                rows.append(((row.get(CLIENT) or "").strip(), Device(*numbers)))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        rule = "it takes none, log-normal, or a CSV file of devices"
        raise SettingsError(f"{where} cannot be read ({one_line(str(error))}): {rule}") from None
    if not rows:
        raise SettingsError(f"{where} has no device: it takes a row for each")
    return rows


Instructions = Sequence[tuple[ClientProxy, FitIns | EvaluateIns]]
"""Flower's pairs of a client and a message."""


@dataclass
class RoundResults:
    """The outcome of a round when it closes."""

    results: list[tuple[ClientProxy, Any]] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    arrived: dict[str, int] = field(default_factory=dict)
    """The clients that reply to an earlier round, and which."""
    late: set[str] = field(default_factory=set)
    """The clients that are still at work."""
    withdrawn: set[str] = field(default_factory=set)
    """The clients that need not begin any more."""
    seconds: dict[str, float] = field(default_factory=dict)
    """How long each client took, by the run's clock."""
    clock: float = math.nan
    """Simulated seconds since the run began."""

    def add(self, call: Call) -> None:
        """Add a finished call whose outcome is in memory."""
        if call.error is not None:
            self.failures.append(call.error)
        else:
            self.results.append((call.proxy, call.result))


class Collector:
    """The calls of one run, of which some outlast the rounds in which they are made."""

    def __init__(
        self, run: RunSettings, codec: Codec, late: LateReplies, spool: ReplySpool | None
    ) -> None:
        """`spool`: where replies are written, None: they stay in memory."""
        self._pace, self._codec, self._late, self._spool = run.pace, codec, late, spool
        self._least = honest_majority(run)[2]
        self._clock = SimulatedClock(run.pace, run.seed) if run.pace.is_simulated else None
        # A function of its own: the pool must not refer to the collector, or a run that has ended
        # would keep the lock of its directory until the next garbage collection.
        self._store_late = partial(_store_late, codec, late)
        self._pool = CallPool(1, self._store_late)
        self._calls: dict[str, Call] = {}
        """By client: the call to train whose outcome no round has got yet."""
        self._evaluating: dict[str, Call] = {}
        self._evaluated: list[Call] = []
        self._durations: list[float] = []
        self._simulated = 0.0
        """Simulated seconds since the run began."""

    def open(self, most: int) -> None:
        """Prepare to call `most` clients at once."""
        self._pool = CallPool(most, self._store_late)

    def close(self) -> None:
        """End the threads that call clients, as they become free; forget the calls."""
        self._pool.shutdown()
        self._calls.clear()

    @property
    def busy(self) -> set[str]:
        """The clients that are not called: they are at work, or their reply awaits a round."""
        return self._calls.keys() | self._evaluating.keys()

    # A round.

    def fit(
        self, round: int, instructions: Instructions, needed: int, timeout: float | None
    ) -> RoundResults:
        """Call clients to train, and return what the round has got when it closes.

        It needs `needed` replies, or 'pace.min-replies' of them.
        """
        began = self._now()
        calls = _calls(instructions, round, timeout, began)
        called = {call.name: call for call in calls}
        self._calls |= called
        awaited = set(called)
        if self._pace.is_asynchronous or not calls:
            awaited = set(self._calls)
        rule = closing(
            self._pace, needed if calls else 1, len(awaited), self._durations, self._least
        )
        found = RoundResults()
        if self._clock is None:
            found.withdrawn = self._wait(calls, awaited, rule)
            self._codec.withdraw(round, found.withdrawn)
            ends = self._now()
        else:
            self._wait(calls, set(called), Closing(len(calls)))
            dues = [self._calls[name].due for name in awaited if self._calls[name].is_usable]
            ends = self._simulated = found.clock = rule.closes_at(dues, began)
        if ends > began:  # a simulated round without a reply takes no time
            self._durations = [*self._durations, ends - began][-RECENT:]
        for name in sorted(self._calls):
            self._take(self._calls[name], round, ends, found)
        found.late = set(self._calls)
        return found

    def evaluate(
        self, round: int, instructions: Instructions, timeout: float | None
    ) -> RoundResults:
        """Call clients to evaluate, and return the replies that come before the round closes.

        By a simulated clock evaluation takes no time, and all are awaited.
        """
        calls = _calls(instructions, round, timeout)
        called, rule = {call.name: call for call in calls}, Closing(len(calls))
        if self._clock is None:
            rule = closing_of_evaluation(self._pace, len(calls), self._durations)
        self._evaluating |= called
        found = RoundResults(withdrawn=self._wait(calls, set(called), rule))
        self._codec.withdraw(round, found.withdrawn, training=False)
        for call in self._evaluated:
            found.add(call)
        self._evaluated = []
        found.late = set(self._evaluating)
        return found

    def settled(self, arrived: Iterable[str]) -> None:
        """Remove the late replies that the last round has used: its checkpoint is written."""
        self._late.remove(set(arrived) - self._calls.keys())

    # What a checkpoint holds.

    def to_dict(self) -> dict[str, Any]:
        """Return what is known of the clients at work, as JSON has it."""
        jobs = {
            name: [call.round, call.began, call.due if call.has_arrived else None]
            for name, call in self._calls.items()
        }
        return {"clock": self._simulated, "durations": self._durations, "jobs": jobs}

    def load_dict(self, known: Mapping[str, Any]) -> None:
        """Restore what `to_dict` returned, of clients whose late replies are on disk.

        The others were at work when the server ended, and are called again. Raises ValueError,
        KeyError or TypeError.
        """
        self._simulated = float(known["clock"])
        self._durations = [float(each) for each in known["durations"]]
        saved = {str(name): job for name, job in known["jobs"].items()}
        rounds = {name: int(job[0]) for name, job in saved.items()}
        for name, round in self._late.restore(rounds).items():
            began, due = map(float, saved[name][1:] if self._clock else (0.0, 0.0))
            call = Call(NamedProxy(name), round, began=began, due=due, is_usable=True)
            self._calls[name] = call

    # What these methods call.

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else self._simulated

    def _wait(self, calls: Sequence[Call], awaited: set[str], rule: Closing) -> set[str]:
        """Make the calls, and wait until the rule closes the round; return who need not begin.

        A call is waited for all the same if only one can be made at a time: the server has nothing
        else to do then.
        """
        began = time.monotonic()
        known = [self._calls[name] for name in awaited & self._calls.keys()]
        arrived = [call for call in known if call.has_arrived]
        missing = awaited - {call.name for call in arrived}
        times = sorted(call.due - began for call in arrived if call.is_usable)
        self._pool.submit(calls)
        while (left := rule.waits(time.monotonic() - began, times, len(missing))) > 0:
            call = self._pool.next_finished(left)
            if call is not None and self._receive(call) in missing:
                missing.remove(call.name)
                times += [call.received_at - began] if call.is_usable else []
        withdrawn = self._pool.cancel_pending()
        for name in withdrawn:
            self._calls.pop(name, None)
            self._evaluating.pop(name, None)
        begun, alone = missing - withdrawn, self._pool.max_concurrent == 1
        coming = {c.name for c in calls if c.name in begun and (alone or not c.decide(late=True))}
        while coming:
            coming.discard(self._receive(self._pool.next_finished()))
        return withdrawn

    def _receive(self, call: Call | None) -> str:
        """Take note of a finished call, and return whose it is; a late evaluation is of no use."""
        assert call is not None
        if isinstance(call.message, EvaluateIns):
            del self._evaluating[call.name]
            self._evaluated += [] if call.is_late else [call]
            return call.name
        call.due = call.received_at
        if self._clock is not None:
            call.due = call.began  # a failure is known at once
            if isinstance(call.result, FitRes) and call.is_usable:
                size = call.bytes_sent + bytes_of(call.result.parameters)
                work = call.samples_processed
                call.due += self._clock.seconds(call.name, call.round, work, size)
        return call.name

    def _take(self, call: Call, round: int, ends: float, found: RoundResults) -> None:
        """Hand a client's reply to the round if it has arrived in time, or else keep it."""
        name = call.name
        if call.due > ends:
            if call.result is not None:
                self._store_late(call)
            return
        del self._calls[name]
        if call.round != round:
            found.arrived[name] = call.round
        if call.message is not None or self._clock is not None:
            found.seconds[name] = call.due - call.began
        if call.result is None and call.error is None:  # it is on disk
            try:
                call.result, of, sent, digest = self._late.get(name)
                if sent is not None:
                    self._codec.keep_sent(name, of, sent, digest)
                if self._spool is not None:
                    call.result.parameters = self._spool.put(name, call.result.parameters)
            except (StateError, OSError) as error:
                call.error = ClientFailureError(name, str(error))
        found.add(call)


def _calls(
    instructions: Instructions, round: int, timeout: float | None, began: float = 0.0
) -> list[Call]:
    named = [(to, each) for to, each in instructions if isinstance(to, NamedProxy)]
    return [Call(to, round, each, timeout, began) for to, each in named]


def _store_late(codec: Codec, late: LateReplies, call: Call) -> None:
    """Move a late reply to disk, with the client's instruction. Raises StateError."""
    result, name, round = call.result, call.name, call.round
    assert isinstance(result, FitRes)
    if isinstance(payload := result.parameters, SpooledPayload):
        result = replace(result, parameters=payload.payload())
    late.put(name, result, round, *codec.sent(name, round))
    codec.forget_sent(name, round)
    call.result = None
