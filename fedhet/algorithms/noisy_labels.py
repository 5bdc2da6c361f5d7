"""Training with noisy labels: RHFL's symmetric loss and confidence in clients.

Xiuwen Fang and Mang Ye, Robust Federated Learning with Noisy and Heterogeneous Clients, CVPR 2022,
Section 3. The symmetric loss is from Wang et al., Symmetric Cross Entropy for Robust Learning with
Noisy Labels, ICCV 2019.
"""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from fedhet.base.arrays import Array

LOG_ZERO = math.log(1e-4)
"""Value of log 0 in the reverse cross-entropy, as in the authors' code."""
MIN_LOSS = 1e-8
"""Lower bound of losses by which loss drops are divided (not in the paper)."""


def symmetric_loss(logits: Tensor, labels: Tensor, ce_weight: float, rce_weight: float) -> Tensor:
    """Return lambda CE + gamma RCE, averaged over samples, as a scalar.

    The reverse cross-entropy (RCE) is -sum_c p_c log y_c, where y is the one-hot label. It equals
    -`LOG_ZERO` (1 - p_y), so a single wrong label has a bounded influence.

    Args:
        logits: Logits, of shape [N, C].
        labels: Labels, of shape [N], which may be wrong.
        ce_weight: Weight lambda of the cross-entropy.
        rce_weight: Weight gamma of the reverse cross-entropy.
    """
    log_p = logits.float().log_softmax(1).gather(1, labels.unsqueeze(1))
    return -(ce_weight * log_p + rce_weight * LOG_ZERO * (1 - log_p.exp())).mean()


def confidence_weights(previous: Array, losses: Array, eta: float) -> Array:
    """Return the weight of each client in the collaboration, of shape [K].

    A client's confidence F is the quality of its labels, 1 / loss, times its learning efficiency,
    the drop of the loss since the previous round. The weights are softmax(1 / (K - 1) + eta F / sum
    F). Before any drop is known, all weights are 1 / (K - 1), as in the authors' code.

    Unlike in the authors' code, the drop is at least 0. Otherwise, the sum of F could be 0 or
    negative, and a client whose loss rises fastest could get the largest weight.

    Args:
        previous: Losses in the previous round, of shape [K]; NaN for clients without a loss.
        losses: Losses in the current round, of shape [K].
        eta: Weight of the confidence.
    """
    base = np.full(len(losses), 1 / max(len(losses) - 1, 1))
    if np.isnan(previous).all():
        return base
    drops = np.nan_to_num(np.maximum(previous - losses, 0.0))
    confidence = drops / np.maximum(losses, MIN_LOSS)
    powers = np.exp(base + eta * confidence / max(confidence.sum(), MIN_LOSS))
    weights: Array = powers / powers.sum()
    return weights
