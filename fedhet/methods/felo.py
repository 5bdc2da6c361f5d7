"""Declaration of Felo: settings and messages."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import FeatureNorm
from fedhet.methods.spec import (
    AVERAGED_MODEL,
    CLASS_SUMS,
    MethodSpec,
    Protection,
    Sums,
    default_sizes,
    model_shapes,
)
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sizes, Sum, TensorField, WeightsField, all_or_none
from fedhet.wire.identity import ClientInfo


class FeloSettings(MethodSettings):
    """Settings of Felo."""

    weighting: Literal["clients", "samples"] = Field(
        "clients",
        description="weights of the clients in a class mean: equal, or by number of samples",
    )
    feature_dim: Count = Field(64, description="width D of the features that clients send")
    alpha: NonNegative = Field(
        1.0, description="weight alpha of the feature term and the logit term in Eq. 1"
    )
    feature_weight: NonNegative = Field(
        0.1,
        description="multiplier of alpha for the feature term of Eq. 1; 0 = no feature term",
    )
    logit_weight: NonNegative = Field(
        1.0, description="multiplier of alpha for the logit term of Eq. 1; 0 = no logit term"
    )
    feature_norm: FeatureNorm = Field(
        "none",
        description="feature scaling in Eq. 1: none, by the server's RMS (rms), or per vector "
        "(unit)",
    )
    share_weights: bool = Field(
        True,
        description="whether clients also send their weights, which are averaged per architecture",
    )


def felo_sizes(settings: FeloSettings, client: ClientInfo) -> Sizes:
    """Return the sizes of axes C (classes) and D (feature width), and the client model's shapes."""
    shapes = model_shapes(client, feature_dim=settings.feature_dim)
    return replace(default_sizes(settings, client), models={"weights": shapes})


SPEC = MethodSpec(
    title="class-wise features and logits, plus weights averaged per architecture",
    paper="Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning",
    headline="common",
    deployed=AVERAGED_MODEL,
    paper_model="each client's model, with the averaged weights of its architecture",
    late="averaged",
    only_tasks="it averages features and logits of each class",
    settings=FeloSettings,
    sizes=felo_sizes,
    kinds=("private", "global"),
    defenses=ROBUST,
    instructions=Contract(
        (
            *all_or_none(
                TensorField("classes", "int64", ("P",), "classes with an average", ids="C"),
                TensorField("features", "float32", ("P", "D"), "average features of each class"),
                TensorField("logits", "float32", ("P", "C"), "average logits of each class"),
            ),
            WeightsField(
                "weights", "averaged weights of the client's architecture", required=False
            ),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
            TensorField("features", "float32", ("P", "D"), "mean features of each class"),
            TensorField("logits", "float32", ("P", "C"), "mean logits of each class"),
            TensorField(
                "counts", "int64", ("P",), "number of samples of each class", low=1, counts=True
            ),
            WeightsField("weights", "weights of the private model", required=False),
        )
    ),
    metrics={"classes_covered": "classes with an average"},
    privacy=Protection(CLASS_SUMS, vectors=2),
    sums=Sums(
        (
            Sum(("features", "logits", "counts"), "classes", differs=("weights",)),
            Sum(("weights",), within="architecture", only_if=("share_weights", True)),
        )
    ),
)
