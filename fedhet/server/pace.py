"""Calls to the clients of a round, and collection of replies until the round closes.

A round closes on the machine's clock or, in a simulation, on a simulated clock. A client that has
not replied by then is late. A late client is not called again while it is working, and its reply is
used in the round in which the reply arrives. In contrast, Flower's own server waits for all
clients.

On the simulated clock, a client's time for a round is its work divided by its speed, plus the bytes
that it receives and sends divided by its bandwidth. This time depends only on the seed, the client
and the round, so a run has the same results if it is resumed or uses more workers.
"""

from __future__ import annotations

import csv
import io
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedhet.algorithms.rounds import RECENT, Closing, is_hit, median_duration, replies_to_close
from fedhet.base.disk import expanded, read_text
from fedhet.base.errors import SettingsError, StateError, error_reason, nearest, one_line
from fedhet.base.seeding import numpy_rng
from fedhet.config.resolve import honest_majority
from fedhet.server.calls import Call, CallOutcome, CallPool, Message, NamedProxy, RoundResults
from fedhet.server.codec import Codec
from fedhet.server.open_calls import OpenCalls
from fedhet.server.reply import ReplySpool
from fedhet.settings.engine import DRAWN_CLOCK, PaceSettings
from fedhet.settings.run import RunSettings

SAMPLE_MS, MBIT, CLIENT = "sample-ms", "mbit", "client"
COLUMNS = (SAMPLE_MS, MBIT, CLIENT)
MAX_BYTES = 64 * 2**20
"""Maximum size of a file with measured devices, in bytes."""
MIN_GRACE = 10.0
"""Minimum grace period of an evaluation, in seconds."""


@dataclass(frozen=True)
class Device:
    """Speed and bandwidth of a client's device."""

    sample_ms: float
    """Milliseconds per training sample."""
    mbit: float
    """Bandwidth in each direction, in Mbit/s."""

    def seconds(self, work: float, size: int) -> float:
        """Return the time to process `work` samples and to transfer `size` bytes, in seconds."""
        return work * self.sample_ms / 1e3 + size * 8 / (self.mbit * 1e6)


class SimulatedClock:
    """Simulated clock that determines the time that clients take for a round."""

    def __init__(self, pace: PaceSettings, seed: int) -> None:
        """Read the file of measured devices, if 'pace.clock' names a file.

        Raises SettingsError if the file is invalid.
        """
        self._pace, self._seed = pace, seed
        self._rows = [] if pace.clock == DRAWN_CLOCK else read_devices(expanded(pace.clock))
        self._named = {name: device for name, device in self._rows if name}

    def seconds(self, client: str, round: int, work: float, size: int) -> float:
        """Return the time that a client takes for a round, in seconds.

        A straggler takes 'pace.slowdown' times as long.

        Args:
            client: Name of the client.
            round: The round.
            work: Number of training samples processed, counting repetitions.
            size: Total size of the instruction and the reply, in bytes.
        """
        seconds = self.device(client).seconds(work, size)
        if is_hit(self._seed, client, round, "straggler", self._pace.stragglers):
            seconds *= self._pace.slowdown
        return seconds

    def device(self, client: str) -> Device:
        """Return a client's device. Raises SettingsError if the file has no row for the client."""
        if self._named:
            if client not in self._named:
                hint = nearest(client, self._named)
                fault = f"client {client!r} has no row in {self._pace.clock}{hint}"
                raise SettingsError(f"pace.clock: {fault}")
            return self._named[client]
        if self._rows:
            row = int(numpy_rng(self._seed, client, "device").integers(len(self._rows)))
            return self._rows[row][1]
        speed, bandwidth = numpy_rng(self._seed, client, "device").standard_normal(2)
        pace, spread = self._pace, self._pace.spread
        slowness, width = math.exp(spread * speed), math.exp(spread * bandwidth)
        return Device(pace.sample_ms * slowness, pace.mbit * width)


def read_devices(path: Path) -> list[tuple[str, Device]]:
    """Read the devices from a CSV file.

    The header must contain the columns `sample-ms` and `mbit`, and may contain `client`.

    Returns:
        The client name and the device in each row. The name is "" if the file has no column
        `client`.

    Raises:
        SettingsError: If the file cannot be read, or if a row is invalid.
    """
    setting, rows = f"pace.clock = {str(path)!r}", list[tuple[str, Device]]()
    try:
        lines = csv.DictReader(io.StringIO(read_text(path, MAX_BYTES), newline=""))
        names = lines.fieldnames or ()
        if not {SAMPLE_MS, MBIT} <= set(names) or not set(names) <= set(COLUMNS):
            header = one_line(", ".join(map(str, names)) or "no header")
            rule = f"expected {SAMPLE_MS}, {MBIT} and optionally {CLIENT}"
            raise SettingsError(f"{setting}: unsupported columns, {rule}, got {header}")
        for row in lines:
            numbers = []
            for name in (SAMPLE_MS, MBIT):
                try:
                    numbers.append(float(row.get(name) or ""))
                except ValueError:
                    numbers.append(math.nan)
                if not 0 < numbers[-1] < 1e9:
                    value = one_line(repr(row.get(name)))
                    line = f"{setting}, line {lines.line_num}"
                    raise SettingsError(f"{line}: {name} must be a number > 0, got {value}")
            rows.append(((row.get(CLIENT) or "").strip(), Device(*numbers)))
    except StateError as error:
        raise SettingsError(f"pace.clock: {error}") from None
    except (OSError, csv.Error) as error:
        rule = "expected none, log-normal, or the path of a CSV file"
        raise SettingsError(f"{setting}: {rule} ({error_reason(error)})") from None
    if not rows:
        raise SettingsError(f"{setting}: file must have at least one row")
    return rows


def closing(
    pace: PaceSettings, needed: int, awaited: int, durations: Iterable[float] = (), least: int = 1
) -> Closing:
    """Return the closing rule of a training round.

    Args:
        pace: Settings in `[pace]`.
        needed: Number of replies that the round needs.
        awaited: Number of clients from which replies are expected.
        durations: Durations of the previous rounds, in seconds.
        least: Minimum number of replies if `pace.min-replies` results in a lower number.
    """
    number = replies_to_close(pace.min_replies, needed, awaited, least)
    return Closing(number, pace.grace, pace.max_seconds(median_duration(durations)))


def closing_of_evaluation(pace: PaceSettings, calls: int, durations: Iterable[float]) -> Closing:
    """Return the closing rule of an evaluation.

    After enough replies have arrived, an evaluation continues for as long as these replies took,
    but at least MIN_GRACE seconds, because a client that misses the evaluation is not called again.
    """
    rule = closing(pace, calls, calls, durations)
    return replace(rule, grace=max(pace.grace, MIN_GRACE), patience=1.0)


Instructions = Sequence[tuple[NamedProxy, Message]]
"""Pairs of a recipient and a message."""


class Collector:
    """Component that calls a run's clients and collects the replies in each round.

    Training calls may outlast the round in which they are made.
    """

    def __init__(
        self, run: RunSettings, codec: Codec, calls: OpenCalls, spool: ReplySpool | None
    ) -> None:
        """Create the collector.

        Args:
            run: Settings of the run.
            codec: Codec that counts the bytes of the messages.
            calls: Open calls of the run.
            spool: Store for the weights in the current round's replies on disk; None keeps them in
                memory.
        """
        self._pace, self._codec, self._calls, self._spool = run.pace, codec, calls, spool
        self._min_replies = honest_majority(run)[2]
        self._clock = SimulatedClock(run.pace, run.seed) if run.pace.is_simulated else None
        self._pool = CallPool(1, calls.store)
        self._evaluating: set[str] = set()
        """Clients that were called to evaluate and have not replied."""
        self._evaluated: list[CallOutcome] = []
        self._durations: list[float] = []
        """Durations of recent rounds on the run's clock, in seconds."""
        self._simulated = 0.0
        """Simulated seconds since the start of the run."""

    def open(self, max_concurrent: int) -> None:
        """Create a pool that calls at most `max_concurrent` clients at the same time."""
        self._pool = CallPool(max_concurrent, self._calls.store)

    def close(self) -> None:
        """Let each thread exit after its current call, and discard all calls."""
        self._pool.shutdown()
        self._calls.end()

    @property
    def clients_at_work(self) -> set[str]:
        """Clients that cannot be called, because they are busy or have an unused reply."""
        return self._calls.at_work | self._evaluating

    # Methods for a round.

    def fit(
        self, round: int, instructions: Instructions, needed: int, timeout: float | None
    ) -> RoundResults:
        """Call clients to train, and return the outcomes of calls that finished in time.

        Args:
            round: The current round.
            instructions: The clients to call, and their instructions.
            needed: Number of replies that the round needs; 'pace.min-replies' may change it.
            timeout: Time limit of each call in seconds, or None for no limit.
        """
        began = self._now()
        calls = [Call(proxy, round, message, timeout) for proxy, message in instructions]
        called = {call.name for call in calls}
        self._calls.begin(called, round, began)
        awaits_earlier_calls = self._pace.is_asynchronous or not calls
        awaited = self._calls.at_work if awaits_earlier_calls else called
        rule = closing(
            self._pace, needed if calls else 1, len(awaited), self._durations, self._min_replies
        )
        results = RoundResults()
        if self._clock is None:
            results.canceled = self._wait(calls, awaited, rule)
            self._codec.cancel(round, results.canceled)
            ends = self._now()
        else:
            self._wait(calls, called, Closing(len(calls)))
            dues = [self._calls[name].due for name in awaited if self._calls[name].has_reply]
            ends = self._simulated = results.clock = rule.closing_time(dues, began)
        if ends > began:  # A simulated round without a reply takes no time.
            self._durations = [*self._durations, ends - began][-RECENT:]
        for name in sorted(self._calls.at_work):
            self._collect(name, round, ends, results)
        return results

    def evaluate(
        self, round: int, instructions: Instructions, timeout: float | None
    ) -> list[CallOutcome]:
        """Call clients to evaluate, and return the outcomes of calls that finished in time.

        On a simulated clock, the evaluation takes no time, and the round waits for all replies.
        """
        calls = [Call(proxy, round, message, timeout) for proxy, message in instructions]
        called, rule = {call.name for call in calls}, Closing(len(calls))
        if self._clock is None:
            rule = closing_of_evaluation(self._pace, len(calls), self._durations)
        self._evaluating |= called
        canceled = self._wait(calls, called, rule)
        self._codec.cancel(round, canceled, training=False)
        evaluated, self._evaluated = self._evaluated, []
        return evaluated

    # Methods for checkpoints.

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state for a checkpoint."""
        jobs = self._calls.to_dict()
        return {"clock": self._simulated, "durations": self._durations, "jobs": jobs}

    def load_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `to_dict`.

        Raises ValueError, KeyError or TypeError if the state is invalid.
        """
        self._simulated = float(saved["clock"])
        self._durations = [float(seconds) for seconds in saved["durations"]]
        self._calls.load_dict(saved["jobs"], is_simulated=self._clock is not None)

    # Private helpers.

    def _now(self) -> float:
        return time.monotonic() if self._clock is None else self._simulated

    def _wait(self, calls: Sequence[Call], awaited: set[str], rule: Closing) -> set[str]:
        """Make calls until `rule` closes the round, and return the clients that were not called.

        If only one call can be made at a time, the server always waits for the call in progress,
        because it has nothing else to do.
        """
        began = time.monotonic()
        at_work = {name: self._calls[name] for name in awaited & self._calls.at_work}
        missing = awaited - {name for name, call in at_work.items() if call.outcome is not None}
        times = sorted(call.due - began for call in at_work.values() if call.has_reply)
        self._pool.submit(calls)
        while (seconds := rule.remaining_wait(time.monotonic() - began, times, len(missing))) > 0:
            outcome = self._pool.next_outcome(seconds)
            if outcome is not None and self._receive(outcome) in missing:
                missing.remove(outcome.client)
                times += [outcome.received_at - began] if outcome.is_reply else []
        canceled = self._pool.cancel_pending()
        self._evaluating -= canceled
        in_progress = [call for call in calls if call.name in missing - canceled]
        if self._pool.max_concurrent > 1:
            in_progress = self._pool.close_round(in_progress)
        arriving = {call.name for call in in_progress}
        while arriving and (outcome := self._pool.next_outcome()):
            arriving.discard(self._receive(outcome))
        return canceled

    def _receive(self, outcome: CallOutcome) -> str:
        """Record a call's outcome, unless it is a late evaluation, and return the client's name."""
        name = outcome.client
        if name in self._evaluating:
            self._evaluating.remove(name)
            self._evaluated += [] if outcome.is_late else [outcome]
            return name
        call, due = self._calls[name], outcome.received_at
        if self._clock is not None:
            due = call.began  # A failure takes no simulated time.
            if outcome.is_reply:
                size = self._codec.bytes_sent(name) + outcome.bytes_received
                due += self._clock.seconds(name, call.round, outcome.samples_processed, size)
        call.outcome, call.due = outcome, due
        return name

    def _collect(self, name: str, round: int, ends: float, results: RoundResults) -> None:
        """Add a call's outcome to the round's results if the call finished before the round closed.

        On a simulated clock, a reply that is due after the round closed is stored on disk.
        """
        call = self._calls[name]
        outcome = call.outcome
        if outcome is None:
            return
        if call.due > ends:
            if not outcome.is_late and outcome.failure != "silent":
                call.outcome = self._calls.store(outcome)
            return
        if self._clock is not None or math.isfinite(outcome.received_at):
            results.seconds[name] = call.due - call.began
        try:
            late, outcome = outcome.is_stored_late, self._calls.collect(name, round)
            if late and self._spool is not None:
                outcome = self._spool.put(outcome)
        except (StateError, OSError) as error:
            outcome = CallOutcome(name, call.round).failed(error)
        results.outcomes.append(outcome)
