"""Declaration of Ditto: settings and messages.

Tian Li, Shengyuan Hu, Ahmad Beirami and Virginia Smith, Ditto: Fair and Robust Federated Learning
Through Personalization, ICML 2021.
"""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, Passes, Protection, local_passes
from fedhet.settings.run import TrainingSettings
from fedhet.settings.schema import CountOrNone, NonNegative

EXTENDS = "fedavg"
"""Method whose strategy Ditto uses."""


class DittoSettings(fedavg.FedAvgSettings):
    """Settings of Ditto."""

    lambda_: NonNegative = Field(
        1.0,
        description="weight lambda of the personal model's proximal term; 0 = local training",
    )
    personal_epochs: CountOrNone = Field(
        0,
        description="epochs of the personal model per round, after the local epochs of the global "
        "model; 0 = training.local-epochs",
    )


def passes(settings: DittoSettings, training: TrainingSettings, rounds: int) -> tuple[Passes, ...]:
    """Return the passes over the samples for the global model, and for the personal model."""
    epochs = settings.personal_epochs or training.local_epochs
    personal = Passes(rounds, training.batch_size, epochs)
    return (*local_passes(settings, training, rounds), personal)


SPEC = replace(
    fedavg.SPEC,
    title="FedAvg, and personal models kept close to the averaged model",
    paper="Li et al., Ditto: Fair and Robust Federated Learning Through Personalization",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's personal model; the averaged model is the kind `global`",
    settings=DittoSettings,
    privacy=Protection(
        "DP-SGD on both models, one after the other; clients send the averaged model's weights",
        passes=passes,
    ),
)
