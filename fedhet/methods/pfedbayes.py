"""pFedBayes: its settings, and the messages between its halves."""

from dataclasses import replace

from pydantic import Field

from fedhet.algorithms import MIN_SCALE
from fedhet.methods import fedavg
from fedhet.methods.spec import Protection, model_shapes
from fedhet.settings.schema import Count, NonNegative
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo


class PFedBayesSettings(fedavg.FedAvgSettings):
    """Settings of pFedBayes."""

    zeta: NonNegative = Field(
        10.0,
        description="weight of the divergence between the personal and the localized "
        "distributions, which is divided by the client's number of samples",
    )
    noise: NonNegative = Field(
        0.001,
        description="factor of the noise in a draw of the weights: 1 draws from the distribution, "
        "as in the paper; 0.001 is a public implementation's, which reports the paper's accuracy",
    )
    steps: Count = Field(5, description="steps on the personal distribution per batch")


def gaussian_sizes(settings: PFedBayesSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, the shapes of the model and, as "scale", those of its trained tensors."""
    means = fedavg.part_sizes(settings, client)
    trained = model_shapes(client, part="trained")
    return Sizes(means.axes, {**means.models, "scale": trained})


SPEC = replace(
    fedavg.SPEC,
    title="personal Gaussian weights near a shared Gaussian model",
    paper="Zhang et al., Personalized Federated Learning via Variational Bayesian Inference",
    headline="personal",
    settings=PFedBayesSettings,
    sizes=gaussian_sizes,
    instructions=Contract(
        (
            WeightsField("weights", "the averaged means, from which clients start"),
            WeightsField("scale", "the averaged standard deviations", low=MIN_SCALE),
        )
    ),
    replies=Contract(
        (
            WeightsField("weights", "the localized means after training"),
            WeightsField("scale", "the localized standard deviations", low=MIN_SCALE),
        )
    ),
    privacy=Protection(unsupported="its weights are drawn within a step, several times a batch"),
)
