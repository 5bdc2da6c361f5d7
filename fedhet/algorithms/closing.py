"""When a round closes.

A round closes when enough of the clients that it waits for have answered, and either all of them
have or a grace time has passed since; or at its timeout. NVFlare has the same rule (min_responses,
wait_time_after_min_received).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from fedhet.algorithms.robust import least_replies, withstood
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings

LEAST_GRACE = 10.0
"""The least seconds for which an evaluation waits when enough clients have answered."""
RECENT = 20
"""The number of last rounds whose median duration is the usual one."""


@dataclass(frozen=True)
class Closing:
    """The rule of one round."""

    enough: int
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
        graced = math.inf
        if self.enough <= len(times):
            graced = times[self.enough - 1] + self._grace(times[self.enough - 1] - began)
        return max(began, min(times[-1], graced, began + self.timeout))

    def waits(self, now: float, answers: Sequence[float], awaited: int) -> float:
        """Return for how many seconds to wait for the next answer; 0: the round closes.

        `now` and `answers`, the times of those that have come, in their order, are seconds since
        the round began; `awaited` are yet to come.
        """
        if not awaited:
            return 0.0
        graced = math.inf
        if self.enough <= len(answers):
            graced = answers[self.enough - 1] + self._grace(answers[self.enough - 1])
        return max(0.0, min(graced, self.timeout) - now)

    def _grace(self, taken: float) -> float:
        """Return the grace if enough answers have taken so long, in seconds."""
        return max(self.grace, self.patience * taken)


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
    defence, members = run.defence, run.clients
    count = min(asked(wanted(members, run.fraction), run.pace.over_selection), members)
    if defence.average == "mean":
        return 0, count, 1
    # Clients influence who is asked, unless clients are selected at random.
    among = count if run.pace.select == "random" else members
    malicious = min(withstood(among, defence.share), count)
    least = min(least_replies(defence.average, malicious), count) if malicious else 1
    return malicious, count, least


def closing(
    pace: PaceSettings,
    needed: int,
    awaited: int,
    durations: Iterable[float] = (),
    least: int = 1,
) -> Closing:
    """Return the rule of a round that needs `needed` answers, or as many as are awaited.

    `durations` are the seconds of the rounds before. `least` answers are needed in any case: the
    share 'enough' is one of the clients that are idle, who may be few.
    """
    share = pace.enough if pace.enough <= 1 else 1.0
    number = math.ceil(round(share * needed, 9)) if pace.enough <= 1 else int(pace.enough)
    enough = min(max(number, least), awaited)
    return Closing(max(1, enough), pace.grace, pace.seconds_at_most(usual(durations)))


def closing_of_evaluation(pace: PaceSettings, asked: int, durations: Iterable[float]) -> Closing:
    """Return the rule of an evaluation, which waits longer: who is left out cannot be asked next.

    Once enough have answered, it waits for as long again, and for LEAST_GRACE at least.
    """
    rule = closing(pace, asked, asked, durations)
    return replace(rule, grace=max(pace.grace, LEAST_GRACE), patience=1.0)


def usual(durations: Iterable[float]) -> float:
    """Return the median of the last rounds' seconds; infinity before the first has ended."""
    last = list(durations)[-RECENT:]
    return median(last) if last else math.inf
