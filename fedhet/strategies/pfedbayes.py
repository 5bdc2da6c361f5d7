"""pFedBayes, server half: Algorithm 1, of Gaussian weights.

Xu Zhang, Yinchuan Li, Wenpeng Li, Kaiyang Guo and Yunfeng Shao, Personalized Federated Learning via
Variational Bayesian Inference, ICML 2022.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from pydantic import Field

from fedhet.algorithms.local_models import LEAST_SCALE, START_SCALE
from fedhet.arrays import Array
from fedhet.models import HetModel, trained_shapes
from fedhet.settings.schema import NonNegative
from fedhet.strategies.fedavg import FedAvgSettings, FedAvgStrategy, part_sizes
from fedhet.wire.contract import Contract, Sizes, WeightsField
from fedhet.wire.identity import ClientInfo


class PFedBayesSettings(FedAvgSettings):
    """Settings of pFedBayes."""

    zeta: NonNegative = Field(
        1e-4, description="weight of the divergence from the server's distribution"
    )


def gaussian_sizes(settings: PFedBayesSettings, client: ClientInfo) -> Sizes:
    """Return the axis C, the shapes of the model and, as "scale", those of its trained tensors."""
    means = part_sizes(settings, client)
    trained = trained_shapes(client.model, client.shape, client.classes)
    return Sizes(means.axes, {**means.models, "scale": trained})


class PFedBayesStrategy(FedAvgStrategy):
    """Averages the means and the standard deviations of the weights by samples."""

    spec = replace(
        FedAvgStrategy.spec,
        title="Gaussian weights near the server's, whose means and scales are averaged",
        paper="Zhang et al., Personalized Federated Learning via Variational Bayesian Inference",
        headline="personal",
        settings=PFedBayesSettings,
        sizes=gaussian_sizes,
    )
    sends = Contract(
        (
            WeightsField("weights", "the averaged means, from which clients start"),
            WeightsField("scale", "the averaged standard deviations", low=LEAST_SCALE),
        )
    )

    def beside_weights(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return the standard deviations, all alike at the start."""
        trained = model.named_parameters()
        return {
            "scale": {name: np.full(tuple(p.shape), START_SCALE, np.float32) for name, p in trained}
        }
