"""Learning rates: over the rounds of a run, and found by a participant's own search.

The factor of a round is a function of its number, so that it does not depend on when a client was
sampled, or on whether the run was resumed. The formulas are those of torch.optim.lr_scheduler, with
rounds for epochs.

The search is CoFED's, Section 5.2: "We conduct a grid search to determine the optimal training
parameter settings for each participant task [...] (including the trainer, learning rate, and
learning rate decay)"; update training adjusts what was found. Cao, Li, Sun, Yu and Guizani,
Cross-Silo Heterogeneous Model Federated Multitask Learning.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from fedhet.learning.training import Evaluation
from fedhet.settings.run import TrainingSettings

MILESTONES = (0.5, 0.75)
"""Default milestones, in shares of the run (He et al., Deep Residual Learning, 2016)."""
LEAST_CHANGE = 1e-4
"""Relative improvement that counts as one; ReduceLROnPlateau's default."""


@dataclass(frozen=True)
class Plateau:
    """The state of torch's ReduceLROnPlateau: the least value, and rounds since an improvement.

    `factor` is the present one on the learning rate.
    """

    best: float = math.inf
    waited: int = 0
    factor: float = 1.0

    def after(self, value: float, *, patience: int, decay: float) -> Plateau:
        """Return the state after a round whose loss or error is `value`."""
        if value < self.best * (1 - LEAST_CHANGE):
            return Plateau(value, 0, self.factor)
        if self.waited < patience:
            return Plateau(self.best, self.waited + 1, self.factor)
        return Plateau(self.best, 0, self.factor * decay)


NO_PLATEAU = Plateau()


def rate_factor(
    settings: TrainingSettings, round: int, rounds: int, plateau: Plateau = NO_PLATEAU
) -> float:
    """Return the factor on the learning rate in `round`, 1 to `rounds`, in (0, 1]."""
    factor = warm_up(round, settings.warm_up_rounds)
    if settings.schedule == "cosine":
        factor *= cosine(round - settings.warm_up_rounds, rounds - settings.warm_up_rounds)
    elif settings.schedule == "step":
        ends = settings.milestones or [max(1, int(s * rounds)) for s in MILESTONES]
        factor *= steps(round, ends, settings.decay)
    elif settings.schedule == "plateau":
        factor *= plateau.factor
    return factor


def warm_up(round: int, rounds: int) -> float:
    """Return the factor of a linear warm-up: 1/(rounds + 1) in round 1, and 1 after `rounds`."""
    return min(1.0, round / (rounds + 1))


def cosine(round: int, rounds: int) -> float:
    """Return the factor of cosine annealing: 1 in round 1, close to 0 in the last of `rounds`."""
    return (1 + math.cos(math.pi * max(0, round - 1) / max(1, rounds))) / 2


def steps(round: int, ends: Sequence[int], decay: float) -> float:
    """Return `decay` to the power of the number of `ends`, ascending, that lie before `round`."""
    return decay ** bisect_left(ends, round)


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
