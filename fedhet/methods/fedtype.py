"""FedType: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from fedhet.algorithms import MIN_SCALE
from fedhet.methods.spec import BOTH_MODELS, MethodSpec, model_shapes
from fedhet.settings.defense import ROBUST
from fedhet.settings.schema import Count, MethodSettings, ModelName, NonNegative, Positive
from fedhet.wire.contract import Contract, ScalarField, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo

Rank = Annotated[int, Field(ge=0, le=1_000_000)]
Share = Annotated[float, Field(ge=0, le=1)]


class FedTypeSettings(MethodSettings):
    """Settings of FedType."""

    proxy: ModelName = Field("cnn2", description="the proxy's model, the same at every client")
    aggregation: Literal["fedavg", "fedprox", "pfedme", "pfedbayes"] = Field(
        "fedavg", description="how proxies are trained and averaged"
    )
    moreau_beta: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="pFedMe's share of the new average in the server's proxy"
    )
    backward: Literal["conformal", "topk", "symmetric", "none"] = Field(
        "conformal",
        description="what the private model imitates: conformal sets, top-k, all, or nothing",
    )
    teacher: Literal["proxy", "global"] = Field(
        "proxy",
        description="what the private model imitates: the proxy as it learns, or the server's, "
        "which stays the same for a round",
    )
    proxy_loss: Literal["ce+kl", "kl"] = Field(
        "ce+kl",
        description="the proxy's loss: cross-entropy and Eq. 1 over the number of classes, as in "
        "the authors' published code, or Eq. 1 alone",
    )
    order: Literal["joint", "alternating"] = Field(
        "joint",
        description="both models learn from each batch, or, as in the authors' published code, the "
        "private model for an epoch and then the proxy for one",
    )
    set_loss: Literal["mean", "sum"] = Field(
        "mean", description="Eq. 3 over a set of labels; the paper prints the sum"
    )
    labels: Literal["own", "all"] = Field(
        "own", description="labels that a set may hold: those of the client's data, or all"
    )
    mode: Literal["training", "evaluation"] = Field(
        "training",
        description="mode of the models (dropout, batch norm) that tau and the sets come from",
    )
    quantile: Literal["plain", "corrected"] = Field(
        "plain",
        description="tau: the (1 - theta) quantile as in RAPS' code, or corrected for few samples, "
        "as printed",
    )
    infinite: Literal["skip", "imitate"] = Field(
        "skip",
        description="if a corrected tau is infinite because there are too few samples, so that "
        "every set holds all labels: imitate nothing, or these sets",
    )
    eta: Literal["consensus", "one"] = Field("consensus", description="the weight of Eq. 8, or 1")
    g: Literal["g1", "g2", "g3", "g4"] = Field(
        "g1", description="how sets shrink as the proxy gets worse; g2 does not"
    )
    shrinks: Literal["proxy", "both"] = Field(
        "proxy",
        description="whose sets g shrinks: the proxy's, or those of both models, as printed",
    )
    lambda_: NonNegative = Field(0.5, description="RAPS' penalty on a rank beyond k-reg")
    k_reg: Literal["auto"] | Rank = Field(
        "auto",
        description="ranks that RAPS does not penalize; auto is 1 for up to 10 labels, 5 from 100",
    )
    theta: Annotated[float, Field(gt=0, lt=1)] = Field(
        0.1, description="share of sets that may miss the truth"
    )
    u: Literal["random"] | Share = Field(
        "random", description="RAPS' factor for the label at the edge: random, or from 0 to 1"
    )
    top_k: Count = Field(3, description="labels in a set, for backward = topk")
    epoch_data: Literal["full", "part"] = Field(
        "full", description="data of an epoch: all of it, or one of local-epochs parts"
    )
    calibrate_on: Literal["training", "held"] = Field(
        "training",
        description="the data that the sets are calibrated on: the training data, as in the "
        "authors' published code, or a part held out for it (Section 4.1)",
    )
    calibration: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.1, description="share of a client's samples held out, for calibrate-on = held"
    )
    prox_mu: NonNegative = Field(0.01, description="weight of FedProx' proximal term")
    moreau_lambda: Positive = Field(15.0, description="strength of pFedMe's Moreau envelope")
    moreau_rate: Positive = Field(0.005, description="rate of pFedMe's local copy")
    moreau_steps: Count = Field(5, description="pFedMe's steps on the proxy per batch")
    bayes_zeta: NonNegative = Field(
        1e-4, description="weight of pFedBayes' divergence from the server's proxy"
    )


def proxy_sizes(settings: FedTypeSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, the proxy's shapes and, as "scale", those of its trained tensors."""
    whole = model_shapes(client, settings.proxy)
    trained = model_shapes(client, settings.proxy, part="trained")
    return Sizes({"C": client.classes}, {"proxy": whole, "scale": trained})


SCALE = WeightsField(
    "scale", "a variational proxy's standard deviations", required=False, low=MIN_SCALE
)
SPEC = MethodSpec(
    title="identical small proxies; conformal sets between proxy and private model",
    paper="Wang et al., Bridging Model Heterogeneity in FL via Asymmetrical Reciprocity Learning",
    headline="personal",
    late="averaged",
    settings=FedTypeSettings,
    sizes=proxy_sizes,
    kinds=("private", "proxy", "global"),
    model_settings={"proxy": "model"},
    semi=False,
    defenses=ROBUST,
    instructions=Contract(
        (WeightsField("proxy", "the server's proxy; of a variational one, the means"), SCALE)
    ),
    replies=Contract(
        (
            WeightsField("proxy", "the proxy's weights; of a variational one, the means"),
            SCALE,
            ScalarField("eta", float, "mean consensus weight", required=False, low=0, high=1),
            ScalarField("proxy_set", float, "mean size of the proxy's sets", required=False, low=0),
            ScalarField(
                "private_set", float, "mean size of the private model's sets", required=False, low=0
            ),
            ScalarField("tau", float, "the proxy's threshold, if finite", required=False, low=0),
        )
    ),
    metrics={
        "eta": "consensus weight η",
        "proxy_set": "labels in the proxy's sets",
        "private_set": "labels in the private model's sets",
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
        },
        reason="conformal thresholds come from samples, and weigh on the gradient of all others",
    ),
)
