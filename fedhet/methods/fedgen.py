"""Declaration of FedGen: settings and messages."""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import Field

from fedhet.base.arrays import Shapes
from fedhet.methods import lg_fedavg
from fedhet.methods.spec import Protection, Sums
from fedhet.settings.schema import Count, NonNegative, Positive
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField, all_or_none
from fedhet.wire.identity import ClientInfo


class FedGenSettings(lg_fedavg.LgFedAvgSettings):
    """Settings of FedGen."""

    alpha: NonNegative = Field(
        10.0,
        description="weight alpha of the head's cross-entropy on generated features",
    )
    beta: NonNegative = Field(
        10.0,
        description="weight beta of distilling the head's output for generated features into the "
        "model; 0 = no distillation",
    )
    decay: Annotated[float, Field(gt=0, le=1)] = Field(
        0.98,
        description="decay factor for alpha and beta per round; 1 = constant weights",
    )
    weighting: Literal["labels", "clients"] = Field(
        "labels",
        description="weights of the clients in the ensemble: in proportion to their class counts "
        "(labels), or equal (clients)",
    )
    prior: Literal["counts", "uniform"] = Field(
        "counts",
        description="probabilities of the generated classes: in proportion to the clients' class "
        "counts (counts), or uniform over the clients' classes",
    )
    noise_dim: Count = Field(32, description="dimension of the generator's noise")
    hidden_dim: Count = Field(128, description="width of the generator's hidden layer")
    server_steps: Count = Field(50, description="training steps of the generator, per round")
    server_batch_size: Count = Field(128, description="number of features generated in each step")
    generator_lr: Positive = Field(3e-4, description="learning rate of the generator (Adam)")
    diversity: NonNegative = Field(1.0, description="weight of the generator's diversity loss")

    @property
    def sends_counts(self) -> bool:
        """Whether clients send their numbers of samples per class."""
        return self.weighting == "labels" or self.prior == "counts"


def gen_sizes(settings: FedGenSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes), and the shapes of the head and the generator."""
    generator = generator_shapes(
        client.classes, settings.noise_dim, settings.hidden_dim, settings.feature_dim
    )
    head = lg_fedavg.SPEC.sizes(settings, client)
    return Sizes(head.axes, {**head.models, "generator": generator})


@lru_cache(maxsize=64)
def generator_shapes(classes: int, noise: int, hidden: int, width: int) -> Shapes:
    """Return the shape and dtype of each generator tensor. Imports PyTorch."""
    import torch

    from fedhet.algorithms.feature_models import Generator

    with torch.device("meta"):
        state = Generator(classes, noise, hidden, width).state_dict()
    return {k: (tuple(v.shape), str(v.dtype).removeprefix("torch.")) for k, v in state.items()}


SPEC = replace(
    lg_fedavg.SPEC,
    title="one head for all extractors, trained with a feature generator",
    paper="Zhu et al., Data-Free Knowledge Distillation for Heterogeneous Federated Learning",
    paper_model="the averaged model; with private extractors (Section 6.4), each client's model",
    needs_task="classes",
    only_tasks="its generator produces features of classes",
    settings=FedGenSettings,
    sizes=gen_sizes,
    instructions=Contract(
        (
            WeightsField("weights", "averaged head, from which clients start"),
            WeightsField("generator", "generator, after its first training", required=False),
            TensorField(
                "prior",
                "float32",
                ("C",),
                "probability with which each class is generated",
                required=False,
                distribution=True,
            ),
        )
    ),
    replies=Contract(
        (
            WeightsField("weights", "head after training"),
            *all_or_none(
                TensorField("classes", "int64", ("P",), "classes of the client", ids="C"),
                TensorField(
                    "counts", "int64", ("P",), "number of samples per class", low=1, counts=True
                ),
            ),
        )
    ),
    metrics={
        "generator_loss": "cross-entropy of the heads' ensemble on generated features",
        "agreement": "fraction of generated features that the ensemble classifies correctly",
    },
    privacy=Protection(
        "DP-SGD; clients send the resulting heads, but not their class counts",
        needs={"weighting": ("clients",), "prior": ("uniform",)},
        reason="with other values, clients would send their class counts",
    ),
    sums=Sums(unsupported="the server trains with the heads of individual clients"),
)
