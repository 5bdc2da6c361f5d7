"""Rules for the rounds of a run: number of clients, closing time, late updates, learning rate.

A round closes when all sampled clients have replied, when the grace period after enough replies has
ended, or at its timeout. NVFlare has the same rule (min_responses, wait_time_after_min_received).

The learning rate is multiplied by a factor. Except with the schedule `plateau`, the factor depends
only on the round number, and not on how often a client was sampled. The formulas are the same as in
torch.optim.lr_scheduler, with rounds instead of epochs.

Late updates are weighted and applied as in FedBuff (Nguyen et al., AISTATS 2022).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

import numpy as np

from fedhet.algorithms.robust import max_malicious, min_replies
from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings, TrainingSettings

MIN_GRACE = 10.0
"""Minimum grace period of an evaluation, in seconds."""
RECENT = 20
"""Number of recent rounds from which the median duration is computed."""
Fault = Literal["drop-out", "straggler"]
"""Fault of a simulated client in a round (`pace.drop-outs`, `pace.stragglers`)."""


@dataclass(frozen=True)
class Closing:
    """Rule that determines when a round closes."""

    min_replies: int
    """Number of replies after which the grace period starts; at least 1."""
    grace: float = 0.0
    """Grace period, in seconds."""
    timeout: float = math.inf
    """Maximum duration of the round, in seconds."""
    patience: float = 0.0
    """Minimum grace period, relative to the time until `min_replies` replies have arrived."""

    def closing_time(self, arrivals: Iterable[float], start: float) -> float:
        """Return the closing time of a round, given the arrival times of all replies.

        Args:
            arrivals: Times at which the replies arrive.
            start: Time at which the round starts.
        """
        times = sorted(arrivals)
        if not times:
            return start
        return max(start, min(times[-1], self._grace_end(times, start), start + self.timeout))

    def remaining_wait(self, now: float, arrivals: Sequence[float], awaited: int) -> float:
        """Return the time to wait for the next reply, in seconds; 0 if the round closes now.

        Args:
            now: Seconds since the start of the round.
            arrivals: Times of the replies that have arrived, in seconds since the start, ascending.
            awaited: Number of replies that are still expected.
        """
        return max(0.0, min(self._grace_end(arrivals), self.timeout) - now) if awaited else 0.0

    def _grace_end(self, times: Sequence[float], start: float = 0.0) -> float:
        """Return the end of the grace period, or infinity if too few replies have arrived."""
        if self.min_replies > len(times):
            return math.inf
        time = times[self.min_replies - 1]
        return time + max(self.grace, self.patience * (time - start))


def clients_per_round(members: int, fraction: float) -> int:
    """Return the number of clients in a round: a fraction of the members, but at least one."""
    return max(1, int(fraction * members + 0.5))


def clients_to_sample(needed: int, over_selection: float) -> int:
    """Return the number of clients to sample in a round that needs `needed` timely replies."""
    return math.ceil(round((1 + over_selection) * needed, 9))


def is_hit(seed: int, client: str, round: int, fault: Fault, probability: float) -> bool:
    """Decide at random whether a simulated client has `fault` in a round."""
    return probability > 0 and bool(numpy_rng(seed, client, round, fault).random() < probability)


def malicious_clients(seed: int, members: Collection[str], count: int) -> Set[str]:
    """Draw the malicious clients of a run, independently of clients that join or leave later."""
    order = sorted(members, key=lambda name: numpy_rng(seed, "attack", "client", name).random())
    return set(order[:count])


def honest_majority(run: RunSettings) -> tuple[int, int, int]:
    """Return a round's numbers of malicious clients, sampled clients, and required replies.

    A round with robust aggregation must not close before the required replies have arrived, because
    all malicious clients may reply before the honest clients. Without robust aggregation, the
    numbers of malicious clients and required replies are 0 and 1.
    """
    defense, members = run.defense, run.clients
    needed = clients_per_round(members, run.fraction)
    count = min(clients_to_sample(needed, run.pace.over_selection), members)
    if defense.average == "mean":
        return 0, count, 1
    # Unless clients are selected at random, malicious clients can influence the selection, so that
    # all of them may be in the round.
    among = count if run.pace.select == "random" else members
    malicious = min(max_malicious(among, defense.malicious_fraction), count)
    required = min(min_replies(defense.average, malicious), count) if malicious else 1
    return malicious, count, required


def closing(
    pace: PaceSettings, needed: int, awaited: int, durations: Iterable[float] = (), least: int = 1
) -> Closing:
    """Return the closing rule of a training round.

    Args:
        pace: Settings in `[pace]`.
        needed: Number of replies that the round needs.
        awaited: Number of clients from which replies are expected.
        durations: Durations of the previous rounds, in seconds.
        least: Minimum number of replies if `pace.min-replies` results in a lower number.
    """
    number = int(pace.min_replies)
    if pace.min_replies <= 1:
        number = math.ceil(round(pace.min_replies * needed, 9))
    number = min(max(number, least), awaited)
    return Closing(max(1, number), pace.grace, pace.max_seconds(median_duration(durations)))


def closing_of_evaluation(pace: PaceSettings, calls: int, durations: Iterable[float]) -> Closing:
    """Return the closing rule of an evaluation.

    After enough replies have arrived, an evaluation continues for as long as these replies took,
    but at least MIN_GRACE seconds, because a client that misses the evaluation is not called again.
    """
    rule = closing(pace, calls, calls, durations)
    return replace(rule, grace=max(pace.grace, MIN_GRACE), patience=1.0)


def median_duration(durations: Iterable[float]) -> float:
    """Return the median duration of the recent rounds, or infinity before the first round ends."""
    recent = list(durations)[-RECENT:]
    return median(recent) if recent else math.inf


def staleness_weight(age: int) -> float:
    """Return (1 + age)^(-1/2), the weight of a reply that is `age` rounds old.

    This is the polynomial weight s(tau) with a = 1/2 in Section 5.1 of FedBuff (Nguyen et al.,
    AISTATS 2022).
    """
    return float((1 + age) ** -0.5)


def rebase(current: Array, trained: Array, start: Array, rate: float, low: float | None) -> Array:
    """Apply a client's update, which was computed from an older tensor, to the current tensor.

    Args:
        current: The server's current tensor.
        trained: The client's tensor after training.
        start: The tensor from which the client started training.
        rate: Factor by which the update is multiplied: 1, or eta s(tau) in FedBuff (Algorithm 1,
            lines 8 to 12: w <- w + eta / K sum_k s(tau_k) Delta_k). An average of such tensors with
            the weights n_k is w + eta sum_k n_k s(tau_k) Delta_k / sum_k n_k. Unlike in the paper,
            each client is thus weighted by its number of samples n_k.
        low: Lower bound of the result, or None for no bound.

    Returns:
        current + rate (trained - start) in the type of `trained`. For integer tensors (counters),
        the client's tensor `trained` is returned unchanged.
    """
    if not np.issubdtype(trained.dtype, np.floating):
        return trained
    update = trained.astype(np.float64) - start
    moved = current + rate * update
    return np.asarray(moved if low is None else moved.clip(min=low), dtype=trained.dtype)


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
