"""Selection of a round's clients: at random, by power-of-choice, or by Oort.

Power-of-choice: Cho, Wang and Joshi, Toward Understanding Biased Client Selection in Federated
Learning, AISTATS 2022; by the losses that the server knows (their rpow-d), without extra messages.
Oort: Lai, Zhu, Madhyastha and Chowdhury, Oort: Efficient Federated Learning via Guided Participant
Selection, OSDI 2021.
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
from fedhet.settings.engine import PaceSettings
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import ClientInfo

EXPLORATION, MIN_EXPLORATION, EXPLORATION_DECAY = 0.9, 0.2, 0.98
"""Oort, Section 7.1: the share of clients that were never asked, its least and its decay."""
CUTOFF = 0.95
"""Oort, Algorithm 1, line 13: of the last utility that would be chosen, what still may be."""
CLIP_AT = 0.95
"""Oort, Section 4.4: utilities are clipped at this quantile."""
PENALTY = 2.0
"""Oort, Eq. 2: alpha, by which slow clients are held back."""
WINDOW = 20
"""Oort, Section 7.1: rounds between two looks at what the rounds were worth."""
FIRST_QUANTILE, QUANTILE_STEP = 0.3, 0.05
"""The quantile of the clients' durations that is the preferred one, and by how much it rises."""


@dataclass
class Past:
    """What the server knows of a client's last reply."""

    round: int
    loss: float
    """Its mean training loss."""
    seconds: float
    """How long it took."""
    samples: float


@dataclass
class History:
    """What is known of all clients that have replied, and what their rounds were worth."""

    clients: dict[str, Past] = field(default_factory=dict)
    worth: list[float] = field(default_factory=list)
    """The sum of the statistical utilities of each round's replies."""


def power_of_choice(
    names: Sequence[str],
    samples: Mapping[str, float],
    history: History,
    count: int,
    candidates: int,
    rng: np.random.Generator,
) -> list[str]:
    """Return the `count` clients with the highest loss of `candidates` drawn by their samples.

    rpow-d (Section 4): candidates are drawn with probability p_k, without replacement; a client
    whose loss is not known yet comes first.
    """
    number = min(len(names), max(count, candidates or 2 * count))
    share = np.array([max(samples[name], 1e-9) for name in names], dtype=np.float64)
    drawn = rng.choice(len(names), size=number, replace=False, p=share / share.sum())

    def loss_of(index: int) -> float:
        known = history.clients.get(names[index])
        return math.inf if known is None or math.isnan(known.loss) else known.loss

    order = sorted(map(int, drawn), key=lambda index: (-loss_of(index), names[index]))
    return [names[index] for index in order[:count]]


def oort(
    names: Sequence[str], history: History, round: int, count: int, rng: np.random.Generator
) -> list[str]:
    """Return `count` clients: some never asked, the others drawn by their utility (Algorithm 1)."""
    known = [name for name in names if name in history.clients]
    fresh = [name for name in names if name not in history.clients]
    share = max(MIN_EXPLORATION, EXPLORATION * EXPLORATION_DECAY ** (round - 1))
    explored = min(len(fresh), int(share * count + 0.5))
    explored = max(explored, min(len(fresh), count - len(known)))
    new = [fresh[int(i)] for i in rng.permutation(len(fresh))[:explored]]
    count -= explored
    if count <= 0 or not known:
        return new
    utility = utilities({name: history.clients[name] for name in known}, round, preferred(history))
    order = sorted(known, key=lambda name: (-utility[name], name))
    least = CUTOFF * utility[order[min(count, len(order)) - 1]]
    pool = [name for name in order if utility[name] >= least]
    weight = np.array([utility[name] for name in pool])
    chances = weight / weight.sum() if weight.sum() > 0 else None
    drawn = rng.choice(len(pool), size=min(count, len(pool)), replace=False, p=chances)
    return [*(pool[int(index)] for index in drawn), *new]


def utilities(clients: Mapping[str, Past], round: int, preferred: float) -> dict[str, float]:
    """Return each client's utility (Eq. 2): what it teaches, times (T / t)^alpha if it is slow.

    The statistical utility |B| sqrt(1/|B| sum of loss^2) is taken from the mean loss, since that is
    what clients report. It is clipped, and grows with the rounds since the client was last asked
    (Algorithm 1, line 10; in units of the largest, ours). None is zero, so that all may be drawn.
    """
    plain = {name: worth_of(past) for name, past in clients.items()}
    most = float(np.quantile(list(plain.values()), CLIP_AT)) if plain else 0.0
    found: dict[str, float] = {}
    for name, past in clients.items():
        unseen = math.sqrt(0.1 * math.log(max(round, 2)) / max(past.round, 1))
        value = min(plain[name], most) + unseen * most
        if past.seconds > preferred > 0:
            value *= (preferred / past.seconds) ** PENALTY
        found[name] = max(value, 1e-12)
    return found


def worth_of(past: Past) -> float:
    """Return a client's statistical utility, by the mean loss of its samples."""
    return past.samples * abs(past.loss) if math.isfinite(past.loss) else 0.0


def preferred(history: History) -> float:
    """Return T, the preferred duration of a round in seconds (Section 4.3, the pacer).

    It is a quantile of the clients' durations, which rises each time that the rounds of a window
    were worth less than those of the window before.
    """
    whole_windows = range(0, len(history.worth) - WINDOW + 1, WINDOW)
    sums = [sum(history.worth[at : at + WINDOW]) for at in whole_windows]
    rises = sum(later < earlier for earlier, later in pairwise(sums))
    quantile = min(1.0, FIRST_QUANTILE + QUANTILE_STEP * rises)
    seconds = [past.seconds for past in history.clients.values()]
    return float(np.quantile(seconds, quantile)) if seconds else 0.0


def chosen(
    pace: PaceSettings,
    names: Sequence[str],
    samples: Mapping[str, float],
    history: History,
    round: int,
    count: int,
    rng: np.random.Generator,
) -> list[str]:
    """Return, sorted, the `count` of the clients `names` that are asked in a round."""
    ordered, count = sorted(names), min(count, len(names))
    if pace.select == "power-of-choice":
        found = power_of_choice(ordered, samples, history, count, pace.candidates, rng)
    elif pace.select == "oort":
        found = oort(ordered, history, round, count, rng)
    else:
        found = [ordered[int(index)] for index in rng.permutation(len(ordered))[:count]]
    return sorted(found)


class ClientSampler:
    """Draws clients by the seed and the round, and remembers what 'pace.select' needs."""

    def __init__(self, run: RunSettings) -> None:
        self._run, self._pace = run, run.pace
        self._history = History()
        self._worth = 0.0
        """The worth of the replies of the current round."""
        self._wanted: int | None = None
        self._seconds: Mapping[str, float] = {}
        """Time that each client of the round took, by the run's clock."""
        self.at_work = 0
        """Clients of the federation that are not asked, since they are still at work."""

    def start(self, at_work: int) -> None:
        """Begin a round in which so many clients are still at work."""
        self.at_work, self._wanted, self._worth = at_work, None, 0.0

    def choose(self, round: int, members: Sequence[ClientInfo]) -> list[str]:
        """Return, sorted, those of the idle clients `members` that are asked to train.

        The round wants a share 'fraction' of all clients, those at work among them. Asynchronously,
        so many are at work at any time.
        """
        self._wanted = clients_per_round(len(members) + self.at_work, self._run.fraction)
        count = clients_to_sample(self._wanted, self._pace.over_selection)
        if self._pace.is_asynchronous:
            count = max(0, count - self.at_work)
        samples = {member.name: float(member.samples) for member in members}
        rng = numpy_rng(self._run.seed, "sample", round)
        return chosen(self._pace, list(samples), samples, self._history, round, count, rng)

    def needed(self, selection: Selection) -> int:
        """Return how many of the selected clients the round is for; the others are in addition."""
        training = len(selection.training)
        if self._wanted is not None:
            training = self._wanted if self._pace.is_asynchronous else min(training, self._wanted)
        return training + len(selection.assisting)

    def record_durations(self, seconds: Mapping[str, float]) -> None:
        """Record the time that each client of the round took, by the run's clock."""
        self._seconds = seconds

    def record_reply(self, reply: Reply, round: int) -> None:
        """Remember a client's reply: its loss, and how long it took."""
        if self._pace.select != "random":
            measured, name = reply.measured, reply.client.name
            loss = math.nan if measured.loss is None else measured.loss
            seconds = self._seconds.get(name, measured.train_seconds)
            past = Past(round, loss, seconds, reply.samples)
            self._history.clients[name] = past
            self._worth += worth_of(past)

    def finish(self) -> None:
        """End a round."""
        if self._pace.select != "random":
            self._history.worth.append(self._worth)

    def to_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs, as JSON has it."""
        found: dict[str, Any] = TypeAdapter(History).dump_python(self._history, mode="json")
        return found

    def load_dict(self, known: Mapping[str, Any]) -> None:
        """Restore what `to_dict` returned. Raises ValueError."""
        self._history = TypeAdapter(History).validate_python(dict(known))
