"""Poisoning attacks on the clients' replies: PAF, LIE and OFOM, for every method.

Cheng et al., FedGEMS, Appendix A, after Baruch et al. (LIE) and Chang et al. (OFOM). The paper's
adversary knows the benign updates of the round and perturbs the logits or weights of some clients
on their way to the server. No client knows the others' updates, so the server applies the attack,
just before the method gets the replies: the same on Ray, in one process and in a deployment. The
clients themselves are honest, and are evaluated like the others. `hostile` has attacks that need
no knowledge of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.defence import AttackSettings
from fedhet.wire.contract import Contract, Field, Sizes, TensorField, ids_of, poisonable
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

IN_THE_PAPER = {"paf": 1, "lie": 1, "ofom": 2}
"""Clients poisoned per round, Section 4.3."""


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
    """Return probability distributions from any values [..., C]: clipped at 0, and normalised.

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
        self._state.figures({"poisoned": float(len(targets))})
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
            craft = partial(self._craft, malicious=len(struck), turn=turn)
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
            ids = ids_of(self.contract, field)
            alike = _alike(field, own, benign, ids)
            for name, value in own.tensors.items():
                if _is_of(field, name) and np.issubdtype(value.dtype, np.floating):
                    known = _known(name, own, alike, ids)
                    rows = own.tensors[ids] if ids else _numbers(field, numbers)
                    crafted = craft(known, self._direction(round, name, value.shape, rows))
                    if name.endswith("running_var"):  # a negative variance makes outputs NaN
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

    def _craft(self, benign: Benign, direction: Array, *, malicious: int, turn: int) -> Array:
        """Return the malicious update of attacker number `turn`, counted from 0."""
        if self.settings.kind == "lie":
            return lie(benign, malicious)
        far = far_vector(benign.mean, self.settings.scale, direction)
        if self.settings.kind == "paf":
            return paf(benign, far)
        return ofom(benign, far, second=turn % 2 == 1)


def _is_of(field: Field, name: str) -> bool:
    return name == field.name or name.startswith(field.name + "/")


def _alike(field: Field, own: Knowledge, benign: Sequence[Knowledge], ids: str) -> list[Knowledge]:
    """Return the benign replies whose tensors of a field can be compared with one's own.

    Models must have one architecture; rows that a field `ids` numbers can always be compared.
    """
    if ids:
        return [reply for reply in benign if ids in reply.tensors]
    shapes = _shapes(field, own)
    return [reply for reply in benign if _shapes(field, reply) == shapes]


def _shapes(field: Field, reply: Knowledge) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in reply.tensors.items() if _is_of(field, name)}


def _known(name: str, own: Knowledge, benign: Sequence[Knowledge], ids: str) -> Benign:
    """Return the statistics of the benign replies for the attacker's tensor, per coordinate.

    Where no other client has a value, the attacker's own honest value is used.
    """
    honest = own.tensors[name].astype(np.float64)
    seen = np.full((max(len(benign), 1), *honest.shape), np.nan)
    for place, reply in enumerate(benign):
        seen[place] = _aligned(own, reply, name, ids)
    unknown = np.isnan(seen).all(0)
    seen[0, ...][unknown] = honest[unknown]
    return Benign(len(seen), np.nanmean(seen, axis=0), np.nanstd(seen, axis=0))


def _numbers(field: Field, numbers: Rows) -> Array | None:
    """Return the numbers of a field's rows in a larger set, if its first axis has such rows."""
    if not isinstance(field, TensorField):
        return None
    return numbers.get(str(field.axes[0])) if field.axes else None


def _aligned(own: Knowledge, other: Knowledge, name: str, ids: str) -> Array:
    """Return another client's tensor in the shape of one's own; NaN for rows that it lacks."""
    mine, theirs = own.tensors[name], other.tensors[name].astype(np.float64)
    if not ids:
        return theirs
    rows = np.full(mine.shape, np.nan)
    _, here, there = np.intersect1d(own.tensors[ids], other.tensors[ids], return_indices=True)
    rows[here] = theirs[there]
    return rows
