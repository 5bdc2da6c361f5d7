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
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from flwr.common import DisconnectRes, EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import (
    DropOutError,
    FedhetError,
    StateError,
    UserModelError,
    describe_error,
    error_text,
)
from fedhet.runs.measures import MISSING_BASE, Measured
from fedhet.wire.knowledge import Knowledge

if TYPE_CHECKING:
    from fedhet.server.reply import Magnitudes, ReplySpool

Message = FitIns | EvaluateIns
Result = FitRes | EvaluateRes
Failure = Literal["silent", "error", "refused"]
"""Kind of a client's failure in a round: no reply, a reported error, or a rejected reply."""
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


@dataclass(frozen=True, eq=False)
class CallOutcome:
    """The outcome of a finished call: the client's decoded reply, or the reason of the failure."""

    client: str
    """The client's name."""
    round: int
    """The round of the message."""
    knowledge: Knowledge = field(default_factory=Knowledge, repr=False)
    """Content of the reply to an instruction to train; empty if `is_stored_late` is True."""
    measured: Measured = field(default_factory=lambda: Measured({}), repr=False)
    """Metrics and durations that the client reported; empty if `is_stored_late` is True."""
    magnitudes: Magnitudes | None = field(default=None, repr=False)
    """Magnitudes of `knowledge`, if they have been measured."""
    samples_processed: float = 0.0
    """Reported number of training samples processed."""
    bytes_received: int = 0
    """Size of the reply as it was received, in bytes."""
    error: str = ""
    """Reason why there is no valid reply, or "" if the reply is valid."""
    failure: Failure | None = None
    """Kind of the failure; None if the reply is valid, or if the client is not at fault."""
    evaluation: CallOutcome | None = field(default=None, repr=False)
    """Outcome of the evaluation of the previous round, if the message requested one."""
    code_fault: UserCodeFault | None = None
    """Error in the client's code that caused the failure (simulations only)."""
    received_at: float = math.inf
    """Time of arrival, as returned by `time.monotonic`; infinity if an earlier process received the
    reply."""
    is_late: bool = False
    """Whether the round of the call had closed when the reply arrived."""

    def failed(self, error: BaseException) -> CallOutcome:
        """Return the outcome of the same call if `error` is the reason that there is no reply."""
        fault = error.fault if isinstance(error, UserCodeError) else None
        reason = error_text(error)[:300] or "failed"
        return replace(self, error=reason, failure="silent", code_fault=fault)

    @property
    def is_reply(self) -> bool:
        """Whether the client replied without reporting an error; its reply may be invalid."""
        return not self.error or self.failure == "refused"

    @property
    def is_stored_late(self) -> bool:
        """Whether the content of a late reply to an instruction to train is stored on disk."""
        return self.is_late and self.failure != "silent"


class NamedProxy:
    """Recipient of one message: a client's name, and the connection to the client.

    `MethodStrategy` returns pairs of such a recipient and a message, as Flower's strategies do.
    """

    def __init__(
        self,
        name: str,
        proxy: ClientProxy,
        read: Callable[[Result, int], CallOutcome],
        *,
        on_reply: OnReply = lambda name, error: None,
        message_without_base: Callable[[], Parameters | None] = lambda: None,
        spool: ReplySpool | None = None,
        make_payload: Callable[[], Parameters] | None = None,
        turn: contextlib.AbstractContextManager[object] | None = None,
    ) -> None:
        """Create the recipient.

        Args:
            name: The client's name.
            proxy: Flower's proxy of the client.
            read: Function that decodes the client's result for a round.
            on_reply: Called when the client has replied to an instruction to train.
            message_without_base: Function that returns the message with full weights, or None if
                the message has no base weights.
            spool: Store for the weights of replies on disk; None keeps the weights in memory.
            make_payload: Function that builds the payload of a large message once `turn` is
                acquired.
            turn: Semaphore that limits the number of large messages that exist at the same time.
        """
        self.name, self._proxy, self.read = name, proxy, read
        self._on_reply, self._message_without_base = on_reply, message_without_base
        self._spool, self.make_payload = spool, make_payload
        self._turn = turn or contextlib.nullcontext()

    def send(
        self,
        message: Message,
        timeout: float | None,
        round: int,
        is_on_time: Callable[[], bool] = lambda: True,
    ) -> CallOutcome:
        """Send a message, and return the outcome with the client's decoded reply.

        Args:
            message: The instruction to train or to evaluate.
            timeout: Time limit in seconds, or None for no limit.
            round: The round of the message.
            is_on_time: Called when a training reply has arrived. If it returns True, the weights
                in the reply are moved to the spool.
        """
        try:
            with self._turn:
                outcome = self.read(self.request(message, timeout, round), round)
                if isinstance(message, FitIns) and is_on_time() and self._spool:
                    outcome = self._spool.put(outcome)
        except Exception as error:
            outcome = CallOutcome(self.name, round).failed(error)
        if isinstance(message, FitIns):
            self._on_reply(self.name, outcome.error)
        return outcome

    def request(self, message: Message, timeout: float | None, round: int) -> Result:
        """Send a message, and return Flower's result.

        A client that lacks the base weights of the message receives the message with full weights.
        """
        is_training = isinstance(message, FitIns)
        call: Callable[..., Result] = self._proxy.fit if is_training else self._proxy.evaluate
        if self.make_payload is not None:
            message = replace(message, parameters=self.make_payload())
        result = call(message, timeout, round)
        if result.metrics.get(MISSING_BASE) is True and (full := self._message_without_base()):
            result = call(replace(message, parameters=full), timeout, round)
        return result


@dataclass(frozen=True, eq=False)
class Call:
    """A call to one client, i.e. the message and its recipient."""

    recipient: NamedProxy
    round: int
    """The round of the message."""
    message: Message
    timeout: float | None = None

    @property
    def name(self) -> str:
        """The client's name."""
        return self.recipient.name


@dataclass
class RoundResults:
    """Outcomes of the calls that finished before a round closed."""

    outcomes: list[CallOutcome] = field(default_factory=list)
    canceled: set[str] = field(default_factory=set)
    """Clients that were not called, because the round closed before their turn."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time that each client took on the run's clock, in seconds."""
    clock: float = math.nan
    """Simulated seconds since the start of the run."""


class CallPool:
    """Thread pool for the client calls of one run."""

    def __init__(
        self, max_concurrent: int, store_late_reply: Callable[[CallOutcome], CallOutcome]
    ) -> None:
        """Create the pool; its threads start on demand.

        Args:
            max_concurrent: Maximum number of clients called at the same time.
            store_late_reply: Function that stores a late training reply on disk, and returns the
                outcome without the content of the reply.
        """
        self.max_concurrent, self._store_late_reply = max_concurrent, store_late_reply
        self._pending: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._finished: queue.SimpleQueue[tuple[Call, CallOutcome]] = queue.SimpleQueue()
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
            call, outcome = self._finished.get(timeout=None if math.isinf(timeout) else timeout)
        except queue.Empty:
            return None
        with self._lock:
            self._is_late.pop(call, None)
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
            self._finished.put((call, self._run(call)))
            del call  # An idle thread must not keep a message in memory.

    def _run(self, call: Call) -> CallOutcome:
        def is_on_time() -> bool:
            """Return whether the reply is on time. Once decided, the result does not change."""
            with self._lock:
                return not self._is_late.setdefault(call, False)

        try:
            outcome = call.recipient.send(call.message, call.timeout, call.round, is_on_time)
            is_training = isinstance(call.message, FitIns)
            if is_training and outcome.failure != "silent" and not is_on_time():
                outcome = self._store_late_reply(outcome)
        except BaseException as error:  # Report every failure to the round.
            outcome = CallOutcome(call.name, call.round).failed(error)
        return replace(outcome, received_at=time.monotonic(), is_late=not is_on_time())


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

    def report(self, faults: Iterable[UserCodeFault | None]) -> None:
        """Show the new errors in user code; None stands for a call without such an error.

        If the reporter is strict, raises StateError for any such error.
        """
        for fault in faults:
            if fault is None or fault.reason in self._reported:
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
