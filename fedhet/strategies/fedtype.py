"""FedType, server half: averages the proxies (Section 3.3).

Jiaqi Wang, Chenxu Zhao, Lingjuan Lyu, Quanzeng You, Mengdi Huai and Fenglong Ma, Bridging Model
Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical Reciprocity Learning, ICML
2024.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedhet.algorithms.averaging import average_weights, moved_towards
from fedhet.algorithms.local_models import START_SCALE
from fedhet.base.arrays import Array, group, grouped
from fedhet.methods.fedtype import SPEC, FedTypeSettings
from fedhet.models import build, to_arrays
from fedhet.runs.measures import mean_figures
from fedhet.strategies.base import HetStrategy, Reply
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge


class FedTypeStrategy(HetStrategy):
    """Averages the proxies by samples; the private models stay at the clients."""

    spec = SPEC
    settings: FedTypeSettings

    def init(self) -> None:
        """Start from a new proxy."""
        task = self.task
        model = build(
            self.settings.proxy, task.shape, task.classes, kind=task.kind, seed=self.run.seed
        )
        self.proxy = to_arrays(model)
        self.scale: dict[str, Array] = {}
        if self.settings.aggregation == "pfedbayes":
            self.scale = {
                name: np.full(tuple(p.shape), START_SCALE, np.float32)
                for name, p in model.named_parameters()
            }
        self._instruct_all()

    def instruct(self, round: int, client: ClientInfo) -> Knowledge:
        """Send the server's proxy, from which the client starts."""
        return self._instruction

    def eval_instruction(self, round: int, client: ClientInfo) -> Knowledge | None:
        """Send the proxy."""
        return self._instruction

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Average the proxies by samples (Section 3.3), and the scales of variational proxies."""
        beta = self.settings.moreau_beta if self.settings.aggregation == "pfedme" else 1.0
        self.proxy = moved_towards(_average(replies, "proxy"), self.proxy, beta)
        if self.settings.aggregation == "pfedbayes":
            self.scale = _average(replies, "scale") or self.scale
        self._instruct_all()
        return mean_figures([reply.knowledge.scalars for reply in replies])

    def state_dict(self) -> dict[str, Array]:
        """Return the server's proxy, as it is sent."""
        return dict(self._instruction.tensors)

    def load_state_dict(self, state: Mapping[str, Array]) -> None:
        """Restore what `state_dict` returned."""
        self.proxy, self.scale = group(state, "proxy"), group(state, "scale")
        self._instruct_all()

    def _instruct_all(self) -> None:
        """Build the one instruction that all clients share."""
        self._instruction = Knowledge(grouped("proxy", self.proxy) | grouped("scale", self.scale))


def _average(replies: Sequence[Reply], group: str) -> dict[str, Array]:
    models = [(weights, r.weight) for r in replies if (weights := r.knowledge.group(group))]
    return average_weights(models) if models else {}
