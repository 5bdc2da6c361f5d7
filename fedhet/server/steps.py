"""The steps that a round's replies pass, one after the other, before the method gets them.

A step takes the replies that the step before it lets through, and yields those that pass, changed
or not. It drops a reply by raising KnowledgeError inside `state.dropping`. A step that compares
replies holds all of them; the others take one at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from statistics import fmean
from typing import TypeVar

import numpy as np

from fedhet.base.arrays import Array, Arrays, OnDemand
from fedhet.base.errors import KnowledgeError
from fedhet.methods.spec import MethodSpec
from fedhet.server.attacks import IN_THE_PAPER, Attack, Hostile
from fedhet.server.defense import Defense
from fedhet.server.reply import (
    OF_STATISTICS,
    Magnitudes,
    Reply,
    from_outside,
    part_of,
    staleness_weight,
)
from fedhet.server.round import RoundState
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import VARIANCES, Contract, Sizes, TensorField, WeightsField
from fedhet.wire.factors import FactorsField, unpacked
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

Step = Callable[[Iterable[Reply]], Iterable[Reply]]
SizesOf = Callable[[ClientInfo], Sizes]
"""Returns the sizes that the fields of a client's reply must have."""
Now = Callable[[ClientInfo], Knowledge]
"""Returns what a client would be sent now."""


def checks(
    run: RunSettings,
    spec: MethodSpec,
    sizes: SizesOf,
    state: RoundState,
    members: Collection[str],
    now: Now,
) -> list[Step]:
    """Return the steps between decoding a reply and the method's `accept`, in their order.

    `members`: the names of the run's clients.

    The contract is checked again after an attack, whose replies the server would refuse as well.
    Changes that came as factors are compared, poisoned and averaged as whole tensors.
    """
    replies = spec.replies
    contract = partial(check_contract, contract=replies, sizes=sizes, state=state)
    steps: list[Step] = [contract]
    if any(isinstance(field, FactorsField) for field in replies.fields):
        steps.append(partial(multiply, contract=replies, sizes=sizes))
    if run.pace.may_be_late and spec.late == "averaged":
        steps.append(StaleUpdateRebase(run.pace, replies, now))
    if run.attack.kind in IN_THE_PAPER:
        steps += [Attack(run.attack, replies, run.seed, state, sizes), contract]
    elif run.attack.kind != "none":
        steps += [Hostile(run, replies, state, members), contract]
    if run.engine.outlier_factor:
        steps.append(partial(check_magnitude, factor=run.engine.outlier_factor, state=state))
    if run.defense.clip_factor:
        limit = run.defense.clip_factor
        steps.append(partial(clip, limit=limit, contract=replies, sizes=sizes, state=state))
    if run.defense.average != "mean":
        steps.append(Defense(run.defense, replies, state))
    return steps


def through(steps: Iterable[Step], replies: Iterable[Reply]) -> Iterable[Reply]:
    """Return the replies that pass all steps."""
    return reduce(lambda passed, step: step(passed), steps, replies)


def check_contract(
    replies: Iterable[Reply], *, contract: Contract, sizes: SizesOf, state: RoundState
) -> Iterator[Reply]:
    """Yield the replies that satisfy the contract; drop the others."""
    for reply in replies:
        name, knowledge = reply.client.name, reply.knowledge
        with state.dropping(name):
            wanted = sizes(reply.client)
            with from_outside(name):
                contract.check(name, knowledge.tensors, knowledge.scalars, wanted)
            yield reply


def multiply(replies: Iterable[Reply], *, contract: Contract, sizes: SizesOf) -> Iterator[Reply]:
    """Yield the replies with the changes of which they hold factors."""
    for reply in replies:
        whole = with_whole_changes(reply.knowledge, contract, sizes(reply.client))
        yield reply.with_knowledge(whole)


def with_whole_changes(knowledge: Knowledge, fields: Contract, sizes: Sizes) -> Knowledge:
    """Return a checked message with all changes as whole tensors, made when they are used."""
    own = knowledge.tensors
    factored = [field.name for field in fields.fields if isinstance(field, FactorsField)]
    sources: dict[str, Array | Callable[[], Array]] = {
        name: partial(own.__getitem__, name)
        for name in own
        if name.partition("/")[0] not in factored
    }
    for field in factored:
        changes = unpacked(knowledge.group(field), sizes.models[field])
        sources |= {f"{field}/{name}": partial(changes.__getitem__, name) for name in changes}
    return Knowledge(OnDemand(sources), knowledge.scalars)


def check_magnitude(
    replies: Iterable[Reply], *, factor: float, state: RoundState
) -> Iterator[Reply]:
    """Yield the replies in proportion to the others of the round; drop the others.

    `factor` is 'engine.outlier-factor'.
    """
    replies = list(replies)
    magnitudes = {reply.client.name: reply.magnitudes() for reply in replies}
    state.magnitudes = magnitudes
    odd = out_of_proportion(magnitudes, state.rollback.usual, factor)
    for reply in replies:
        with state.dropping(reply.client.name):
            if reply.client.name in odd:
                raise odd[reply.client.name]
            yield reply


SPREAD = 2.5
"""How many times as far as weights of one architecture others may lie apart: see `clip`."""


def clip(
    replies: Iterable[Reply], *, limit: float, contract: Contract, sizes: SizesOf, state: RoundState
) -> Iterator[Reply]:
    """Yield the replies, each part scaled down if it is too large beside the other clients'.

    Weights may be `limit` times the median, features and logits `SPREAD` times that: they come from
    different architectures.
    """
    found, weights = {reply.client.name: reply for reply in replies}, contract.weights
    all_ratios = ratios(list(found.values()), contract, sizes)
    for name, reply in found.items():
        excess = {
            part: ratio / most
            for part, ratio in all_ratios.get(name, {}).items()
            if ratio
            > (most := limit * (1 if part.removeprefix(OF_STATISTICS) in weights else SPREAD))
        }
        if excess:
            which = ", ".join(f"{part} by {by:.3g}" for part, by in sorted(excess.items()))
            state.notice(
                f"client {name}'s reply in round {state.record.round} is scaled down, as it is "
                f"larger than 'defense.clip-factor' allows: {which}"
            )
            yield reply.with_knowledge(scaled_down(reply.knowledge, excess))
        else:
            yield reply


def ratios(
    replies: Sequence[Reply], contract: Contract, sizes: SizesOf
) -> dict[str, dict[str, float]]:
    """Return how large the parts of each client's reply are, in times of the others' median.

    Weights are compared between models of one architecture, as a perceptron's are no measure of a
    residual network's; a client whose architecture nobody else has is compared with nobody.
    Probabilities and other tensors with a range of their own are never too large.
    """
    fields = {field.name: field for field in contract.fields}
    magnitudes: dict[str, dict[tuple[str, object], float]] = {}
    for reply in replies:
        models, own = sizes(reply.client).models, magnitudes.setdefault(reply.client.name, {})
        for part, size in reply.magnitudes().items():
            field = fields[part.removeprefix(OF_STATISTICS)]
            architecture: object = None
            if isinstance(field, TensorField):
                if field.distribution or field.low is not None:
                    continue
            elif isinstance(field, WeightsField):
                shapes = models.get(field.name, {})
                architecture = tuple(shapes) if field.nested else tuple(shapes.items())
            own[part, architecture] = size
    found: dict[str, dict[str, float]] = {}
    for name, (part, _), size, others in _beside_the_others(magnitudes):
        if others:
            found.setdefault(name, {})[part] = size / max(*others, MIN_REFERENCE)
    return found


def buffered_rate(samples: Sequence[float], ages: Sequence[int], server_lr: float) -> float:
    """Return the factor of the mean change that makes an average FedBuff's step.

    An average with weights n_k s(tau_k) divides by their sum. FedBuff divides by the buffer's size
    (Algorithm 1, lines 8 to 12: w <- w + eta / K sum_k s(tau_k) Delta_k; here each client counts by
    its samples n_k), so that a buffer of old changes moves the weights less.
    """
    aged = [n * staleness_weight(age) for n, age in zip(samples, ages, strict=True)]
    return server_lr * sum(aged) / sum(samples) if sum(samples) > 0 else server_lr


def carried_over(now: Array, trained: Array, start: Array, rate: float, low: float | None) -> Array:
    """Return the server's tensor of now plus `rate` times a client's change of an older one.

    That is now + rate (trained - start), not below `low`; counters stay as the client has them.
    """
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    change = trained.astype(np.float64) - start
    moved = now + rate * change
    return np.asarray(moved if low is None else moved.clip(min=low), dtype=trained.dtype)


class StaleUpdateRebase:
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
            there, sent = now.group(field.name), reply.sent.group(field.name)
            if own and all(
                own.keys() == each.keys() and all(own[k].shape == each[k].shape for k in own)
                for each in (there, sent)
            ):
                for name in own:
                    low = 0.0 if name.endswith(VARIANCES) else field.low
                    make = partial(_moved, there, own, sent, name, rate, low)
                    sources[f"{field.name}/{name}"] = make
        if not sources:
            return reply
        tensors = reply.knowledge.tensors
        kept = tensors.sources if isinstance(tensors, OnDemand) else tensors
        changed = Knowledge(OnDemand({**kept, **sources}), reply.knowledge.scalars)
        return reply.with_knowledge(changed)


def _moved(
    now: Arrays, own: Arrays, sent: Arrays, name: str, rate: float, low: float | None
) -> Array:
    return carried_over(now[name], own[name], sent[name], rate, low)


MIN_REFERENCE = 0.01
"""A root mean square to which others may always be compared: a reply of zeros makes nobody odd."""


def out_of_proportion(
    magnitudes: Mapping[str, Magnitudes], usual: Magnitudes, factor: float
) -> dict[str, KnowledgeError]:
    """Return the clients whose replies are out of proportion, with the error that says so.

    `magnitudes`: by client, those of a round's replies; `usual`: the last round's medians. A field
    is compared with the larger of the other clients' median and the usual one. With two clients
    the larger is thus refused: it is the one that does harm. No client is judged by its own reply,
    so nothing is refused where there is nothing to compare with.
    """
    found: dict[str, KnowledgeError] = {}
    for name, field, size, others in _beside_the_others(magnitudes):
        known = [*others, *([usual[field]] if field in usual else [])]
        if known and size > factor * max(*known, MIN_REFERENCE):
            fault = (
                f"its root mean square is {size:.3g}, the other clients' {max(known):.3g}: more "
                f"than 'engine.outlier-factor' = {factor:g} times as large"
            )
            found.setdefault(name, KnowledgeError(name, field, fault))
    return found


def scaled_down(knowledge: Knowledge, excess: Mapping[str, float]) -> Knowledge:
    """Return a reply with the floating-point tensors of each part in `excess` divided by it.

    Those of a reply on disk are divided when they are used.
    """
    own = knowledge.tensors

    def divided(name: str) -> Array:
        value, by = own[name], excess.get(part_of(name))
        if by is None or not np.issubdtype(value.dtype, np.floating):
            return value
        return (value / by).astype(value.dtype)

    return Knowledge(OnDemand({name: partial(divided, name) for name in own}), knowledge.scalars)


Part = TypeVar("Part", bound=Hashable)


def _beside_the_others(
    magnitudes: Mapping[str, Mapping[Part, float]],
) -> Iterator[tuple[str, Part, float, tuple[float, ...]]]:
    """Yield each client's parts: name, part, size, and the median of the others, if any.

    A median without one's own is a look-up in the sorted sizes: ten thousand clients cost no more
    each than ten do.
    """
    ordered: dict[Part, list[float]] = {}
    for parts in magnitudes.values():
        for part, size in parts.items():
            ordered.setdefault(part, []).append(size)
    for sizes in ordered.values():
        sizes.sort()
    for name, parts in magnitudes.items():
        for part, size in parts.items():
            others, sizes = len(ordered[part]) - 1, ordered[part]
            own, middle = bisect_left(sizes, size), {(others - 1) // 2, others // 2}
            median = (fmean(sizes[at + (at >= own)] for at in middle),) if others else ()
            yield name, part, size, median
