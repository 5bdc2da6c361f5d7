"""Entangled representations, and the training of a head on them.

Yuan Yao et al., FedRE: A Representation Entanglement Framework for Model-Heterogeneous Federated
Learning, CVPR 2026, arXiv:2511.22265. The formulas follow the abstract and the authors' code
(clientre.py and serverre.py), because the full text of the paper was not available.

Shapes: N representations, C classes, P classes of a client, features of width D.
"""

from __future__ import annotations

from typing import Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.feature_models import TrainingOptions
from fedhet.base.arrays import Array
from fedhet.learning.training import SGD


def entangle(means: Array, classes: Array, draws: Array, size: int) -> tuple[Array, Array]:
    """Mix the class means of a client, and mix the one-hot labels with the same weights.

    The weights are w_c = u_c / sum_c' u_c' for the draws u (clientre.py, entangle_rep).

    Args:
        means: Mean features of each class, of shape [P, D].
        classes: Classes of the means, of shape [P].
        draws: Positive numbers u, of shape [P].
        size: Number of classes, C.

    Returns:
        The entangled representation sum_c w_c m_c [D] and the entangled-label encoding w [C].
    """
    weights = draws.astype(np.float64) / draws.sum(dtype=np.float64)
    labels = np.zeros(size, np.float32)
    labels[classes] = weights
    return (weights @ means).astype(np.float32), labels


def entangled_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum over n and c of w_nc CE(h_n, c), as a scalar (serverre.py, train_head).

    `logits` [N, C] are the outputs h of the head, and `labels` [N, C] the label encodings w.
    """
    return F.cross_entropy(logits, labels, reduction="sum")


def train_entangled(
    head: nn.Module, representations: Tensor, labels: Tensor, **options: Unpack[TrainingOptions]
) -> float:
    """Train a head with SGD on shuffled batches of representations [N, D] and encodings [N, C].

    Returns the mean loss of a representation over the last epoch.
    """
    optimizer = SGD(head.parameters(), lr=options["lr"])
    total = 0.0
    for _ in range(options["epochs"]):
        total = 0.0
        order = torch.randperm(len(labels), generator=options["generator"])
        for rows in torch.split(order, options["batch_size"]):
            loss = entangled_loss(head(representations[rows]), labels[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            total += loss.item()
    return total / len(labels)
