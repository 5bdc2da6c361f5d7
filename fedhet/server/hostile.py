"""Hostile clients, which change their own honest replies in all rounds.

Unlike the attacks of FedGEMS' Appendix A (`attacks`), they know nothing of the other clients, and
are the same clients throughout the run. Blanchard et al. (NeurIPS 2017) and Yin et al. (ICML 2018)
have such Byzantine clients; the four kinds are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Set

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng
from fedhet.server.reply import Reply
from fedhet.server.round import RoundState
from fedhet.settings.run import RunSettings
from fedhet.wire.contract import VARIANCES, Contract, Field, TensorField, floating
from fedhet.wire.knowledge import Knowledge

SMALLEST = 1e-12
"""The probability from which logits are formed, for a smaller one."""


def hostile_clients(seed: int, members: Collection[str], count: int) -> Set[str]:
    """Return the hostile ones of a run's clients.

    Each client has a draw of its own, whoever else joins or leaves.
    """
    order = sorted(members, key=lambda name: numpy_rng(seed, "attack", "client", name).random())
    return set(order[:count])


class Hostile:
    """Changes the replies of the run's hostile clients: a step that a round's replies pass."""

    def __init__(
        self, run: RunSettings, contract: Contract, state: RoundState, members: Collection[str]
    ) -> None:
        """`contract` is that of the replies; `members` are the names of the run's clients."""
        self.run, self.contract, self._state = run, contract, state
        self.names = hostile_clients(run.seed, members, run.attack.attackers or 1)

    def __call__(self, replies: Iterable[Reply]) -> Iterator[Reply]:
        """Yield the replies, those of hostile clients changed."""
        struck = 0
        for reply in replies:
            if reply.client.name in self.names:
                struck += 1
                changed = self.changed(self._state.record.round, reply.knowledge)
                yield reply.with_knowledge(changed)
            else:
                yield reply
        self._state.figures({"poisoned": float(struck)})

    def changed(self, round: int, reply: Knowledge) -> Knowledge:
        """Return a hostile client's reply in a round, from its honest one."""
        tensors = dict(reply.tensors)
        for field in floating(self.contract):
            for name, value in reply.tensors.items():
                own = name == field.name or name.startswith(field.name + "/")
                if own and np.issubdtype(value.dtype, np.floating):
                    tensors[name] = self._changed(round, name, value, field)
        return Knowledge(tensors, reply.scalars)

    def _changed(self, round: int, name: str, value: Array, field: Field) -> Array:
        """Return a changed tensor within the field's limits; of probabilities, their logits are."""
        wide = value.astype(np.float64)
        if isinstance(field, TensorField) and field.distribution:
            logits = np.log(np.maximum(wide, SMALLEST))
            return softmax(self._moved(round, name, logits)).astype(value.dtype)
        moved, low = self._moved(round, name, wide), getattr(field, "low", None)
        if name.endswith(VARIANCES):
            low = 0.0
        return (moved if low is None else moved.clip(min=low)).astype(value.dtype)

    def _moved(self, round: int, name: str, value: Array) -> Array:
        kind, scale = self.run.attack.kind, self.run.attack.scale
        if kind == "drift":
            direction = numpy_rng(self.run.seed, "attack", "run", name).standard_normal(value.shape)
            length = scale * round / self.run.rounds * np.linalg.norm(value)
            return value + direction * (length / max(float(np.linalg.norm(direction)), SMALLEST))
        factor = {"sign-flip": -1.0, "scale": scale}.get(kind)
        if factor is None:  # alternating
            factor = scale if round % 2 else -scale
        return factor * value


def softmax(logits: Array) -> Array:
    """Return the probabilities [..., C] of logits [..., C]."""
    powers = np.exp(logits - logits.max(-1, keepdims=True, initial=-np.inf))
    probabilities: Array = powers / powers.sum(-1, keepdims=True)
    return probabilities
