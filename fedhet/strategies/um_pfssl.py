"""UM-pFSSL, server half: the model pool, and which models each client is sent (Algorithms 1 to 3).

Yanhang Shi, Siguang Chen and Haijun Zhang, Uncertainty Minimization for Personalized Federated
Semi-Supervised Learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedhet.algorithms.uncertainty import (
    Helper,
    Key,
    Plan,
    from_arrays,
    refreshable,
    replaceable,
    to_arrays,
)
from fedhet.base.arrays import Array, group, grouped, groups
from fedhet.base.errors import KnowledgeError
from fedhet.base.seeding import numpy_rng
from fedhet.methods.um_pfssl import SPEC, UmPfsslSettings
from fedhet.runs.measures import mean_metrics
from fedhet.runs.storage import ModelStore
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

KEPT_VERSIONS = 3
"""Versions of each model that the pool keeps: a server that resumes needs an earlier one."""


class UmPfsslStrategy(HetStrategy):
    """Keeps every client's latest model on disk and sends clients the ones that may help them.

    The first round is the warm-up of all clients; Algorithm 1's t is the round minus one. Later, a
    client is not asked if it is neither sampled nor has helpers to search or update.
    """

    spec = SPEC
    settings: UmPfsslSettings

    def init(self) -> None:
        """Start with an empty pool."""
        self.pool = ModelStore(self.log.directory / "pool", self.log.directory)
        self.numbers: dict[str, int] = {}
        """The number of each client's model, by client name."""
        self.versions: dict[int, int] = {}
        """The round in which each model of the pool was last uploaded."""
        self.lists: dict[str, list[Helper]] = {}
        """Each client's helper list, as last reported, including the client itself."""
        self.sent: dict[str, dict[int, int]] = {}
        """The last version of each model that a client was sent and has confirmed."""
        self.refreshes: dict[str, int] = {}
        """How many periodic updates each client has completed."""
        self.plans: dict[str, Plan] = {}
        """The plan for each client in this round, made by `select`."""
        self._number(self.members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return C, the architecture's tensor shapes, and K, the number of models in the pool."""
        sizes = super().sizes(client)
        return replace(sizes, axes={**sizes.axes, "K": len(self.numbers)})

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Plan the round: sampled clients train, others only search for or update their helpers.

        A client that does not train keeps its model.
        """
        names = [member.name for member in members]
        self._number(names)
        sampled = super().select(round, members).training if self.step(round) > 0 else ()
        plans = {name: self._plan(round, name, name in sampled) for name in names}
        self.plans |= plans  # a client that is still at work keeps the plan that it has
        for name, plan in plans.items():
            if not plan.refresh:
                self.refreshes[name] = max(self._due(round), 0)
        asked = {name: plan for name, plan in plans.items() if not plan.is_idle}
        training = tuple(name for name, plan in asked.items() if plan.train or plan.warm_up)
        return Selection(training, tuple(sorted(asked.keys() - set(training))))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send a client its plan, with the models read from the pool."""
        plan, own = self.plans[client.name], self.numbers[client.name]
        scalars = {"own": own, "train": plan.train, "held": self.versions.get(own, 0)}
        if not plan.models:
            return Knowledge(scalars=scalars)
        models = [self.pool.get(key) for key in plan.models]
        numbers, versions = np.array(plan.models, np.int64).T
        tensors = {"numbers": numbers, "versions": versions, "roles": np.array(plan.roles)}
        names = self.sizes(client).models["models"]
        stacked = {name: np.stack([model[name] for model in models]) for name in names}
        return Knowledge({**tensors, **grouped("models", stacked)}, scalars)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Store an uploaded model in the pool, as the version of the round that it is of."""
        weights = reply.knowledge.group("weights")
        if not weights:
            return reply
        number = self.numbers[reply.client.name]
        self.versions[number] = round - reply.age
        self.pool.put((number, self.versions[number]), weights)
        self.pool.trim(number, KEPT_VERSIONS)
        lists = {k: v for k, v in reply.knowledge.tensors.items() if "/" not in k}
        return reply.with_knowledge(Knowledge(lists, reply.knowledge.scalars))

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the helper lists; the server averages nothing."""
        for reply in replies:
            name = reply.client.name
            try:
                self.lists[name] = self._read_list(reply)
            except KnowledgeError as error:
                self.log.notice(f"client {name}'s helper list is unchanged: {error}")
            self.sent.setdefault(name, {}).update(self._models_sent(name))
            self.refreshes[name] = self._due(round)
        scalars = [reply.knowledge.scalars for reply in replies]
        sent = sum(len(self._models_sent(reply.client.name)) for reply in replies)
        found = {"replaced": sum(int(each["replaced"]) for each in scalars), "models_sent": sent}
        return mean_metrics(scalars) | {name: float(count) for name, count in found.items()}

    def _models_sent(self, client: str) -> Sequence[Key]:
        """Return the models that a client was sent; of one that came before a restart, none."""
        return self.plans[client].models if client in self.plans else ()

    def forget(self, client: str) -> None:
        """Send a client's model to no client until it uploads one again."""
        self.versions.pop(self.numbers.get(client, -1), None)

    def state_dict(self) -> dict[str, Array]:
        """Return the pool's index and the helper lists; the models are in the run's directory."""
        kept = grouped("number", {name: np.array(n) for name, n in self.numbers.items()})
        kept["versions"] = _pairs(self.versions)
        kept |= grouped("sent", {name: _pairs(sent) for name, sent in self.sent.items()})
        kept |= grouped("refreshes", {n: np.array(count) for n, count in self.refreshes.items()})
        for name, helpers in self.lists.items():
            kept |= grouped(f"list/{name}", to_arrays(helpers))
        return kept

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.numbers = {name: int(n) for name, n in group(state, "number").items()}
        self.versions = dict(state["versions"].tolist())
        self.sent = {name: dict(pairs.tolist()) for name, pairs in group(state, "sent").items()}
        self.refreshes = {name: int(n) for name, n in group(state, "refreshes").items()}
        self.lists = {name: from_arrays(kept) for name, kept in groups(state, "list").items()}

    def step(self, round: int) -> int:
        """Return Algorithm 1's t for a round of the run; 0 is the warm-up."""
        return round - (1 if self.settings.warm_up else 0)

    def _number(self, names: Sequence[str] | Mapping[str, object]) -> None:
        for name in sorted(set(names) - self.numbers.keys()):
            self.numbers[name] = len(self.numbers)

    def _due(self, round: int) -> int:
        """Return the number of periodic updates that are due up to a round."""
        return self.step(round) // self.settings.refresh_rounds(self.run.fraction)

    def _plan(self, round: int, name: str, train: bool) -> Plan:
        """Return the plan for a client in a round."""
        chosen, own, step = self.settings, self.numbers[name], self.step(round)
        warm_up = bool(chosen.warm_up) and own not in self.versions
        helpers = self.lists.get(name, [])
        new = self._outside(round, name, "candidates", sent=False)
        searching = step < chosen.search_rounds and replaceable(helpers, own, chosen.replace)
        candidates = new[: chosen.replace] if searching else []
        room = chosen.helpers - max(1, len(helpers)) if train else 0
        # Models that were already sent fill a list for which no new ones are left (Algorithm 1,
        # line 16): if models were lost, or candidates were compared before the list was full.
        seen = self._outside(round, name, "fill", sent=True)
        fill = [*new[len(candidates) :], *seen][: max(room, 0)]
        refresh = self._newer(name) if self._due(round) > self.refreshes.get(name, 0) else []
        return Plan(train, warm_up, candidates, fill, refresh)

    def _outside(self, round: int, name: str, use: str, *, sent: bool) -> list[Key]:
        """Return the models of the pool outside a client's list, in random order.

        Those that it was `sent` in their current version, or the others (Algorithm 3, line 7).
        """
        known = {helper.number for helper in self.lists.get(name, [])} | {self.numbers[name]}
        last = self.sent.get(name, {})
        found = [key for key in sorted(self.versions.items()) if key[0] not in known]
        found = [key for key in found if (last.get(key[0]) == key[1]) == sent]
        order = numpy_rng(self.run.seed, use, round, name).permutation(len(found))
        return [found[place] for place in order]

    def _newer(self, name: str) -> list[Key]:
        """Return the helpers to update (Algorithm 2): changed since, and not the least related.

        Ranks are those at the end of the client's last round, where section IV-B sorts the list.
        """
        helpers = self.lists.get(name, [])
        found = refreshable(helpers, self.numbers[name], self.settings.replace)
        return [
            (h.number, self.versions[h.number])
            for h in found
            if self.versions.get(h.number, 0) > h.version
        ]

    def _read_list(self, reply: Reply) -> list[Helper]:
        """Return a client's helper list. Raises KnowledgeError if it is not valid."""
        helpers = from_arrays(reply.knowledge.tensors)
        name, most = reply.client.name, self.settings.helpers
        if self.numbers[name] not in {helper.number for helper in helpers}:
            raise KnowledgeError(name, "numbers", "the client itself is missing")
        if len(helpers) > most:
            raise KnowledgeError(name, "numbers", f"has {len(helpers)} helpers, {most} are allowed")
        return helpers


def _pairs(table: Mapping[int, int]) -> Array:
    """Return an integer table as an array [entries, 2]."""
    return np.array(sorted(table.items()), np.int64).reshape(-1, 2)
