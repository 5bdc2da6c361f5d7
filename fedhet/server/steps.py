"""Processing steps for the replies of a round, before the method receives them.

A step is a function from replies to replies. It may change replies, and it drops a reply by raising
KnowledgeError inside `state.drop_on_error`. Steps that compare replies hold all replies in memory;
all other steps process one reply at a time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TypeVar

import numpy as np

from fedhet.algorithms.rounds import rebase
from fedhet.base.arrays import Array, Arrays, OnDemand
from fedhet.base.errors import KnowledgeError
from fedhet.methods.spec import MethodSpec
from fedhet.server.attacks import IN_THE_PAPER, Attack, ByzantineClients
from fedhet.server.defense import Defense
from fedhet.server.reply import STATISTICS_OF, Magnitudes, Reply, from_outside, part_of
from fedhet.server.round import RoundState
from fedhet.server.unmasking import SizesOf, Unmasking
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import VARIANCES, Contract, TensorField, WeightsField, check_values
from fedhet.wire.factors import FactorsField, unpacked
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge
from fedhet.wire.masking import MASKED_CONTRACT

Step = Callable[[Iterable[Reply]], Iterable[Reply]]
MakeInstruction = Callable[[ClientInfo], Knowledge]
"""Function that returns the instruction for a client in the current round."""
Part = TypeVar("Part", bound=Hashable)

MIN_REFERENCE = 0.01
"""Lower bound for reference magnitudes, so that all-zero replies make no other reply an outlier."""
CROSS_ARCHITECTURE_FACTOR = 2.5
"""Factor by which 'defense.clip-factor' is multiplied for features and logits, which `clip`
compares between different architectures."""


def steps_of(
    run: RunSettings,
    spec: MethodSpec,
    sizes: SizesOf,
    state: RoundState,
    members: Collection[str],
    instruct: MakeInstruction,
    unmasking: Unmasking | None = None,
) -> list[Step]:
    """Return the steps between the decoding of a reply and the method's `accept`, in order.

    The contract is checked again after an attack, because the server would also reject a malicious
    reply that violates the contract. Updates sent as factors are expanded before replies are
    compared, attacked, or averaged.

    Args:
        run: Settings of the run.
        spec: Declaration of the method.
        sizes: Function that returns the required sizes of a client's reply.
        state: State of the round.
        members: Names of the clients of the run.
        instruct: Function that returns the current instruction for a client.
        unmasking: Step that replaces masked replies with their sums, or None without secure
            aggregation. With secure aggregation, attacks and steps that compare individual replies
            are excluded.
    """
    replies = spec.replies
    contract = partial(check_contract, contract=replies, sizes=sizes, state=state)
    if unmasking is not None:
        shapes = partial(unmasking.masked_sizes, sizes=sizes)
        masked = partial(check_contract, contract=MASKED_CONTRACT, sizes=shapes, state=state)
        limit = run.engine.outlier_factor
        magnitude = [partial(check_magnitude, factor=limit, state=state)] if limit else []
        return [masked, partial(unmasking, sizes=sizes), contract, *magnitude]
    steps: list[Step] = [contract]
    if any(isinstance(field, FactorsField) for field in replies.fields):
        steps.append(partial(expand_factors, contract=replies, sizes=sizes, state=state))
    if run.pace.may_be_late and spec.late == "averaged":
        steps.append(StaleUpdateRebase(run.pace, replies, instruct))
    if run.attack.kind in IN_THE_PAPER:
        steps += [Attack(run.attack, replies, run.seed, state, sizes), contract]
    elif run.attack.kind != "none":
        steps += [ByzantineClients(run, replies, state, members), contract]
    if run.engine.outlier_factor:
        steps.append(partial(check_magnitude, factor=run.engine.outlier_factor, state=state))
    if run.defense.clip_factor:
        limit = run.defense.clip_factor
        steps.append(partial(clip, limit=limit, contract=replies, sizes=sizes, state=state))
    if run.defense.average != "mean":
        steps.append(Defense(run.defense, replies, state))
    return steps


def check_contract(
    replies: Iterable[Reply], *, contract: Contract, sizes: SizesOf, state: RoundState
) -> Iterator[Reply]:
    """Drop replies that violate the contract."""
    for reply in replies:
        name, knowledge = reply.client.name, reply.knowledge
        with state.drop_on_error(name):
            required = sizes(reply.client)
            with from_outside(name):
                contract.check(name, knowledge.tensors, knowledge.scalars, required)
            yield reply


def expand_factors(
    replies: Iterable[Reply], *, contract: Contract, sizes: SizesOf, state: RoundState
) -> Iterator[Reply]:
    """Replace low-rank factors in checked replies with full updates, computed on access.

    Drops replies whose updates are too large. The factors are within the limits of the contract,
    but their product may not be.
    """
    factored = [field.name for field in contract.fields if isinstance(field, FactorsField)]
    for reply in replies:
        tensors = reply.knowledge.tensors
        sources: dict[str, Array | Callable[[], Array]] = {
            name: partial(tensors.__getitem__, name)
            for name in tensors
            if name.partition("/")[0] not in factored
        }
        for field in factored:
            shapes = sizes(reply.client).models[field]
            updates = unpacked(reply.knowledge.group(field), shapes)
            sources |= {f"{field}/{name}": partial(updates.__getitem__, name) for name in updates}
        with state.drop_on_error(reply.client.name):
            for name, make in sources.items():
                if callable(make) and name.partition("/")[0] in factored:
                    with np.errstate(over="ignore", invalid="ignore"):
                        check_values(reply.client.name, name, make())
            yield reply.with_knowledge(Knowledge(OnDemand(sources), reply.knowledge.scalars))


class StaleUpdateRebase:
    """Step that rebases late updates, i.e. adds each client's update to the current weights.

    An average then moves the weights by the mean update (FedBuff) instead of pulling them back
    toward an older version. A client's weights are unchanged if its instruction had no weights or
    weights with other shapes.

    In asynchronous rounds, each update is also multiplied by FedBuff's factor for its age. The
    average over any set of clients, such as the clients of an architecture, is then FedBuff's step
    for these clients.
    """

    def __init__(self, pace: PaceSettings, contract: Contract, instruct: MakeInstruction) -> None:
        self._pace, self._instruct = pace, instruct
        # Fields of type FactorsField already contain updates, so they need no current weights.
        self._fields = [f for f in contract.fields if type(f) is WeightsField and not f.stacked]
        self._updates = [f.name for f in contract.fields if isinstance(f, FactorsField)]

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the rebased replies."""
        for reply in replies:
            if self._pace.is_asynchronous:
                yield self._rebase(reply, self._pace.server_lr * reply.freshness)
            else:
                yield self._rebase(reply, 1.0)

    def _rebase(self, reply: Reply, rate: float) -> Reply:
        """Return a reply with its update multiplied by `rate` and added to the current weights."""
        if rate == 1 and not reply.age:
            return reply
        sources = dict[str, Array | Callable[[], Array]]()
        if self._fields and reply.sent is not None:
            sources |= self._rebased_weights(reply, reply.sent, rate)
        if self._pace.is_asynchronous:
            for field in self._updates:
                update = reply.knowledge.group(field)
                sources |= {f"{field}/{n}": partial(_scaled, update, n, rate) for n in update}
        if not sources:
            return reply
        tensors = reply.knowledge.tensors
        unchanged = tensors.sources if isinstance(tensors, OnDemand) else tensors
        rebased = Knowledge(OnDemand({**unchanged, **sources}), reply.knowledge.scalars)
        return replace(reply.with_knowledge(rebased), is_scaled=self._pace.is_asynchronous)

    def _rebased_weights(
        self, reply: Reply, sent: Knowledge, rate: float
    ) -> dict[str, Array | Callable[[], Array]]:
        """Return functions that compute the rebased weights of a reply to the instruction `sent`.

        The result has no entries for fields that are missing or have other shapes in one message.
        """
        instruction = self._instruct(reply.client)
        sources = dict[str, Array | Callable[[], Array]]()
        for field in self._fields:
            trained = reply.knowledge.group(field.name)
            current, start = instruction.group(field.name), sent.group(field.name)
            if trained and all(
                trained.keys() == other.keys()
                and all(trained[name].shape == other[name].shape for name in trained)
                for other in (current, start)
            ):
                for name in trained:
                    low = 0.0 if name.endswith(VARIANCES) else field.low
                    make = partial(_rebased, current, trained, start, name, rate, low)
                    sources[f"{field.name}/{name}"] = make
        return sources


def _rebased(
    current: Arrays, trained: Arrays, start: Arrays, name: str, rate: float, low: float | None
) -> Array:
    return rebase(current[name], trained[name], start[name], rate, low)


def _scaled(update: Arrays, name: str, rate: float) -> Array:
    value = update[name]
    if not np.issubdtype(value.dtype, np.floating):
        return value
    return (rate * value.astype(np.float64)).astype(value.dtype)


def check_magnitude(
    replies: Iterable[Reply], *, factor: float, state: RoundState
) -> Iterator[Reply]:
    """Drop replies in which the magnitude of a part exceeds `factor` times its reference.

    `factor` is the setting 'engine.outlier-factor'; `magnitude_errors` explains the reference.
    """
    replies = list(replies)
    magnitudes = {reply.client.name: reply.magnitudes() for reply in replies}
    state.record_magnitudes(magnitudes)
    errors = magnitude_errors(magnitudes, state.rollback.usual, factor)
    for reply in replies:
        with state.drop_on_error(reply.client.name):
            if reply.client.name in errors:
                raise errors[reply.client.name]
            yield reply


def magnitude_errors(
    magnitudes: Mapping[str, Magnitudes], usual: Magnitudes, factor: float
) -> dict[str, KnowledgeError]:
    """Return an error for each client whose reply is too large.

    Each part of a reply is compared with the larger of two references: the median of the other
    clients, and the usual magnitude. If there are only two clients, the larger reply is thus
    rejected, because a large reply is more harmful. A reply is never compared with itself, so a
    part without references is accepted.

    Args:
        magnitudes: Magnitudes of the round's replies, by client.
        usual: Median magnitude of each part in the last successful round.
        factor: Maximum ratio of a part's magnitude to its reference.
    """
    errors: dict[str, KnowledgeError] = {}
    for name, part, size, others in _with_medians_of_others(magnitudes):
        references = [*others, *([usual[part]] if part in usual else [])]
        if references and size > factor * max(*references, MIN_REFERENCE):
            fault = (
                f"its root mean square is {size:.3g}, more than 'engine.outlier-factor' = "
                f"{factor:g} times the median of {max(references):.3g}"
            )
            errors.setdefault(name, KnowledgeError(name, part, fault))
    return errors


def clip(
    replies: Iterable[Reply], *, limit: float, contract: Contract, sizes: SizesOf, state: RoundState
) -> Iterator[Reply]:
    """Scale down the parts of replies that are too large compared with the other clients' replies.

    Weights may be up to `limit` times as large as the median. For features and logits, `limit` is
    multiplied by CROSS_ARCHITECTURE_FACTOR, because they are computed by different architectures.
    """
    by_name = {reply.client.name: reply for reply in replies}
    ratios = magnitude_ratios(list(by_name.values()), contract, sizes)
    for name, reply in by_name.items():
        excess: dict[str, float] = {}
        for part, ratio in ratios.get(name, {}).items():
            is_weights = part.removeprefix(STATISTICS_OF) in contract.weights
            max_ratio = limit * (1 if is_weights else CROSS_ARCHITECTURE_FACTOR)
            if ratio > max_ratio:
                excess[part] = ratio / max_ratio
        if excess:
            factors = ", ".join(f"{part} by {by:.3g}" for part, by in sorted(excess.items()))
            state.notice(
                f"client {name}'s reply in round {state.record.round} is scaled down, because it "
                f"exceeds the limit of 'defense.clip-factor': {factors}"
            )
            yield reply.with_knowledge(scaled_down(reply.knowledge, excess))
        else:
            yield reply


def magnitude_ratios(
    replies: Sequence[Reply], contract: Contract, sizes: SizesOf
) -> dict[str, dict[str, float]]:
    """Return the ratios of each reply's magnitudes to the other clients' medians, by part.

    Weights are compared only between models with the same architecture, because weights of
    different architectures are unrelated. A client has no ratio for weights if no other client has
    its architecture. Probabilities and other tensors with a bounded range have no ratio.
    """
    fields = {field.name: field for field in contract.fields}
    magnitudes: dict[str, dict[tuple[str, object], float]] = {}
    for reply in replies:
        models = sizes(reply.client).models
        parts = magnitudes.setdefault(reply.client.name, {})
        for part, size in reply.magnitudes().items():
            field = fields[part.removeprefix(STATISTICS_OF)]
            architecture: object = None
            if isinstance(field, TensorField):
                if field.distribution or field.low is not None:
                    continue
            elif isinstance(field, WeightsField):
                shapes = models.get(field.name, {})
                architecture = tuple(shapes) if field.nested else tuple(shapes.items())
            parts[part, architecture] = size
    ratios: dict[str, dict[str, float]] = {}
    for name, (part, _), size, others in _with_medians_of_others(magnitudes):
        if others:
            ratios.setdefault(name, {})[part] = size / max(*others, MIN_REFERENCE)
    return ratios


def scaled_down(knowledge: Knowledge, excess: Mapping[str, float]) -> Knowledge:
    """Divide the floating-point tensors of each part by the part's value in `excess`, on access."""
    tensors = knowledge.tensors

    def divided(name: str) -> Array:
        value, by = tensors[name], excess.get(part_of(name))
        if by is None or not np.issubdtype(value.dtype, np.floating):
            return value
        return (value / by).astype(value.dtype)

    sources = {name: partial(divided, name) for name in tensors}
    return Knowledge(OnDemand(sources), knowledge.scalars)


def _with_medians_of_others(
    magnitudes: Mapping[str, Mapping[Part, float]],
) -> Iterator[tuple[str, Part, float, tuple[float, ...]]]:
    """Yield the client, name and size of each part, and the median of the other clients' sizes.

    The median is in a tuple, which is empty if no other client has the part. The median without a
    client's own size is looked up in the sorted sizes, so the time per client grows only with the
    logarithm of the number of clients.
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
