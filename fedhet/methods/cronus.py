"""Declaration of Cronus: settings and messages."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedhet.algorithms import DigestLoss
from fedhet.methods import fedmd
from fedhet.methods.spec import Sums
from fedhet.settings.schema import Positive


class CronusSettings(fedmd.SoftLabelSettings):
    """Settings of Cronus."""

    loss: DigestLoss = Field(
        "cross-entropy",
        description="loss on the consensus: cross-entropy, or mean absolute or squared error "
        "of probabilities",
    )
    aggregation: Literal["filter", "median", "trimmed", "mean"] = Field(
        "filter",
        description="robust mean of soft labels: filter, coordinate-wise median or trimmed mean, "
        "or plain mean",
    )
    sigma: Positive = Field(
        0.1,
        description="with aggregation = filter: standard deviation of honest soft labels",
    )
    trim: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.1,
        description="with aggregation = trimmed: fraction of the clients removed at each end, "
        "rounded up",
    )


SPEC = replace(
    fedmd.SPEC,
    title="robust mean of soft labels on unlabeled public data",
    paper="Chang et al., Cronus: Robust and Heterogeneous Collaborative Learning",
    paper_model="each party's model",
    needs_task="classes",
    only_tasks="its robust means are defined for class probabilities",
    without_classes={},
    settings=CronusSettings,
    defenses=(),
    robustness="'cronus.aggregation' is already a robust mean",
    instructions=fedmd.instructions("probabilities"),
    replies=fedmd.replies("probabilities"),
    metrics={"filtered": "fraction of the replies removed by the filter"},
    sums=Sums(unsupported="the robust average needs the scores of each client"),
)
