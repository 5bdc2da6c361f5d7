"""Declaration of FCCL: settings and messages."""

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from fedhet.algorithms import ScoreKind
from fedhet.methods import fedmd
from fedhet.settings.schema import NonNegative

EXTENDS = "fedmd"
"""Method whose strategy FCCL uses."""


class FcclSettings(fedmd.SoftLabelSettings, fedmd.DigestSettings):
    """Settings of FCCL."""

    exchanged: ClassVar[ScoreKind] = "logits"

    off_diagonal: NonNegative = Field(
        0.0051,
        description="weight lambda_Col of different classes in the cross-correlation loss",
    )
    dual_weight: NonNegative = Field(
        1.0,
        description="weight lambda_Loc of the distillation from the client's earlier models; 0 = "
        "labels only",
    )


SPEC = replace(
    fedmd.SPEC,
    title="cross-correlation with mean logits on unlabeled public data; earlier models as teachers",
    paper="Huang et al., Learn from Others and Be Yourself in Heterogeneous Federated Learning",
    paper_model="each participant's model",
    needs_task="classes",
    only_tasks="its losses compare classes",
    without_classes={},
    any_model="",
    settings=FcclSettings,
)
