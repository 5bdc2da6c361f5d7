"""Cronus strategy: FedMD with a robust mean of the clients' soft labels.

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
    """Strategy that aggregates soft labels with a mean that is robust to a malicious minority."""

    spec = SPEC
    settings: CronusSettings

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Compute the consensus, and return the fraction of replies removed by the filter."""
        super().aggregate(round, replies)
        return {"filtered": self.filtered} if self.settings.aggregation == "filter" else {}

    def aggregate_scores(self, scores: Array) -> Array:
        """Return the robust mean [R, C] of the clients' soft labels [K, R, C].

        The mean of each public sample is estimated separately, in C dimensions. A robust estimate
        in few dimensions needs few clients, which is why the paper exchanges soft labels.
        """
        match self.settings.aggregation:
            case "mean":
                return mean_scores(scores)
            case "median":
                return median_scores(scores)
            case "trimmed":
                return trimmed_scores(scores, self.settings.trim)
        weights = filter_weights(scores, self.settings.sigma)
        self.filtered = 1 - float(weights.mean())
        return weighted_scores(scores, weights)
