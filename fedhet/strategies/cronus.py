"""Cronus, server half: FedMD's round with a robust mean of the clients' soft labels.

Hongyan Chang, Virat Shejwalkar, Reza Shokri and Amir Houmansadr, Cronus: Robust and Heterogeneous
Collaborative Learning with Black-Box Knowledge Transfer, arXiv:1912.11279.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedhet.algorithms.consensus import (
    filter_weights,
    mean_scores,
    median_scores,
    trimmed_scores,
    weighted_scores,
)
from fedhet.base.arrays import Array
from fedhet.methods.cronus import SPEC, CronusSettings
from fedhet.strategies.base import Reply
from fedhet.strategies.fedmd import FedMdStrategy


class CronusStrategy(FedMdStrategy):
    """Aggregates soft labels so that a malicious minority has little influence on them."""

    spec = SPEC
    settings: CronusSettings

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Form the consensus; return the share of the replies that the filter has left out."""
        super().aggregate(round, replies)
        return {"filtered": self.filtered} if self.settings.aggregation == "filter" else {}

    def consensus(self, answers: Array) -> Array:
        """Return the robust mean [R, C] of K clients' soft labels [K, R, C], sample by sample.

        Each public sample is estimated separately, in C dimensions. The fewer dimensions, the fewer
        clients the estimate needs, which is why the paper exchanges soft labels.
        """
        match self.settings.aggregation:
            case "mean":
                return mean_scores(answers)
            case "median":
                return median_scores(answers)
            case "trimmed":
                return trimmed_scores(answers, self.settings.trim)
        weights = filter_weights(answers, self.settings.sigma)
        self.filtered = 1 - float(weights.mean())
        return weighted_scores(answers, weights)
