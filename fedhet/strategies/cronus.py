"""Cronus, server half: FedMD's round with a robust mean of the clients' soft labels.

Hongyan Chang, Virat Shejwalkar, Reza Shokri and Amir Houmansadr, Cronus: Robust and Heterogeneous
Collaborative Learning with Black-Box Knowledge Transfer, arXiv:1912.11279.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedhet.algorithms.consensus import (
    filter_weights,
    mean_scores,
    median_scores,
    trimmed_scores,
    weighted_scores,
)
from fedhet.algorithms.distillation import DigestLoss, Scores
from fedhet.arrays import Array
from fedhet.settings.schema import CountOrNone, Positive
from fedhet.strategies.base import Reply
from fedhet.strategies.fedmd import ConsensusSettings, FedMdStrategy
from fedhet.wire.scores import instructions


class CronusSettings(ConsensusSettings):
    """Settings of Cronus."""

    public_epochs: CountOrNone = Field(
        0,
        description="a client's epochs on the public data's labels before its first round; 0, as "
        "in the paper: public data needs no labels",
    )
    loss: DigestLoss = Field(
        "cross-entropy",
        description="distance from the consensus: cross-entropy with the soft labels, or mean "
        "absolute or squared error of the probabilities",
    )
    aggregation: Literal["filter", "median", "trimmed", "mean"] = Field(
        "filter",
        description="the robust mean of a public sample's soft labels: the filter of Diakonikolas "
        "et al., the coordinate-wise median or trimmed mean, or the plain mean",
    )
    sigma: Positive = Field(
        0.1,
        description="filter: honest soft labels of a sample may differ so much, as a standard "
        "deviation; it filters where they differ by more than three times that",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.1, description="trimmed: share of the clients left out at either end, rounded up"
    )


class CronusStrategy(FedMdStrategy):
    """Aggregates soft labels so that a hostile minority moves them little."""

    spec = replace(
        FedMdStrategy.spec,
        title="robust mean of soft labels on unlabelled public data",
        paper="Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning",
        settings=CronusSettings,
    )
    settings: CronusSettings
    exchanged: ClassVar[Scores] = "probabilities"
    sends = instructions("probabilities")

    def aggregate(self, round: int, replies: Sequence[Reply]) -> Mapping[str, float]:
        """Form the consensus; say which share of the replies the filter has left out."""
        super().aggregate(round, replies)
        return {"filtered": self.filtered} if self.settings.aggregation == "filter" else {}

    def consensus(self, answers: Array) -> Array:
        """Return the robust mean [R, C] of K clients' soft labels [K, R, C], sample by sample.

        Each public sample is estimated by itself, in C dimensions: the fewer dimensions, the fewer
        clients the estimate needs, which is what the paper has soft labels travel for.
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
