"""Networks that process or generate features: prototypes, heads, projectors and generators.

- FedProto, nearest prototype: Tan et al., FedProto: Federated Prototype Learning across
  Heterogeneous Clients, Eq. 4.
- FedTGP, trainable prototypes: Zhang et al., FedTGP: Trainable Global Prototypes with
  Adaptive-Margin-Enhanced Contrastive Learning for Data and Model Heterogeneity in Federated
  Learning, section "Method", where phi is the Euclidean distance.
- FedMRL, nested representations: Liping Yi et al., Federated Model Heterogeneous Matryoshka
  Representation Learning, NeurIPS 2024, Section 4.
- FedGH, global head: Yi et al., FedGH: Heterogeneous Federated Learning with Generalized Global
  Header.
- Velo, conditional variational autoencoder (CVAE) for features s with latent variables z: Chan and
  Ngai, Exploiting Features and Logits in Heterogeneous Federated Learning, Section 3.2. The CVAE
  was proposed by Sohn et al., Learning Structured Output Representation using Deep Conditional
  Generative Models. Unlike in the paper, Eq. 2 is applied to standardized features, because
  training diverges on large raw features, even with a single client.
- FedGen, feature generator: Zhuangdi Zhu, Junyuan Hong and Jiayu Zhou, Data-Free Knowledge
  Distillation for Heterogeneous Federated Learning, ICML 2021.

Shapes: N samples, C classes, features of width D, latent variables of width Z.
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
from fedhet.learning.training import (
    SGD,
    Adam,
    BatchLoss,
    CrossEntropy,
    Optimization,
    train_epochs,
)

EXACT = "donot_use_mm_for_euclid_dist"
"""Mode of `torch.cdist` that computes distances from differences, which avoids cancellation."""


class TrainingOptions(TypedDict):
    """Options for training a network on the server in one round."""

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
    options: TrainingOptions,
) -> float:
    """Train a network on features x [N, D], and return the mean loss over the last epoch.

    Raises DataError if `x` contains only one feature vector.
    """
    return train_epochs(
        x,
        y,
        loss_of,
        Optimization(
            optimizer(model.parameters(), lr=options["lr"], fused=True),
            torch.amp.GradScaler("cpu", enabled=False),
        ),
        epochs=options["epochs"],
        batch_size=options["batch_size"],
        generator=options["generator"],
        compute=CPU,
    )


class NearestPrototype(nn.Module):
    """Classifier that predicts the class of the nearest prototype (FedProto, Eq. 4)."""

    def __init__(self, extractor: nn.Module, prototypes: Tensor, known: Tensor) -> None:
        """Create a classifier.

        Args:
            extractor: Network that maps samples to features [N, D].
            prototypes: Prototypes on the extractor's device, of shape [C, D].
            known: Mask of the classes that have a prototype, of shape [C].
        """
        super().__init__()
        self.extractor = extractor
        self.prototypes, self.known = prototypes, known

    def forward(self, x: Tensor) -> Tensor:
        """Return the negative squared distances [N, C], or -inf for classes without a prototype."""
        features = self.extractor(x).float()
        distances = torch.cdist(features, self.prototypes, compute_mode=EXACT)
        return (-distances.square()).masked_fill(~self.known, float("-inf"))


class TrainablePrototypes(nn.Module):
    """Trainable prototypes F(v), from one vector v per class and a shared network F.

    F has two linear layers with the prototypes' width and a ReLU in between (FedTGP, Fig. 3).
    """

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.vectors = nn.Embedding(classes, width)
        self.network = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        """Return the prototypes [C, D]."""
        prototypes: Tensor = self.network(self.vectors.weight)
        return prototypes


def adaptive_margin(
    prototypes: Tensor, labels: Tensor, threshold: float, reading: Margin = "largest"
) -> float:
    """Return the margin delta(t) (FedTGP, Eq. 9).

    The center of a class is the mean of the clients' prototypes.

    Args:
        prototypes: Prototypes of the clients, of shape [N, D].
        labels: Classes of the prototypes, of shape [N].
        threshold: Upper bound of the margin.
        reading: "largest" is the largest distance between two centers, as printed. "nearest" is the
            largest distance from a center to its nearest neighbor, as in the authors' code.

    Returns:
        The margin, or 0 if there is only one class.
    """
    centers = torch.stack([prototypes[labels == c].mean(0) for c in sorted(set(labels.tolist()))])
    if len(centers) < 2:
        return 0.0
    if reading == "largest":
        margin = torch.cdist(centers, centers, compute_mode=EXACT).max()
    else:
        margin = nearest_distances(centers).max()
    return min(margin.item(), threshold)


def nearest_distances(centers: Tensor) -> Tensor:
    """Return the distances [C] from C >= 2 vectors [C, D] to their nearest neighbors."""
    distances = torch.cdist(centers, centers, compute_mode=EXACT)
    return distances.fill_diagonal_(torch.inf).amin(1)


def contrastive_loss(prototypes: Tensor, labels: Tensor, trained: Tensor, margin: float) -> Tensor:
    """Return FedTGP's loss (Eq. 10, or Eq. 6 if the margin is 0), as a scalar.

    As in the authors' code, the loss is the mean over the clients' prototypes instead of the sum,
    so a suitable learning rate does not depend on the number of clients.

    Args:
        prototypes: Prototypes of the clients, of shape [N, D].
        labels: Classes of the prototypes, of shape [N].
        trained: Trained prototypes of all classes, of shape [C, D].
        margin: Margin delta(t).
    """
    distances = torch.cdist(prototypes, trained, compute_mode=EXACT)
    margins = F.one_hot(labels, len(trained)).to(distances.dtype) * margin
    return F.cross_entropy(-(distances + margins), labels)


def train_prototypes(
    model: TrainablePrototypes,
    prototypes: Tensor,
    labels: Tensor,
    *,
    margin: float,
    **options: Unpack[TrainingOptions],
) -> float:
    """Train the server's prototypes with SGD on Eq. 10 (FedTGP, Algorithm 1, line 9).

    `prototypes` [N, D] are the clients' prototypes for the classes `labels` [N]. Returns the mean
    loss over the last epoch.
    """

    def loss_of(prototypes: Tensor, labels: Tensor) -> Tensor:
        return contrastive_loss(prototypes, labels, model(), margin)

    return _train(model, prototypes, labels, loss_of, SGD, options)


class Projector(nn.Linear):
    """FedMRL's projector P: fuses features from the shared and the local model."""

    def __init__(self, shared_dim: int, local_dim: int) -> None:
        """Create P for features of width d1 = `shared_dim` and d2 = `local_dim`, where d2 >= d1."""
        super().__init__(shared_dim + local_dim, local_dim)
        self.coarse_dim = shared_dim

    def fuse(self, shared: Tensor, local: Tensor) -> Tensor:
        """Fuse features [N, d1] and [N, d2] into P([shared, local]) [N, d2] (Section 4.1)."""
        fused: Tensor = self(torch.cat([shared, local], dim=1))
        return fused

    def coarse(self, fused: Tensor) -> Tensor:
        """Return the coarse part of fused features, i.e. the first d1 components (Section 4.2)."""
        return fused[:, : self.coarse_dim]


def matryoshka_losses(
    fine: Tensor, coarse: Tensor, labels: Tensor, loss_of: BatchLoss = F.cross_entropy
) -> Tensor:
    """Return the losses [2] of the local and the shared head (FedMRL, Section 4.2).

    Args:
        fine: Logits of the local head on the fused features, of shape [N, C].
        coarse: Logits of the shared head on the coarse part, of shape [N, C].
        labels: Labels, of shape [N], or the targets of another task.
        loss_of: Function that maps outputs and targets to the mean loss of a batch.
    """
    losses = [loss_of(logits.float(), labels) for logits in (fine, coarse)]
    return torch.stack(losses)


def train_head(
    head: nn.Module, representations: Tensor, labels: Tensor, **options: Unpack[TrainingOptions]
) -> float:
    """Train FedGH's head with SGD, and return the mean cross-entropy over the last epoch.

    Args:
        head: Head to train.
        representations: Mean features of each class of each client, of shape [N, D].
        labels: Classes of the representations, of shape [N].
        **options: Training options.
    """
    return _train(head, representations, labels, CrossEntropy(head), SGD, options)


LIMIT = 5.0
"""Maximum distance of standardized features from the center; features farther away are scaled
down."""


class Cvae(nn.Module):
    """Conditional variational autoencoder for standardized features (Velo, Section 3.2).

    The encoder and the decoder have two layers and receive the class as a one-hot input. The
    buffers `center` [D] and `spread`, a scalar, define the standardization.
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

    def fit_scaling(self, features: Tensor) -> None:
        """Set the center and the spread to medians, which tolerate outliers in features [N, D].

        All components share one spread, because a spread per component would clip components that
        are mostly 0.
        """
        self.center.copy_(features.median(0).values)
        distances = _distance(features.double() - self.center)
        positive = distances[distances > 0]
        self.spread.fill_(positive.median() if len(positive) else 1)

    def standardize(self, features: Tensor) -> Tensor:
        """Standardize features [N, D], and limit their distance from the center to LIMIT."""
        scaled = (features.double() - self.center) / self.spread
        return (scaled * (LIMIT / _distance(scaled)).clamp(max=1)).float()

    def encode(self, features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and log variance [N, Z] of q(z | s, y) for standardized features."""
        mean, log_variance = self.encoder(self._join(features, labels)).chunk(2, dim=1)
        return mean, log_variance

    def decode(self, latent: Tensor, labels: Tensor) -> Tensor:
        """Return the mean of p(s | z, y), of shape [N, D], on the standardized scale."""
        decoded: Tensor = self.decoder(self._join(latent, labels))
        return decoded

    def _join(self, values: Tensor, labels: Tensor) -> Tensor:
        return torch.cat([values, F.one_hot(labels, self.classes).to(values.dtype)], dim=1)


def _distance(offsets: Tensor) -> Tensor:
    """Return the root mean square [N, 1] of each row of offsets [N, D]."""
    return offsets.square().mean(1, keepdim=True).sqrt()


def cvae_loss(
    model: Cvae, features: Tensor, labels: Tensor, noise: Tensor, deviation: float
) -> Tensor:
    """Return the loss of Velo's CVAE, i.e. the negative of Eq. 2, averaged over the features s.

    Eq. 2 is the lower bound of log p(s | y), with L = 1 sample of z for each s.

    Args:
        model: The CVAE.
        features: Standardized features, of shape [N, D].
        labels: Classes of the features, of shape [N].
        noise: Samples of N(0, I), of shape [N, Z].
        deviation: Standard deviation of the Gaussian p(s | z, y) (not in the paper).
    """
    mean, log_variance = model.encode(features, labels)
    latent = mean + noise * torch.exp(log_variance / 2)  # This is z = g(s, y, noise).
    decoded = model.decode(latent, labels)
    error = ((features - decoded) / deviation).square().sum(1)
    constant = features.shape[1] * (math.log(deviation) + 0.5 * math.log(2 * math.pi))
    log_likelihood = -0.5 * error - constant
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).sum(1)
    return -(log_likelihood - divergence).mean()


def train_cvae(
    model: Cvae,
    features: Tensor,
    labels: Tensor,
    *,
    deviation: float,
    **options: Unpack[TrainingOptions],
) -> float:
    """Train the CVAE with Adam on Eq. 2, and return the mean loss over the last epoch.

    Args:
        model: The CVAE.
        features: Raw features, of shape [N, D]. This function standardizes them.
        labels: Classes of the features, of shape [N].
        deviation: Standard deviation of p(s | z, y), as a multiple of the spread.
        **options: Training options; the generator also draws the noise.
    """
    model.fit_scaling(features)
    standardized = model.standardize(features)

    def loss_of(s: Tensor, y: Tensor) -> Tensor:
        noise = torch.randn(len(y), model.latent, generator=options["generator"])
        return cvae_loss(model, s, y, noise, deviation)

    return _train(model, standardized, labels, loss_of, Adam, options)


@torch.no_grad()
def separation(synthetic: Tensor, classes: Tensor, means: Tensor) -> float:
    """Return the fraction of synthetic features whose nearest class mean belongs to their class.

    The paper has no such check and always sends decoded features, but an undertrained CVAE decodes
    all classes to similar features.

    Args:
        synthetic: S synthetic features of each class, of shape [P, S, D].
        classes: Row of `means` that belongs to each class, of shape [P].
        means: Means of all classes on the raw scale, of shape [M, D].

    Raises:
        ValueError: If there are no synthetic features.
    """
    if not synthetic.numel():
        raise ValueError("expected at least one synthetic feature, got none")
    nearest = torch.cdist(synthetic.flatten(0, 1).double(), means.double()).argmin(1)
    expected = classes.repeat_interleave(synthetic.shape[1])
    return float((nearest == expected).double().mean())


@torch.no_grad()
def synthesize(model: Cvae, labels: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Generate `count` synthetic features [P, count, D] for each class in `labels` [P].

    The features are means of p(s | z, y) for z ~ N(0, I), on the raw scale.
    """
    rows = labels.repeat_interleave(count)
    latent = torch.randn(len(rows), model.latent, generator=generator)
    features = model.center + model.spread * model.decode(latent, rows)
    return features.reshape(len(labels), count, -1)


class Generator(nn.Module):
    """FedGen's generator G(y, epsilon): maps a class and noise to features.

    As in the authors' code, the generator has one hidden layer with batch norm.
    """

    def __init__(self, classes: int, noise: int, hidden: int, width: int) -> None:
        """Create a generator with noise of width E = `noise` and features of width D = `width`."""
        super().__init__()
        self.classes, self.noise = classes, noise
        self.hidden = nn.Sequential(
            nn.Linear(noise + classes, hidden), nn.BatchNorm1d(hidden), nn.ReLU()
        )
        self.output = nn.Linear(hidden, width)

    def forward(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Generate features [N, D] from classes [N] and noise [N, E]."""
        joined = torch.cat([noise, F.one_hot(labels, self.classes).to(noise.dtype)], dim=1)
        features: Tensor = self.output(self.hidden(joined))
        return features

    def sample(self, labels: Tensor, generator: torch.Generator) -> Tensor:
        """Generate features [N, D] of classes [N] from noise ~ N(0, I).

        The authors' code samples the noise from [0, 1).
        """
        # Sample on the CPU, so that the noise does not depend on the device.
        noise = torch.randn(len(labels), self.noise, generator=generator)
        features: Tensor = self(labels, to_device(noise, labels.device))
        return features


@dataclass(frozen=True)
class Head:
    """Ensemble of linear heads, stored as one averaged head per generated class.

    Attributes:
        weight: Weights, of shape [C, C, D]; the first axis is the generated class.
        bias: Biases, of shape [C, C].
    """

    weight: Tensor
    bias: Tensor

    def logits(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the logits [N, C] of features [N, D] that were generated for classes [N]."""
        products: Tensor = torch.einsum("ncd,nd->nc", self.weight[labels], features)
        return products + self.bias[labels]


def label_weights(counts: Array) -> Array:
    """Return the clients' weights [K, C] for each class, proportional to `counts` [K, C].

    The weights of a class without samples are 0.
    """
    totals = counts.sum(0, keepdims=True)
    weights: Array = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    return weights


def ensemble(weights: Array, heads: list[Array], biases: list[Array]) -> Head:
    """Return FedGen's ensemble, the weighted mean of the clients' logits (Eq. 4).

    The heads are linear, so the mean of their logits equals the logits of the mean head.

    Args:
        weights: Weight of each client for each generated class, of shape [K, C].
        heads: Weights of the clients' heads, of shape [C, D] each.
        biases: Biases of the clients' heads, of shape [C] each.
    """
    weight = np.einsum("ky,kcd->ycd", weights, np.stack(heads).astype(np.float64))
    bias = np.einsum("ky,kc->yc", weights, np.stack(biases).astype(np.float64))
    return Head(*(torch.tensor(array, dtype=torch.float32) for array in (weight, bias)))


def diversity_loss(noise: Tensor, features: Tensor) -> Tensor:
    """Return FedGen's diversity loss, exp(-mean_ij ||e_i - e_j||^2 |z_i - z_j|), as a scalar.

    Here, e [N, E] is the noise and z [N, D] are the features. The loss is small if different noise
    produces different features. As in the authors' code, both distances are means over components.
    """
    noise_distance = torch.cdist(noise, noise).square() / noise.shape[1]
    feature_distance = torch.cdist(features, features, p=1) / features.shape[1]
    return torch.exp(-(noise_distance * feature_distance).mean())


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
    """Train the generator with Adam on Eq. 4 (FedGen) plus the diversity loss.

    Args:
        model: The generator.
        head: Ensemble of the clients' heads, which are not trained.
        prior: Probabilities p(y) of the classes, of shape [C].
        draws: Random generator that samples classes and noise.
        steps: Number of steps.
        batch_size: Number of features in each step.
        lr: Learning rate.
        diversity: Weight of the diversity loss.

    Returns:
        The mean cross-entropy over all steps.
    """
    adam = Adam(model.train().parameters(), lr=lr)
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
    """Return the fraction of generated features that the ensemble classifies correctly."""
    labels = torch.multinomial(prior, 1000, replacement=True, generator=draws)
    features = model.eval().sample(labels, draws)
    return float((head.logits(features, labels).argmax(1) == labels).float().mean())
