"""Chooses the clients of a round, as `[pace]` says: a method need not know how."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import TypeAdapter

from fedhet.base.seeding import numpy_rng
from fedhet.pace.closing import asked, wanted
from fedhet.pace.selection import History, Past, chosen, worth_of
from fedhet.server.reply import Reply
from fedhet.server.round import Selection
from fedhet.settings.run import RunSettings
from fedhet.wire.identity import ClientInfo


class Selecting:
    """Draws clients by the seed and the round, and remembers what 'pace.select' needs."""

    def __init__(self, run: RunSettings) -> None:
        self._run, self._pace = run, run.pace
        self._history = History()
        self._worth = 0.0
        """What the answers of the current round have been worth."""
        self._wanted: int | None = None
        self.seconds: Mapping[str, float] = {}
        """How long the clients of this round took, by the run's clock."""
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
        self._wanted = wanted(len(members) + self.at_work, self._run.fraction)
        count = asked(self._wanted, self._pace.over_selection)
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

    def answered(self, reply: Reply, round: int) -> None:
        """Remember a client's answer: its loss, and how long it took."""
        if self._pace.select != "random":
            measured, name = reply.measured, reply.client.name
            loss = math.nan if measured.loss is None else measured.loss
            seconds = self.seconds.get(name, measured.train_seconds)
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
