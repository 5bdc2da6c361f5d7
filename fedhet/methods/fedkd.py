"""FedKD: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS
from fedhet.settings.schema import ModelName, NonNegative
from fedhet.wire.contract import Contract, ScalarField, Sizes, WeightsField
from fedhet.wire.factors import FactorsField
from fedhet.wire.identity import ClientInfo

Energy = Annotated[float, Field(gt=0, le=1)]


class FedKdSettings(fedavg.FedAvgSettings):
    """Settings of FedKD."""

    averaged_by: ClassVar[str] = "mentee"
    mentee: ModelName = Field("cnn2", description="the mentee's model, the same at every client")
    energy_start: Energy = Field(
        0.95, description="share of a change's energy that is sent at the start of a run, T_start"
    )
    energy_end: Energy = Field(0.98, description="the same at its end, T_end")
    intensity: Literal["batch", "sample"] = Field(
        "batch",
        description="task losses by which distillation is divided: batch, the means over a batch, "
        "as in the authors' code, or sample, those of each sample",
    )
    intensity_learned: bool = Field(
        True,
        description="whether the gradient passes through these task losses too, as printed and in "
        "the authors' code; false: they are a constant weight",
    )
    hidden_weight: NonNegative = Field(
        1.0, description="weight of the distance between the two models' features; 0: none"
    )


def mentee_sizes(settings: FedKdSettings, client: ClientInfo) -> Sizes:
    """Return the axis C and the mentee's shapes."""
    sizes = fedavg.part_sizes(settings, client)
    return replace(sizes, models={**sizes.models, "update": sizes.models["weights"]})


SPEC = replace(
    fedavg.SPEC,
    title="private mentor and small shared mentee, with low-rank updates",
    paper="Wu et al., Communication-efficient federated learning via knowledge distillation",
    headline="personal",
    settings=FedKdSettings,
    sizes=mentee_sizes,
    kinds=("private", "proxy", "global"),
    one_model=False,
    model_settings={"mentee": "model"},
    instructions=Contract(
        (
            WeightsField(
                "weights", "the mentee, for a client that lacks the last one", required=False
            ),
            FactorsField("update", "the mentee's change since the last one", required=False),
            ScalarField("base", int, "the round that began with the last one", False, low=1),
        )
    ),
    replies=Contract(
        (
            FactorsField("update", "the mentee's change in training"),
            ScalarField("sent_up", float, "numbers sent, as a share of the mentee's", False, 0),
            ScalarField("intensity", float, "mean intensity of distillation", False, 0),
        )
    ),
    metrics={
        "sent_up": "numbers that a client sends, as a share of the mentee's",
        "sent_down": "numbers of the mentee's change that the server sends, as a share of its own",
        "intensity": "intensity of distillation: 1 by the sum of both task losses",
    },
    privacy=replace(
        BOTH_MODELS,
        models=("mentee",),
        needs={"intensity": ("sample",)},
        reason="a batch's mean loss weighs on the gradient of all its samples",
    ),
)
