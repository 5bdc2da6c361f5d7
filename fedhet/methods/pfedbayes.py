"""Declaration of pFedBayes: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.algorithms import MIN_SCALE
from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, Protection, Sums, model_shapes
from fedhet.settings.schema import Count, NonNegative
from fedhet.wire.contract import Contract, Sizes, Sum, WeightsField
from fedhet.wire.identity import ClientInfo


class PFedBayesSettings(fedavg.FedAvgSettings):
    """Settings of pFedBayes."""

    zeta: NonNegative = Field(
        10.0,
        description="weight zeta of the divergence between the personal and the localized "
        "distribution, divided by the number of samples",
    )
    noise: NonNegative = Field(
        0.001,
        description="factor for the noise of sampled weights; 1 = as in the paper",
    )
    steps: Count = Field(5, description="number of steps on the personal distribution, per batch")


def gaussian_sizes(settings: PFedBayesSettings, client: ClientInfo) -> Sizes:
    """Return the size of axis C (classes), and the shapes of the means and the scales."""
    means = fedavg.part_sizes(settings, client)
    trained = model_shapes(client, part="trained")
    return Sizes(means.axes, {**means.models, "scale": trained})


SPEC = replace(
    fedavg.SPEC,
    title="personal Gaussian weight distributions close to a shared distribution",
    paper="Zhang et al., Personalized Federated Learning via Variational Bayesian Inference",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's personal model; the averaged model is the kind `global`",
    needs_task="likelihood",
    only_tasks="the loss must be a negative log-likelihood",
    settings=PFedBayesSettings,
    sizes=gaussian_sizes,
    instructions=Contract(
        (
            WeightsField("weights", "averaged means, from which clients start"),
            WeightsField("scale", "averaged standard deviations", low=MIN_SCALE),
        )
    ),
    replies=Contract(
        (
            WeightsField("weights", "localized means after training"),
            WeightsField("scale", "localized standard deviations after training", low=MIN_SCALE),
        )
    ),
    privacy=Protection(unsupported="weights are sampled several times for each batch"),
    sums=Sums((Sum(("weights", "scale")),)),
)
