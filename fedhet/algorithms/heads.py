"""Classifiers on the features of different extractors: prototypes, nested features, one head.

- FedProto: the nearest prototype. Tan et al., FedProto: Federated Prototype Learning across
  Heterogeneous Clients, Eq. 4.
- FedTGP: prototypes that the server trains. Zhang et al., FedTGP: Trainable Global Prototypes with
  Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
  Learning, "Method". phi is the Euclidean distance; the clients' prototypes are [N, D] with their
  classes [N], the global ones [C, D].
- FedMRL: representations nested like Matryoshka dolls. Liping Yi et al., Federated Model
  Heterogeneous Matryoshka Representation Learning, NeurIPS 2024, Section 4.
- FedGH: a head for all extractors, trained on the server on class means of their features. Yi et
  al., FedGH: Heterogeneous Federated Learning with Generalized Global Header.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms.choices import Margin
from fedhet.learning.devices import CPU
from fedhet.learning.training import CrossEntropy, Optimization, train_epochs

EXACT = "donot_use_mm_for_euclid_dist"
"""How distances are computed: from differences, which lose no digits to cancellation."""


class NearestPrototype(nn.Module):
    """An extractor whose classes are those of the nearest prototype (Eq. 4)."""

    def __init__(self, extractor: nn.Module, prototypes: Tensor, known: Tensor) -> None:
        """Take the prototypes [C, D], on the extractor's device.

        `known` [C], bool, marks the classes that have a prototype.
        """
        super().__init__()
        self.extractor = extractor
        self.prototypes, self.known = prototypes, known

    def forward(self, x: Tensor) -> Tensor:
        """Return minus the squared distances [N, C]; minus infinity for unknown classes."""
        features = self.extractor(x).float()
        distances = torch.cdist(features, self.prototypes, compute_mode=EXACT)
        return (-distances.square()).masked_fill(~self.known, float("-inf"))


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


class Projector(nn.Linear):
    """P: the features of the shared and of the own model -> the fused representation [N, d2]."""

    def __init__(self, shared_dim: int, own_dim: int) -> None:
        """`shared_dim` is d1, `own_dim` d2 >= d1: the widths of the two models' features."""
        super().__init__(shared_dim + own_dim, own_dim)
        self.coarse_dim = shared_dim

    def fuse(self, shared: Tensor, own: Tensor) -> Tensor:
        """Return P([shared, own]) [N, d2] of features [N, d1] and [N, d2] (Section 4.1)."""
        fused: Tensor = self(torch.cat([shared, own], dim=1))
        return fused

    def coarse(self, fused: Tensor) -> Tensor:
        """Return the inner doll [N, d1]: the first components of the fused ones (Section 4.2)."""
        return fused[:, : self.coarse_dim]


def matryoshka_losses(fine: Tensor, coarse: Tensor, labels: Tensor) -> Tensor:
    """Return [2]: the cross-entropy of the own head and that of the shared head (Section 4.2).

    Logits [N, C] of the own head on all fused features, and of the shared head on the coarse part.
    """
    losses = [F.cross_entropy(logits.float(), labels) for logits in (fine, coarse)]
    return torch.stack(losses)


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
        CrossEntropy(head),
        Optimization(sgd, torch.amp.GradScaler("cpu", enabled=False)),
        epochs=epochs,
        batch_size=batch_size,
        generator=generator,
        compute=CPU,
    )
