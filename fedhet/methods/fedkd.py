"""Declaration of FedKD: settings and messages."""

from dataclasses import replace
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import BOTH_MODELS, OWN_MODEL, Sums
from fedhet.settings.schema import ModelName, NonNegative
from fedhet.wire.contract import Contract, ScalarField, Sizes, WeightsField
from fedhet.wire.factors import FactorsField
from fedhet.wire.identity import ClientInfo

Energy = Annotated[float, Field(gt=0, le=1)]


class FedKdSettings(fedavg.FedAvgSettings):
    """Settings of FedKD."""

    averaged_by: ClassVar[str] = "mentee"
    mentee: ModelName = Field("cnn2", description="mentee model, the same on all clients")
    energy_start: Energy = Field(
        0.95, description="fraction of the update's energy sent at the start of the run, T_start"
    )
    energy_end: Energy = Field(
        0.98, description="fraction of the update's energy sent in the last round, T_end"
    )
    intensity: Literal["batch", "sample"] = Field(
        "batch",
        description="task losses in the denominator of the distillation losses: means over the "
        "batch, or losses per sample",
    )
    intensity_learned: bool = Field(
        True,
        description="whether to backpropagate through the task losses in the denominator; false = "
        "treat the denominator as a constant",
    )
    hidden_weight: NonNegative = Field(
        1.0,
        description="weight of the distance between the features of both models; 0 = no "
        "feature distillation",
    )


def mentee_sizes(settings: FedKdSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes), and the shapes of the mentee and of its update."""
    sizes = fedavg.part_sizes(settings, client)
    return replace(sizes, models={**sizes.models, "update": sizes.models["weights"]})


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="its distillation needs one vector of outputs for each sample",
    title="private mentor and small shared mentee, with low-rank updates",
    paper="Wu et al., Communication-efficient federated learning via knowledge distillation",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's mentor, in the authors' code (run.py, test)",
    # Squared errors approach 0, so gradients through the denominators would dominate.
    without_classes={"intensity_learned": (False,)},
    settings=FedKdSettings,
    sizes=mentee_sizes,
    kinds=("private", "proxy", "ensemble", "global"),
    ensemble=("private", "proxy"),
    one_model=False,
    model_settings={"mentee": "model"},
    instructions=Contract(
        (
            WeightsField(
                "weights", "mentee, sent to a client without the previous mentee", required=False
            ),
            FactorsField("update", "update since the previous mentee", required=False),
            ScalarField(
                "base",
                int,
                "round that started with the previous mentee, to which the update applies",
                False,
                low=1,
            ),
        )
    ),
    replies=Contract(
        (
            FactorsField("update", "update of the mentee in training"),
            ScalarField("sent_up", float, "values sent, relative to the mentee's size", False, 0),
            ScalarField("intensity", float, "mean distillation intensity", False, 0),
        )
    ),
    metrics={
        "sent_up": "number of values that a client sends, relative to the mentee's size",
        "sent_down": "number of values that the server sends, relative to the mentee's size",
        "intensity": "distillation intensity: reciprocal of the sum of both task losses",
    },
    privacy=replace(
        BOTH_MODELS,
        models=("mentee",),
        needs={"intensity": ("sample",)},
        reason="the mean loss of a batch affects the gradient of every sample",
    ),
    sums=Sums(unsupported="the low-rank factors of clients cannot be summed"),
)
