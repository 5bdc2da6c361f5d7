"""Declaration of RHFL: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedmd
from fedhet.methods.spec import Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import NonNegative
from fedhet.wire.contract import Contract, ScalarField

EXTENDS = "fedmd"
"""Method whose declaration RHFL changes."""


class RhflSettings(fedmd.SoftLabelSettings, fedmd.DigestSettings):
    """Settings of RHFL."""

    ce_weight: NonNegative = Field(
        0.1, description="weight lambda of the cross-entropy in the symmetric loss"
    )
    rce_weight: NonNegative = Field(
        1.0, description="weight gamma of the reverse cross-entropy in the symmetric loss"
    )
    eta: NonNegative = Field(
        0.5, description="weight eta of the confidence in clients; 0 = equal weights"
    )


SPEC = replace(
    fedmd.SPEC,
    title="soft labels on unlabeled public data, for clients with noisy labels",
    paper="Fang and Ye, Robust Federated Learning with Noisy and Heterogeneous Clients",
    paper_model="each client's model",
    needs_task="classes",
    only_tasks="its loss for noisy labels is defined only for classes",
    without_classes={},
    any_model="",
    settings=RhflSettings,
    defenses=CHOOSING,
    instructions=fedmd.instructions("probabilities", distribution=False),
    replies=Contract(
        (
            *fedmd.replies("probabilities").fields,
            ScalarField(
                "loss", float, "mean loss on the client's samples", required=False, low=0.0
            ),
        )
    ),
    metrics={"max_confidence": "largest weight of a client"},
    privacy=replace(
        fedmd.SPEC.privacy,
        needs={"eta": (0.0,)},
        reason="with any other value, clients send the exact loss on their samples",
    ),
    sums=Sums(unsupported="the server weights the scores of the clients by their losses"),
)
