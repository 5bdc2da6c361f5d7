"""Generators of features, trained on the server: Velo's auto-encoder and FedGen's generator.

Velo: Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section
3.2; its conditional variational auto-encoder is of Sohn et al., Learning Structured Output
Representation using Deep Conditional Generative Models. Features s are [N, D], their classes y
[N], latent variables z [N, Z]. Ours: Eq. 2 is used as printed, but on standardised features. The
paper does not mention their scale; with raw features, large ones, even of a single client, make the
training diverge.

FedGen: Zhuangdi Zhu, Junyuan Hong and Jiayu Zhou, Data-Free Knowledge Distillation for
Heterogeneous Federated Learning, ICML 2021; "Eq. 4" below is this paper's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.base.arrays import Array
from fedhet.base.transfer import to_device
from fedhet.learning.devices import CPU
from fedhet.learning.training import Optimization, train_epochs

LIMIT = 5.0
"""Maximum distance from the centre, in spreads: features further away are scaled back to it."""


class Cvae(nn.Module):
    """A two-layer encoder and a two-layer decoder; both get the class as one-hot input.

    Both work on standardised features; `centre` [D] and `spread`, a scalar, define the scaling.
    """

    centre: Tensor
    spread: Tensor

    def __init__(self, width: int, classes: int, latent: int, hidden: int) -> None:
        super().__init__()
        self.classes, self.latent = classes, latent
        self.encoder = _two_layers(width + classes, hidden, 2 * latent)
        self.decoder = _two_layers(latent + classes, hidden, width)
        self.register_buffer("centre", torch.zeros(width))
        self.register_buffer("spread", torch.ones(()))

    def measure(self, features: Tensor) -> None:
        """Set centre and spread from features [N, D]: medians, which are robust to outliers.

        One spread for all components: one per component would cut off those that are mostly 0.
        """
        self.centre.copy_(features.median(0).values)
        distances = _distance(features.double() - self.centre)
        apart = distances[distances > 0]
        self.spread.fill_(apart.median() if len(apart) else 1)

    def standardise(self, features: Tensor) -> Tensor:
        """Return features [N, D] in spreads from the centre, with a distance of at most LIMIT."""
        scaled = (features.double() - self.centre) / self.spread
        return (scaled * (LIMIT / _distance(scaled)).clamp(max=1)).float()

    def encode(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and log variance, both [N, Z], of q(z | s, y); s is standardised."""
        mean, log_variance = self.encoder(self._join(features, labels)).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, latent: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of p(s | z, y), [N, D]; s is standardised."""
        decoded: Tensor = self.decoder(self._join(latent, labels))
        return decoded

    def _join(self, values: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([values, F.one_hot(labels, self.classes).to(values.dtype)], dim=1)


def _two_layers(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))


def _distance(offsets: Tensor) -> Tensor:
    """Return the root mean square of each row of [N, D], [N, 1]."""
    return offsets.square().mean(1, keepdim=True).sqrt()


def reparameterise(mean: Tensor, log_variance: Tensor, noise: Tensor) -> Tensor:
    """Return z = g(s, y, noise) of Eq. 2; mean, log variance and noise ~ N(0, I) are [N, Z]."""
    return mean + noise * torch.exp(log_variance / 2)


def divergence(mean: Tensor, log_variance: Tensor) -> Tensor:
    """Return KL(q(z | s, y) || N(0, I)) per feature, [N]: the first term of Eq. 2, negated."""
    return 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)


def log_likelihood(features: Tensor, decoded: Tensor, deviation: float) -> Tensor:
    """Return log p(s | z, y) per feature, [N]: a Gaussian with this standard deviation (ours)."""
    error = ((features - decoded) / deviation).square().sum(1)
    return -0.5 * error - features.shape[1] * (math.log(deviation) + 0.5 * math.log(2 * math.pi))


def cvae_loss(
    model: Cvae, features: Tensor, labels: Tensor, noise: Tensor, deviation: float
) -> Tensor:
    """Return the negative of Eq. 2, a scalar: the mean over standardised features.

    Eq. 2 is the lower bound of log p(s | y), which training maximises. `noise` [N, Z] is one draw
    per feature: L = 1.
    """
    mean, log_variance = model.encode(features, labels)
    decoded = model.decode(reparameterise(mean, log_variance, noise), labels)
    bound = log_likelihood(features, decoded, deviation) - divergence(mean, log_variance)
    return -bound.mean()


def train_cvae(
    model: Cvae,
    features: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    batch_size: int,
    lr: float,
    deviation: float,
    generator: torch.Generator,
) -> float:
    """Train with Adam on the negative of Eq. 2; return its mean over the last epoch.

    `features` are raw and are standardised here; `deviation` is in spreads. Order and noise depend
    on `generator` only. Raises DataError for a single feature.
    """
    model.measure(features)
    standardised = model.standardise(features)
    adam = torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    optimizing = Optimization(adam, torch.amp.GradScaler("cpu", enabled=False))

    def loss_of(s: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(y), model.latent, generator=generator)
        return cvae_loss(model, s, y, noise, deviation)

    return train_epochs(
        standardised,
        labels,
        loss_of,
        optimizing,
        epochs=epochs,
        batch_size=batch_size,
        generator=generator,
        compute=CPU,
    )


@torch.no_grad()
def separation(synthetic: Tensor, classes: Tensor, means: Tensor) -> float:
    """Return the share of synthetic features that are nearest to their own class's mean, 0 to 1.

    `synthetic` [P, S, D] are S features of each of `classes` [P], which number rows of `means`
    [M, D]: the means of all classes that have one. Distances are Euclidean, in the features' own
    scale; a tie goes to the first of the nearest. Ours: the paper always sends what it decodes, but
    a CVAE that has hardly been trained decodes all classes to much the same feature. Raises
    ValueError if there is no feature.
    """
    if not synthetic.numel():
        raise ValueError("a share needs at least one synthetic feature")
    nearest = torch.cdist(synthetic.flatten(0, 1).double(), means.double()).argmin(1)
    own = classes.repeat_interleave(synthetic.shape[1])
    return float((nearest == own).double().mean())


@torch.no_grad()
def synthesise(model: Cvae, labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` synthetic features for each class in `labels` [P], [P, count, D].

    They are the means of the decoder p(s | z, y) for z ~ N(0, I), in the features' own scale.
    """
    rows = labels.repeat_interleave(count)
    latent = torch.randn(len(rows), model.latent, generator=generator)
    features = model.centre + model.spread * model.decode(latent, rows)
    return features.reshape(len(labels), count, -1)


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
