"""FML, server half: FedAvg's, of the meme models.

Tao Shen, Jie Zhang, Xinkang Jia, Fengda Zhang, Gang Huang, Pan Zhou, Kun Kuang, Fei Wu and Chao Wu,
Federated Mutual Learning, arXiv:2006.16765.
"""

from __future__ import annotations

from fedhet.methods.fml import SPEC, FmlSettings
from fedhet.models import build, to_arrays
from fedhet.strategies.fedavg import FedAvgStrategy


class FmlStrategy(FedAvgStrategy):
    """Averages the memes by samples; the private models, which may differ, stay at the clients."""

    spec = SPEC
    settings: FmlSettings

    def init(self) -> None:
        """Start from a new meme."""
        task = self.task
        meme = build(
            self.settings.meme, task.shape, task.classes, kind=task.kind, seed=self.run.seed
        )
        self._instruct_all({"weights": to_arrays(meme)})
