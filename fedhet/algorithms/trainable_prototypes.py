"""FedTGP: global prototypes that the server trains on the clients' own.

Zhang et al., FedTGP: Trainable Global Prototypes with Adaptive-Margin-Enhanced Contrastive Learning
for Data and Model Heterogeneity in Federated Learning, "Method". phi is the Euclidean distance; the
clients' prototypes are [N, D] with their classes [N], the global ones [C, D].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.choices import Margin
from fedhet.algorithms.prototypes import EXACT
from fedhet.learning.devices import CPU
from fedhet.learning.training import Optimization, train_epochs


class TrainablePrototypes(nn.Module):
    """A trainable vector of each class and a network F that all share; their product is sent.

    F has two dense layers with a ReLU between them, of the prototypes' width (Fig. 3).
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, width)
        self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        """Return the global prototypes [C, D]."""
        prototypes: Tensor = self.network(self.vectors.weight)
        return prototypes


def adaptive_margin(
    prototypes: Tensor, labels: Tensor, threshold: float, reading: Margin = "largest"
) -> float:
    """Return the margin delta(t) of Eq. 9, at most `threshold`; 0 if there is one class alone.

    It is a distance between the centres of two classes, each the plain mean of the clients'
    prototypes: the `largest` of any two, as printed, or as in the authors' code the largest of the
    distances from a class to its `nearest`.
    """
    centres = torch.stack([prototypes[labels == c].mean(0) for c in sorted(set(labels.tolist()))])
    if len(centres) < 2:
        return 0.0
    largest = torch.cdist(centres, centres, compute_mode=EXACT).max()
    found = largest if reading == "largest" else nearest_distances(centres).max()
    return min(found.item(), threshold)


def nearest_distances(centres: Tensor) -> Tensor:
    """Return the distance of each of C >= 2 vectors [C, D] to the nearest other, [C]."""
    distances = torch.cdist(centres, centres, compute_mode=EXACT)
    return distances.fill_diagonal_(torch.inf).amin(1)


def contrastive_loss(prototypes: Tensor, labels: Tensor, trained: Tensor, margin: float) -> Tensor:
    """Return Eq. 10 as a mean over clients' prototypes [N, D], a scalar; `trained` is [C, D].

    The mean in place of the sums of Eqs. 5 and 10 is the authors' code's: it leaves the learning
    rate independent of the number of clients. Without a margin it is Eq. 6.
    """
    distances = torch.cdist(prototypes, trained, compute_mode=EXACT)
    own = F.one_hot(labels, len(trained)).to(distances.dtype) * margin
    return F.cross_entropy(-(distances + own), labels)


def train_prototypes(
    model: TrainablePrototypes,
    prototypes: Tensor,
    labels: Tensor,
    *,
    margin: float,
    epochs: int,
    batch_size: int,
    lr: float,
    generator: torch.Generator,
) -> float:
    """Train with SGD on Eq. 10; return its mean over the last epoch (line 9 of Algorithm 1).

    Raises DataError for a single prototype.
    """
    sgd = torch.optim.SGD(model.parameters(), lr=lr, fused=True)
    return train_epochs(
        prototypes,
        labels,
        lambda own, classes: contrastive_loss(own, classes, model(), margin),
        Optimization(sgd, torch.amp.GradScaler("cpu", enabled=False)),
        epochs=epochs,
        batch_size=batch_size,
        generator=generator,
        compute=CPU,
    )
