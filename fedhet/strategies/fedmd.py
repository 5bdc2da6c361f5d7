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
from typing import ClassVar

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
    personalized: ClassVar[bool] = False
    """Whether each client learns from a different consensus, returned by `consensus_for`."""

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
        self.instruction = Knowledge(self._fields(self.consensus) | {"asked": self.requested})
        return super().select(round, members)

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Return the consensus, if it exists, and the requested public samples."""
        if not self.personalized:
            return self.instruction
        return Knowledge(self.consensus_fields(client) | {"asked": self.requested})

    def sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and Q (requested public samples)."""
        axes, unused = {"C": client.classes, "Q": len(self.requested)}, self._unused
        return Sizes(axes, rows={"Q": self.requested}, unused=unused)

    def instruction_sizes(self, client: ClientInfo) -> Sizes:
        """Return the sizes of axes C (classes) and N (public samples)."""
        return Sizes({"C": client.classes, "N": len(self.public)}, unused=self._unused)

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Return the last consensus, on which clients train before they evaluate."""
        if round != self.run.rounds or self.consensus is None:
            return None
        return Knowledge(self.consensus_fields(client) | {"asked": self._numbers([])})

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

    def consensus_for(self, client: str, scores: Array) -> Array:
        """Return the consensus [R, C] of one client, if the method is personalized.

        Args:
            client: Name of the client, which may have no scores in the round.
            scores: Scores [K, R, C] of the clients in `self.scores`, sorted by name.
        """
        raise NotImplementedError(f"{type(self).__name__} must implement consensus_for")

    def consensus_fields(self, client: ClientInfo) -> dict[str, Array]:
        """Return the client's consensus and the indices of its public samples, if it exists."""
        if self.consensus is None or not self.personalized:
            return self._fields(self.consensus)
        return self._fields(self.consensus_for(client.name, self._stacked()))

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

    def _fields(self, consensus: Array | None) -> dict[str, Array]:
        """Return a consensus [R, C] and the indices of its public samples, or no fields if None."""
        return (
            {} if consensus is None else {self._exchanged: consensus, "rows": self.consensus_rows}
        )

    def _stacked(self) -> Array:
        """Return the scores [K, R, C] of the clients in `self.scores`, sorted by name."""
        return np.stack([self.scores[name] for name in sorted(self.scores)])

    def _update_consensus(self) -> None:
        self.consensus = self.aggregate_scores(self._stacked()) if self.scores else None

    def _numbers(self, rows: Array | list[int]) -> Array:
        return np.asarray(rows).astype(smallest_uint(len(self.public)))
