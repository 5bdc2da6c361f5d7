"""Rules for the rounds of a run: number of clients, closing time, and late updates.

A round closes when all sampled clients have replied, when the grace period after enough replies has
ended, or at its timeout. NVFlare has the same rule (min_responses, wait_time_after_min_received).

Late updates are weighted and applied as in FedBuff (Nguyen et al., AISTATS 2022).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Literal

import numpy as np

from fedhet.base.arrays import Array
from fedhet.base.seeding import numpy_rng

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


def replies_to_close(min_replies: float, needed: int, awaited: int, least: int = 1) -> int:
    """Return the number of replies after which the grace period of a round starts.

    Args:
        min_replies: Number of replies or, up to 1, fraction of the needed replies.
        needed: Number of replies that the round needs.
        awaited: Number of clients from which replies are expected.
        least: Minimum number of replies if `min_replies` results in a lower number.
    """
    number = math.ceil(round(min_replies * needed, 9)) if min_replies <= 1 else int(min_replies)
    return max(1, min(max(number, least), awaited))


def is_hit(seed: int, client: str, round: int, fault: Fault, probability: float) -> bool:
    """Decide at random whether a simulated client has `fault` in a round."""
    return probability > 0 and bool(numpy_rng(seed, client, round, fault).random() < probability)


def malicious_clients(seed: int, members: Collection[str], count: int) -> Set[str]:
    """Draw the malicious clients of a run, independently of clients that join or leave later."""
    order = sorted(members, key=lambda name: numpy_rng(seed, "attack", "client", name).random())
    return set(order[:count])


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
