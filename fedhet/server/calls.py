"""Calls to clients, and the bounded pool of daemon threads that makes the calls.

`NamedProxy.send` sends all training and evaluation messages to clients. Flower's own server waits
until every call of a round has finished. Here, a round can close earlier: calls that have not
started are canceled, and calls in progress run to completion, so that a late reply can still be
used. The threads are daemons, so a client that hangs does not keep the process alive.
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
    describe_error,
    error_text,
    one_line,
)
from fedhet.runs.measures import MAX_REPORTED, MISSING_BASE, WORK
from fedhet.server.reply import ReplySpool
from fedhet.wire.knowledge import payload_bytes

Result = FitRes | EvaluateRes
Failures = Sequence[tuple[ClientProxy, FitRes] | tuple[ClientProxy, EvaluateRes] | BaseException]
OnReply = Callable[[str, str], None]
"""Callback that receives a client's name and an error message, or "" if the client succeeded."""
NOTHING = Parameters(tensors=[], tensor_type="numpy.ndarray")
"""An empty payload."""
LOG = logging.getLogger("flwr")
EXPECTED_ERRORS = (FedhetError, DropOutError, MemoryError, OSError, torch.OutOfMemoryError)
"""Errors caused by the machine or the settings, after which the run continues without the
client."""
_LIBRARIES = [
    Path(__file__).parents[1],
    *(Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")),
]
MAX_LIBRARY_FRAMES = 3
"""Maximum number of frames to show from a traceback without frames in user code."""


class DirectProxy(ClientProxy):
    """Base class for proxies that implement Flower's requests with one method, `call`."""

    @abstractmethod
    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`. If not None, `timeout` is the time limit in seconds."""

    def get_properties(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Request the client's properties."""
        return self.call("get_properties", ins, timeout)

    def get_parameters(self, ins: Any, timeout: float | None, group_id: int | None) -> Any:
        """Request the client's parameters."""
        return self.call("get_parameters", ins, timeout)

    def fit(self, ins: FitIns, timeout: float | None, group_id: int | None) -> FitRes:
        """Request training from the client."""
        return cast(FitRes, self.call("fit", ins, timeout))

    def evaluate(
        self, ins: EvaluateIns, timeout: float | None, group_id: int | None
    ) -> EvaluateRes:
        """Request an evaluation from the client."""
        return cast(EvaluateRes, self.call("evaluate", ins, timeout))

    def reconnect(self, ins: Any, timeout: float | None, group_id: int | None) -> DisconnectRes:
        """Do nothing, because there is no connection."""
        return DisconnectRes(reason="")


class NamedProxy(DirectProxy):
    """Recipient of one message: a client's name, and the connection to the client.

    Strategies return pairs of such a proxy and a message, as in Flower.
    """

    def __init__(
        self,
        name: str,
        proxy: ClientProxy | None = None,
        *,
        on_reply: OnReply = lambda name, error: None,
        message_without_base: Callable[[], Parameters | None] = lambda: None,
        spool: ReplySpool | None = None,
        make_payload: Callable[[], Parameters] | None = None,
        turn: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        """Create the proxy for a client.

        Args:
            name: The client's name.
            proxy: Flower's proxy, or None if the client was called by an earlier process.
            on_reply: Called when the client has replied to an instruction to train.
            message_without_base: Function that returns the message with full weights, or None if
                the message has no base weights.
            spool: Store for the payloads of replies on disk; None keeps the payloads in memory.
            make_payload: Function that builds the payload of a large message once `turn` is
                acquired.
            turn: Semaphore that limits the number of large messages that exist at the same time.
        """
        super().__init__(proxy.cid if proxy else name)
        self.name, self._proxy = name, proxy
        self._on_reply, self._message_without_base = on_reply, message_without_base
        self._spool, self.make_payload = spool, make_payload
        self._turn = turn or contextlib.nullcontext()

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`. Raises ClientFailureError if the client fails."""
        if isinstance(instruction, FitIns | EvaluateIns):
            return self.send(instruction, timeout)[0]
        return getattr(self._proxy, name)(instruction, timeout, 0)

    def send(
        self,
        message: FitIns | EvaluateIns,
        timeout: float | None,
        round: int = 0,
        is_on_time: Callable[[], bool] = lambda: True,
    ) -> tuple[Result, int]:
        """Send a message, and return the client's result and the size of the message in bytes.

        A client that lacks the base weights of the message receives the message with full weights.
        Raises ClientFailureError if the client does not reply.

        Args:
            message: The instruction to train or to evaluate.
            timeout: Time limit in seconds, or None for no limit.
            round: The round of the message.
            is_on_time: Called when a training reply has arrived. If it returns True, the payload
                of the reply is moved to the spool.
        """
        is_training = isinstance(message, FitIns)
        try:
            with self._turn:
                if self.make_payload is not None:
                    message = replace(message, parameters=self.make_payload())
                bytes_sent = payload_bytes(message.parameters)
                result = self._forward(message, timeout, round)
                lacks_base = result.metrics.get(MISSING_BASE) is True
                if lacks_base and (full := self._message_without_base()):
                    result = self._forward(replace(message, parameters=full), timeout, round)
                if isinstance(result, FitRes) and is_on_time() and self._spool:
                    stored = self._spool.put(self.name, result.parameters)
                    result = replace(result, parameters=stored)
        except Exception as error:
            if is_training:
                self._on_reply(self.name, error_text(error))
            raise ClientFailureError(self.name, error_text(error)) from error
        if is_training:
            self._on_reply(self.name, one_line(str(result.metrics.get("error", ""))))
        return result, bytes_sent

    def _forward(
        self, message: FitIns | EvaluateIns, timeout: float | None, round: int
    ) -> FitRes | EvaluateRes:
        assert self._proxy is not None
        if isinstance(message, FitIns):
            return self._proxy.fit(message, timeout, round)
        return self._proxy.evaluate(message, timeout, round)


@dataclass(frozen=True, eq=False)
class Call:
    """A call to one client, i.e. the message and its recipient."""

    recipient: NamedProxy
    round: int
    """The round of the message."""
    message: FitIns | EvaluateIns | None
    """The instruction, or None if an earlier server process made the call."""
    timeout: float | None = None

    @property
    def name(self) -> str:
        """The client's name."""
        return self.recipient.name


@dataclass(frozen=True, eq=False)
class CallOutcome:
    """The outcome of a finished call: the client's result, or the exception that was raised."""

    call: Call
    result: Result | None = None
    """The client's result, without its payload if `is_on_disk` is True."""
    error: BaseException | None = None
    received_at: float = math.inf
    """Time of arrival, as returned by `time.monotonic`."""
    is_late: bool = False
    """Whether the round of the call had closed when the reply arrived."""
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
        """Whether the payload of a late training reply has been moved to disk."""
        return self.is_late and isinstance(self.result, FitRes)

    @property
    def samples_processed(self) -> float:
        """Reported number of training samples processed, clamped to [0, MAX_REPORTED]."""
        reported = self.result.metrics.get(WORK, 0.0) if self.result is not None else 0.0
        if not isinstance(reported, int | float):
            return 0.0
        return min(max(float(reported), 0.0), MAX_REPORTED)


@dataclass
class RoundResults:
    """Replies and failures that arrived before a round, or its evaluation, closed."""

    results: list[tuple[ClientProxy, Any]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    canceled: set[str] = field(default_factory=set)
    """Clients that were not called, because the round closed before their turn."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that each client took on the run's clock, in seconds."""
    clock: float = math.nan
    """Simulated seconds since the start of the run."""

    def add(self, outcome: CallOutcome) -> None:
        """Add the outcome of a call."""
        if outcome.error is not None:
            self.failures.append(outcome.error)
        else:
            self.results.append((outcome.call.recipient, outcome.result))


class CallPool:
    """Thread pool for the client calls of one run."""

    def __init__(
        self, max_concurrent: int, store_late_reply: Callable[[Call, FitRes], FitRes]
    ) -> None:
        """Create the pool; its threads start on demand.

        Args:
            max_concurrent: Maximum number of clients called at the same time.
            store_late_reply: Function that stores the payload of a late training reply on disk, and
                returns the reply without its payload.
        """
        self.max_concurrent, self._store_late_reply = max_concurrent, store_late_reply
        self._pending: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[CallOutcome] = queue.SimpleQueue()
        self._num_threads = 0
        self._lock = threading.Lock()
        self._is_late: dict[Call, bool] = {}
        """Whether the reply is late, for each call whose round has closed or whose reply has
        arrived."""

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
            self._is_late.pop(outcome.call, None)
        return outcome

    def close_round(self, calls: Iterable[Call]) -> list[Call]:
        """Mark calls without a reply as late, and return all other calls."""
        with self._lock:
            return [call for call in calls if not self._is_late.setdefault(call, True)]

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
            self._outcomes.put(self._run(call))
            del call  # An idle thread must not keep a message in memory.

    def _run(self, call: Call) -> CallOutcome:
        def is_on_time() -> bool:
            """Return whether the reply is on time. Once decided, the result does not change."""
            with self._lock:
                return not self._is_late.setdefault(call, False)

        result, error, bytes_sent = None, None, 0
        assert call.message is not None
        try:
            result, bytes_sent = call.recipient.send(
                call.message, call.timeout, call.round, is_on_time
            )
            if isinstance(result, FitRes) and not is_on_time():
                result = self._store_late_reply(call, result)
        except BaseException as raised:  # Report every failure to the round.
            result, error = None, raised
        late = not is_on_time()
        return CallOutcome(call, result, error, time.monotonic(), late, bytes_sent)


class ClientFailureError(Exception):
    """Raised if a client did not reply, or if Flower reported an error."""

    def __init__(self, client: str, reason: str) -> None:
        super().__init__(f"{client}: {reason}")
        self.client, self.reason = client, reason


def name_of(proxy: ClientProxy) -> str:
    """Return the name of the client behind a `NamedProxy`."""
    assert isinstance(proxy, NamedProxy)
    return proxy.name


def reasons(failures: Failures) -> dict[str, str]:
    """Return the reason for each failure of a known client, by client name."""
    by_client: dict[str, str] = {}
    for failure in failures:
        if isinstance(failure, ClientFailureError):
            reason = one_line(" ".join(failure.reason.split()))[:300]
            by_client[failure.client] = reason or "failed"
        elif isinstance(failure, tuple):
            proxy, result = failure
            by_client[name_of(proxy)] = one_line(result.status.message)[:300] or "failed"
    return by_client


def is_user_code_error(error: BaseException) -> bool:
    """Return whether an error was caused by a client's code, including user models."""
    if isinstance(error, UserModelError):
        return not isinstance(error.__cause__, MemoryError)
    return not isinstance(error, EXPECTED_ERRORS)


@dataclass(frozen=True)
class UserCodeFault:
    """Picklable description of an error in a client's code.

    Not every exception can be pickled. A bug in a user's method or model may first appear during
    training. Its traceback is shown once, shortened to the frames in user code; flower.log holds
    the full traceback.
    """

    reason: str
    """Type and message of the error, with its file and line."""
    user_frames: str
    """Traceback, shortened to the frames in user code."""
    traceback: str
    """Full traceback."""

    @classmethod
    def from_exception(cls, error: BaseException) -> UserCodeFault:
        """Describe an error that has been raised."""
        is_of_model = isinstance(error, UserModelError)
        raised = error.__cause__ if is_of_model else error
        frames = traceback.extract_tb(raised.__traceback__) if raised else []
        paths = [Path(frame.filename).resolve() for frame in frames]
        user_frames = [
            frame
            for frame, path in zip(frames, paths, strict=True)
            if path.is_file() and not any(path.is_relative_to(library) for library in _LIBRARIES)
        ] or frames[-MAX_LIBRARY_FRAMES:]
        place = ""
        if user_frames:
            place = f" ({Path(user_frames[-1].filename).name}, line {user_frames[-1].lineno})"
        return cls(
            f"{error_text(error) if is_of_model else describe_error(error)}{place}",
            "".join(traceback.format_list(user_frames)).rstrip(),
            "".join(traceback.format_exception(error)),
        )


class UserCodeError(Exception):
    """Raised if a client in a simulation failed because of an error in its code."""

    def __init__(self, fault: UserCodeFault) -> None:
        super().__init__(fault.reason)
        self.fault = fault


class UserCodeFaults:
    """Reporter that shows each distinct error in the clients' code once."""

    def __init__(self, notice: Callable[[str], None], *, strict: bool) -> None:
        """Create the reporter.

        Args:
            notice: Function that shows a message to the user.
            strict: Whether the first error ends the run.
        """
        self._notice, self._strict = notice, strict
        self._reported: set[str] = set()

    def report(self, errors: Iterable[object]) -> None:
        """Show new errors in user code among the errors of a round.

        If the reporter is strict, raises StateError for any such error.
        """
        causes = (getattr(error, "__cause__", None) or error for error in errors)
        for fault in [cause.fault for cause in causes if isinstance(cause, UserCodeError)]:
            if fault.reason in self._reported:
                continue
            self._reported.add(fault.reason)
            LOG.error("%s", fault.traceback)
            if self._strict:
                error = StateError(
                    f"a client's code failed: {fault.reason}. The run's flower.log contains the "
                    "full traceback. Use --no-strict to continue without such clients."
                )
                if fault.user_frames:
                    error.add_note(fault.user_frames)
                raise error
            for line in [*fault.user_frames.splitlines(), fault.reason]:
                self._notice(line)
