"""Felo: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Literal

from pydantic import Field

from fedhet.algorithms import FeatureNorm
from fedhet.methods.spec import CLASS_SUMS, MethodSpec, Protection, default_sizes, model_shapes
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, NonNegative
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField, all_or_none
from fedhet.wire.identity import ClientInfo


class FeloSettings(MethodSettings):
    """Settings of Felo."""

    weighting: Literal["clients", "samples"] = Field(
        "clients", description="does a client count once in a class's mean, or by its samples?"
    )
    feature_dim: Count = Field(64, description="width of the features that travel, D")
    alpha: NonNegative = Field(1.0, description="weight of the feature and logit terms of Eq. 1")
    feature_weight: NonNegative = Field(
        0.1,
        description="times alpha: the weight of Eq. 1's feature term alone; 1 as printed, 0 leaves "
        "it out",
    )
    logit_weight: NonNegative = Field(
        1.0, description="times alpha: the weight of Eq. 1's logit term alone; 0 leaves it out"
    )
    feature_norm: FeatureNorm = Field(
        "none",
        description="scale of Eq. 1's feature term: as printed, in units of the server's features "
        "(rms), or every vector at length 1 in root mean square (unit)",
    )
    share_weights: bool = Field(
        True, description="send the weights too, to be averaged within an architecture"
    )


def felo_sizes(settings: FeloSettings, client: ClientInfo) -> Sizes:
    """Return the axes C and D (feature width), and the shapes of the client's architecture."""
    own = model_shapes(client, feature_dim=settings.feature_dim)
    return replace(default_sizes(settings, client), models={"weights": own})


SPEC = MethodSpec(
    title="class-wise features and logits, and weights within an architecture",
    paper="Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning",
    headline="common",
    late="averaged",
    settings=FeloSettings,
    sizes=felo_sizes,
    kinds=("private", "global"),
    defenses=ROBUST,
    instructions=Contract(
        (
            *all_or_none(
                TensorField("classes", "int64", ("P",), "the classes with an entry", ids="C"),
                TensorField("features", "float32", ("P", "D"), "average features of each"),
                TensorField("logits", "float32", ("P", "C"), "average logits of each"),
            ),
            WeightsField("weights", "averaged weights of the architecture", required=False),
        )
    ),
    replies=Contract(
        (
            TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
            TensorField("features", "float32", ("P", "D"), "mean features of each class"),
            TensorField("logits", "float32", ("P", "C"), "mean logits of each class"),
            TensorField("counts", "int64", ("P",), "samples of each class", low=1),
            WeightsField("weights", "the private model's weights", required=False),
        )
    ),
    metrics={"classes_covered": "classes with an average"},
    privacy=Protection(CLASS_SUMS, vectors=2),
)
