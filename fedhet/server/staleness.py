"""Carries the changes that clients made to older weights over to the server's weights of now."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from fedhet.base.arrays import Array, Arrays, OnDemand
from fedhet.methods.spec import MethodSpec
from fedhet.pace.staleness import buffered_rate, carried_over
from fedhet.server.reply import Reply
from fedhet.settings.engine import PaceSettings
from fedhet.wire.contract import VARIANCES, Contract, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

Now = Callable[[ClientInfo], Knowledge]
"""Returns what a client would be sent now."""


class CarriedOver:
    """A step that replies pass: a late client's weights become those of now plus its change.

    So an average moves the weights by the mean change (FedBuff), and does not draw them back to an
    older version. A client that was sent no weights, or of other shapes, keeps its own.
    """

    def __init__(self, pace: PaceSettings, contract: Contract, now: Now) -> None:
        """`contract` is that of the replies."""
        self._pace, self._now = pace, now
        # Of factors, whose kind is another, changes are sent already.
        self._fields = [f for f in contract.fields if type(f) is WeightsField and not f.stacked]

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies; asynchronously, the rate of FedBuff needs all of them."""
        if not self._pace.is_asynchronous:
            yield from (self._carried(reply, 1.0) if reply.age else reply for reply in replies)
            return
        found = list(replies)
        samples, ages = [reply.samples for reply in found], [reply.age for reply in found]
        rate = buffered_rate(samples, ages, self._pace.server_lr)
        yield from (self._carried(reply, rate) for reply in found)

    def _carried(self, reply: Reply, rate: float) -> Reply:
        if not self._fields or reply.sent is None or (rate == 1 and not reply.age):
            return reply
        now, sources = self._now(reply.client), dict[str, Array | Callable[[], Array]]()
        for field in self._fields:
            own = reply.knowledge.group(field.name)
            groups: Sequence[Arrays] = [now.group(field.name), reply.sent.group(field.name)]
            if own and all(_fits(own, each) for each in groups):
                for name in own:
                    low = 0.0 if name.endswith(VARIANCES) else field.low
                    make = partial(_moved, groups[0], own, groups[1], name, rate, low)
                    sources[f"{field.name}/{name}"] = make
        return reply.with_knowledge(_replacing(reply.knowledge, sources)) if sources else reply


def carried_over_by(pace: PaceSettings, spec: MethodSpec, now: Now) -> list[CarriedOver]:
    """Return the step in a list, or none where no reply can be late, or has no average to enter."""
    applies = pace.may_be_late and spec.late == "averaged"
    return [CarriedOver(pace, spec.replies, now)] if applies else []


def _moved(
    now: Arrays, own: Arrays, sent: Arrays, name: str, rate: float, low: float | None
) -> Array:
    return carried_over(now[name], own[name], sent[name], rate, low)


def _fits(own: Arrays, other: Arrays) -> bool:
    """Return whether two models have the same tensors."""
    return own.keys() == other.keys() and all(own[k].shape == other[k].shape for k in own)


def _replacing(knowledge: Knowledge, sources: dict[str, Array | Callable[[], Array]]) -> Knowledge:
    """Return the same knowledge, of which some tensors are made each time they are used."""
    own = knowledge.tensors
    kept = own.sources if isinstance(own, OnDemand) else dict(own)
    return Knowledge(OnDemand({**kept, **sources}), knowledge.scalars)
