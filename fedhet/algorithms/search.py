"""A participant's search for its own training configuration: CoFED, Section 5.2.

"We conduct a grid search to determine the optimal training parameter settings for each participant
task [...] (including the trainer, learning rate, and learning rate decay)"; update training adjusts
what was found. Cao, Li, Sun, Yu and Guizani, Cross-Silo Heterogeneous Model Federated Multitask
Learning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fedhet.learning.training import Evaluation

SGD = "sgd"
SGD_RATES = 10.0
"""How much greater the rates are that sgd tries, as in the authors' published script."""


@dataclass(frozen=True)
class Candidate:
    """A training configuration."""

    optimizer: str
    lr: float
    """The learning rate of the first epoch."""
    decay: float
    """The factor by which the learning rate falls after each epoch."""


def grid(
    optimizers: Sequence[str], rates: Sequence[float], decays: Sequence[float]
) -> list[Candidate]:
    """Return every combination; sgd has `SGD_RATES` times each rate."""
    return [
        Candidate(optimizer, rate * (SGD_RATES if optimizer == SGD else 1.0), decay)
        for optimizer in optimizers
        for rate in rates
        for decay in decays
    ]


def adjusted(found: Candidate, factors: Sequence[float]) -> list[Candidate]:
    """Return what was found with its learning rate times each of the factors."""
    return [replace(found, lr=found.lr * factor) for factor in factors]


def best(candidates: Iterable[Candidate], score_of: Callable[[Candidate], Evaluation]) -> Candidate:
    """Return the candidate of the highest accuracy; of equals, the one of the lowest loss.

    If they are equal in both, it is the first. A loss that is not finite is the highest.
    """

    def rank(candidate: Candidate) -> tuple[float, float]:
        score = score_of(candidate)
        return score.accuracy, -score.loss if math.isfinite(score.loss) else -math.inf

    return max(candidates, key=rank)
