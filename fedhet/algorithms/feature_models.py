"""Networks on the features of other networks: prototypes, heads and generators.

Features are [N, D], their classes [N], the vectors of all classes [C, D].

- FedProto: the nearest prototype. Tan et al., FedProto: Federated Prototype Learning across
  Heterogeneous Clients, Eq. 4.
- FedTGP: prototypes that the server trains. Zhang et al., FedTGP: Trainable Global Prototypes with
  Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
  Learning, "Method". phi is the Euclidean distance.
- FedMRL: representations nested like Matryoshka dolls. Liping Yi et al., Federated Model
  Heterogeneous Matryoshka Representation Learning, NeurIPS 2024, Section 4.
- FedGH: a head for all extractors, trained on the server on class means of their features. Yi et
  al., FedGH: Heterogeneous Federated Learning with Generalized Global Header.
- Velo: a conditional variational auto-encoder (Sohn et al., Learning Structured Output
  Representation using Deep Conditional Generative Models) of features s, with latent variables z
  [N, Z]. Chan and Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section
  3.2. Ours: Eq. 2 is used as printed, but on standardized features. The paper does not mention
  their scale; with raw features, large ones, even of a single client, make the training diverge.
- FedGen: a generator. Zhuangdi Zhu, Junyuan Hong and Jiayu Zhou, Data-Free Knowledge Distillation
  for Heterogeneous Federated Learning, ICML 2021; "FedGen's Eq. 4" below is this paper's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypedDict, Unpack

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedhet.algorithms import Margin
from fedhet.base.arrays import Array
from fedhet.base.transfer import to_device
from fedhet.learning.devices import CPU
from fedhet.learning.training import BatchLoss, CrossEntropy, Optimization, train_epochs

EXACT = "donot_use_mm_for_euclid_dist"
"""How distances are computed: from differences, which lose no digits to cancellation."""


class Course(TypedDict):
    """How a network is trained in a round."""

    epochs: int
    batch_size: int
    lr: float
    generator: torch.Generator


def _train(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    loss_of: BatchLoss,
    optimizer: Callable[..., torch.optim.Optimizer],
    course: Course,
) -> float:
    """Train on features x [N, D]; return the mean loss of the last epoch.

    Raises DataError for a single feature.
    """
    return train_epochs(
        x,
        y,
        loss_of,
        Optimization(
            optimizer(model.parameters(), lr=course["lr"], fused=True),
            torch.amp.GradScaler("cpu", enabled=False),
        ),
        epochs=course["epochs"],
        batch_size=course["batch_size"],
        generator=course["generator"],
        compute=CPU,
    )


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

    It is a distance between the centers of two classes, each the plain mean of the clients'
    prototypes: the `largest` of any two, as printed, or as in the authors' code the largest of the
    distances from a class to its `nearest`.
    """
    centers = torch.stack([prototypes[labels == c].mean(0) for c in sorted(set(labels.tolist()))])
    if len(centers) < 2:
        return 0.0
    largest = torch.cdist(centers, centers, compute_mode=EXACT).max()
    found = largest if reading == "largest" else nearest_distances(centers).max()
    return min(found.item(), threshold)


def nearest_distances(centers: Tensor) -> Tensor:
    """Return the distance of each of C >= 2 vectors [C, D] to the nearest other, [C]."""
    distances = torch.cdist(centers, centers, compute_mode=EXACT)
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
    **course: Unpack[Course],
) -> float:
    """Train with SGD on Eq. 10; return its mean over the last epoch (line 9 of Algorithm 1)."""

    def loss_of(own: Tensor, classes: Tensor) -> Tensor:
        return contrastive_loss(own, classes, model(), margin)

    return _train(model, prototypes, labels, loss_of, torch.optim.SGD, course)


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
    head: nn.Module, representations: Tensor, labels: Tensor, **course: Unpack[Course]
) -> float:
    """Train with SGD on the cross-entropy of `head`; return its mean over the last epoch.

    `representations` [N, D] are the clients' local averaged representations, one of each client
    and class, and `labels` [N] their classes.
    """
    return _train(head, representations, labels, CrossEntropy(head), torch.optim.SGD, course)


LIMIT = 5.0
"""Maximum distance from the center, in spreads: features further away are scaled back to it."""


class Cvae(nn.Module):
    """A two-layer encoder and a two-layer decoder; both get the class as one-hot input.

    Both work on standardized features; `center` [D] and `spread`, a scalar, define the scaling.
    """

    center: Tensor
    spread: Tensor

    def __init__(self, width: int, classes: int, latent: int, hidden: int) -> None:
        super().__init__()
        self.classes, self.latent = classes, latent
        self.encoder, self.decoder = (
            nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs))
            for inputs, outputs in ((width + classes, 2 * latent), (latent + classes, width))
        )
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("spread", torch.ones(()))

    def measure(self, features: Tensor) -> None:
        """Set center and spread from features [N, D]: medians, which are robust to outliers.

        One spread for all components: one per component would cut off those that are mostly 0.
        """
        self.center.copy_(features.median(0).values)
        distances = _distance(features.double() - self.center)
        apart = distances[distances > 0]
        self.spread.fill_(apart.median() if len(apart) else 1)

    def standardize(self, features: Tensor) -> Tensor:
        """Return features [N, D] in spreads from the center, with a distance of at most LIMIT."""
        scaled = (features.double() - self.center) / self.spread
        return (scaled * (LIMIT / _distance(scaled)).clamp(max=1)).float()

    def encode(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and log variance, both [N, Z], of q(z | s, y); s is standardized."""
        mean, log_variance = self.encoder(self._join(features, labels)).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, latent: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of p(s | z, y), [N, D]; s is standardized."""
        decoded: Tensor = self.decoder(self._join(latent, labels))
        return decoded

    def _join(self, values: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([values, F.one_hot(labels, self.classes).to(values.dtype)], dim=1)


def _distance(offsets: Tensor) -> Tensor:
    """Return the root mean square of each row of [N, D], [N, 1]."""
    return offsets.square().mean(1, keepdim=True).sqrt()


def cvae_loss(
    model: Cvae, features: Tensor, labels: Tensor, noise: Tensor, deviation: float
) -> Tensor:
    """Return the negative of Eq. 2, a scalar: the mean over standardized features.

    Eq. 2 is the lower bound of log p(s | y), which training maximizes. `noise` [N, Z] ~ N(0, I) is
    one draw per feature: L = 1. p(s | z, y) is a Gaussian of standard deviation `deviation` (ours).
    """
    mean, log_variance = model.encode(features, labels)
    latent = mean + noise * torch.exp(log_variance / 2)  # z = g(s, y, noise)
    decoded = model.decode(latent, labels)
    error = ((features - decoded) / deviation).square().sum(1)
    constant = features.shape[1] * (math.log(deviation) + 0.5 * math.log(2 * math.pi))
    log_likelihood = -0.5 * error - constant
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return -(log_likelihood - divergence).mean()


def train_cvae(
    model: Cvae, features: Tensor, labels: Tensor, *, deviation: float, **course: Unpack[Course]
) -> float:
    """Train with Adam on the negative of Eq. 2; return its mean over the last epoch.

    `features` are raw and are standardized here; `deviation` is in spreads. Order and noise depend
    on the generator only.
    """
    model.measure(features)
    standardized = model.standardize(features)

    def loss_of(s: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(y), model.latent, generator=course["generator"])
        return cvae_loss(model, s, y, noise, deviation)

    return _train(model, standardized, labels, loss_of, torch.optim.Adam, course)


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
def synthesize(model: Cvae, labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return `count` synthetic features for each class in `labels` [P], [P, count, D].

    They are the means of the decoder p(s | z, y) for z ~ N(0, I), in the features' own scale.
    """
    rows = labels.repeat_interleave(count)
    latent = torch.randn(len(rows), model.latent, generator=generator)
    features = model.center + model.spread * model.decode(latent, rows)
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


def train_generator(
    model: Generator,
    head: Head,
    prior: Tensor,
    draws: torch.Generator,
    *,
    steps: int,
    batch_size: int,
    lr: float,
    diversity: float,
) -> float:
    """Train with Adam on Eq. 4 plus the diversity loss; return the mean cross-entropy.

    Classes are drawn from `prior` [C], p(y), and noise from N(0, I), both by `draws` alone. The
    heads are fixed. `diversity` is the weight of the diversity loss, eta.
    """
    adam = torch.optim.Adam(model.train().parameters(), lr=lr)
    total = 0.0
    for _ in range(steps):
        labels = torch.multinomial(prior, batch_size, replacement=True, generator=draws)
        noise = torch.randn(len(labels), model.noise, generator=draws)
        features = model(labels, noise)
        loss = F.cross_entropy(head.logits(features, labels), labels)
        adam.zero_grad(set_to_none=True)
        (loss + diversity * diversity_loss(noise, features)).backward()  # type: ignore[no-untyped-call]
        adam.step()
        total += loss.item()
    return total / steps


@torch.no_grad()
def agreement(model: Generator, head: Head, prior: Tensor, draws: torch.Generator) -> float:
    """Return the share of generated features that the ensemble takes for their class, 0 to 1."""
    labels = torch.multinomial(prior, 1000, replacement=True, generator=draws)
    features = model.eval().drawn(labels, draws)
    return float((head.logits(features, labels).argmax(1) == labels).float().mean())
