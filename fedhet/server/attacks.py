"""Poisoning of the clients' replies, for every method.

PAF, LIE and OFOM: Cheng et al., FedGEMS, Appendix A, after Baruch et al. (LIE) and Chang et al.
(OFOM). The paper's adversary knows the benign updates of the round and perturbs the logits or
weights of some clients on their way to the server. No client knows the others' updates, so the
server applies the attack, just before the method gets the replies: the same on Ray, in one process
and in a deployment. The clients themselves are honest, and are evaluated like the others.

The other kinds need no knowledge of the others, and strike the same clients in all rounds.
Blanchard et al. (NeurIPS 2017) and Yin et al. (ICML 2018) have such Byzantine clients; the four
kinds are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.defense import AttackSettings
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import (
    VARIANCES,
    Contract,
    Field,
    Sizes,
    TensorField,
    floating,
    ids_of,
    poisonable,
)
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

IN_THE_PAPER = {"paf": 1, "lie": 1, "ofom": 2}
"""Clients poisoned per round, Section 4.3."""
SMALLEST = 1e-12
"""The probability from which logits are formed, for a smaller one."""


@dataclass(frozen=True)
class Benign:
    """Statistics of the benign updates of one tensor: their number n, mean and standard deviation.

    `mean` and `std` have the tensor's shape; `std` is the population's.
    """

    n: int
    mean: Array
    std: Array


def far_vector(mean: Array, scale: float, direction: Array) -> Array:
    """Return theta' of Eq. 7: a vector along `direction`, `scale` times as long as the mean.

    The paper only says "significantly large"; the length is ours.
    """
    length = np.linalg.norm(direction)
    return direction * (scale * np.linalg.norm(mean) / length if length else 0.0)


def z_max(benign: int, malicious: int) -> float:
    """Return z^max of Eq. 8 and 9 for n benign and epsilon n malicious updates.

    The largest z whose cumulative probability is below (n - s) / n, where
    s = floor(n / 2 + 1) - epsilon n. It is kept from 0 and 1, where z is infinite (ours).
    """
    supporters = benign // 2 + 1 - malicious
    share = (benign - supporters) / benign
    edge = 1 / (2 * benign)
    return NormalDist().inv_cdf(min(max(share, edge), 1 - edge))


def paf(benign: Benign, far: Array) -> Array:
    """Return Eq. 7: the benign mean plus a large vector."""
    return benign.mean + far


def lie(benign: Benign, malicious: int) -> Array:
    """Return Eq. 10: the benign mean, shifted slightly in every coordinate."""
    return benign.mean + z_max(benign.n, malicious) * benign.std


def ofom(benign: Benign, far: Array, *, second: bool) -> Array:
    """Return Eq. 11: a far update or, if `second`, the mean of it and the benign updates."""
    first = paf(benign, far)
    return (benign.n * benign.mean + first) / (benign.n + 1) if second else first


def nearby_distributions(values: Array) -> Array:
    """Return probability distributions from any values [..., C]: clipped at 0, and normalized.

    An adversary that poisons probabilities sends what the server accepts (ours). A row without a
    positive value becomes uniform.
    """
    positive = values.clip(min=0)
    total = positive.sum(-1, keepdims=True)
    uniform = np.full_like(positive, 1 / values.shape[-1])
    nearest: Array = np.divide(positive, total, out=uniform, where=total > 0)
    return nearest


Rows = Mapping[str, Array]
"""By the letter of an axis: the numbers of its rows in a larger set."""


class Attack:
    """Poisons the replies of some of the clients that train: a step that a round's replies pass."""

    def __init__(
        self,
        settings: AttackSettings,
        contract: Contract,
        seed: int,
        state: RoundState,
        sizes: Callable[[ClientInfo], Sizes],
    ) -> None:
        """`contract` is that of the replies, and `sizes` returns the sizes of a client's."""
        self.settings, self.contract, self.seed = settings, contract, seed
        self.count = settings.attackers or IN_THE_PAPER[settings.kind]
        self._state, self._sizes = state, sizes

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, some of them poisoned."""
        honest = {reply.client.name: reply for reply in replies}
        round, training = self._state.record.round, self._state.selection.training
        targets = self.targets(round, training) & honest.keys()
        self._state.add_metrics({"poisoned": float(len(targets))})
        rows = {name: self._sizes(honest[name].client).rows for name in targets}
        benign = {name: reply.knowledge for name, reply in honest.items()}
        poisoned = self.poison(round, benign, targets, rows)
        for name, reply in honest.items():
            yield reply.with_knowledge(poisoned[name]) if name in targets else reply

    def targets(self, round: int, training: Sequence[str]) -> Set[str]:
        """Return the clients to poison in a round, drawn among those that train."""
        order = numpy_rng(self.seed, "attack", round).permutation(len(training))
        return {sorted(training)[index] for index in order[: self.count]}

    def poison(
        self,
        round: int,
        replies: Mapping[str, Knowledge],
        targets: Set[str],
        rows: Mapping[str, Rows] | None = None,
    ) -> dict[str, Knowledge]:
        """Return the replies by client, with those of `targets` poisoned.

        If all clients that replied are targets, their original replies count as benign. `rows`: by
        client, the numbers of rows that are some of a larger set (see `Sizes`).
        """
        benign = [replies[name] for name in sorted(replies.keys() - targets)]
        struck = sorted(replies.keys() & targets)
        benign = benign or [replies[name] for name in struck]
        poisoned = dict(replies)
        for turn, name in enumerate(struck):
            # The malicious update of attacker number `turn`, counted from 0.
            def craft(known: Benign, direction: Array, turn: int = turn) -> Array:
                if self.settings.kind == "lie":
                    return lie(known, len(struck))
                far = far_vector(known.mean, self.settings.scale, direction)
                if self.settings.kind == "paf":
                    return paf(known, far)
                return ofom(known, far, second=turn % 2 == 1)

            numbers = (rows or {}).get(name, {})
            poisoned[name] = self._poisoned(round, replies[name], benign, numbers, craft)
        return poisoned

    def _poisoned(
        self,
        round: int,
        own: Knowledge,
        benign: Sequence[Knowledge],
        numbers: Rows,
        craft: Callable[[Benign, Array], Array],
    ) -> Knowledge:
        tensors = dict(own.tensors)
        for field in poisonable(self.contract):
            ids, rows = ids_of(self.contract, field), None
            if ids:
                rows = own.tensors[ids]
            elif isinstance(field, TensorField) and field.axes:
                rows = numbers.get(str(field.axes[0]))
            alike = _alike(field, own, benign, ids)
            for name, value in own.tensors.items():
                if _is_of(field, name) and np.issubdtype(value.dtype, np.floating):
                    known = _known(name, own, alike, ids)
                    crafted = craft(known, self._direction(round, name, value.shape, rows))
                    if name.endswith(VARIANCES):  # a negative variance makes outputs NaN
                        crafted = crafted.clip(min=0)
                    if isinstance(field, TensorField) and field.distribution:
                        crafted = nearby_distributions(crafted)
                    tensors[name] = crafted.astype(value.dtype)
        return Knowledge(tensors, own.scalars)

    def _direction(
        self, round: int, name: str, shape: tuple[int, ...], rows: Array | None
    ) -> Array:
        """Return the direction of theta' (Eq. 7, 11) for a tensor, which all attackers share.

        One for the run has a row of its own for each class or public sample in `rows` [shape[0]],
        whichever of them a reply holds.
        """
        if self.settings.direction == "round":
            return numpy_rng(self.seed, "attack", round, name).standard_normal(shape)
        rng = numpy_rng(self.seed, "attack", "run", name)
        if rows is None:
            return rng.standard_normal(shape)
        most = int(rows.max()) + 1 if len(rows) else 0
        return rng.standard_normal((most, *shape[1:]))[rows]


def _is_of(field: Field, name: str) -> bool:
    return name == field.name or name.startswith(field.name + "/")


def _alike(field: Field, own: Knowledge, benign: Sequence[Knowledge], ids: str) -> list[Knowledge]:
    """Return the benign replies whose tensors of a field can be compared with one's own.

    Models must have one architecture; rows that a field `ids` numbers can always be compared.
    """
    if ids:
        return [reply for reply in benign if ids in reply.tensors]

    def shapes(reply: Knowledge) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in reply.tensors.items() if _is_of(field, name)}

    return [reply for reply in benign if shapes(reply) == shapes(own)]


def _known(name: str, own: Knowledge, benign: Sequence[Knowledge], ids: str) -> Benign:
    """Return the statistics of the benign replies for the attacker's tensor, per coordinate.

    Where no other client has a value, the attacker's own honest value is used.
    """
    honest = own.tensors[name].astype(np.float64)
    seen = np.full((max(len(benign), 1), *honest.shape), np.nan)
    for place, reply in enumerate(benign):
        theirs = reply.tensors[name].astype(np.float64)
        if ids:  # rows that the other client lacks stay NaN
            _, here, there = np.intersect1d(
                own.tensors[ids], reply.tensors[ids], return_indices=True
            )
            seen[place][here] = theirs[there]
        else:
            seen[place] = theirs
    unknown = np.isnan(seen).all(0)
    seen[0, ...][unknown] = honest[unknown]
    return Benign(len(seen), np.nanmean(seen, axis=0), np.nanstd(seen, axis=0))


def malicious_clients(seed: int, members: Collection[str], count: int) -> Set[str]:
    """Return the names of the malicious clients, independent of which other clients take part."""
    order = sorted(members, key=lambda name: numpy_rng(seed, "attack", "client", name).random())
    return set(order[:count])


class Malicious:
    """Changes the replies of the run's malicious clients: a step that a round's replies pass."""

    def __init__(
        self, run: RunSettings, contract: Contract, state: RoundState, members: Collection[str]
    ) -> None:
        """`contract` is that of the replies; `members` are the names of the run's clients."""
        self.run, self.contract, self._state = run, contract, state
        self.names = malicious_clients(run.seed, members, run.attack.attackers or 1)

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, those of malicious clients changed."""
        struck = 0
        for reply in replies:
            if reply.client.name in self.names:
                struck += 1
                changed = self.changed(self._state.record.round, reply.knowledge)
                yield reply.with_knowledge(changed)
            else:
                yield reply
        self._state.add_metrics({"poisoned": float(struck)})

    def changed(self, round: int, reply: Knowledge) -> Knowledge:
        """Return a malicious client's reply in a round, from its honest one."""
        tensors = dict(reply.tensors)
        for field in floating(self.contract):
            for name, value in reply.tensors.items():
                if _is_of(field, name) and np.issubdtype(value.dtype, np.floating):
                    tensors[name] = self._changed(round, name, value, field)
        return Knowledge(tensors, reply.scalars)

    def _changed(self, round: int, name: str, value: Array, field: Field) -> Array:
        """Return a changed tensor within the field's limits; of probabilities, their logits are."""
        wide, kind, scale = value.astype(np.float64), self.run.attack.kind, self.run.attack.scale
        is_distribution = isinstance(field, TensorField) and field.distribution
        if is_distribution:
            wide = np.log(np.maximum(wide, SMALLEST))
        if kind == "drift":
            direction = numpy_rng(self.run.seed, "attack", "run", name).standard_normal(value.shape)
            length = scale * round / self.run.rounds * np.linalg.norm(wide)
            moved = wide + direction * (length / max(float(np.linalg.norm(direction)), SMALLEST))
        else:
            alternating = scale if round % 2 else -scale
            moved = {"sign-flip": -1.0, "scale": scale}.get(kind, alternating) * wide
        if is_distribution:
            return softmax(moved).astype(value.dtype)
        low = 0.0 if name.endswith(VARIANCES) else getattr(field, "low", None)
        return (moved if low is None else moved.clip(min=low)).astype(value.dtype)


def softmax(logits: Array) -> Array:
    """Return the probabilities [..., C] of logits [..., C]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    probabilities: Array = powers / powers.sum(-1, keepdims=True)
    return probabilities
