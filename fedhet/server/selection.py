"""Selection of a round's clients: random, power-of-choice, or Oort.

Power-of-choice: Cho, Wang and Joshi, Toward Understanding Biased Client Selection in Federated
Learning, AISTATS 2022. The implemented variant is rpow-d, which uses the latest reported losses and
needs no extra messages. Oort: Lai, Zhu, Madhyastha and Chowdhury, Oort: Efficient Federated
Learning via Guided Participant Selection, OSDI 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from pydantic import TypeAdapter

from fedhet.algorithms.rounds import clients_per_round, clients_to_sample
from fedhet.base.seeding import numpy_rng
from fedhet.server.reply import Reply
from fedhet.server.round import Selection
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import ClientInfo

EXPLORATION, MIN_EXPLORATION, EXPLORATION_DECAY = 0.9, 0.2, 0.98
"""Fraction of new clients: initial value, minimum, and decay per round (Oort, Section 7.1)."""
CUTOFF = 0.95
"""Minimum utility, as a fraction of the lowest selected utility (Oort, Algorithm 1, line 13)."""
CLIP_QUANTILE = 0.95
"""Quantile at which utilities are clipped (Oort, Section 4.4)."""
PENALTY = 2.0
"""Exponent alpha of the penalty for slow clients (Oort, Eq. 2)."""
WINDOW = 20
"""Number of rounds after which the preferred duration may change (Oort, Section 7.1)."""
FIRST_QUANTILE, QUANTILE_STEP = 0.3, 0.05
"""Initial quantile of the clients' durations used as the preferred duration, and its increment."""


@dataclass
class LastReply:
    """Information about a client's last reply."""

    round: int
    loss: float
    """Mean training loss, or NaN if it is unknown."""
    seconds: float
    """Time that the client took for the round."""
    samples: float


@dataclass
class History:
    """Last replies of all clients, and utilities of past rounds."""

    clients: dict[str, LastReply] = field(default_factory=dict)
    worth: list[float] = field(default_factory=list)
    """Sum of the statistical utilities over the replies in each round."""


def power_of_choice(
    names: Sequence[str],
    samples: Mapping[str, float],
    history: History,
    count: int,
    candidates: int,
    rng: np.random.Generator,
) -> list[str]:
    """Draw candidates in proportion to sample counts, and select the highest-loss candidates.

    This is rpow-d (Section 4). Candidates with an unknown loss are selected first.

    Args:
        names: Names of the clients, sorted.
        samples: Number of training samples of each client.
        history: Last replies of the clients.
        count: Number of clients to select.
        candidates: Number of candidates; 0 means twice `count`.
        rng: Random generator for the round.
    """
    number = min(len(names), max(count, candidates or 2 * count))
    weights = np.array([max(samples[name], 1e-9) for name in names], dtype=np.float64)
    drawn = rng.choice(len(names), size=number, replace=False, p=weights / weights.sum())

    def loss_of(index: int) -> float:
        last = history.clients.get(names[index])
        return math.inf if last is None or math.isnan(last.loss) else last.loss

    order = sorted(map(int, drawn), key=lambda index: (-loss_of(index), names[index]))
    return [names[index] for index in order[:count]]


def oort(
    names: Sequence[str], history: History, round: int, count: int, rng: np.random.Generator
) -> list[str]:
    """Select new clients at random and known clients by utility (Oort, Algorithm 1)."""
    explored = [name for name in names if name in history.clients]
    unexplored = [name for name in names if name not in history.clients]
    fraction = max(MIN_EXPLORATION, EXPLORATION * EXPLORATION_DECAY ** (round - 1))
    num_new = min(len(unexplored), int(fraction * count + 0.5))
    num_new = max(num_new, min(len(unexplored), count - len(explored)))
    new = [unexplored[int(i)] for i in rng.permutation(len(unexplored))[:num_new]]
    count -= num_new
    if count <= 0 or not explored:
        return new
    replies = {name: history.clients[name] for name in explored}
    utility = utilities(replies, round, preferred_seconds(history))
    order = sorted(explored, key=lambda name: (-utility[name], name))
    min_utility = CUTOFF * utility[order[min(count, len(order)) - 1]]
    pool = [name for name in order if utility[name] >= min_utility]
    weights = np.array([utility[name] for name in pool])
    probabilities = weights / weights.sum() if weights.sum() > 0 else None
    drawn = rng.choice(len(pool), size=min(count, len(pool)), replace=False, p=probabilities)
    return [*(pool[int(index)] for index in drawn), *new]


def utilities(clients: Mapping[str, LastReply], round: int, preferred: float) -> dict[str, float]:
    """Return the utility of each client: its statistical utility, reduced if the client is slow.

    The statistical utility |B| sqrt(1/|B| sum of loss^2) in Eq. 2, where B is the client's set of
    samples, is computed from the mean loss, because clients report no other loss. It is clipped,
    and grows with the number of rounds since the client's last reply (Algorithm 1, line 10). Unlike
    in the paper, this growth is relative to the clip value. All utilities are positive, so every
    client can be drawn.

    Args:
        clients: Last replies of the clients.
        round: The current round.
        preferred: Preferred duration T in seconds; a client that takes t > T seconds is penalized
            by (T / t)^alpha.
    """
    plain = {name: statistical_utility(last) for name, last in clients.items()}
    clip = float(np.quantile(list(plain.values()), CLIP_QUANTILE)) if plain else 0.0
    utility: dict[str, float] = {}
    for name, last in clients.items():
        uncertainty = math.sqrt(0.1 * math.log(max(round, 2)) / max(last.round, 1))
        value = min(plain[name], clip) + uncertainty * clip
        if last.seconds > preferred > 0:
            value *= (preferred / last.seconds) ** PENALTY
        utility[name] = max(value, 1e-12)
    return utility


def statistical_utility(last: LastReply) -> float:
    """Return a client's statistical utility from its mean loss, or 0 if the loss is unknown."""
    return last.samples * abs(last.loss) if math.isfinite(last.loss) else 0.0


def preferred_seconds(history: History) -> float:
    """Return T, the preferred duration of a round in seconds ("pacer" in Section 4.3).

    T is a quantile of the clients' durations. The quantile rises each time the utility of a window
    of rounds is lower than the utility of the previous window.
    """
    starts = range(0, len(history.worth) - WINDOW + 1, WINDOW)
    sums = [sum(history.worth[start : start + WINDOW]) for start in starts]
    rises = sum(later < earlier for earlier, later in pairwise(sums))
    quantile = min(1.0, FIRST_QUANTILE + QUANTILE_STEP * rises)
    seconds = [last.seconds for last in history.clients.values()]
    return float(np.quantile(seconds, quantile)) if seconds else 0.0


class ClientSampler:
    """Sampler that selects each round's clients, and stores the history needed by 'pace.select'.

    The selection depends only on the seed, the round and the history.
    """

    def __init__(self, run: RunSettings) -> None:
        self._run, self._pace = run, run.pace
        self._history = History()
        self._round_utility = 0.0
        """Sum of the statistical utilities over the current round's replies."""
        self._wanted: int | None = None
        """Number of replies that the round needs; None until clients are selected."""
        self._seconds: Mapping[str, float] = {}
        self._num_at_work = 0
        """Number of eligible clients that are still working on an earlier instruction."""

    def start(self, num_at_work: int) -> None:
        """Start a round, given the number of clients that are still at work."""
        self._num_at_work, self._wanted, self._round_utility = num_at_work, None, 0.0

    def choose(self, round: int, members: Sequence[ClientInfo]) -> list[str]:
        """Select idle clients to train in a round, sorted by name.

        A round needs replies from a fraction (the setting 'fraction') of all clients, including
        clients at work. In asynchronous mode, this number of clients is at work at any time.
        """
        self._wanted = clients_per_round(len(members) + self._num_at_work, self._run.fraction)
        count = clients_to_sample(self._wanted, self._pace.over_selection)
        if self._pace.is_asynchronous:
            count = max(0, count - self._num_at_work)
        samples = {member.name: float(member.samples) for member in members}
        names, count, history = sorted(samples), min(count, len(samples)), self._history
        rng = numpy_rng(self._run.seed, "sample", round)
        if self._pace.select == "power-of-choice":
            candidates = self._pace.candidates
            selected = power_of_choice(names, samples, history, count, candidates, rng)
        elif self._pace.select == "oort":
            selected = oort(names, history, round, count, rng)
        else:
            selected = [names[int(index)] for index in rng.permutation(len(names))[:count]]
        return sorted(selected)

    def needed(self, selection: Selection) -> int:
        """Return the number of replies that the round needs, not counting over-selected clients."""
        training = len(selection.training)
        if self._wanted is not None:
            training = self._wanted if self._pace.is_asynchronous else min(training, self._wanted)
        return training + len(selection.assisting)

    def record_durations(self, seconds: Mapping[str, float]) -> None:
        """Record the time that each client took for the round on the run's clock, in seconds."""
        self._seconds = seconds

    def record_reply(self, reply: Reply, round: int) -> None:
        """Record the loss and the duration of a client's reply."""
        if self._pace.select != "random":
            measured, name = reply.measured, reply.client.name
            loss = math.nan if measured.loss is None else measured.loss
            seconds = self._seconds.get(name, measured.train_seconds)
            last = LastReply(round, loss, seconds, reply.samples)
            self._history.clients[name] = last
            self._round_utility += statistical_utility(last)

    def finish(self) -> None:
        """End a round, and record its utility."""
        if self._pace.select != "random":
            self._history.worth.append(self._round_utility)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state for a checkpoint."""
        state: dict[str, Any] = TypeAdapter(History).dump_python(self._history, mode="json")
        return state

    def load_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore the state returned by `to_dict`. Raises ValueError if the state is invalid."""
        self._history = TypeAdapter(History).validate_python(dict(saved))
