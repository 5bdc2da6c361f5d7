"""UM-pFSSL strategy: the model pool, and the models sent to each client (Algorithms 1 to 3).

Yanhang Shi, Siguang Chen and Haijun Zhang, Uncertainty Minimization for Personalized Federated
Semi-Supervised Learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

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
from fedhet.config.resolve import Config
from fedhet.methods.um_pfssl import SPEC, UmPfsslSettings
from fedhet.runs.measures import mean_metrics
from fedhet.runs.storage import ModelStore
from fedhet.runs.units import natural
from fedhet.strategies.base import HetStrategy, Reply, Selection, ServerModel
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge

KEPT_VERSIONS = 3
"""Number of versions of each model in the pool; a resumed run may need an earlier version."""


class UmPfsslStrategy(HetStrategy):
    """Strategy that stores the clients' models and sends each client models that may help it.

    In the first round, all clients warm up, so t in Algorithm 1 is the round number minus one. In
    later rounds, a client is called if it is sampled, or if it needs to find or update helpers.
    """

    spec = SPEC
    settings: UmPfsslSettings

    def init(self) -> None:
        """Initialize an empty pool."""
        self.pool = ModelStore(self.log.directory / "pool", self.log.directory)
        self.numbers: dict[str, int] = {}
        """Number of each client's model, by client name."""
        self.versions: dict[int, int] = {}
        """Round in which each model in the pool was last uploaded, by model number."""
        self.lists: dict[str, list[Helper]] = {}
        """Latest helper list of each client. The list includes the client itself."""
        self.sent: dict[str, dict[int, int]] = {}
        """Versions of the models that each client has confirmed, by model number."""
        self.refreshes: dict[str, int] = {}
        """Number of periodic updates that each client has completed."""
        self.plans: dict[str, Plan] = {}
        """Plan of each client for this round, created by `select`."""
        self._assign_numbers(self.members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and K (pooled models), and the model's shapes."""
        sizes = super().sizes(client)
        return replace(sizes, axes={**sizes.axes, "K": len(self.numbers)})

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Plan the round. Sampled clients train, and other clients only find or update helpers."""
        names = [member.name for member in members]
        self._assign_numbers(names)
        sampled = super().select(round, members).training if self.step(round) > 0 else ()
        plans = {name: self._plan(round, name, name in sampled) for name in names}
        self.plans |= plans  # A busy client keeps its plan.
        for name, plan in plans.items():
            if not plan.refresh:
                self.refreshes[name] = max(self._updates_due(round), 0)
        active = {name: plan for name, plan in plans.items() if not plan.is_idle}
        training = tuple(name for name, plan in active.items() if plan.train or plan.warm_up)
        return Selection(training, tuple(sorted(active.keys() - set(training))))

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the client's plan, with the models read from the pool."""
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
        """Move an uploaded model to the pool. Its version is the round in which it was trained."""
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
        """Store the helper lists, without averaging any weights."""
        for reply in replies:
            name = reply.client.name
            try:
                self.lists[name] = self._read_list(reply)
            except KnowledgeError as error:
                self.log.notice(f"client {name}: the previous helper list is kept: {error}")
            self.sent.setdefault(name, {}).update(self._models_sent(name))
            self.refreshes[name] = self._updates_due(round)
        scalars = [reply.knowledge.scalars for reply in replies]
        sent = sum(len(self._models_sent(reply.client.name)) for reply in replies)
        replaced = sum(int(values["replaced"]) for values in scalars)
        return mean_metrics(scalars) | {"replaced": float(replaced), "models_sent": float(sent)}

    def _models_sent(self, client: str) -> Sequence[Key]:
        """Return the models sent to a client in this round, or none after a server restart."""
        return self.plans[client].models if client in self.plans else ()

    def forget(self, client: str) -> None:
        """Stop sending the client's model until the client uploads a new version."""
        self.versions.pop(self.numbers.get(client, -1), None)

    def state_dict(self) -> dict[str, Array]:
        """Return the state of the pool without the models, which are stored separately.

        The state contains the models' numbers and versions, the versions that each client has, and
        the helper lists.
        """
        state = grouped("number", {name: np.array(n) for name, n in self.numbers.items()})
        state["versions"] = _pairs(self.versions)
        state |= grouped("sent", {name: _pairs(sent) for name, sent in self.sent.items()})
        state |= grouped("refreshes", {n: np.array(count) for n, count in self.refreshes.items()})
        for name, helpers in self.lists.items():
            state |= grouped(f"list/{name}", to_arrays(helpers))
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        self.numbers = {name: int(n) for name, n in group(state, "number").items()}
        self.versions = dict(state["versions"].tolist())
        self.sent = {name: dict(pairs.tolist()) for name, pairs in group(state, "sent").items()}
        self.refreshes = {name: int(n) for name, n in group(state, "refreshes").items()}
        self.lists = {name: from_arrays(parts) for name, parts in groups(state, "list").items()}

    @classmethod
    def saved_models(
        cls, config: Config, directory: Path, state: Mapping[str, Array], client: ClientInfo
    ) -> Mapping[str, ServerModel]:
        """Return the models in the pool, under the names of the clients that uploaded them."""
        pool, versions = ModelStore(directory / "pool", directory), dict(state["versions"].tolist())
        names = {int(number): name for name, number in group(state, "number").items()}
        keys = {f"pool/{names[n]}": (n, version) for n, version in versions.items()}
        return {
            kind: ServerModel(pool.get(key), client.model, field="")
            for kind, key in sorted(keys.items(), key=lambda item: natural(item[0]))
            if key in pool
        }

    def step(self, round: int) -> int:
        """Convert a round number to t in Algorithm 1; the warm-up round has t = 0."""
        return round - (1 if self.settings.warm_up else 0)

    def _assign_numbers(self, names: Sequence[str] | Mapping[str, object]) -> None:
        for name in sorted(set(names) - self.numbers.keys()):
            self.numbers[name] = len(self.numbers)

    def _updates_due(self, round: int) -> int:
        """Return the number of periodic updates that are due up to a round."""
        return self.step(round) // self.settings.refresh_rounds(self.run.fraction)

    def _plan(self, round: int, name: str, train: bool) -> Plan:
        """Return the plan of a client for a round."""
        settings, own, step = self.settings, self.numbers[name], self.step(round)
        warm_up = bool(settings.warm_up) and own not in self.versions
        helpers = self.lists.get(name, [])
        new = self._models_outside_list(round, name, "candidates", sent=False)
        searching = step < settings.search_rounds and replaceable(helpers, own, settings.replace)
        candidates = new[: settings.replace] if searching else []
        free = settings.helpers - max(1, len(helpers)) if train else 0
        # If no new models are left, fill the list with models that were sent before (Algorithm 1,
        # line 16). Models can run out if some were lost or were compared before the list was full.
        sent = self._models_outside_list(round, name, "fill", sent=True)
        fill = [*new[len(candidates) :], *sent][: max(free, 0)]
        refresh = []
        if self._updates_due(round) > self.refreshes.get(name, 0):
            # Send newer versions of the helpers, except the R lowest-ranked helpers (Algorithm 2).
            # The ranks are from the end of the client's last round (Section IV-B).
            refresh = [
                (h.number, self.versions[h.number])
                for h in refreshable(helpers, own, settings.replace)
                if self.versions.get(h.number, 0) > h.version
            ]
        return Plan(train, warm_up, candidates, fill, refresh)

    def _models_outside_list(self, round: int, name: str, use: str, *, sent: bool) -> list[Key]:
        """Return the pooled models that are not in a client's helper list, in random order.

        Args:
            round: Round number.
            name: Name of the client.
            use: Key that seeds the random order.
            sent: If True, return only models that the client has received in their current version;
                otherwise, only models that it has not (Algorithm 3, line 7).
        """
        listed = {helper.number for helper in self.lists.get(name, [])} | {self.numbers[name]}
        last = self.sent.get(name, {})
        keys = [key for key in sorted(self.versions.items()) if key[0] not in listed]
        keys = [key for key in keys if (last.get(key[0]) == key[1]) == sent]
        order = numpy_rng(self.run.seed, use, round, name).permutation(len(keys))
        return [keys[index] for index in order]

    def _read_list(self, reply: Reply) -> list[Helper]:
        """Return a client's helper list. Raises KnowledgeError if the list is invalid."""
        helpers = from_arrays(reply.knowledge.tensors)
        name, limit = reply.client.name, self.settings.helpers
        if self.numbers[name] not in {helper.number for helper in helpers}:
            raise KnowledgeError(name, "numbers", "the client itself is missing")
        if len(helpers) > limit:
            fault = f"expected at most {limit} helpers, got {len(helpers)}"
            raise KnowledgeError(name, "numbers", fault)
        return helpers


def _pairs(table: Mapping[int, int]) -> Array:
    """Convert a dictionary of N integers, with integer keys, into an array [N, 2] of its items."""
    return np.array(sorted(table.items()), np.int64).reshape(-1, 2)
