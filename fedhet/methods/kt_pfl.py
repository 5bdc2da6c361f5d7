"""Declaration of KT-pFL: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedmd
from fedhet.methods.spec import Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import NonNegative, Positive

EXTENDS = "fedmd"
"""Method whose declaration KT-pFL changes."""


class KtPflSettings(fedmd.SoftLabelSettings, fedmd.DigestSettings):
    """Settings of KT-pFL."""

    temperature: Positive = Field(
        10.0, description="temperature T of the soft predictions; higher values are softer"
    )
    rho: NonNegative = Field(
        0.7, description="weight rho of the penalty that keeps the knowledge coefficients equal"
    )
    coefficient_lr: NonNegative = Field(
        0.1,
        description="learning rate of the knowledge coefficients; 0 = equal coefficients",
    )


SPEC = replace(
    fedmd.SPEC,
    title="personalized soft labels on unlabeled public data, with learned client coefficients",
    paper="Zhang et al., Parameterized Knowledge Transfer for Personalized Federated Learning",
    headline="personal",
    paper_model="each client's model",
    needs_task="classes",
    only_tasks="its coefficients are learned from the divergence of class probabilities",
    without_classes={},
    any_model="",
    settings=KtPflSettings,
    defenses=CHOOSING,
    instructions=fedmd.instructions("probabilities"),
    replies=fedmd.replies("probabilities"),
    metrics={"own_coefficient": "mean coefficient of a client's own soft predictions"},
    sums=Sums(unsupported="the server combines the scores of the clients for each client"),
)
