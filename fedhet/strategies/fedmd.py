"""FedMD strategy, and base class for methods that exchange predictions on public data.

Daliang Li and Junpu Wang, FedMD: Heterogenous Federated Learning via Model Distillation, NeurIPS
2019 Workshop on Federated Learning, Algorithm 1.

Each Flower round is one exchange. A client trains on the consensus of the previous round ("Digest")
and on its own data ("Revisit"), and then predicts the requested public samples ("Communicate").
Round 1 covers the transfer learning and the paper's first "Communicate". Round t + 1 covers the
steps from the consensus in the paper's round t to the next scores. The last consensus is sent with
the last evaluation, and clients train on it before they evaluate.

In regression (not in the paper), the scores are outputs, i.e. standardized predictions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms import ScoreKind
from fedhet.algorithms.consensus import mean_scores
from fedhet.base.arrays import Array, group, grouped
from fedhet.base.seeding import numpy_rng
from fedhet.methods.fedmd import SPEC, ConsensusSettings
from fedhet.strategies.base import HetStrategy, Reply, Selection
from fedhet.wire.contract import Sizes, smallest_uint
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedMdStrategy(HetStrategy):
    """Strategy that averages the clients' scores on the public samples drawn in each round."""

    spec = SPEC
    settings: ConsensusSettings

    def init(self) -> None:
        """Start with an empty consensus and no requested public samples."""
        self._exchanged: ScoreKind = self.settings.exchanged_in(self.task)
        """Kind of scores, which is also the name of the message field."""
        self._unused = self.settings.unused_in(self.task)
        self.public = self.public_set(labeled=self.settings.public_epochs > 0)
        self.requested = self.consensus_rows = self._numbers([])
        """Indices of the public samples to predict in this round (`requested`), and of the public
        samples in the consensus (`consensus_rows`)."""
        self.scores: dict[str, Array] = {}
        """Scores [R, C] of each client in the last round with replies, by client name."""
        self.consensus: Array | None = None
        """Consensus [R, C], aggregated from `scores`."""

    def select(self, round: int, members: Sequence[ClientInfo]) -> Selection:
        """Draw the public samples of the round, and select the clients."""
        size = min(self.settings.sample or len(self.public), len(self.public))
        rng = numpy_rng(self.run.seed, "public-rows", round)
        self.requested = self._numbers(np.sort(rng.permutation(len(self.public))[:size]))
        self.instruction = Knowledge(self._consensus_fields() | {"asked": self.requested})
        return super().select(round, members)

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and Q (requested public samples)."""
        axes, unused = {"C": client.classes, "Q": len(self.requested)}, self._unused
        return Sizes(axes, rows={"Q": self.requested}, unused=unused)

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and N (public samples)."""
        return Sizes({"C": client.classes, "N": len(self.public)}, unused=self._unused)

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the last consensus, on which clients train before they evaluate."""
        last = round == self.run.rounds and self.consensus is not None
        return Knowledge(self._consensus_fields() | {"asked": self._numbers([])}) if last else None

    def evaluates_after(self, round: int) -> bool:
        """Return whether `round` is the last round."""
        return round == self.run.rounds

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Compute the consensus from the replies ("Aggregate")."""
        self.consensus_rows, field = self.requested, self._exchanged
        self.scores = {reply.client.name: reply.knowledge.tensors[field] for reply in replies}
        self._update_consensus()
        return {}

    def aggregate_scores(self, scores: Array) -> Array:
        """Return the consensus [R, C] from the clients' scores [K, R, C], by default their mean."""
        return mean_scores(scores)

    def forget(self, client: str) -> None:
        """Discard a client's scores, and recompute the consensus."""
        if self.scores.pop(client, None) is not None:
            self._update_consensus()

    def state_dict(self) -> dict[str, Array]:
        """Return the clients' latest scores and the indices of the scored public samples."""
        return {**grouped("answers", self.scores), "rows": self.consensus_rows}

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore the scores, and recompute the consensus."""
        self.scores, self.consensus_rows = group(state, "answers"), state["rows"]
        self._update_consensus()

    def _consensus_fields(self) -> dict[str, Array]:
        """Return the consensus and the indices of its public samples, if a consensus exists."""
        if self.consensus is None:
            return {}
        return {self._exchanged: self.consensus, "rows": self.consensus_rows}

    def _update_consensus(self) -> None:
        scores = [self.scores[name] for name in sorted(self.scores)]
        self.consensus = self.aggregate_scores(np.stack(scores)) if scores else None

    def _numbers(self, rows: Array | list[int]) -> Array:
        return np.asarray(rows).astype(smallest_uint(len(self.public)))
