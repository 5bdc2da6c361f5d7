"""Learning rate of each round.

The learning rate is multiplied by a factor. Except with the schedule `plateau`, the factor depends
only on the round number, and not on how often a client was sampled. The formulas are the same as in
torch.optim.lr_scheduler, with rounds instead of epochs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

from fedhet.settings.run import TrainingSettings

MILESTONES = (0.5, 0.75)
"""Default milestones, as fractions of the rounds (He et al., Deep Residual Learning, 2016)."""
MIN_CHANGE = 1e-4
"""Minimum relative decrease that counts as an improvement (the default of ReduceLROnPlateau)."""


@dataclass(frozen=True)
class Plateau:
    """State of a ReduceLROnPlateau schedule.

    Attributes:
        best: Lowest value so far.
        waited: Number of rounds since the last improvement.
        factor: Current factor for the learning rate.
    """

    best: float = math.inf
    waited: int = 0
    factor: float = 1.0

    def after(self, value: float, *, patience: int, decay: float) -> Plateau:
        """Return the state after a round with the given loss or error."""
        if value < self.best * (1 - MIN_CHANGE):
            return Plateau(value, 0, self.factor)
        if self.waited < patience:
            return Plateau(self.best, self.waited + 1, self.factor)
        return Plateau(self.best, 0, self.factor * decay)


NO_PLATEAU = Plateau()


def scheduled(
    settings: TrainingSettings, round: int, rounds: int, plateau: Plateau = NO_PLATEAU
) -> TrainingSettings:
    """Return the settings with the learning rate of `round` (counted from 1)."""
    factor = rate_factor(settings, round, rounds, plateau)
    return settings.model_copy(update={"lr": settings.lr * factor})


def rate_factor(
    settings: TrainingSettings, round: int, rounds: int, plateau: Plateau = NO_PLATEAU
) -> float:
    """Return the factor, in (0, 1], for the learning rate in `round` (counted from 1)."""
    warm_up = settings.warm_up_rounds
    factor = min(1.0, round / (warm_up + 1))  # The factor is linear during the warm-up, then 1.
    # The factor is 1 in the first round after the warm-up and near 0 at the end.
    if settings.schedule == "cosine":
        angle = math.pi * max(0, round - warm_up - 1) / max(1, rounds - warm_up)
        factor *= (1 + math.cos(angle)) / 2
    elif settings.schedule == "step":
        ends = settings.milestones or [max(1, int(s * rounds)) for s in MILESTONES]
        # Count the milestones that have passed.
        factor *= settings.decay ** bisect_left(ends, round)
    elif settings.schedule == "plateau":
        factor *= plateau.factor
    return factor
