"""Simulated poisoning of the clients' replies, for every method.

PAF, LIE and OFOM are from Cheng et al., FedGEMS, Appendix A, based on Baruch et al. (LIE) and Chang
et al. (OFOM). The paper's adversary knows the round's benign updates, and perturbs the logits or
weights of some clients on their way to the server. Because no client knows the updates of other
clients, the server applies the attack before the method receives the replies. The attack is thus
the same on every backend and in a deployment. The clients themselves are honest, and are evaluated
like all other clients.

The other kinds of attack need no knowledge of other clients, and affect the same clients in all
rounds. Blanchard et al. (NeurIPS 2017) and Yin et al. (ICML 2018) study such Byzantine clients, but
the kinds of attack implemented here are not from a paper. With a poisoned dataset (`label-flip`,
`backdoor`), the clients poison their own samples (`client_runtime.samples`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from fedhet.algorithms.rounds import malicious_clients
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
"""Number of clients poisoned per round in the paper (Section 4.3)."""
MIN_PROBABILITY = 1e-12
"""Lower bound for probabilities from which logits are computed."""


@dataclass(frozen=True)
class Benign:
    """Statistics of the benign updates for one tensor."""

    n: int
    """Number of updates."""
    mean: Array
    std: Array
    """Population standard deviation."""


def far_vector(mean: Array, scale: float, direction: Array) -> Array:
    """Return theta' (Eq. 7), a vector along `direction` that is `scale` times as long as the mean.

    The paper specifies the length only as "significantly large".
    """
    length = np.linalg.norm(direction)
    return direction * (scale * np.linalg.norm(mean) / length if length else 0.0)


def z_max(benign: int, malicious: int) -> float:
    """Return z^max (Eqs. 8 and 9) for n benign and epsilon n malicious updates.

    This is the largest z whose cumulative probability is below (n - s) / n, where
    s = floor(n / 2 + 1) - epsilon n. Unlike in the paper, the probability is bounded away from 0
    and 1, where z is infinite.
    """
    supporters = benign // 2 + 1 - malicious
    probability = (benign - supporters) / benign
    margin = 1 / (2 * benign)
    return NormalDist().inv_cdf(min(max(probability, margin), 1 - margin))


def paf(benign: Benign, far: Array) -> Array:
    """Return the benign mean plus a large vector (Eq. 7)."""
    return benign.mean + far


def lie(benign: Benign, malicious: int) -> Array:
    """Return the benign mean with a small shift in every coordinate (Eq. 10)."""
    return benign.mean + z_max(benign.n, malicious) * benign.std


def ofom(benign: Benign, far: Array, *, second: bool) -> Array:
    """Return the first or second of the two OFOM updates (Eq. 11).

    The first update is the benign mean plus a large vector, as in PAF. The second update is the
    mean of the first update and all benign updates.
    """
    first = paf(benign, far)
    return (benign.n * benign.mean + first) / (benign.n + 1) if second else first


def nearby_distributions(values: Array) -> Array:
    """Convert values [..., C] to probabilities: clip them at 0, and normalize each row.

    A row without a positive value becomes uniform. The paper has no such step, but the server would
    refuse values that are not probabilities.
    """
    positive = values.clip(min=0)
    total = positive.sum(-1, keepdims=True)
    uniform = np.full_like(positive, 1 / values.shape[-1])
    probabilities: Array = np.divide(positive, total, out=uniform, where=total > 0)
    return probabilities


Rows = Mapping[str, Array]
"""Indices of a tensor's rows in a larger set, by the letter of the axis, e.g. "Q"."""


class Attack:
    """Step that uses PAF, LIE or OFOM to poison the replies of some clients."""

    def __init__(
        self,
        settings: AttackSettings,
        contract: Contract,
        seed: int,
        state: RoundState,
        sizes: Callable[[ClientInfo], Sizes],
    ) -> None:
        """Create the step that poisons replies.

        Args:
            settings: Settings of the attack.
            contract: Contract of the replies.
            seed: Seed of the run.
            state: State of the round.
            sizes: Function that returns the required sizes of a client's reply.
        """
        self.settings, self.contract, self.seed = settings, contract, seed
        self.count = settings.attackers or IN_THE_PAPER[settings.kind]
        self._state, self._sizes = state, sizes

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield all replies, after poisoning the replies of attacked clients."""
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
        """Draw the clients to poison in a round from the training clients."""
        order = numpy_rng(self.seed, "attack", round).permutation(len(training))
        return {sorted(training)[index] for index in order[: self.count]}

    def poison(
        self,
        round: int,
        replies: Mapping[str, Knowledge],
        targets: Set[str],
        rows: Mapping[str, Rows] | None = None,
    ) -> dict[str, Knowledge]:
        """Poison the replies of some clients.

        If all clients that replied are targets, their original replies serve as benign updates.

        Args:
            round: The current round.
            replies: Content of all replies, by client.
            targets: Names of the clients to poison.
            rows: Row indices of each client, for fields whose rows belong to a larger set (see
                `Sizes`).

        Returns:
            Content of all replies, by client.
        """
        benign = [replies[name] for name in sorted(replies.keys() - targets)]
        attackers = sorted(replies.keys() & targets)
        benign = benign or [replies[name] for name in attackers]
        poisoned = dict(replies)
        for number, client in enumerate(attackers):
            honest, tensors = replies[client], dict(replies[client].tensors)
            for field in poisonable(self.contract):
                ids, indices = ids_of(self.contract, field), None
                if ids:
                    indices = honest.tensors[ids]
                elif isinstance(field, TensorField) and field.axes:
                    indices = (rows or {}).get(client, {}).get(str(field.axes[0]))
                comparable = _comparable(field, honest, benign, ids)
                for name, value in honest.tensors.items():
                    if not (_is_of(field, name) and np.issubdtype(value.dtype, np.floating)):
                        continue
                    statistics = _statistics(name, honest, comparable, ids)
                    direction = self._direction(round, name, value.shape, indices)
                    far = far_vector(statistics.mean, self.settings.scale, direction)
                    if self.settings.kind == "lie":
                        crafted = lie(statistics, len(attackers))
                    elif self.settings.kind == "paf":
                        crafted = paf(statistics, far)
                    else:
                        crafted = ofom(statistics, far, second=number % 2 == 1)
                    if name.endswith(VARIANCES):  # A negative variance would make outputs NaN.
                        crafted = crafted.clip(min=0)
                    if isinstance(field, TensorField) and field.distribution:
                        crafted = nearby_distributions(crafted)
                    tensors[name] = crafted.astype(value.dtype)
            poisoned[client] = Knowledge(tensors, honest.scalars)
        return poisoned

    def _direction(
        self, round: int, name: str, shape: tuple[int, ...], rows: Array | None
    ) -> Array:
        """Return the direction of theta' (Eqs. 7 and 11) for a tensor. All attackers share it.

        The direction is drawn in each round or once per run ('attack.direction'). If it is drawn
        once per run, `rows` of shape [shape[0]] contains the class or public sample of each row, or
        is None for other tensors. Each class or sample has the same direction in all rounds.
        """
        if self.settings.direction == "round":
            return numpy_rng(self.seed, "attack", round, name).standard_normal(shape)
        rng = numpy_rng(self.seed, "attack", "run", name)
        if rows is None:
            return rng.standard_normal(shape)
        num_rows = int(rows.max()) + 1 if len(rows) else 0
        return rng.standard_normal((num_rows, *shape[1:]))[rows]


def _is_of(field: Field, name: str) -> bool:
    return name == field.name or name.startswith(field.name + "/")


def _comparable(
    field: Field, honest: Knowledge, benign: Sequence[Knowledge], ids: str
) -> list[Knowledge]:
    """Return the benign replies that are comparable with `honest` in the given field.

    Weights are comparable if the models have the same architecture. Rows with ids are always
    comparable.
    """
    if ids:
        return [reply for reply in benign if ids in reply.tensors]

    def shapes(reply: Knowledge) -> dict[str, tuple[int, ...]]:
        return {name: value.shape for name, value in reply.tensors.items() if _is_of(field, name)}

    return [reply for reply in benign if shapes(reply) == shapes(honest)]


def _statistics(name: str, honest: Knowledge, benign: Sequence[Knowledge], ids: str) -> Benign:
    """Return the statistics of the benign values for each coordinate of an attacker's tensor.

    If no other client has a value for a coordinate, the attacker's honest value is used.
    """
    own_values = honest.tensors[name].astype(np.float64)
    stack = np.full((max(len(benign), 1), *own_values.shape), np.nan)
    for index, reply in enumerate(benign):
        values = reply.tensors[name].astype(np.float64)
        if ids:  # Rows that the other client lacks stay NaN.
            _, own_rows, rows = np.intersect1d(
                honest.tensors[ids], reply.tensors[ids], return_indices=True
            )
            stack[index][own_rows] = values[rows]
        else:
            stack[index] = values
    missing = np.isnan(stack).all(0)
    stack[0, ...][missing] = own_values[missing]
    return Benign(len(stack), np.nanmean(stack, axis=0), np.nanstd(stack, axis=0))


class ByzantineClients:
    """Step that changes the replies of the run's malicious clients."""

    def __init__(
        self, run: RunSettings, contract: Contract, state: RoundState, members: Collection[str]
    ) -> None:
        """Create the step that simulates Byzantine clients.

        Args:
            run: Settings of the run.
            contract: Contract of the replies.
            state: State of the round.
            members: Names of the clients of the run.
        """
        self.run, self.contract, self._state = run, contract, state
        self.names = malicious_clients(run.seed, members, run.attack.attackers or 1)

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield all replies, after changing the replies of malicious clients."""
        poisoned = 0
        for reply in replies:
            if reply.client.name in self.names:
                poisoned += 1
                yield reply.with_knowledge(self.poison(self._state.record.round, reply.knowledge))
            else:
                yield reply
        self._state.add_metrics({"poisoned": float(poisoned)})

    def poison(self, round: int, honest: Knowledge) -> Knowledge:
        """Return the malicious reply that replaces a client's honest reply.

        If the client's data is poisoned, only claimed numbers of samples change.
        """
        tensors, claimed = dict(honest.tensors), self.run.attack.claimed_samples
        for field in () if self.run.attack.poisons_data else floating(self.contract):
            values = {
                name: value
                for name, value in honest.tensors.items()
                if _is_of(field, name) and np.issubdtype(value.dtype, np.floating) and value.size
            }
            if values and self.run.attack.kind == "small-tensor":
                smallest = min(reversed(values), key=lambda name: values[name].size)
                values = {smallest: values[smallest]}
            for name, value in values.items():
                tensors[name] = self._poison_tensor(round, name, value, field)
        for name in self.contract.counts if claimed else ():
            if (counts := tensors.get(name)) is not None and counts.size:
                tensors[name] = np.maximum(counts * (claimed / counts.sum()), 1).astype(
                    counts.dtype
                )
        return Knowledge(tensors, honest.scalars)

    def _poison_tensor(self, round: int, name: str, value: Array, field: Field) -> Array:
        """Poison a tensor within the limits of its field. Probabilities are poisoned as logits."""
        wide, kind, scale = value.astype(np.float64), self.run.attack.kind, self.run.attack.scale
        is_distribution = isinstance(field, TensorField) and field.distribution
        if is_distribution:
            wide = np.log(np.maximum(wide, MIN_PROBABILITY))
        if kind == "drift":
            direction = numpy_rng(self.run.seed, "attack", "run", name).standard_normal(value.shape)
            distance = scale * round / self.run.rounds * np.linalg.norm(wide)
            length = max(float(np.linalg.norm(direction)), MIN_PROBABILITY)
            moved = wide + direction * (distance / length)
        elif kind == "small-tensor":
            moved = wide.copy()
            moved.flat[0] += scale
        else:
            alternating = scale if round % 2 else -scale
            moved = {"sign-flip": -1.0, "scale": scale}.get(kind, alternating) * wide
        if is_distribution:
            return softmax(moved).astype(value.dtype)
        low = 0.0 if name.endswith(VARIANCES) else getattr(field, "low", None)
        return (moved if low is None else moved.clip(min=low)).astype(value.dtype)


def softmax(logits: Array) -> Array:
    """Return the probabilities [..., C] for logits [..., C]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    probabilities: Array = powers / powers.sum(-1, keepdims=True)
    return probabilities
