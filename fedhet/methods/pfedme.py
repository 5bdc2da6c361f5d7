"""Declaration of pFedMe: settings and messages."""

from dataclasses import replace

from pydantic import Field

from fedhet.methods import fedavg
from fedhet.methods.spec import OWN_MODEL, Protection
from fedhet.settings.run import TrainingSettings
from fedhet.settings.schema import Count, Positive


class PFedMeSettings(fedavg.FedAvgSettings):
    """Settings of pFedMe."""

    strength: Positive = Field(15.0, description="strength lambda of the Moreau envelope")
    rate: Positive = Field(0.005, description="learning rate eta of the local copy")
    steps: Count = Field(5, description="number K of steps on the personal model, per batch")
    beta: Positive = Field(
        1.0,
        description="weight beta of the new average in the server's model; 1 = replace the model, "
        "above 1 = extrapolate",
    )


def damping(settings: PFedMeSettings, training: TrainingSettings) -> float:
    """Return the largest fraction of a weight that regularization removes per step (Eqs. 7, 8)."""
    first = training.first()
    personal = first.lr * (first.weight_decay + settings.strength)
    return float(max(personal, settings.rate * settings.strength))


SPEC = replace(
    fedavg.SPEC,
    sums=replace(fedavg.SPEC.sums, damping=damping),
    title="personal models kept close to local copies of the averaged model",
    paper="T. Dinh et al., Personalized Federated Learning with Moreau Envelopes",
    headline="personal",
    deployed=OWN_MODEL,
    paper_model="each client's personal model; the averaged model is the kind `global`",
    settings=PFedMeSettings,
    privacy=Protection(unsupported="clients take several steps on each batch"),
)
