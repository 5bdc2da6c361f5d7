"""Threads that call clients: as many at a time as the engine serves.

Flower's own server waits until all calls have ended. Here a round may close before: a call that has
not begun is withdrawn, and one that has goes on. The threads end with the process.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from flwr.common import Code, EvaluateIns, EvaluateRes, FitIns, FitRes

from fedhet.runs.measures import MOST, WORK
from fedhet.server.proxy import NamedProxy, always

Result = FitRes | EvaluateRes


@dataclass
class Call:
    """A call of a client; it may arrive in time for its round, or late."""

    proxy: NamedProxy
    message: FitIns | EvaluateIns
    round: int
    timeout: float | None
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_late: bool | None = None
    """None: neither has it arrived, nor has its round closed."""

    @property
    def name(self) -> str:
        """The client's name."""
        return self.proxy.name

    def arrives(self) -> bool:
        """Return whether the answer, which is there, is in time; from now on it is."""
        return not self._settled(late=False)

    def closes(self) -> bool:
        """Return whether the call is late, as its round closes now."""
        return self._settled(late=True)

    def _settled(self, *, late: bool) -> bool:
        with self._lock:
            if self._is_late is None:
                self._is_late = late
            return self._is_late

    def make(self) -> Result:
        """Call the client and return its answer."""
        proxy, message = self.proxy, self.message
        if isinstance(message, EvaluateIns):
            return proxy.evaluate(message, self.timeout, self.round)
        proxy.in_time = self.arrives
        try:
            return proxy.fit(message, self.timeout, self.round)
        finally:
            # They refer to this call and to the strategy, which refer to the proxy.
            proxy.in_time, proxy.instruction = always, None


@dataclass(frozen=True)
class Answer:
    """What has become of a call: a result, or an error."""

    call: Call
    result: Result | None
    error: BaseException | None
    at: float
    """When it came, by `time.monotonic`."""
    is_late: bool

    @property
    def is_usable(self) -> bool:
        """Whether it is no failure, and no error of the client's own."""
        found = self.result
        return found is not None and found.status.code is Code.OK and "error" not in found.metrics

    @property
    def is_kept(self) -> bool:
        """Whether it is a reply that was written to the disk, as it is late."""
        return self.is_late and self.error is None

    @property
    def work(self) -> float:
        """The training samples that the client says it has used."""
        said = self.result.metrics.get(WORK, 0.0) if self.result is not None else 0.0
        return min(max(float(said), 0.0), MOST) if isinstance(said, int | float) else 0.0


class Callers:
    """The threads of one run, and the answers that they bring."""

    def __init__(self, most: int, keep_late: Callable[[Call, FitRes], None]) -> None:
        """`most` clients are called at once; `keep_late` writes a reply that comes late."""
        self.most, self._keep_late = most, keep_late
        self._waiting: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._threads = 0

    def begin(self, calls: Sequence[Call]) -> None:
        """Begin the calls, in their order, as far as threads are free."""
        for call in calls:
            self._waiting.put(call)
        for _ in range(min(self.most - self._threads, len(calls))):
            self._threads += 1
            threading.Thread(target=self._work, daemon=True).start()

    def next(self, seconds: float = math.inf) -> Answer | None:
        """Return the next answer; None if none comes in so many seconds."""
        with contextlib.suppress(queue.Empty):
            return self._answers.get(timeout=None if math.isinf(seconds) else seconds)
        return None

    def withdraw(self) -> list[Call]:
        """Return the calls that have not begun; they are not made any more."""
        found: list[Call] = []
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._waiting.get_nowait()
                found += [call] if call is not None else []
        return found

    def close(self) -> None:
        """End the threads as they become free."""
        self.withdraw()
        for _ in range(self._threads):
            self._waiting.put(None)
        self._threads = 0

    def _work(self) -> None:
        while (call := self._waiting.get()) is not None:
            self._answers.put(self._answer(call))

    def _answer(self, call: Call) -> Answer:
        result, error = None, None
        try:
            result = call.make()
            if not call.arrives() and isinstance(result, FitRes):
                self._keep_late(call, result)
        except BaseException as raised:  # the round must hear of it, whatever it is
            error = raised
        return Answer(call, result, error, time.monotonic(), not call.arrives())


def names_of(calls: Iterable[Call]) -> set[str]:
    """Return the names of the clients that are called."""
    return {call.name for call in calls}
