"""Calls to clients, and the pool that makes them: a call is a future, which holds its outcome.

`Call.run` sends a message: all messages to clients pass through it, except the question for their
descriptions (`members`). Flower's own server waits until every call of a round has finished. Here,
a round can close earlier: calls that have not started are canceled, and calls in progress run to
completion, so that a late reply can still be used. The threads are daemons, so a client that hangs
does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sysconfig
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from flwr.common import Code, DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import (
    DropOutError,
    FedhetError,
    StateError,
    UserModelError,
    one_line,
    typed,
    words_of,
)
from fedhet.runs.measures import LACKS, MOST, WORK
from fedhet.server.reply import ReplySpool
from fedhet.wire.knowledge import payload_bytes

Result = FitRes | EvaluateRes
Failures = Sequence[tuple[ClientProxy, FitRes] | tuple[ClientProxy, EvaluateRes] | BaseException]
OnReply = Callable[[str, str], None]
"""Called with the name of a client that replied, and the error message or an empty string."""
NOTHING = Parameters(tensors=[], tensor_type="numpy.ndarray")
LOG = logging.getLogger("flwr")
NOT_OF_CODE = (FedhetError, DropOutError, MemoryError, OSError, torch.OutOfMemoryError)
"""Errors that the machine or the settings cause: the client is dropped, and the run continues."""
_LIBRARIES = [
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
]
LAST = 3
"""Frames that are shown of a traceback without any file of one's own."""


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
            return Call(self, 0, instruction, timeout).run()
        return getattr(self._proxy, name)(instruction, timeout, 0)


@dataclass(eq=False)
class Call:
    """A call to one client: a message and, once the client has replied or failed, the outcome."""

    proxy: NamedProxy
    round: int
    """The round that the client replies to."""
    message: FitIns | EvaluateIns | None = None
    """None if the call was made before the server was started again."""
    timeout: float | None = None
    began: float = 0.0
    """When the call began, by the run's clock."""
    due: float = math.inf
    """When the reply arrives, by the run's clock; infinity if it is not known yet."""
    result: Result | None = None
    """The client's result; None before it has arrived, and if the reply is late and on disk."""
    error: BaseException | None = None
    is_usable: bool = False
    """Whether the client has replied successfully and reported no error."""
    is_late: bool | None = None
    """None until the reply arrives or the round closes."""
    received_at: float = math.inf
    """Time of arrival, as returned by `time.monotonic`."""
    bytes_sent: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def name(self) -> str:
        """The client's name."""
        return self.proxy.name

    @property
    def has_arrived(self) -> bool:
        """Whether the outcome is known to the round."""
        return math.isfinite(self.due)

    @property
    def samples_processed(self) -> float:
        """Number of training samples processed, as reported by the client, clamped to [0, MOST]."""
        reported = self.result.metrics.get(WORK, 0.0) if self.result is not None else 0.0
        return min(max(float(reported), 0.0), MOST) if isinstance(reported, int | float) else 0.0

    def decide(self, *, late: bool) -> bool:
        """Decide whether the reply is late unless that is decided; return whether it is late.

        Whichever comes first decides: the reply arrives, or the round closes.
        """
        with self._lock:
            if self.is_late is None:
                self.is_late = late
            return self.is_late

    def run(self) -> Result:
        """Send the message; return the client's result, which the call keeps as well.

        A client that lacks the base weights of the message is sent the message without them. A
        reply that arrives on time is written to the proxy's spool. Raises ClientFailureError.
        """
        to, message = self.proxy, self.message
        assert message is not None
        training = isinstance(message, FitIns)
        try:
            with to.turn:
                if to.instruction is not None:
                    message = replace(message, parameters=to.instruction())
                self.bytes_sent, result = payload_bytes(message.parameters), self._send(message)
                if result.metrics.get(LACKS) is True and (whole := to.whole()):
                    result = self._send(replace(message, parameters=whole))
                if isinstance(result, FitRes) and not self.decide(late=False) and to.spool:
                    result.parameters = to.spool.put(self.name, result.parameters)
        except Exception as error:
            if training:
                to.on_reply(self.name, words_of(error))
            raise ClientFailureError(self.name, words_of(error)) from error
        if training:
            to.on_reply(self.name, one_line(str(result.metrics.get("error", ""))))
        self.is_usable = result.status.code is Code.OK and "error" not in result.metrics
        self.result = result
        return result

    def _send(self, message: FitIns | EvaluateIns) -> Result:
        proxy = self.proxy._proxy
        assert proxy is not None
        if isinstance(message, FitIns):
            return proxy.fit(message, self.timeout, self.round)
        return proxy.evaluate(message, self.timeout, self.round)


class CallPool:
    """Thread pool for the client calls of one run."""

    def __init__(self, max_concurrent: int, store_late_reply: Callable[[Call], None]) -> None:
        """Create the pool; its threads start on demand.

        Args:
            max_concurrent: Maximum number of clients called at the same time.
            store_late_reply: Moves each training reply that arrives after its round closed to disk.
        """
        self.max_concurrent, self._store_late_reply = max_concurrent, store_late_reply
        self._pending: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._num_threads = 0

    def submit(self, calls: Sequence[Call]) -> None:
        """Queue calls in order, and start as many threads as needed and allowed."""
        for call in calls:
            self._pending.put(call)
        for _ in range(min(self.max_concurrent - self._num_threads, len(calls))):
            self._num_threads += 1
            threading.Thread(target=self._run_calls, daemon=True).start()

    def next_finished(self, timeout: float = math.inf) -> Call | None:
        """Return the next finished call, or None if none finishes within `timeout` seconds."""
        try:
            return self._finished.get(timeout=None if math.isinf(timeout) else timeout)
        except queue.Empty:
            return None

    def cancel_pending(self) -> set[str]:
        """Cancel the calls that have not started, and return the names of their clients."""
        canceled: set[str] = set()
        with contextlib.suppress(queue.Empty):
            while True:
                call = self._pending.get_nowait()
                canceled |= {call.name} if call is not None else set()
        return canceled

    def shutdown(self) -> None:
        """Cancel pending calls, and let each thread exit after its current call."""
        self.cancel_pending()
        for _ in range(self._num_threads):
            self._pending.put(None)
        self._num_threads = 0

    def _run_calls(self) -> None:
        while (call := self._pending.get()) is not None:
            try:
                if isinstance(call.run(), FitRes) and call.is_late:
                    self._store_late_reply(call)
            except BaseException as raised:  # report every failure to the round
                call.error = raised
            call.received_at = time.monotonic()
            call.decide(late=False)
            self._finished.put(call)
            del call  # an idle thread must not keep its reply in memory


class ClientFailureError(Exception):
    """Raised if a client did not reply, or Flower reported an error."""

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


def is_user_code_error(error: BaseException) -> bool:
    """Return whether an error is one of a client's code, a user's own model included."""
    if isinstance(error, UserModelError):
        return not isinstance(error.__cause__, MemoryError)
    return not isinstance(error, NOT_OF_CODE)


@dataclass(frozen=True)
class UserCodeFault:
    """An error of a client's code in words, since not every exception travels to a process.

    A method or a model of one's own may have a mistake that shows only in training. Its traceback
    is shown once, shortened to the frames of one's own files; the whole of it is in flower.log.
    """

    reason: str
    """Type, message, file and line."""
    short: str
    """The traceback's frames in one's own files."""
    whole: str

    @classmethod
    def of(cls, error: BaseException) -> UserCodeFault:
        """Return the fault of an error that has been raised."""
        of_model = isinstance(error, UserModelError)
        raised = error.__cause__ if of_model else error
        frames = traceback.extract_tb(raised.__traceback__) if raised else []
        paths = [Path(frame.filename).resolve() for frame in frames]
        own = [
            frame
            for frame, path in zip(frames, paths, strict=True)
            if path.is_file() and not any(path.is_relative_to(each) for each in _LIBRARIES)
        ] or frames[-LAST:]
        place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
        return cls(
            f"{words_of(error) if of_model else typed(error)}{place}",
            "".join(traceback.format_list(own)).rstrip(),
            "".join(traceback.format_exception(error)),
        )


class UserCodeError(Exception):
    """A client of a simulation failed by an error of its code."""

    def __init__(self, fault: UserCodeFault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class UserCodeFaults:
    """What follows from errors of the clients' code: the first of each kind is shown."""

    def __init__(self, notice: Callable[[str], None], *, strict: bool) -> None:
        """`strict`: the first one ends the run."""
        self._notice, self._strict = notice, strict
        self._shown: set[str] = set()

    def enter(self, errors: Iterable[object]) -> None:
        """Show what is new among the errors of a round. Raises StateError if it ends the run."""
        causes = (getattr(error, "__cause__", None) or error for error in errors)
        for fault in [cause.fault for cause in causes if isinstance(cause, UserCodeError)]:
            if fault.reason in self._shown:
                continue
            self._shown.add(fault.reason)
            LOG.error("%s", fault.whole)
            if self._strict:
                error = StateError(
                    f"a client's code failed: {fault.reason}; the whole traceback is in the run's "
                    "flower.log, and --no-strict lets a run go on without such clients"
                )
                if fault.short:
                    error.add_note(fault.short)
                raise error
            for line in [*fault.short.splitlines(), fault.reason]:
                self._notice(line)
