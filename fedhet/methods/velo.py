"""Declaration of Velo: settings and messages."""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from fedhet.methods import felo
from fedhet.methods.spec import Sums
from fedhet.settings.defense import CHOOSING
from fedhet.settings.schema import Count, Positive
from fedhet.wire.contract import Sizes, TensorField
from fedhet.wire.identity import ClientInfo


class VeloSettings(felo.FeloSettings):
    """Settings of Velo."""

    interval: Count = Field(1, description="training interval of the CVAE, in rounds")
    samples_per_class: Count = Field(
        1, description="number S of synthetic features sent per class and round"
    )
    min_separation: Annotated[float, Field(ge=0, le=1)] = Field(
        0.9,
        description="minimum fraction of synthetic features closest to the mean of their class; "
        "if the fraction is lower, the server sends class means",
    )
    memory: Count = Field(
        20,
        description="maximum number of features per class that the server stores; the oldest "
        "features are discarded",
    )
    latent_dim: Count = Field(16, description="dimension of the CVAE's latent variable Z")
    hidden_dim: Count = Field(128, description="width of the CVAE's hidden layers")
    deviation: Positive = Field(
        1.0,
        description="standard deviation of the CVAE's reconstruction, as a multiple of the "
        "features' standard deviation",
    )
    epochs: Count = Field(50, description="epochs in each training of the CVAE")
    cvae_lr: Positive = Field(0.01, description="learning rate of the CVAE (Adam)")
    cvae_batch_size: Count = Field(256, description="batch size of the CVAE, in features")


def velo_sizes(settings: VeloSettings, client: ClientInfo) -> Sizes:
    """Return Felo's sizes and the size of axis S (synthetic features per class)."""
    sizes = felo.felo_sizes(settings, client)
    return replace(sizes, axes={**sizes.axes, "S": settings.samples_per_class})


SPEC = replace(
    felo.SPEC,
    title="Felo with synthetic features from a conditional VAE on the server",
    paper_model="as in Felo, the averaged weights of the client's architecture",
    settings=VeloSettings,
    sizes=velo_sizes,
    defenses=CHOOSING,
    instructions=felo.SPEC.instructions.replacing(
        TensorField(
            "features",
            "float32",
            ("P", "S", "D"),
            "synthetic features of each class, or its average repeated S times",
            required=False,
            needs=("classes",),
        )
    ),
    metrics={
        **felo.SPEC.metrics,
        "features_kept": "number of features stored by the server",
        "cvae_loss": "loss of the CVAE",
        "separation": "fraction of the CVAE's features that are closest to the mean of their class",
        "synthetic": "whether the server sends synthetic features (1) or means (0) after the round",
    },
    sums=Sums(unsupported="the server trains on the class means of individual clients"),
)
