"""FedGen: its settings, and the messages between its halves."""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from fedhet.base.arrays import Shapes
from fedhet.methods import lg_fedavg
from fedhet.methods.spec import Protection
from fedhet.settings.schema import Count, NonNegative, Positive
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField, all_or_none
from fedhet.wire.identity import ClientInfo


class FedGenSettings(lg_fedavg.LgFedAvgSettings):
    """Settings of FedGen."""

    alpha: NonNegative = Field(
        10.0,
        description="weight of the cross-entropy of the head on generated features, alpha: 1 in "
        "Eq. 5, 10 in the authors' code",
    )
    beta: NonNegative = Field(
        10.0,
        description="weight of the divergence from the head's output for generated features, beta, "
        "as in the authors' code; 0: none, as in Eq. 5",
    )
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.98,
        description="factor by which both weights fall in each round, as in the authors' code; 1: "
        "constant weights, as in Eq. 5",
    )
    weighting: Literal["labels", "clients"] = Field(
        "labels",
        description="weights of the clients in the ensemble: labels, a client's share of the "
        "samples of a class, as in the authors' code; clients, equal, as printed (Eq. 4)",
    )
    prior: Literal["counts", "uniform"] = Field(
        "counts",
        description="probabilities p(y) of the generated classes: counts, shares of all clients' "
        "samples, as printed (Algorithm 1); uniform, equal for all classes that a client has, as "
        "in the authors' code, or for all classes if no client sends numbers of samples",
    )
    noise_dim: Count = Field(32, description="width of the generator's noise")
    hidden_dim: Count = Field(128, description="width of the generator's hidden layer")
    server_steps: Count = Field(50, description="steps of the generator's training per round")
    server_batch_size: Count = Field(128, description="generated features per step")
    generator_lr: Positive = Field(3e-4, description="the generator's learning rate (Adam)")
    diversity: NonNegative = Field(1.0, description="weight of the generator's diversity loss")

    @property
    def sends_counts(self) -> bool:
        """Whether clients send their numbers of samples of each class."""
        return self.weighting == "labels" or self.prior == "counts"


def gen_sizes(settings: FedGenSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, and the shapes of the head and of the generator."""
    own = settings
    generator = generator_shapes(client.classes, own.noise_dim, own.hidden_dim, own.feature_dim)
    head = lg_fedavg.SPEC.sizes(settings, client)
    return Sizes(head.axes, {**head.models, "generator": generator})


@lru_cache(maxsize=64)
def generator_shapes(classes: int, noise: int, hidden: int, width: int) -> Shapes:
    """Return the shape and dtype of the generator's tensors; PyTorch is imported for it."""
    import torch

    from fedhet.algorithms.feature_models import Generator

    with torch.device("meta"):
        state = Generator(classes, noise, hidden, width).state_dict()
    return {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in state.items()}


SPEC = replace(
    lg_fedavg.SPEC,
    title="one head for all extractors, trained with a generator of features",
    paper="Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning",
    settings=FedGenSettings,
    sizes=gen_sizes,
    instructions=Contract(
        (
            WeightsField("weights", "the averaged head, from which clients start"),
            WeightsField("generator", "the generator, once it has been trained", required=False),
            TensorField(
                "prior",
                "float32",
                ("C",),
                "probability of each class",
                required=False,
                distribution=True,
            ),
        )
    ),
    replies=Contract(
        (
            WeightsField("weights", "the head, after training"),
            *all_or_none(
                TensorField("classes", "int64", ("P",), "the classes present, each once", ids="C"),
                TensorField("counts", "int64", ("P",), "samples of each class", low=1),
            ),
        )
    ),
    metrics={
        "generator_loss": "cross-entropy of the ensemble of heads on generated features",
        "agreement": "share of generated features that the ensemble takes for their class",
    },
    privacy=Protection(
        "DP-SGD; the heads that are sent are its result, without the numbers of samples by class",
        needs={"weighting": ("clients",), "prior": ("uniform",)},
        reason="otherwise it sends the number of samples of each class",
    ),
)
