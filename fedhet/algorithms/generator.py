"""FedGen: a generator of features, its training on the server, and what clients learn from it.

Zhuangdi Zhu, Junyuan Hong and Jiayu Zhou, Data-Free Knowledge Distillation for Heterogeneous
Federated Learning, ICML 2021.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.base.arrays import Array
from fedhet.base.transfer import to_device


class Generator(nn.Module):
    """G(y, epsilon): classes [N] and noise [N, E] -> features [N, D], as in the authors' code."""

    def __init__(self, classes: int, noise: int, hidden: int, width: int) -> None:
        """`width` is D, `noise` E; one hidden layer with a batch norm."""
        super().__init__()
        self.classes, self.noise = classes, noise
        self.hidden = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.output = nn.Linear(hidden, width)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Return the features [N, D] of classes [N]."""
        joined = torch.cat([noise, F.one_hot(labels, self.classes).to(noise.dtype)], dim=1)
        features: Tensor = self.output(self.hidden(joined))
        return features

    def drawn(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Return features [N, D] for noise ~ N(0, I); the authors' code draws from [0, 1)."""
        noise = torch.randn(len(labels), self.noise, generator=generator)  # on every device alike
        features: Tensor = self(labels, to_device(noise, labels.device))
        return features


@dataclass(frozen=True)
class Head:
    """Linear heads, one for each class [C, C, D] and [C, C]: of the clients that have it."""

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [N, C] of features [N, D], by the head of each label [N]."""
        found: Tensor = torch.einsum("ncd,nd->nc", self.weight[labels], features)
        return found + self.bias[labels]


def label_weights(counts: Array) -> Array:
    """Return each client's weight for each class [K, C]: its share of the class's samples.

    `counts` [K, C]. A class that nobody has weighs 0 everywhere.
    """
    totals = counts.sum(0, keepdims=True)
    weights: Array = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    return weights


def ensemble(weights: Array, heads: list[Array], biases: list[Array]) -> Head:
    """Return the ensemble of Eq. 4: the mean of the clients' logits, by their weights [K, C].

    Heads [C, D] and biases [C], one a client. They are linear, so that a mean of logits is the
    logits of a mean head, one for each class that is generated.
    """
    weight = np.einsum("ky,kcd->ycd", weights, np.stack(heads).astype(np.float64))
    bias = np.einsum("ky,kc->yc", weights, np.stack(biases).astype(np.float64))
    return Head(*(torch.tensor(each, dtype=torch.float32) for each in (weight, bias)))


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """Return exp(-mean_ij ||e_i - e_j||^2 |z_i - z_j|), a scalar: small if features differ.

    Of noise e [N, E] and features z [N, D]; both distances are means over components, as in the
    authors' code.
    """
    apart = torch.cdist(noise, noise).square() / noise.shape[1]
    moved = torch.cdist(features, features, p=1) / features.shape[1]
    return torch.exp(-(apart * moved).mean())


@dataclass(frozen=True)
class Course:
    """How a generator is trained in a round."""

    steps: int
    batch_size: int
    lr: float
    diversity: float
    """The weight of the diversity loss, eta."""


def train_generator(
    model: Generator, head: Head, prior: Tensor, course: Course, draws: torch.Generator
) -> float:
    """Train with Adam on Eq. 4 plus the diversity loss; return the mean cross-entropy.

    Classes are drawn from `prior` [C], p(y), and noise from N(0, I), both by `draws` alone. The
    heads are fixed.
    """
    adam = torch.optim.Adam(model.train().parameters(), lr=course.lr)
    total = 0.0
    for _ in range(course.steps):
        labels = torch.multinomial(prior, course.batch_size, replacement=True, generator=draws)
        noise = torch.randn(len(labels), model.noise, generator=draws)
        features = model(labels, noise)
        loss = F.cross_entropy(head.logits(features, labels), labels)
        adam.zero_grad(set_to_none=True)
        (loss + course.diversity * diversity_loss(noise, features)).backward()  # type: ignore[no-untyped-call]
        adam.step()
        total += loss.item()
    return total / course.steps


@torch.no_grad()
def agreement(model: Generator, head: Head, prior: Tensor, draws: torch.Generator) -> float:
    """Return the share of generated features that the ensemble takes for their class, 0 to 1."""
    labels = torch.multinomial(prior, 1000, replacement=True, generator=draws)
    features = model.eval().drawn(labels, draws)
    return float((head.logits(features, labels).argmax(1) == labels).float().mean())
