"""FedGH: a head for all extractors, trained on the server on class means of their features.

Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global Header.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedhet.learning.devices import CPU
from fedhet.learning.training import Optimization, cross_entropy_of, train_epochs


def train_head(
    head: nn.Module,
    representations: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> float:
    """Train with SGD on the cross-entropy of `head`; return its mean over the last epoch.

    `representations` [N, D] are the clients' local averaged representations, one of each client
    and class, and `labels` [N] their classes. Raises DataError for a single one.
    """
    sgd = torch.optim.SGD(head.parameters(), lr=lr, fused=True)
    return train_epochs(
        representations,
        labels,
        cross_entropy_of(head),
        Optimization(sgd, torch.amp.GradScaler("cpu", enabled=False)),
        epochs=epochs,
        batch_size=batch_size,
        generator=generator,
        compute=CPU,
    )
