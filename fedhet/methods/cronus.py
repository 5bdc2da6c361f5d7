"""Cronus: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedhet.algorithms import DigestLoss
from fedhet.methods import fedmd
from fedhet.settings.schema import Positive


class CronusSettings(fedmd.SoftLabelSettings):
    """Settings of Cronus."""

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
        description="filter: the standard deviation that honest soft labels of a sample may have; "
        "the filter acts where they differ by more than three times that",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.1, description="trimmed: share of the clients left out at either end, rounded up"
    )


SPEC = replace(
    fedmd.SPEC,
    title="robust mean of soft labels on unlabeled public data",
    paper="Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning",
    settings=CronusSettings,
    defenses=(),
    robustness="its 'cronus.aggregation' is a robust mean itself",
    instructions=fedmd.instructions("probabilities"),
    replies=fedmd.replies("probabilities"),
    metrics={"filtered": "share of the replies that the filter leaves out"},
)
