"""The rounds of a run: how many clients each needs, when it closes, and its learning rate.

Updates of late clients are weighted and applied as in FedBuff (Nguyen et al., AISTATS 2022).

A round closes when enough of the clients that it waits for have answered, and either all of them
have or a grace time has passed since; or at its timeout. NVFlare has the same rule (min_responses,
wait_time_after_min_received).

The factor on the learning rate is a function of the round's number, so that it does not depend on
when a client was sampled, or on whether the run was resumed. The formulas are those of
torch.optim.lr_scheduler, with rounds for epochs.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from fedhet.algorithms.robust import min_replies, withstood
from fedhet.base.arrays import Array
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings, TrainingSettings

MIN_GRACE = 10.0
"""The least seconds for which an evaluation waits when enough clients have answered."""
RECENT = 20
"""The number of last rounds whose median duration is the usual one."""


@dataclass(frozen=True)
class Closing:
    """The rule of one round."""

    min_replies: int
    """Answers with which the round closes, from 1."""
    grace: float = 0.0
    """Seconds."""
    timeout: float = math.inf
    """Seconds since the round began."""
    patience: float = 0.0
    """The least grace, in times of what enough answers took."""

    def closes_at(self, answers: Iterable[float], began: float) -> float:
        """Return when a round that began at `began` closes, if answers come at these times.

        It waits for all of them.
        """
        times = sorted(answers)
        if not times:
            return began
        return max(began, min(times[-1], self._graced(times, began), began + self.timeout))

    def waits(self, now: float, answers: Sequence[float], awaited: int) -> float:
        """Return for how many seconds to wait for the next answer; 0: the round closes.

        `now` and `answers`, the times of those that have come, in their order, are seconds since
        the round began; `awaited` are yet to come.
        """
        return max(0.0, min(self._graced(answers), self.timeout) - now) if awaited else 0.0

    def _graced(self, times: Sequence[float], began: float = 0.0) -> float:
        """Return when the grace ends that follows enough of the answers; infinity if too few."""
        if self.min_replies > len(times):
            return math.inf
        at = times[self.min_replies - 1]
        return at + max(self.grace, self.patience * (at - began))


def wanted(members: int, fraction: float) -> int:
    """Return how many of a federation's clients a round needs: a share of them, at least one."""
    return max(1, int(fraction * members + 0.5))


def asked(number: int, over_selection: float) -> int:
    """Return how many clients are asked so that a round gets `number` answers in good time."""
    return math.ceil(round((1 + over_selection) * number, 9))


def honest_majority(run: RunSettings) -> tuple[int, int, int]:
    """Return how many clients may be malicious, of how many that are asked, and the least replies.

    A round with a robust average must not close with fewer replies: all malicious clients may be
    faster than the honest clients. (0, asked, 1) if the mean is not robust.
    """
    defense, members = run.defense, run.clients
    count = min(asked(wanted(members, run.fraction), run.pace.over_selection), members)
    if defense.average == "mean":
        return 0, count, 1
    # Clients influence who is asked, unless clients are selected at random.
    among = count if run.pace.select == "random" else members
    malicious = min(withstood(among, defense.malicious_fraction), count)
    least = min(min_replies(defense.average, malicious), count) if malicious else 1
    return malicious, count, least


def closing(
    pace: PaceSettings, needed: int, awaited: int, durations: Iterable[float] = (), least: int = 1
) -> Closing:
    """Return the rule of a round that needs `needed` answers, or as many as are awaited.

    `durations` are the seconds of the rounds before. `least` answers are needed in any case: the
    share 'enough' is one of the clients that are idle, who may be few.
    """
    share = pace.min_replies if pace.min_replies <= 1 else 1.0
    number = math.ceil(round(share * needed, 9)) if pace.min_replies <= 1 else int(pace.min_replies)
    enough = min(max(number, least), awaited)
    return Closing(max(1, enough), pace.grace, pace.max_seconds(usual(durations)))


def closing_of_evaluation(pace: PaceSettings, asked: int, durations: Iterable[float]) -> Closing:
    """Return the rule of an evaluation, which waits longer: who is left out cannot be asked next.

    Once enough have answered, it waits for as long again, and for MIN_GRACE at least.
    """
    rule = closing(pace, asked, asked, durations)
    return replace(rule, grace=max(pace.grace, MIN_GRACE), patience=1.0)


def usual(durations: Iterable[float]) -> float:
    """Return the median of the last rounds' seconds; infinity before the first has ended."""
    last = list(durations)[-RECENT:]
    return median(last) if last else math.inf


def staleness_weight(age: int) -> float:
    """Return s(tau) = (1 + tau)^(-1/2), the weight of a reply that is `age` rounds old.

    FedBuff (Nguyen et al., AISTATS 2022), Section 5.1: polynomial weights with a = 1/2.
    """
    return float((1 + age) ** -0.5)


def fedbuff_rate(samples: Sequence[float], ages: Sequence[int], server_lr: float) -> float:
    """Return the factor on each update that turns a weighted average into FedBuff's step.

    An average with weights n_k s(tau_k) divides by the sum of the weights. FedBuff divides by the
    size of the buffer (Algorithm 1, lines 8 to 12: w <- w + eta / K sum_k s(tau_k) Delta_k; unlike
    the paper, each client counts by its samples n_k). A buffer of old updates thus moves the
    weights less.
    """
    weights = [n * staleness_weight(age) for n, age in zip(samples, ages, strict=True)]
    return server_lr * sum(weights) / sum(samples) if sum(samples) > 0 else server_lr


def rebase(current: Array, trained: Array, start: Array, rate: float, low: float | None) -> Array:
    """Apply a client's update of an older tensor to the server's current tensor.

    Args:
        current: The server's current tensor.
        trained: The client's tensor after training.
        start: The tensor from which the client started training.
        rate: Factor on the update.
        low: Lower bound of the result, or None.

    Returns:
        current + rate (trained - start) in the type of `trained`. Integer tensors (counters) are
        returned as the client trained them.
    """
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    update = trained.astype(np.float64) - start
    moved = current + rate * update
    return np.asarray(moved if low is None else moved.clip(min=low), dtype=trained.dtype)


MILESTONES = (0.5, 0.75)
"""Default milestones, in shares of the run (He et al., Deep Residual Learning, 2016)."""
MIN_CHANGE = 1e-4
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
        if value < self.best * (1 - MIN_CHANGE):
            return Plateau(value, 0, self.factor)
        if self.waited < patience:
            return Plateau(self.best, self.waited + 1, self.factor)
        return Plateau(self.best, 0, self.factor * decay)


NO_PLATEAU = Plateau()


def rate_factor(
    settings: TrainingSettings, round: int, rounds: int, plateau: Plateau = NO_PLATEAU
) -> float:
    """Return the factor on the learning rate in `round`, 1 to `rounds`, in (0, 1]."""
    warm_up = settings.warm_up_rounds
    factor = min(1.0, round / (warm_up + 1))  # linear, and 1 after the warm-up
    if settings.schedule == "cosine":  # 1 in the first round after it, close to 0 in the last
        angle = math.pi * max(0, round - warm_up - 1) / max(1, rounds - warm_up)
        factor *= (1 + math.cos(angle)) / 2
    elif settings.schedule == "step":
        ends = settings.milestones or [max(1, int(s * rounds)) for s in MILESTONES]
        factor *= settings.decay ** bisect_left(ends, round)  # the milestones before the round
    elif settings.schedule == "plateau":
        factor *= plateau.factor
    return factor
