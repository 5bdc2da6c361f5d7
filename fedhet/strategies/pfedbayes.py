"""pFedBayes strategy: averaging of Gaussian weights (Algorithm 1).

Xu Zhang, Yinchuan Li, Wenpeng Li, Kaiyang Guo and Yunfeng Shao, Personalized Federated Learning via
Variational Bayesian Inference, ICML 2022.

In regression (not in the paper's experiments), the loss is the squared error. For one target, it is
the negative log likelihood, up to a constant, of a Gaussian with variance 1/2.
"""

from __future__ import annotations

import numpy as np

from fedhet.algorithms.local_models import equal_scales
from fedhet.base.arrays import Array
from fedhet.methods.pfedbayes import SPEC
from fedhet.models import HetModel
from fedhet.strategies.fedavg import FedAvgStrategy

START_SCALE = np.log1p(np.exp(-2.5))
"""Initial standard deviation of every weight, softplus(-2.5)."""


class PFedBayesStrategy(FedAvgStrategy):
    """Strategy that averages the means and the standard deviations of the weights."""

    spec = SPEC

    def extra_groups(self, model: HetModel) -> dict[str, dict[str, Array]]:
        """Return the initial standard deviations, as an additional group to average."""
        return {"scale": equal_scales(model, START_SCALE)}
