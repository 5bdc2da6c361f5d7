"""The steps that a round's replies pass, one after the other, before the method gets them.

A step takes the replies that the step before it lets through, and yields those that pass, changed
or not. It drops a reply by raising KnowledgeError inside `state.dropping`. A step that compares
replies holds all of them; the others take one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial, reduce

from fedhet.base.arrays import Array, OnDemand
from fedhet.server.attacks import IN_THE_PAPER, Attack
from fedhet.server.defence import Defence
from fedhet.server.hostile import Hostile
from fedhet.server.magnitudes import excesses, out_of_proportion, scaled_down
from fedhet.server.reply import Reply, from_outside
from fedhet.server.round import RoundState
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import Contract, Sizes, TensorField
from fedhet.wire.factors import FactorsField, unpacked
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

Step = Callable[[Iterable[Reply]], Iterable[Reply]]
SizesOf = Callable[[ClientInfo], Sizes]
"""Returns the sizes that the fields of a client's reply must have."""


def checks(
    run: RunSettings,
    replies: Contract,
    sizes: SizesOf,
    state: RoundState,
    members: Collection[str] = (),
    late: Iterable[Step] = (),
) -> list[Step]:
    """Return the steps between decoding a reply and the method's `accept`, in their order.

    `members`: the names of the run's clients. `late`: what is done with replies that are late.

    The contract is checked again after an attack, whose replies the server would refuse as well.
    Changes that came as factors are compared, poisoned and averaged as whole tensors.
    """
    contract = partial(check_contract, contract=replies, sizes=sizes, state=state)
    steps: list[Step] = [contract]
    if any(isinstance(field, FactorsField) for field in replies.fields):
        steps.append(partial(multiply, contract=replies, sizes=sizes))
    steps += late
    if run.attack.kind != "none":
        steps += [_attack(run, replies, sizes, state, members), contract]
    if run.engine.outlier_factor:
        steps.append(partial(check_magnitude, factor=run.engine.outlier_factor, state=state))
    if run.defence.clip_factor:
        steps.append(partial(clip, limit=run.defence.clip_factor, contract=replies, state=state))
    if run.defence.average != "mean":
        steps.append(Defence(run.defence, replies, state))
    return steps


def _attack(
    run: RunSettings,
    replies: Contract,
    sizes: SizesOf,
    state: RoundState,
    members: Collection[str],
) -> Step:
    if run.attack.kind in IN_THE_PAPER:
        return Attack(run.attack, replies, run.seed, state, sizes)
    return Hostile(run, replies, state, members)


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
    state.compared(magnitudes)
    odd = out_of_proportion(magnitudes, state.usual, factor)
    for reply in replies:
        with state.dropping(reply.client.name):
            if reply.client.name in odd:
                raise odd[reply.client.name]
            yield reply


def clip(
    replies: Iterable[Reply], *, limit: float, contract: Contract, state: RoundState
) -> Iterator[Reply]:
    """Yield the replies, each field scaled down to `limit` times the other clients' median.

    Probabilities and other tensors with a range of their own stay as they are.
    """
    found = {reply.client.name: reply for reply in replies}
    exempt = [
        f.name
        for f in contract.fields
        if isinstance(f, TensorField) and (f.distribution or f.low is not None)
    ]
    excess = excesses({name: each.magnitudes() for name, each in found.items()}, limit, exempt)
    for name, reply in found.items():
        if name in excess:
            state.scaled_down(name, excess[name])
            yield reply.with_knowledge(scaled_down(reply.knowledge, excess[name]))
        else:
            yield reply
