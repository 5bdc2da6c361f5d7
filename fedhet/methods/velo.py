"""Velo: its settings, and the messages between its halves."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.methods import felo
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, Positive
from fedhet.wire.contract import Sizes, TensorField
from fedhet.wire.identity import ClientInfo


class VeloSettings(felo.FeloSettings):
    """Settings of Velo."""

    interval: Count = Field(1, description="rounds between trainings of the CVAE")
    samples_per_class: Count = Field(
        1, description="synthetic features of each class that are sent per round, S"
    )
    min_separation: Annotated[float, Field(ge=0, le=1)] = Field(
        0.9,
        description="the server sends means until this share of the CVAE's features is nearest to "
        "the mean of its own class; 0: until the CVAE has been trained once, as printed",
    )
    memory: Count = Field(
        20, description="features of each class that the server keeps, oldest out first"
    )
    latent_dim: Count = Field(16, description="width of the CVAE's latent variable, Z")
    hidden_dim: Count = Field(128, description="width of the CVAE's hidden layers")
    deviation: Positive = Field(
        1.0,
        description="standard deviation of the CVAE's Gaussian reconstruction, in spreads of the "
        "features",
    )
    epochs: Count = Field(50, description="epochs per training of the CVAE")
    cvae_lr: Positive = Field(0.01, description="learning rate of the CVAE (Adam)")
    cvae_batch_size: Count = Field(256, description="features per minibatch of the CVAE")


def velo_sizes(settings: VeloSettings, client: ClientInfo) -> Sizes:
    """Return Felo's sizes, and the axis S, the number of synthetic features per class."""
    sizes = felo.felo_sizes(settings, client)
    return replace(sizes, axes={**sizes.axes, "S": settings.samples_per_class})


SPEC = replace(
    felo.SPEC,
    title="Felo with synthetic features from a conditional VAE on the server",
    settings=VeloSettings,
    sizes=velo_sizes,
    defenses=CHOOSING,
    instructions=felo.SPEC.instructions.replacing(
        TensorField(
            "features",
            "float32",
            ("P", "S", "D"),
            "synthetic features of each, or its average S times",
            required=False,
            needs=("classes",),
        )
    ),
    metrics={
        **felo.SPEC.metrics,
        "features_kept": "features that the server keeps",
        "cvae_loss": "loss of the CVAE",
        "separation": "share of the CVAE's features nearest to their own class",
    },
)
