"""Declaration of SCAFFOLD: FedAvg with control variates that correct each local step."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import Protection, Sums, model_shapes
from fedhet.settings.schema import Positive
from fedhet.wire.contract import Contract, ScalarField, Sizes, Sum, WeightsField
from fedhet.wire.identity import ClientInfo


class ScaffoldSettings(fedavg.FedAvgSettings):
    """Settings of SCAFFOLD."""

    global_lr: Positive = Field(
        1.0, description="global step size eta_g; 1 = replace the weights with the average"
    )


def control_sizes(settings: ScaffoldSettings, client: ClientInfo) -> Sizes:
    """Return the axis sizes, and the tensor shapes of the model and of its control variates."""
    sizes, shapes = fedavg.part_sizes(settings, client), model_shapes(client, part="trained")
    return replace(sizes, models={**sizes.models, "control": shapes, "change": shapes})


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg with control variates against client drift",
    paper="Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
    paper_model="the averaged model",
    settings=ScaffoldSettings,
    sizes=control_sizes,
    training={"optimizer": "sgd", "lr": 0.1, "momentum": 0.0, "clip": 0.0},
    fixed_training=("optimizer", "momentum", "clip"),
    why_fixed="SCAFFOLD defines control variates only for SGD without momentum and clipping",
    instructions=Contract(
        (
            *fedavg.SPEC.instructions.fields,
            # Clients evaluate the average without the control variate.
            WeightsField("control", "the server's control variate c", required=False),
            ScalarField(
                "counted", int, "round of the client's last reply that is part of c", False, 0
            ),
        )
    ),
    replies=Contract(
        (
            *fedavg.REPLIES.fields,
            # The name differs from "control", so that a late change is not rebased on c.
            WeightsField("change", "change of the client's control variate, c_i+ - c_i"),
        )
    ),
    privacy=Protection(
        "DP-SGD; clients send the resulting weights, and control variates computed from them"
    ),
    # Replies depend on the client's control variate, which a malicious server may have spoiled.
    sums=Sums((Sum(("weights", "change")),)),
)
