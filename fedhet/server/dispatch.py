"""Sends instructions: Flower gets each client's proxy, which knows its name, and a payload."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial

from flwr.common import EvaluateIns, Parameters, Scalar

from fedhet.methods.spec import MethodSpec
from fedhet.server.direct_proxy import DirectProxy
from fedhet.server.exchange import Exchange
from fedhet.server.members import Member
from fedhet.server.proxy import Group, NamedProxy, OnAnswer
from fedhet.server.reply_spool import ReplySpool
from fedhet.settings.run import RunSettings
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
        together: int = 1,
    ) -> None:
        """`spool`: where replies are written, None: they stay in memory.

        `at_once`: the most clients that have an instruction of their own at a time, each made just
        before it is sent; None: all instructions are made before the first is sent.

        `together`: up to so many clients of one architecture train as one, if all instructions are
        made before and the clients are called by this process.
        """
        self._exchange, self._on_answer, self._spool = exchange, on_answer, spool
        self._together = together
        self._turns = None if at_once is None else threading.BoundedSemaphore(at_once)

    def to_train(
        self, round: int, members: Sequence[Member], instruct: Instruct
    ) -> Iterator[tuple[NamedProxy, Parameters]]:
        """Yield the proxy and the payload of each member's instruction."""
        if self._turns is None:
            made = {member.info.name: instruct(round, member.info) for member in members}
            payloads = self._exchange.encode_all(round, made)
            proxies = {self._proxy(member): payloads[member.info.name] for member in members}
            yield from self._grouped(members, proxies).items()
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

    def _grouped(
        self, members: Sequence[Member], payloads: Mapping[NamedProxy, Parameters]
    ) -> Mapping[NamedProxy, Parameters]:
        """Return the payloads, the first client of each group in front: it trains the others too.

        Which clients train together depends on who is asked alone, and not on when.
        """
        if self._together < 2:
            return payloads
        like: dict[Hashable, list[NamedProxy]] = {}
        for member, proxy in zip(members, payloads, strict=True):
            if isinstance(member.proxy, DirectProxy):
                like.setdefault(_kind(member), []).append(proxy)
        groups = [part for each in like.values() for part in _parts(each, self._together)]
        for proxies in groups:
            if len(proxies) > 1:
                group = Group({proxy: payloads[proxy] for proxy in proxies})
                for proxy in proxies:
                    proxy.group = group
        first = [proxies[0] for proxies in groups]
        return {proxy: payloads[proxy] for proxy in dict.fromkeys([*first, *payloads])}

    def _payload(self, round: int, client: ClientInfo, instruct: Instruct) -> Parameters:
        return self._exchange.encode(round, client.name, instruct(round, client))

    def _proxy(self, member: Member) -> NamedProxy:
        proxy = NamedProxy(member, self._on_answer, self._spool)
        proxy.again = partial(self._exchange.again, member.info.name)
        return proxy


def _told(unseen: bool) -> dict[str, Scalar]:
    return {"unseen": True} if unseen else {}


def _kind(member: Member) -> Hashable:
    info = member.info
    return type(member.proxy), info.model, info.shape, info.classes


def _parts(proxies: Sequence[NamedProxy], most: int) -> list[Sequence[NamedProxy]]:
    """Return the proxies in parts of `most`, the last of which may have fewer."""
    return [proxies[start : start + most] for start in range(0, len(proxies), most)]


def together_of(spec: MethodSpec, run: RunSettings) -> int:
    """Return how many clients may train as one: 1 where the method or a setting needs each alone.

    A privacy promise clips each sample's gradient. A straggler would delay its companions, and a
    client whose answer a round does not await, or which is withdrawn, must not depend on others.
    """
    paced = run.pace.stragglers or (run.pace.may_be_late and not run.pace.is_simulated)
    apart = run.privacy.is_on or paced or run.training.semi != "none"
    return run.engine.together if spec.together and not apart else 1
