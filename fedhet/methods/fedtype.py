"""Declaration of FedType: settings and messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhet.algorithms import MIN_SCALE
from fedhet.methods.spec import BOTH_MODELS, MethodSpec, Sums, model_shapes
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, ModelName, NonNegative, Positive
from fedhet.wire.contract import Contract, ScalarField, Sizes, Sum, WeightsField
from fedhet.wire.identity import ClientInfo

Rank = Annotated[int, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]


class FedTypeSettings(MethodSettings):
    """Settings of FedType."""

    proxy: ModelName = Field("cnn2", description="proxy model, the same on all clients")
    aggregation: Literal["fedavg", "fedprox", "pfedme", "pfedbayes"] = Field(
        "fedavg", description="method of training and averaging the proxies"
    )
    moreau_beta: Positive = Field(
        1.0,
        description="with pFedMe: weight of the new average in the server's proxy; 1 = replace the "
        "proxy, above 1 = extrapolate",
    )
    backward: Literal["conformal", "topk", "symmetric", "none"] = Field(
        "conformal",
        description="labels that the private model imitates: conformal sets, top-k labels, all "
        "labels, or none",
    )
    teacher: Literal["proxy", "global"] = Field(
        "proxy",
        description="model that the private model imitates: the proxy during training, or the "
        "server's proxy",
    )
    proxy_loss: Literal["ce+kl", "kl"] = Field(
        "ce+kl",
        description="loss of the proxy: cross-entropy plus the scaled loss of Eq. 1, or the loss "
        "of Eq. 1 alone",
    )
    order: Literal["joint", "alternating"] = Field(
        "joint",
        description="training order: both models on each batch (joint), or alternating epochs of "
        "each model",
    )
    set_loss: Literal["mean", "sum"] = Field(
        "mean", description="reduction of Eq. 3 over the labels of a set; sum = as in the paper"
    )
    labels: Literal["own", "all"] = Field(
        "own",
        description="labels that a set may contain: the labels in the client's data "
        "(own), or all labels",
    )
    mode: Literal["training", "evaluation"] = Field(
        "training",
        description="mode of the models (dropout, batch norm) when tau and the sets are computed",
    )
    quantile: Literal["plain", "corrected"] = Field(
        "plain",
        description="quantile for tau: 1 - theta, or with the paper's finite-sample correction",
    )
    infinite: Literal["skip", "imitate"] = Field(
        "skip",
        description="behavior if tau is infinite because of too few samples: skip imitation, or "
        "imitate all labels",
    )
    eta: Literal["consensus", "one"] = Field("consensus", description="weight eta: Eq. 8, or 1")
    g: Literal["g1", "g2", "g3", "g4"] = Field(
        "g1",
        description="form of the function g, which shrinks the sets if the proxy's accuracy "
        "decreases; g2 is constant",
    )
    shrinks: Literal["proxy", "both"] = Field(
        "proxy",
        description="conformal sets that the function g shrinks: only the proxy's sets, or, as "
        "in the paper, the sets of both models",
    )
    lambda_: NonNegative = Field(0.5, description="RAPS penalty on ranks beyond k-reg")
    k_reg: Literal["auto"] | Rank = Field(
        "auto",
        description="number of ranks without RAPS penalty; auto = 1 (10 labels) to 5 (100 labels)",
    )
    theta: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="maximum fraction of sets that lack the true label (theta)"
    )
    u: Literal["random"] | Share = Field(
        "random", description="RAPS randomization factor u: random, or a constant from 0 to 1"
    )
    top_k: Count = Field(3, description="with backward = topk: number of labels in a set")
    epoch_data: Literal["full", "part"] = Field(
        "full", description="data of an epoch: all samples, or one of local-epochs equal parts"
    )
    calibrate_on: Literal["training", "held", "unseen"] = Field(
        "training",
        description="calibration data: training data, held-out samples (Section 3.2.2), or, with "
        "epoch-data = part, the parts of the other epochs (unseen)",
    )
    calibration: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.1, description="with calibrate-on = held: held-out fraction of a client's samples"
    )
    prox_mu: NonNegative = Field(0.01, description="with FedProx: weight of the proximal term")
    moreau_lambda: Positive = Field(
        15.0, description="with pFedMe: strength of the Moreau envelope"
    )
    moreau_rate: Positive = Field(0.005, description="with pFedMe: learning rate of the local copy")
    moreau_steps: Count = Field(5, description="with pFedMe: steps on the proxy per batch")
    bayes_zeta: NonNegative = Field(
        1e-4, description="with pFedBayes: weight of the divergence from the server's proxy"
    )

    @model_validator(mode="after")
    def _check_parts(self) -> FedTypeSettings:
        if self.calibrate_on == "unseen" and self.epoch_data != "part":
            raise ValueError(
                "setting 'fedtype.calibrate-on': with 'fedtype.epoch-data' = full, expected "
                "training or held, got 'unseen'"
            )
        return self


def proxy_sizes(settings: FedTypeSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes), and the shapes of the proxy and of its scales."""
    proxy = model_shapes(client, settings.proxy)
    trained = model_shapes(client, settings.proxy, part="trained")
    return Sizes({"C": client.classes}, {"proxy": proxy, "scale": trained})


SCALE = WeightsField(
    "scale", "standard deviations of a variational proxy", required=False, low=MIN_SCALE
)
SPEC = MethodSpec(
    title="private models and identical small proxies, which teach each other with conformal sets",
    paper="Wang et al., Bridging Model Heterogeneity in FL via Asymmetrical Reciprocity Learning",
    headline="personal",
    paper_model="private models, proxies, and the averaged proxy; the claim is about private "
    "models",
    late="averaged",
    only_tasks="its conformal sets contain classes",
    settings=FedTypeSettings,
    sizes=proxy_sizes,
    kinds=("private", "proxy", "ensemble", "global"),
    ensemble=("private", "proxy"),
    model_settings={"proxy": "model"},
    semi=False,
    defenses=ROBUST,
    instructions=Contract(
        (WeightsField("proxy", "the server's proxy, or the means of a variational proxy"), SCALE)
    ),
    replies=Contract(
        (
            WeightsField("proxy", "weights of the proxy, or the means of a variational proxy"),
            SCALE,
            ScalarField("eta", float, "mean consensus weight", required=False, low=0, high=1),
            ScalarField("proxy_set", float, "mean size of the proxy's sets", required=False, low=0),
            ScalarField(
                "private_set", float, "mean size of the private model's sets", required=False, low=0
            ),
            ScalarField(
                "single_sets",
                float,
                "fraction of the proxy's sets with one label",
                required=False,
                low=0,
                high=1,
            ),
            ScalarField(
                "tau", float, "threshold of the proxy's sets, if finite", required=False, low=0
            ),
        )
    ),
    metrics={
        "eta": "mean consensus weight η",
        "proxy_set": "mean size of the proxy's sets, in labels",
        "private_set": "mean size of the private model's sets, in labels",
        "single_sets": "fraction of the proxy's sets with one label",
        "tau": "threshold τ of the proxy's sets",
    },
    privacy=replace(
        BOTH_MODELS,
        models=("proxy",),
        needs={
            "backward": ("symmetric", "topk", "none"),
            "labels": ("all",),
            "aggregation": ("fedavg",),
            "epoch_data": ("full",),
            "order": ("joint",),
            "calibrate_on": ("training",),
        },
        reason="with conformal thresholds, a sample's gradient depends on other samples",
    ),
    # The run's seed would choose the held-out samples.
    sums=Sums(
        (Sum(("proxy",)), Sum(("scale",), only_if=("aggregation", "pfedbayes"))),
        needs={"calibrate_on": ("training",)},
    ),
)
