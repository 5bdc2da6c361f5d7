"""FedHe: its settings, and the messages between its halves."""

from typing import Literal

from pydantic import Field

from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import MethodSettings, NonNegative
from fedhet.wire.contract import Contract, TensorField, all_or_none


class FedHeSettings(MethodSettings):
    """Settings of FedHe."""

    loss: Literal["mse", "kl"] = Field(
        "mse",
        description="distance to the server's logits: their mean squared error, as in the authors' "
        "code, or the divergence of the probabilities",
    )
    alpha: NonNegative = Field(0.5, description="weight of the distance to the server's logits")
    replies: Literal["all", "latest"] = Field(
        "all",
        description="a client's part in the server's logits: the mean of all its replies, as in "
        "the authors' code, or its latest reply",
    )


SPEC = MethodSpec(
    title="class-wise mean logits, averaged over the clients",
    paper="Chan and Ngai, FedHe: Heterogeneous Models and Communication-Efficient FL",
    headline="common",
    late="averaged",
    settings=FedHeSettings,
    defenses=ROBUST,
    instructions=Contract(
        all_or_none(
            TensorField("classes", "int64", ("P",), "the classes with an entry", ids="C"),
            TensorField("logits", "float32", ("P", "C"), "average logits of each"),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("logits", "float32", ("P", "C"), "mean logits of each class"),
        )
    ),
    metrics={"classes_covered": "classes with an average"},
    privacy=Protection(CLASS_SUMS, vectors=1),
)
