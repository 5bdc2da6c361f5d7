"""FedMD, server half: the round of all methods that exchange predictions on public data.

Daliang Li and Junpu Wang, FedMD: Heterogeneous Federated Learning via Model Distillation, NeurIPS
2019 Workshop on Federated Learning, Algorithm 1.

Flower's round is one exchange, in which a client digests the consensus of the round before,
revisits its own data, and then predicts the public samples that the round asks for. So round 1 is
the transfer learning and the first "Communicate", and round t + 1 is what the paper's loop does
from the consensus of its round t to the scores of its next: the same steps in the same order. The
last consensus travels with the last evaluation, before which clients digest it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.consensus import mean_scores
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.seeding import numpy_rng
from fedhet.data.store import check_no_overlap
from fedhet.methods.fedmd import SPEC, ConsensusSettings
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedMdStrategy(HetStrategy):
    """Draws public samples, collects the clients' scores on them, and sends all their mean."""

    spec = SPEC
    settings: ConsensusSettings

    def init(self) -> None:
        """Start without a consensus."""
        self.public = self.public_set(labeled=self.settings.public_epochs > 0)
        if self.run.data.public_dataset and (common := self.common_test()):
            check_no_overlap(self.public, common, "the common test set")
        self.asked = self.rows = self._numbers([])
        """The public samples to predict in this round, and those of the consensus."""
        self.answers: dict[str, Array] = {}
        """Each client's scores [R, C] in the last round that had replies."""
        self.agreed: Array | None = None
        """The consensus [R, C] of `answers`."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Draw the round's public samples, and select clients as usual."""
        size = min(self.settings.sample or len(self.public), len(self.public))
        rng = numpy_rng(self.run.seed, "public-rows", round)
        self.asked = self._numbers(np.sort(rng.permutation(len(self.public))[:size]))
        self.instruction = Knowledge(self._consensus() | {"asked": self.asked})
        return super().select(round, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the axes C, and Q, the number of samples asked for."""
        return Sizes({"C": client.classes, "Q": len(self.asked)}, rows={"Q": self.asked})

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the last consensus, which clients learn from before they evaluate."""
        last = round == self.run.rounds and self.agreed is not None
        return Knowledge(self._consensus() | {"asked": self._numbers([])}) if last else None

    def evaluates_after(self, round: int) -> bool:
        """Return whether it is the last round."""
        return round == self.run.rounds

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Form the consensus of the round's replies ("Aggregate")."""
        self.rows = self.asked
        self.answers = {
            r.client.name: r.knowledge.tensors[self.settings.exchanged] for r in replies
        }
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

    def _consensus(self) -> dict[str, Array]:
        """Return the consensus and its samples, if there is one."""
        if self.agreed is None:
            return {}
        return {self.settings.exchanged: self.agreed, "rows": self.rows}

    def _agree(self) -> None:
        answers = [self.answers[name] for name in sorted(self.answers)]
        self.agreed = self.consensus(np.stack(answers)) if answers else None

    def _numbers(self, rows: Array | list[int]) -> Array:
        return np.asarray(rows).astype(smallest_uint(len(self.public)))
