"""FedGEMS: its settings, and the messages between its halves."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhet.methods.spec import PUBLIC_PREDICTIONS, MethodSpec
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, MethodSettings, ModelName, kebab
from fedhet.wire.contract import Contract, TensorField


class FedGemsSettings(MethodSettings):
    """Settings of FedGEMS."""

    server_model: ModelName = Field("gems-resnet56", description="the server's own model")
    epsilon: Annotated[float, Field(ge=0, le=1)] = Field(
        0.75, description="share of cross-entropy in the losses of Eq. 2, 5 and 6"
    )
    selective: bool = Field(
        True, description="learn selectively; false is FedGEM: the mean of all clients' logits"
    )
    split: Literal["round", "batch"] = Field(
        "round",
        description="when public samples are split into S1, S2 and S3: by the self-evaluation "
        "before each round, or again for each minibatch by its predictions in training",
    )
    self_training: bool = Field(
        True,
        description="learn samples that are predicted correctly from their labels alone; false: as "
        "the others (Table 5)",
    )
    self_distillation: bool = Field(
        True,
        description="learn samples that are predicted wrongly now, but were predicted correctly "
        "before, from the logits of that time; false: from the clients' (Table 5)",
    )
    ensemble: Literal["weighted", "mean", "none"] = Field(
        "weighted",
        description="what the server learns from the clients: the logits of those that are right, "
        "weighted by Eq. 4; the mean of all; or nothing (Table 5)",
    )
    server_epochs: Count = Field(
        1, description="the server's epochs per round, over the public data"
    )
    public_epochs: Count = Field(1, description="a client's epochs per round, over the public data")

    @model_validator(mode="after")
    def _fedgem_selects_nothing(self) -> FedGemsSettings:
        for name in ("split", "self_training", "self_distillation", "ensemble"):
            default, value = type(self).model_fields[name].default, getattr(self, name)
            if not self.selective and value != default:
                raise ValueError(
                    f"setting 'fedgems.{kebab(name)}' = {value!r} is not allowed: it takes "
                    f"{default!r} where 'fedgems.selective' = False, which splits nothing"
                )
        return self

    @property
    def teachers(self) -> Literal["weighted", "mean", "none"]:
        """Return `ensemble`, which in FedGEM is the mean."""
        return self.ensemble if self.selective else "mean"


SPEC = MethodSpec(
    title="larger server model, selective distillation on labeled public data",
    paper="Cheng et al., FedGEMS: Federated Learning of Larger Server Models",
    headline="common",
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
                "the server's logits on public samples",
                required=False,
            ),
            TensorField(
                "changed",
                "uint8",
                ("B",),
                "one bit per public sample: does `logits` have a row of it? absent: of all",
                required=False,
                needs=("logits",),
            ),
            TensorField(
                "wanted",
                "uint8",
                ("B",),
                "one bit per public sample: is the client to reply with its logits? absent: all",
                required=False,
            ),
        )
    ),
    replies=Contract(
        (TensorField("logits", "float32", ("Q", "C"), "logits on the samples asked for"),)
    ),
    metrics={
        "s1": "public samples that the server has right (S1)",
        "s2": "others with logits in the pool (S2)",
        "s3": "others without (S3)",
        "asked": "samples asked of the clients",
        "nobody_right": "asked samples that no client has right",
        "upload_ratio": "share of the public set that is asked",
    },
    privacy=PUBLIC_PREDICTIONS,
)
