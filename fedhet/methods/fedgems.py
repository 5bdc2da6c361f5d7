"""Declaration of FedGEMS: settings and messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec, Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, MethodSettings, ModelName, Positive, kebab
from fedhet.tasks import Task
from fedhet.wire.contract import Contract, TensorField

if TYPE_CHECKING:
    from fedhet.algorithms.distillation import Selection


class FedGemsSettings(MethodSettings):
    """Settings of FedGEMS."""

    server_model: ModelName = Field("cnn4", description="server model")
    epsilon: Annotated[float, Field(ge=0, le=1)] = Field(
        0.75, description="weight epsilon of the loss on the labels (Eqs. 2, 5, and 6)"
    )
    selective: bool = Field(
        True,
        description="whether to fuse knowledge selectively; false = FedGEM, the mean of all "
        "clients' logits",
    )
    split: Literal["round", "batch"] = Field(
        "round",
        description="when the public samples are divided into S1 to S3: before each round, or for "
        "each batch",
    )
    self_training: bool = Field(
        True,
        description="whether to train on correctly predicted samples with the labels alone, "
        "without logits (Table 5)",
    )
    self_distillation: bool = Field(
        True,
        description="whether to train with earlier logits on previously correct samples (Table 5)",
    )
    ensemble: Literal["weighted", "mean", "none"] = Field(
        "weighted",
        description="combination of clients' logits from which the server learns: weighted mean "
        "(Eq. 4), mean, or none (Table 5)",
    )
    tolerance: Positive = Field(
        0.25,
        description="regression, multi-label: maximum error (squared error, cross-entropy) of a "
        "correct prediction; 0.25 is a difference of half a standard deviation, or a probability "
        "of 0.78 for each true label",
    )
    server_epochs: Count = Field(
        1, description="server training epochs on the public data, per round"
    )
    public_epochs: Count = Field(
        1, description="client training epochs on the public data, per round"
    )

    @model_validator(mode="after")
    def _check_fedgem(self) -> FedGemsSettings:
        for name in ("split", "self_training", "self_distillation", "ensemble"):
            default, value = type(self).model_fields[name].default, getattr(self, name)
            if not self.selective and value != default:
                raise ValueError(
                    f"setting 'fedgems.{kebab(name)}': with 'fedgems.selective' = false, expected "
                    f"{default!r}, got {value!r}"
                )
        return self

    @property
    def teachers(self) -> Literal["weighted", "mean", "none"]:
        """Combination of the clients' logits: `ensemble`, or "mean" if `selective` is not set."""
        return self.ensemble if self.selective else "mean"


def selection_for(settings: FedGemsSettings, task: Task) -> Selection:
    """Return a task's selection rule: by predicted class, or by error if there are no classes."""
    from fedhet.algorithms.distillation import BY_CLASS, SelectionByError

    if task.has_distribution:
        return BY_CLASS
    errors, losses = task.errors, task.loss("none")
    return SelectionByError(errors, losses, task.divergence("none"), settings.tolerance)


SPEC = MethodSpec(
    title="large server model with selective distillation on labeled public data",
    paper="Cheng et al., FedGEMS: Federated Learning of Larger Server Models",
    headline="common",
    deployed={"personal": "private", "common": "server"},
    paper_model="the server's model, next to the clients' models",
    needs_task="outputs",
    only_tasks="it exchanges one vector of outputs for each public sample",
    with_classes={"tolerance": (0.25,)},
    any_model="regression",
    settings=FedGemsSettings,
    needs_public=True,
    model_settings={"server_model": "large_model"},
    defenses=CHOOSING,
    instructions=Contract(
        (
            TensorField(
                "logits",
                "float32",
                ("R", "C"),
                "logits of the server on public samples",
                required=False,
            ),
            TensorField(
                "changed",
                "uint8",
                ("B",),
                "one bit per public sample, which is 1 if `logits` contains a row for the sample; "
                "absent = all rows",
                required=False,
                needs=("logits",),
            ),
            TensorField(
                "wanted",
                "uint8",
                ("B",),
                "one bit per public sample: 1 to request the client's logits; absent = all",
                required=False,
            ),
        )
    ),
    replies=Contract(
        (TensorField("logits", "float32", ("Q", "C"), "logits on the requested samples"),)
    ),
    metrics={
        "s1": "S1, public samples that the server predicts correctly",
        "s2": "S2, incorrectly predicted public samples with stored logits",
        "s3": "S3, incorrectly predicted public samples without stored logits",
        "asked": "public samples requested from the clients",
        "nobody_right": "requested samples that no client predicts correctly",
        "upload_ratio": "fraction of the public set that is requested",
    },
    privacy=PUBLIC_PREDICTIONS,
    sums=Sums(unsupported="the server compares the scores of each client with the labels"),
)
