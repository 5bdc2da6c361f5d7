"""Calls to clients: what a call is, the pool that makes calls, and the outcomes that it yields.

Flower's own server waits until all calls have ended. Here a round may close before: a call that has
not begun is withdrawn, and one that has goes on. The threads end with the process.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from flwr.common import Code, DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import one_line, words_of
from fedhet.runs.measures import LACKS, MOST, WORK
from fedhet.server.members import Member
from fedhet.server.reply import ReplySpool
from fedhet.wire.knowledge import payload_bytes

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


Failures = Sequence[tuple[ClientProxy, FitRes] | tuple[ClientProxy, EvaluateRes] | BaseException]
OnAnswer = Callable[[str, str], None]
"""Called with the name of a client that replied, and the error message or an empty string."""


def always() -> bool:
    """Return True."""
    return True


class NamedProxy(ClientProxy):
    """A member's proxy with the client's name; it reports when the client has replied.

    For large messages, `instruction` makes the payload once the semaphore `turn` is acquired.
    Replies are written to `spool`, if there is one.
    """

    def __init__(
        self, member: Member, on_answer: OnAnswer, spool: ReplySpool | None = None
    ) -> None:
        super().__init__(member.proxy.cid)
        self.name = member.info.name
        self.instruction: Callable[[], Parameters] | None = None
        self.turn: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        self.again: Callable[[], Parameters | None] = lambda: None
        """Makes the last message without what the client lacks; None: it built on nothing."""
        self.spool = spool
        self.in_time: Callable[[], bool] = always
        """Whether a reply that has come belongs to the round: a late one is not spooled."""
        self.sent = 0
        """Bytes of the message that it was sent last."""
        self._proxy = member.proxy
        self._on_answer = on_answer

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Forward the instruction; an error carries the client's name."""
        try:
            with self.turn:
                if self.instruction is not None:
                    ins = FitIns(self.instruction(), ins.config)
                self.sent = payload_bytes(ins.parameters)
                result = self._proxy.fit(ins, timeout, group_id)
                if lacks(result) and (whole := self.again()):
                    result = self._proxy.fit(replace(ins, parameters=whole), timeout, group_id)
                if self.in_time() and self.spool is not None:
                    result.parameters = self.spool.put(self.name, result.parameters)
        except Exception as error:
            self._on_answer(self.name, words_of(error))
            raise ClientFailureError(self.name, words_of(error)) from error
        self._on_answer(self.name, one_line(str(result.metrics.get("error", ""))))
        return result

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Forward the instruction; an error carries the client's name."""
        try:
            result = self._proxy.evaluate(ins, timeout, group_id)
            if lacks(result) and (whole := self.again()):
                result = self._proxy.evaluate(replace(ins, parameters=whole), timeout, group_id)
            return result
        except Exception as error:
            raise ClientFailureError(self.name, words_of(error)) from error

    def get_properties(self, ins, timeout, group_id):  # type: ignore[no-untyped-def]
        """Forward the call."""
        return self._proxy.get_properties(ins, timeout, group_id)

    def get_parameters(self, ins, timeout, group_id):  # type: ignore[no-untyped-def]
        """Forward the call."""
        return self._proxy.get_parameters(ins, timeout, group_id)

    def reconnect(self, ins, timeout, group_id):  # type: ignore[no-untyped-def]
        """Forward the call."""
        return self._proxy.reconnect(ins, timeout, group_id)


class FormerProxy(NamedProxy):
    """A client that was asked before the server was started again: only its name is known."""

    def __init__(self, name: str) -> None:
        ClientProxy.__init__(self, name)
        self.name = name


def lacks(result: FitRes | EvaluateRes) -> bool:
    """Return whether a client says that it lacks the weights on which its instruction builds."""
    return result.metrics.get(LACKS) is True


class ClientFailureError(Exception):
    """A client did not reply, or Flower reported an error."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"{client}: {reason}")
        self.client, self.reason = client, reason


def name_of(proxy: ClientProxy) -> str:
    """Return the name of the client behind one of our proxies."""
    assert isinstance(proxy, NamedProxy)
    return proxy.name


def reasons(failures: Failures) -> dict[str, str]:
    """Return the reason of each client's failure, as far as it is known."""
    found: dict[str, str] = {}
    for failure in failures:
        if isinstance(failure, ClientFailureError):
            found[failure.client] = one_line(" ".join(failure.reason.split()))[:300] or "failed"
        elif isinstance(failure, tuple):
            proxy, result = failure
            found[name_of(proxy)] = one_line(result.status.message)[:300] or "failed"
    return found


class DirectProxy(ClientProxy):
    """Passes each of the server's calls on to `call`."""

    @abstractmethod
    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`; `timeout` in seconds, None: none."""

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Call the client."""
        return self.call("get_properties", ins, timeout)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Call the client."""
        return self.call("get_parameters", ins, timeout)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Call the client."""
        return cast(FitRes, self.call("fit", ins, timeout))

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Call the client."""
        return cast(EvaluateRes, self.call("evaluate", ins, timeout))

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing: there is no connection."""
        return DisconnectRes(reason="")
