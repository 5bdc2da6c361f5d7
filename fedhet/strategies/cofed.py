"""CoFED, server half: pseudolabels by vote, Algorithm 1.

Xingjian Cao, Zonghang Li, Gang Sun, Hongfang Yu and Mohsen Guizani, Cross-Silo Heterogeneous Model
Federated Multitask Learning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import AfterValidator, Field

from fedhet.algorithms.search import Candidate, grid
from fedhet.algorithms.voting import Vote, aggregate, conflicts, for_space
from fedhet.arrays import Array, grouped, groups
from fedhet.errors import KnowledgeError, nearest
from fedhet.methods.registry import MethodSpec
from fedhet.settings.run import Optimizer
from fedhet.settings.schema import Count, CountOrNone, MethodSettings, refused
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Contract, ScalarField, Sizes, TensorField, smallest_uint
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge, is_name

EQUAL, SAMPLES = "equal", "samples"
MOST_WEIGHT = 1e6


def given_weights(credibility: str) -> dict[str, float]:
    """Parse weights by client, as "site-a=2,site-b=0.5". Raises ValueError for malformed text."""
    if credibility in (EQUAL, SAMPLES):
        return {}
    weights: dict[str, float] = {}
    for part in credibility.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        weight = float(number)
        if not is_name(name) or name in weights or not 0 <= weight <= MOST_WEIGHT:
            raise ValueError(part)
        weights[name] = weight
    return weights


def _is_credibility(text: str) -> str:
    try:
        given_weights(text)
    except ValueError:
        raise ValueError(
            f"it takes {EQUAL}, {SAMPLES}, or weights from 0 to {MOST_WEIGHT:g} by client, each "
            "once, such as site-a=2,site-b=0.5"
        ) from None
    return text


def words(text: str) -> list[str]:
    """Return the words in a comma-separated text."""
    return [word.strip() for word in text.split(",")]


def numbers(text: str) -> list[float]:
    """Return the numbers in a comma-separated text. Raises ValueError for anything else."""
    return [float(word) for word in words(text)]


def _are_numbers(high: float) -> AfterValidator:
    """Return a check that a text holds numbers above 0 and at most `high`, none twice."""

    def check(text: str) -> str:
        rule = f"it takes numbers above 0 and at most {high:g}, comma-separated, none twice"
        try:
            found = numbers(text)
        except ValueError:
            raise ValueError(rule) from None
        if not all(0 < number <= high for number in found) or len({*found}) < len(found):
            raise ValueError(rule)
        return text

    return AfterValidator(check)


def _are_optimizers(text: str) -> str:
    known = get_args(Optimizer)
    if not {*words(text)} <= {*known} or len({*words(text)}) < len(words(text)):
        raise ValueError(f"it takes some of {', '.join(known)}, comma-separated, none twice")
    return text


class CofedSettings(MethodSettings):
    """Settings of CoFED."""

    threshold: Annotated[float, Field(ge=0, le=1)] = Field(
        0.3, description="alpha of Eq. 18: a class takes an instance by more than this share"
    )
    credibility: Annotated[str, AfterValidator(_is_credibility)] = Field(
        EQUAL,
        description="a participant's weight in the vote: equal (1), samples (its training samples) "
        "or given, as site-a=2,site-b=0.5; 1 for who is not named",
    )
    iterations: Count = Field(
        1, description="times of predicting, voting and update training; rounds are one more"
    )
    margin: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="a participant abstains where the probabilities of its two best classes differ "
        "by at most this; 0 = it never does, as in the paper's text",
    )
    update_epochs: CountOrNone = Field(
        0, description="epochs of a network's update training; 0 = local-epochs"
    )
    update_batch_size: Count = Field(1000, description="samples a minibatch of update training")
    search: Literal["none", "grid"] = Field(
        "none",
        description="grid: each participant with a network tries the combinations below on a held-"
        "out part of its own data, and trains with the best (Section 5.2)",
    )
    search_optimizers: Annotated[str, AfterValidator(_are_optimizers)] = Field(
        "adam,sgd", description="search = grid: optimisers to try"
    )
    search_rates: Annotated[str, _are_numbers(1e3)] = Field(
        "0.002,0.004,0.006,0.008,0.01",
        description="search = grid: learning rates to try; sgd tries ten times each",
    )
    search_decays: Annotated[str, _are_numbers(1.0)] = Field(
        "1,0.99",
        description="search = grid: factors to try, by which the rate falls after each epoch",
    )
    search_updates: Annotated[str, _are_numbers(1e3)] = Field(
        "0.1,2",
        description="search = grid: factors on the rate found, to try in update training",
    )
    search_share: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.2, description="search = grid: share of a participant's own training data held out"
    )

    def fixed_rounds(self) -> int:
        """Return one round of local training plus one of update training per iteration."""
        return self.iterations + 1

    def grid(self) -> list[Candidate]:
        """Return the training configurations that a search tries."""
        rates, decays = numbers(self.search_rates), numbers(self.search_decays)
        return grid(words(self.search_optimizers), rates, decays)


class CofedStrategy(HetStrategy):
    """Collects predictions on the public set, votes, and sends each client labels for its task."""

    spec = MethodSpec(
        title="pseudolabels on public data by vote; tasks and models of any kind",
        paper="Cao et al., Cross-Silo Heterogeneous Model Federated Multitask Learning (CoFED)",
        headline="common",
        settings=CofedSettings,
        kinds=("private", "local"),
        needs_public=True,
        any_model=True,
    )
    settings: CofedSettings
    sends = Contract(
        (
            ScalarField("predict", bool, "is the public set to be predicted after training?"),
            TensorField(
                "labels",
                "uint",
                ("N",),
                "each public instance's pseudolabel in R_i, C for none",
                required=False,
                numbers="L",
            ),
        )
    )

    def init(self) -> None:
        """Start without votes."""
        self.weights = given_weights(self.settings.credibility)
        """Credibility weights from the settings, by client (Section 4.6)."""
        self._check_names()
        self.instances = len(self.public_set(labelled=False))
        self.votes: dict[str, Vote] = {}
        """Each participant's latest predictions."""
        self.joined = aggregate([], self.task.classes, self.settings.threshold)
        """Which instances are in which P_k, [C, N]."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Select the same clients in every round, so that those who vote get pseudolabels."""
        return super().select(1, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C (classes) and N (public instances), and L, the answers of a vote.

        The answers are the classes and, where participants may abstain, C for none of them.
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
        return Knowledge({"labels": self._labels(self.votes[client.name].space)}, predict)

    def accept(self, round: int, reply: Reply) -> Reply:
        """Return the reply. Raises KnowledgeError if the vote is missing or outside its space."""
        if round > self.settings.iterations:
            return reply
        name, tensors = reply.client.name, reply.knowledge.tensors
        if "predictions" not in tensors:
            raise KnowledgeError(name, "predictions", "missing")
        said, space = tensors["predictions"], tensors["space"]
        outside = ~np.isin(said, space) & (said != reply.client.classes)
        if outside.any():
            fault = f"holds {said[outside][0]}, not in its label space"
            raise KnowledgeError(name, "predictions", fault)
        return reply

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Store the votes and count them (Algorithm 1)."""
        if round > self.settings.iterations:
            return {}
        for reply in replies:
            said = reply.knowledge.tensors
            space = np.sort(said["space"]).astype(np.int64)
            self.votes[reply.client.name] = Vote(said["predictions"], space, self._weight(reply))
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
        heard = [self.votes[name] for name in sorted(self.votes)]
        self.joined = aggregate(heard, self.task.classes, self.settings.threshold)

    def _weight(self, reply: Reply) -> float:
        if self.settings.credibility == SAMPLES:
            return float(reply.samples)
        return self.weights.get(reply.client.name, 1.0)

    def _check_names(self) -> None:
        """Raise SettingsError for unknown names in `credibility`; notify if they may still join."""
        for name in sorted(self.weights.keys() - self.members.keys()):
            rule = f"clients of the run; {name!r} is none{nearest(name, self.members)}"
            if len(self.members) >= self.run.clients:
                raise refused("cofed.credibility", self.settings.credibility, rule)
            self.log.notice(f"cofed.credibility: no client {name!r} is there yet")

    def _labels(self, space: Array) -> Array:
        labels = np.full(self.instances, self.task.classes, smallest_uint(self.task.classes + 1))
        kept, classes = for_space(self.joined, space)
        labels[kept] = classes
        return labels

    def _figures(self) -> dict[str, float]:
        """Return the pseudolabels in total (Fig. 7), per class, and per client on average.

        Where participants may abstain, also the share of predictions that they leave out.
        """
        sizes = self.joined.sum(1)
        spaces = [vote.space for vote in self.votes.values()]
        figures = {
            "pseudolabels": float(sizes.sum()),
            "received": float(np.mean([len(for_space(self.joined, s)[0]) for s in spaces])),
            "conflicts": float(np.mean([conflicts(self.joined, s) for s in spaces])),
        }
        if self.settings.margin:
            none = [vote.predictions == self.task.classes for vote in self.votes.values()]
            figures["abstained"] = float(np.mean(none))
        return figures | {f"class_{k}": float(size) for k, size in enumerate(sizes)}
