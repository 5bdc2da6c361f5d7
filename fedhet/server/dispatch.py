"""Sends instructions: Flower gets each client's proxy, which knows its name, and a payload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from flwr.common import EvaluateIns, Parameters, Scalar

from fedhet.server.calls import NamedProxy, OnAnswer
from fedhet.server.codec import Exchange
from fedhet.server.members import Member
from fedhet.server.reply import ReplySpool
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

NOTHING = Parameters(tensors=[], tensor_type="numpy.ndarray")
Instruct = Callable[[int, ClientInfo], Knowledge]
"""Returns the instruction of a round for a client."""


class Dispatch:
    """Makes the messages of one run to its clients."""

    def __init__(
        self,
        exchange: Exchange,
        on_answer: OnAnswer,
        spool: ReplySpool | None = None,
        at_once: int | None = None,
    ) -> None:
        """`spool`: where replies are written, None: they stay in memory.

        `at_once`: the most clients that have an instruction of their own at a time, each made just
        before it is sent; None: all instructions are made before the first is sent.
        """
        self._exchange, self._on_answer, self._spool = exchange, on_answer, spool
        self._turns = None if at_once is None else threading.BoundedSemaphore(at_once)

    def to_train(
        self, round: int, members: Sequence[Member], instruct: Instruct
    ) -> Iterator[tuple[NamedProxy, Parameters]]:
        """Yield the proxy and the payload of each member's instruction."""
        if self._turns is None:
            made = {member.info.name: instruct(round, member.info) for member in members}
            payloads = self._exchange.encode_all(round, made)
            yield from ((self._proxy(member), payloads[member.info.name]) for member in members)
            return
        for member in members:
            proxy = self._proxy(member)
            proxy.instruction = partial(self._payload, round, member.info, instruct)
            proxy.turn = self._turns
            yield proxy, NOTHING

    def to_evaluate(
        self,
        round: int,
        members: Mapping[str, Member],
        instructions: Mapping[str, Knowledge],
        unseen: Collection[str] = (),
    ) -> list[tuple[NamedProxy, EvaluateIns]]:
        """Return the proxy of each client in `instructions`, with what it is sent.

        Those in `unseen` are told that nobody has trained with them.
        """
        payloads = self._exchange.encode_all(round, instructions, training=False)
        return [
            (self._proxy(members[name]), EvaluateIns(payload, _told(name in unseen)))
            for name, payload in payloads.items()
        ]

    def _payload(self, round: int, client: ClientInfo, instruct: Instruct) -> Parameters:
        return self._exchange.encode(round, client.name, instruct(round, client))

    def _proxy(self, member: Member) -> NamedProxy:
        proxy = NamedProxy(member, self._on_answer, self._spool)
        proxy.again = partial(self._exchange.again, member.info.name)
        return proxy


def _told(unseen: bool) -> dict[str, Scalar]:
    return {"unseen": True} if unseen else {}
