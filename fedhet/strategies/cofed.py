"""CoFED, server half: pseudolabels by vote, Algorithm 1.

Xingjian Cao, Zonghang Li, Gang Sun, Hongfang Yu and Mohsen Guizani, Cross-Silo Heterogeneous Model
Federated Multitask Learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.consensus import Vote, aggregate, count_conflicts, labels_in_space
from fedhet.base.arrays import Array, grouped, groups
from fedhet.base.errors import KnowledgeError, closest
from fedhet.methods.cofed import SPEC, CofedSettings
from fedhet.settings.schema import invalid_setting
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class CofedStrategy(HetStrategy):
    """Collects predictions on the public set, votes, and sends each client labels for its task."""

    spec = SPEC
    settings: CofedSettings

    def init(self) -> None:
        """Start without votes."""
        given = self.settings.credibility
        self.weights = given if isinstance(given, dict) else {}
        """Credibility weights from the settings, by client (Section 4.6)."""
        for name in sorted(self.weights.keys() - self.members.keys()):  # which may still join
            if len(self.members) >= self.run.clients:
                close = closest(name, self.members)
                hint = f" (did you mean '{close}'?)" if close else ""
                problem = f"unknown client '{name}'{hint}"
                weights, expected = self.settings.credibility, "names of the run's clients"
                raise invalid_setting("cofed.credibility", weights, expected, problem)
            self.log.notice(f"cofed.credibility: no client {name!r} has joined yet")
        self.instances = len(self.public_set(labeled=False))
        self.votes: dict[str, Vote] = {}
        """Each participant's latest predictions."""
        self.pseudolabeled = aggregate([], self.task.classes, self.settings.threshold)
        """Which instances are in which P_k, [C, N]."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the same clients in every round, so that those who vote get pseudolabels."""
        return super().select(1, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C (classes), N (public instances) and L, the possible answers in a vote.

        The answers are the classes and, if participants may abstain, C for none of them.
        """
        answers = client.classes + (self.settings.margin > 0)
        return Sizes({"C": client.classes, "N": self.instances, "L": answers})

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send R_i to clients that voted (step 3, Eq. 19); before the end, ask for predictions.

        A client that has not voted trains alone: the server does not know its label space.
        """
        predict = {"predict": round <= self.settings.iterations}
        if client.name not in self.votes:
            return Knowledge(scalars=predict)
        labels = np.full(self.instances, self.task.classes, smallest_uint(self.task.classes + 1))
        kept, classes = labels_in_space(self.pseudolabeled, self.votes[client.name].space)
        labels[kept] = classes
        return Knowledge({"labels": labels}, predict)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply. Raises KnowledgeError if the vote is missing or outside its space."""
        if round > self.settings.iterations:
            return reply
        name, tensors = reply.client.name, reply.knowledge.tensors
        if "predictions" not in tensors:
            raise KnowledgeError(name, "predictions", "missing")
        labels, space = tensors["predictions"], tensors["space"]
        outside = ~np.isin(labels, space) & (labels != reply.client.classes)
        if outside.any():
            fault = f"holds {labels[outside][0]}, not in its label space"
            raise KnowledgeError(name, "predictions", fault)
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the votes and count them (Algorithm 1)."""
        if round > self.settings.iterations:
            return {}
        for reply in replies:
            tensors = reply.knowledge.tensors
            space, weight = np.sort(tensors["space"]).astype(np.int64), float(reply.samples)
            if self.settings.credibility != "samples":
                weight = self.weights.get(reply.client.name, 1.0)
            self.votes[reply.client.name] = Vote(tensors["predictions"], space, weight)
        self._vote()
        return self._figures()

    def forget(self, client: str) -> None:
        """Drop a client's vote, and count the others again."""
        if self.votes.pop(client, None) is not None:
            self._vote()

    def state_dict(self) -> dict[str, Array]:
        """Return the votes."""
        kept: dict[str, Array] = {}
        for client, vote in self.votes.items():
            parts = {"predictions": vote.predictions, "space": vote.space}
            kept |= grouped(f"votes/{client}", parts | {"weight": np.array(vote.weight)})
        return kept

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned, and count the votes again."""
        self.votes = {
            name: Vote(kept["predictions"], kept["space"], float(kept["weight"]))
            for name, kept in groups(state, "votes").items()
        }
        self._vote()

    def _vote(self) -> None:
        votes = [self.votes[name] for name in sorted(self.votes)]
        self.pseudolabeled = aggregate(votes, self.task.classes, self.settings.threshold)

    def _figures(self) -> dict[str, float]:
        """Return the pseudolabels in total (Fig. 7), per class, and per client on average.

        If participants may abstain, also the share of abstentions in the predictions.
        """
        sizes = self.pseudolabeled.sum(1)
        spaces = [vote.space for vote in self.votes.values()]
        received = [len(labels_in_space(self.pseudolabeled, space)[0]) for space in spaces]
        metrics = {
            "pseudolabels": float(sizes.sum()),
            "received": float(np.mean(received)),
            "conflicts": float(np.mean([count_conflicts(self.pseudolabeled, s) for s in spaces])),
        }
        if self.settings.margin:
            none = [vote.predictions == self.task.classes for vote in self.votes.values()]
            metrics["abstained"] = float(np.mean(none))
        return metrics | {f"class_{k}": float(size) for k, size in enumerate(sizes)}
