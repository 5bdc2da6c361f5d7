"""Declaration of FedHe: settings and messages."""

from typing import Literal

from pydantic import Field

from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection, Sums
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sum, TensorField, all_or_none


class FedHeSettings(MethodSettings):
    """Settings of FedHe."""

    loss: Literal["mse", "kl"] = Field(
        "mse",
        description="distance from the server's logits: mean squared error, or KL divergence of "
        "the probabilities",
    )
    alpha: NonNegative = Field(0.5, description="weight of the distance from the server's logits")
    replies: Literal["all", "latest"] = Field(
        "all",
        description="contribution of a client to the server's logits: the mean of its replies, "
        "or its latest reply",
    )


SPEC = MethodSpec(
    title="class-wise mean logits, averaged over the clients",
    paper="Chan and Ngai, FedHe: Heterogeneous Models and Communication-Efficient FL",
    headline="common",
    paper_model="each client's model",
    late="averaged",
    only_tasks="it averages logits of each class",
    settings=FedHeSettings,
    defenses=ROBUST,
    instructions=Contract(
        all_or_none(
            TensorField("classes", "int64", ("P",), "classes with an average", ids="C"),
            TensorField("logits", "float32", ("P", "C"), "average logits of each class"),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField("logits", "float32", ("P", "C"), "mean logits of each class"),
        )
    ),
    metrics={"classes_covered": "classes with an average"},
    privacy=Protection(CLASS_SUMS, vectors=1),
    sums=Sums((Sum(("logits",), "clients"),), needs={"replies": ("latest",)}),
)
