"""FedMRL, server half: FedAvg's, of the shared models.

Liping Yi, Han Yu, Chao Ren, Gang Wang, Xiaoguang Liu and Xiaoxiao Li, Federated Model Heterogeneous
Matryoshka Representation Learning, NeurIPS 2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.methods.fedmrl import SPEC, FedMrlSettings
from fedhet.models import build, to_arrays
from fedhet.runs.measures import mean_figures
from fedhet.strategies.base import Reply
from fedhet.strategies.fedavg import FedAvgStrategy


class FedMrlStrategy(FedAvgStrategy):
    """Averages the shared models by samples; own models and projectors stay at the clients."""

    spec = SPEC
    settings: FedMrlSettings

    def init(self) -> None:
        """Start from a new shared model."""
        task, own = self.task, self.settings
        shared = build(
            own.shared,
            task.shape,
            task.classes,
            kind=task.kind,
            seed=self.run.seed,
            feature_dim=own.shared_dim,
        )
        self._instruct_all({"weights": to_arrays(shared)})

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the shared models by samples; return the means of the clients' figures."""
        super().aggregate(round, replies)
        return mean_figures([reply.knowledge.scalars for reply in replies])
