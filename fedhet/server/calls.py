"""Calls to clients: what a call is, the pool that makes calls, and the outcomes that it yields.

`Call.run` sends a message: all messages to clients pass through it, except the question for their
descriptions (`members`). Flower's own server waits until every call of a round has finished. Here,
a round can close earlier: calls that have not started are cancelled, and calls in progress run to
completion, so that a late reply can still be used. The threads are daemons, so a client that hangs
does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import math
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

from flwr.common import Code, DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import one_line, words_of
from fedhet.runs.measures import LACKS, MOST, WORK
from fedhet.server.reply import ReplySpool
from fedhet.wire.knowledge import payload_bytes

Result = FitRes | EvaluateRes
Failures = Sequence[tuple[ClientProxy, FitRes] | tuple[ClientProxy, EvaluateRes] | BaseException]
OnReply = Callable[[str, str], None]
"""Called with the name of a client that replied, and the error message or an empty string."""
NOTHING = Parameters(tensors=[], tensor_type="numpy.ndarray")


class DirectProxy(ClientProxy):
    """A client that is called, not sent messages: each of Flower's methods calls `call`."""

    @abstractmethod
    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`, with a timeout in seconds, or without one if None."""

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


class NamedProxy(DirectProxy):
    """The recipient of one message: the client by its name, and how it is reached.

    Flower's strategies return pairs of such a proxy and a message; `Call` sends the message.
    """

    def __init__(
        self,
        name: str,
        proxy: ClientProxy | None = None,
        *,
        on_reply: OnReply = lambda name, error: None,
        whole: Callable[[], Parameters | None] = lambda: None,
        spool: ReplySpool | None = None,
        instruction: Callable[[], Parameters] | None = None,
        turn: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        """Create the proxy of a client; all arguments but its name are needed to call it.

        Args:
            name: The client's name.
            proxy: Flower's proxy, or None if the client was called by an earlier process.
            on_reply: Called when the client has replied to an instruction to train.
            whole: Returns the message without base weights, or None if it has none.
            spool: Where replies are written, or None if they stay in memory.
            instruction: Makes the payload of a large message once `turn` is acquired.
            turn: Semaphore that limits how many large messages exist at the same time.
        """
        super().__init__(proxy.cid if proxy else name)
        self.name, self.on_reply, self.whole, self.spool = name, on_reply, whole, spool
        self.instruction, self.turn = instruction, turn or contextlib.nullcontext()
        self._proxy = proxy

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`. Raises ClientFailureError if it does not reply."""
        if isinstance(instruction, FitIns | EvaluateIns):
            return Call(self, instruction, 0, timeout).run()[0]
        return getattr(self._proxy, name)(instruction, timeout, 0)


@dataclass(frozen=True, eq=False)
class Call:
    """A call to one client: a message, and the round that the client replies to."""

    proxy: NamedProxy
    message: FitIns | EvaluateIns
    round: int
    timeout: float | None

    @property
    def name(self) -> str:
        """The client's name."""
        return self.proxy.name

    def run(self, is_on_time: Callable[[], bool] = lambda: True) -> tuple[Result, int]:
        """Send the message; return the client's result, and the bytes that it was sent.

        A client that lacks the base weights of the message is sent the message without them. A
        reply that arrives on time is written to the proxy's spool. Raises ClientFailureError.
        """
        to, message = self.proxy, self.message
        training = isinstance(message, FitIns)
        try:
            with to.turn:
                if to.instruction is not None:
                    message = replace(message, parameters=to.instruction())
                size, result = payload_bytes(message.parameters), self._send(message)
                if result.metrics.get(LACKS) is True and (whole := to.whole()):
                    result = self._send(replace(message, parameters=whole))
                if isinstance(result, FitRes) and is_on_time() and to.spool is not None:
                    result.parameters = to.spool.put(self.name, result.parameters)
        except Exception as error:
            if training:
                to.on_reply(self.name, words_of(error))
            raise ClientFailureError(self.name, words_of(error)) from error
        if training:
            to.on_reply(self.name, one_line(str(result.metrics.get("error", ""))))
        return result, size

    def _send(self, message: FitIns | EvaluateIns) -> Result:
        proxy = self.proxy._proxy
        assert proxy is not None
        if isinstance(message, FitIns):
            return proxy.fit(message, self.timeout, self.round)
        return proxy.evaluate(message, self.timeout, self.round)


@dataclass(frozen=True)
class CallOutcome:
    """The outcome of a finished call: the client's result, or the exception raised."""

    call: Call
    result: Result | None
    error: BaseException | None
    received_at: float
    """Time of arrival, as returned by `time.monotonic`."""
    is_late: bool
    bytes_sent: int = 0

    @property
    def is_usable(self) -> bool:
        """Whether the client replied successfully and reported no error."""
        result = self.result
        return (
            result is not None and result.status.code is Code.OK and "error" not in result.metrics
        )

    @property
    def is_on_disk(self) -> bool:
        """Whether the reply was late and has been stored on disk."""
        return self.is_late and self.error is None

    @property
    def samples_processed(self) -> float:
        """Number of training samples processed, as reported by the client, clamped to [0, MOST]."""
        reported = self.result.metrics.get(WORK, 0.0) if self.result is not None else 0.0
        return min(max(float(reported), 0.0), MOST) if isinstance(reported, int | float) else 0.0


class CallPool:
    """Thread pool for the client calls of one run."""

    def __init__(
        self, max_concurrent: int, store_late_reply: Callable[[Call, FitRes], None]
    ) -> None:
        """Create the pool; its threads start on demand.

        Args:
            max_concurrent: Maximum number of clients called at the same time.
            store_late_reply: Called with each training reply that arrives after its round closed.
        """
        self.max_concurrent, self._store_late_reply = max_concurrent, store_late_reply
        self._pending: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()
        self._late: dict[Call, bool] = {}
        """Whether a call is late, as soon as its reply has arrived or its round has closed."""

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls in order, and start as many threads as needed and allowed."""
        for call in calls:
            self._pending.put(call)
        for _ in range(min(self.max_concurrent - self._num_threads, len(calls))):
            self._num_threads += 1
            threading.Thread(target=self._run_calls, daemon=True).start()

    def next_outcome(self, timeout: float = math.inf) -> CallOutcome | None:
        """Return the next outcome, or None if no call finishes within `timeout` seconds."""
        try:
            outcome = self._outcomes.get(timeout=None if math.isinf(timeout) else timeout)
        except queue.Empty:
            return None
        with self._lock:
            del self._late[outcome.call]
        return outcome

    def cancel_pending(self) -> list[Call]:
        """Cancel the calls that have not started, and return them."""
        cancelled: list[Call] = []
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._pending.get_nowait()
                cancelled += [call] if call is not None else []
        return cancelled

    def mark_late(self, call: Call) -> bool:
        """Mark a call as late unless its reply has arrived; return whether it is late.

        Whichever comes first decides, and the decision is final.
        """
        with self._lock:
            return self._late.setdefault(call, True)

    def shutdown(self) -> None:
        """Cancel pending calls, and let each thread exit after its current call."""
        self.cancel_pending()
        for _ in range(self._num_threads):
            self._pending.put(None)
        self._num_threads = 0

    def _run_calls(self) -> None:
        while (call := self._pending.get()) is not None:
            self._outcomes.put(self._run(call))

    def _run(self, call: Call) -> CallOutcome:
        result, error, size = None, None, 0
        try:
            result, size = call.run(partial(self._is_on_time, call))
            if not self._is_on_time(call) and isinstance(result, FitRes):
                self._store_late_reply(call, result)
        except BaseException as raised:  # report every failure to the round
            error = raised
        late = not self._is_on_time(call)
        return CallOutcome(call, result, error, time.monotonic(), late, size)

    def _is_on_time(self, call: Call) -> bool:
        """Record that a reply has arrived, and return whether it is on time."""
        with self._lock:
            return not self._late.setdefault(call, False)


class ClientFailureError(Exception):
    """Raised if a client did not reply, or Flower reported an error."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"{client}: {reason}")
        self.client, self.reason = client, reason


def client_names(calls: Iterable[Call]) -> set[str]:
    """Return the names of the clients being called."""
    return {call.name for call in calls}


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
