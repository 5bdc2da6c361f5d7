"""CoFED strategy: pseudolabels from a vote of the clients (Algorithm 1).

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
    """Strategy that derives pseudolabels for the public set from the clients' votes."""

    spec = SPEC
    settings: CofedSettings

    def init(self) -> None:
        """Check the credibility weights, and initialize an empty set of votes."""
        credibility = self.settings.credibility
        self.weights = credibility if isinstance(credibility, dict) else {}
        """Credibility weights from the settings, by client (Section 4.6)."""
        for name in sorted(self.weights.keys() - self.members.keys()):  # The client may join later.
            if len(self.members) >= self.run.clients:
                close = closest(name, self.members)
                hint = f" (did you mean '{close}'?)" if close else ""
                problem = f"unknown client '{name}'{hint}"
                weights, expected = self.settings.credibility, "names of the run's clients"
                raise invalid_setting("cofed.credibility", weights, expected, problem)
            self.log.notice(f"cofed.credibility: client {name!r} has not joined yet")
        self.instances = len(self.public_set(labeled=False))
        self.votes: dict[str, Vote] = {}
        """Latest vote of each participant."""
        self.pseudolabeled = aggregate([], self.reference_client.classes, self.settings.threshold)
        """Mask [C, N] of the pseudolabeled sets; row k is P_k."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the same clients in each round, so that voters receive pseudolabels."""
        return super().select(1, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes), N (public instances) and L (prediction values).

        L includes the value C for abstentions if participants may abstain.
        """
        values = client.classes + (self.settings.margin > 0)
        return Sizes({"C": client.classes, "N": self.instances, "L": values})

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes), L (prediction values), N (public instances)."""
        classes = client.classes
        return Sizes({"C": classes, "L": classes + 1, "N": self.instances})

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the client's pseudolabels R_i (step 3, Eq. 19), and request predictions.

        A client that has not voted receives no pseudolabels, because the server does not know the
        client's label space. No predictions are requested in the last round.
        """
        predict = {"predict": round <= self.settings.iterations}
        if client.name not in self.votes:
            return Knowledge(scalars=predict)
        labels = np.full(
            self.instances,
            self.reference_client.classes,
            smallest_uint(self.reference_client.classes + 1),
        )
        instances, classes = labels_in_space(self.pseudolabeled, self.votes[client.name].space)
        labels[instances] = classes
        return Knowledge({"labels": labels}, predict)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Check the vote, and return the reply.

        Raises KnowledgeError if the vote is missing or contains classes outside the client's label
        space.
        """
        if round > self.settings.iterations:
            return reply
        name, tensors = reply.client.name, reply.knowledge.tensors
        if "predictions" not in tensors:
            raise KnowledgeError(name, "predictions", "missing")
        labels, space = tensors["predictions"], tensors["space"]
        outside = ~np.isin(labels, space) & (labels != reply.client.classes)
        if outside.any():
            fault = f"must be in the client's label space, got {labels[outside][0]}"
            raise KnowledgeError(name, "predictions", fault)
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store and count the votes (Algorithm 1)."""
        if round > self.settings.iterations:
            return {}
        for reply in replies:
            tensors = reply.knowledge.tensors
            space, weight = np.sort(tensors["space"]).astype(np.int64), float(reply.samples)
            if self.settings.credibility != "samples":
                weight = self.weights.get(reply.client.name, 1.0)
            self.votes[reply.client.name] = Vote(tensors["predictions"], space, weight)
        self._count_votes()
        return self._metrics()

    def forget(self, client: str) -> None:
        """Discard a client's vote, and count the votes again."""
        if self.votes.pop(client, None) is not None:
            self._count_votes()

    def state_dict(self) -> dict[str, Array]:
        """Return the participants' votes."""
        state: dict[str, Array] = {}
        for client, vote in self.votes.items():
            parts = {"predictions": vote.predictions, "space": vote.space}
            state |= grouped(f"votes/{client}", parts | {"weight": np.array(vote.weight)})
        return state

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the votes, and count them again."""
        self.votes = {
            name: Vote(vote["predictions"], vote["space"], float(vote["weight"]))
            for name, vote in groups(state, "votes").items()
        }
        self._count_votes()

    def _count_votes(self) -> None:
        votes = [self.votes[name] for name in sorted(self.votes)]
        self.pseudolabeled = aggregate(
            votes, self.reference_client.classes, self.settings.threshold
        )

    def _metrics(self) -> dict[str, float]:
        """Return the numbers of pseudolabels (total, and per client) and of conflicts.

        Fig. 7 shows the total. Includes the fraction of abstentions if participants may abstain.
        """
        spaces = [vote.space for vote in self.votes.values()]
        received = [len(labels_in_space(self.pseudolabeled, space)[0]) for space in spaces]
        metrics = {
            "pseudolabels": float(self.pseudolabeled.sum()),
            "received": float(np.mean(received)),
            "conflicts": float(np.mean([count_conflicts(self.pseudolabeled, s) for s in spaces])),
        }
        if self.settings.margin:
            abstentions = [
                vote.predictions == self.reference_client.classes for vote in self.votes.values()
            ]
            metrics["abstained"] = float(np.mean(abstentions))
        return metrics
