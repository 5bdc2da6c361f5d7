"""A client as the strategy sees it: Flower's proxy with the client's name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace

from flwr.common import EvaluateIns, EvaluateRes, FitIns, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import one_line, words_of
from fedhet.runs.measures import LACKS
from fedhet.server.members import Member
from fedhet.server.reply_spool import ReplySpool
from fedhet.wire.knowledge import payload_bytes

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
