"""FedMD, server half: the round of all methods that exchange predictions on public data.

Daliang Li and Junpu Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS
2019 Workshop on Federated Learning, Algorithm 1.

Flower's round is one exchange, in which a client digests the consensus of the round before,
revisits its own data, and then predicts the public samples that the round asks for. So round 1 is
the transfer learning and the first "Communicate", and round t + 1 is what the paper's loop does
from the consensus of its round t to the scores of its next: the same steps in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from pydantic import Field, field_validator

from fedhet.algorithms.consensus import mean_scores
from fedhet.algorithms.distillation import DigestLoss, Scores
from fedhet.arrays import Array, group, grouped
from fedhet.data import refuse_overlap
from fedhet.methods.registry import MethodSpec
from fedhet.seeding import numpy_rng
from fedhet.settings.schema import Count, CountOrNone, MethodSettings
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge
from fedhet.wire.scores import instructions

LEAST_SAMPLE = 2
"""Public samples that a client can train on."""


class ConsensusSettings(MethodSettings):
    """Settings of all methods of this round; each declares two more, with a default of its own."""

    if TYPE_CHECKING:
        public_epochs: int
        loss: DigestLoss

    sample: CountOrNone = Field(
        5000, description="public samples drawn for each round, from which all learn; 0 = all"
    )
    digest_epochs: Count = Field(
        5, description="a client's epochs towards the consensus on public samples, a round"
    )

    @field_validator("sample")
    @classmethod
    def _sample_can_be_trained_on(cls, value: int) -> int:
        if 0 < value < LEAST_SAMPLE:
            raise ValueError(f"it takes 0 or at least {LEAST_SAMPLE}")
        return value


class FedMdSettings(ConsensusSettings):
    """Settings of FedMD."""

    public_epochs: CountOrNone = Field(
        10,
        description="a client's epochs on the labelled public data before its first round "
        "(transfer learning); 0: none, and the public data needs no labels",
    )
    loss: DigestLoss = Field(
        "mae",
        description="distance from the consensus: mean absolute or squared error of the scores "
        "that travel, or cross-entropy between the probabilities",
    )


class FedMdStrategy(HetStrategy):
    """Draws public samples, collects the clients' scores on them, and sends all their mean."""

    spec = MethodSpec(
        title="mean class scores on labelled public data; models of any architecture",
        paper="Li and Wang, FedMD: Heterogenous Federated Learning via Model Distillation",
        headline="common",
        settings=FedMdSettings,
        needs_public=True,
    )
    settings: ConsensusSettings
    exchanged: ClassVar[Scores] = "logits"
    """What travels, and the name of its field."""
    sends = instructions("logits")

    def init(self) -> None:
        """Start without a consensus."""
        self.public = self.public_set(labelled=self.settings.public_epochs > 0)
        if self.run.data.public_dataset and (common := self.common_test()):
            refuse_overlap(self.public, common, "the common test set")
        self.asked = self.rows = self._numbers([])
        """The public samples that this round asks about, and those of the consensus."""
        self.answers: dict[str, Array] = {}
        """Each client's scores [R, C] in the last round that had replies."""
        self.agreed: Array | None = None
        """The consensus [R, C] of `answers`."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Draw the round's public samples, and select clients as usual."""
        size = min(self.settings.sample or len(self.public), len(self.public))
        rng = numpy_rng(self.run.seed, "public-rows", round)
        self.asked = self._numbers(np.sort(rng.permutation(len(self.public))[:size]))
        told = {} if self.agreed is None else {self.exchanged: self.agreed, "rows": self.rows}
        self._instruction = Knowledge({**told, "asked": self.asked})
        return super().select(round, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C, and Q, the number of samples asked for."""
        return Sizes({"C": client.classes, "Q": len(self.asked)}, rows={"Q": self.asked})

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the consensus ("Distribute"), and the samples to predict."""
        return self._instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Form the consensus of the round's replies ("Aggregate")."""
        self.rows = self.asked
        self.answers = {r.client.name: r.knowledge.tensors[self.exchanged] for r in replies}
        self._agree()
        return {}

    def consensus(self, answers: Array) -> Array:
        """Return the consensus [R, C] of K clients' scores [K, R, C]: their mean."""
        return mean_scores(answers)

    def forget(self, client: str) -> None:
        """Form the consensus again without a client's scores."""
        if self.answers.pop(client, None) is not None:
            self._agree()

    def state_dict(self) -> dict[str, Array]:
        """Return the last scores."""
        return {**grouped("answers", self.answers), "rows": self.rows}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned, and form the consensus again."""
        self.answers, self.rows = group(state, "answers"), state["rows"]
        self._agree()

    def _agree(self) -> None:
        heard = [self.answers[name] for name in sorted(self.answers)]
        self.agreed = self.consensus(np.stack(heard)) if heard else None

    def _numbers(self, rows: Array | list[int]) -> Array:
        return np.asarray(rows).astype(smallest_uint(len(self.public)))
