"""Declaration of MOON: FedAvg with a contrastive term in the clients' loss.

Qinbin Li, Bingsheng He and Dawn Song, Model-Contrastive Federated Learning, CVPR 2021.
"""

from dataclasses import replace

from pydantic import Field

from fedhet.algorithms import MlpWidth
from fedhet.methods import fedavg
from fedhet.methods.spec import SUM_OF_WEIGHTS
from fedhet.settings.schema import CountOrNone, NonNegative, Positive

EXTENDS = "fedavg"
"""Method whose strategy MOON uses."""


class MoonSettings(fedavg.FedAvgSettings):
    """Settings of MOON."""

    mu: NonNegative = Field(1.0, description="weight mu of the contrastive loss; 0 = FedAvg")
    temperature: Positive = Field(0.5, description="temperature tau of the contrastive loss")
    projection_dim: CountOrNone = Field(
        256,
        description="output width of the projection head, a two-layer MLP before the classifier; "
        "0 = the model's own features",
    )

    @property
    def width(self) -> MlpWidth | None:
        """Width of the projected features, or None without a projection head."""
        return MlpWidth(self.projection_dim) if self.projection_dim else None

    @property
    def feature_dim(self) -> MlpWidth | None:
        """Width of the clients' features, i.e. `width`."""
        return self.width


SPEC = replace(
    fedavg.SPEC,
    needs_task="outputs",
    only_tasks="its contrastive loss needs one vector of features for each sample",
    # Replies depend on the client's previous model, which a malicious server may have spoiled.
    sums=SUM_OF_WEIGHTS,
    title="FedAvg with a contrastive loss between models",
    paper="Li et al., Model-Contrastive Federated Learning",
    paper_model="the averaged model",
    settings=MoonSettings,
)
