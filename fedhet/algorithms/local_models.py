"""Local training for models that the server averages: FedAvg and related methods.

- FedAvg: McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data,
  AISTATS 2017.
- FedProx: Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020, Eq. 2.
- FedRep: Collins et al., Exploiting Shared Representations for Personalized Federated Learning,
  ICML 2021, Algorithm 1.
- SCAFFOLD: Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
  ICML 2020, Algorithm 1.
- MOON: Li et al., Model-Contrastive Federated Learning, CVPR 2021, Eqs. 3 to 5.
- pFedMe: T. Dinh et al., Personalized Federated Learning with Moreau Envelopes, NeurIPS 2020,
  Algorithm 1.
- pFedBayes: Zhang et al., Personalized Federated Learning via Variational Bayesian Inference, ICML
  2022, Algorithm 1.

The trained model is the client's private model or, in FedType, its proxy (FedType, Section 3.3).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedhet.algorithms import MIN_SCALE
from fedhet.base.arrays import Array
from fedhet.base.transfer import joined, separated
from fedhet.learning.training import Adam

Weights = Mapping[str, Tensor]

START_SCALE = 0.01
"""Initial standard deviation of every weight of a variational proxy."""


def equal_scales(model: nn.Module, scale: float) -> dict[str, Array]:
    """Return standard deviations for all parameters, each equal to `scale`."""
    trained = model.named_parameters()
    return {name: np.full(tuple(p.shape), scale, np.float32) for name, p in trained}


class LocalModel:
    """Model and training loss for FedAvg, and base class for other methods.

    Attributes:
        model: The model to train.
        anchor: Weights received from the server, by name.
    """

    def __init__(self, model: nn.Module, anchor: Weights) -> None:
        self.model = model
        self.anchor: Weights = {name: anchor[name] for name, _ in model.named_parameters()}

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimize."""
        return list(self.model.parameters())

    def logits(self, x: Tensor) -> Tensor:
        """Return the training-mode logits [N, C] for samples x [N, ...]."""
        logits: Tensor = self.model(x)
        return logits

    def logits_and_term(self, x: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the logits [N, C], and a term of the loss that depends on the samples.

        The term is a scalar: the mean over the samples.
        """
        return self.logits(x), 0.0

    def regularizer(self) -> Tensor | float:
        """Return the term of the loss that depends only on the weights, as a scalar."""
        return 0.0

    def stepped(self) -> None:
        """Update the local state after the optimizer's steps on a batch."""

    def upload(self) -> dict[str, Tensor]:
        """Return the tensors to send to the server, by name in the state dict."""
        return dict(self.model.state_dict())


class ProximalModel(LocalModel):
    """Model and training loss for FedProx.

    The proximal term is mu / 2 ||w - w_g||^2, where w_g are the server's weights.
    """

    def __init__(self, model: nn.Module, anchor: Weights, mu: float) -> None:
        super().__init__(model, anchor)
        self.mu = mu

    def regularizer(self) -> Tensor:
        """Return the proximal term."""
        return self.mu / 2 * squared_distance(self.model, self.anchor)


class PartModel(LocalModel):
    """Model of which only the parameters in `trained` learn, for the phases of FedRep."""

    def __init__(self, model: nn.Module, anchor: Weights, trained: Collection[str]) -> None:
        super().__init__(model, anchor)
        self.trained = trained

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimize."""
        return [p for name, p in self.model.named_parameters() if name in self.trained]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Compute no gradients of the other parameters within the block."""
        learning = {id(p) for p in self.parameters()}
        others = [p for p in self.model.parameters() if p.requires_grad and id(p) not in learning]
        for parameter in others:
            parameter.requires_grad = False
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad = True


class ControlledModel(LocalModel):
    """Model and training loss for SCAFFOLD: each step is corrected by control variates.

    Requires SGD without momentum and without gradient clipping (see `new_control`).
    """

    def __init__(
        self, model: nn.Module, anchor: Weights, control: Weights, server: Weights, lr: float
    ) -> None:
        """Create the model.

        Args:
            model: Model y, with the server's weights x.
            anchor: The server's weights x.
            control: The client's control variate c_i.
            server: The server's control variate c.
            lr: Learning rate of all steps.
        """
        super().__init__(model, anchor)
        self._correction = {name: server[name] - control[name] for name in self.anchor}
        self._lr, self._num_steps = lr, 0

    def regularizer(self) -> Tensor:
        """Return 0, as a scalar whose gradient is the correction c - c_i (line 10)."""
        named = dict(self.model.named_parameters())
        pairs = zip(
            joined(list(named.values())), joined([self._correction[n] for n in named]), strict=True
        )
        product = torch.stack([(p * correction).sum() for p, correction in pairs]).sum()
        return product - product.detach()

    def stepped(self) -> None:
        """Count the steps."""
        self._num_steps += 1

    @torch.no_grad()
    def new_control(self) -> dict[str, Tensor]:
        """Return the client's new control variate, c_i - c + (x - y) / (K lr) (line 12, option II).

        This is the mean gradient over the K steps.
        """
        scale = 1 / (self._num_steps * self._lr)
        return {
            name: (self.anchor[name] - y) * scale - self._correction[name]
            for name, y in self.model.named_parameters()
        }


class ContrastiveModel(LocalModel):
    """Model and training loss for MOON.

    The contrastive term pulls a sample's features toward the features of the received model, and
    pushes them away from the features of the client's previous model. Both models are constant.
    """

    def __init__(
        self, model: nn.Module, anchor: Weights, previous: nn.Module, mu: float, temperature: float
    ) -> None:
        super().__init__(model, anchor)
        self.mu, self.temperature = mu, temperature
        self._references = [
            each.requires_grad_(requires_grad=False).eval().get_submodule("extractor")
            for each in (copy.deepcopy(model), previous)
        ]

    def logits_and_term(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, C] and mu times the contrastive loss (Eq. 4)."""
        features = self.model.get_submodule("extractor")(x)
        logits = self.model.get_submodule("classifier")(features)
        with torch.no_grad():
            received, previous = (extractor(x) for extractor in self._references)
        return logits, self.mu * contrastive_loss(features, received, previous, self.temperature)


class MoreauModel(LocalModel):
    """Personal model p and local copy w of the server's model, for pFedMe.

    The personal model minimizes its loss plus lambda / 2 ||p - w||^2. After the steps on a batch,
    the local copy moves toward the personal model, w <- w - rate lambda (w - p). The server
    averages the copies w.
    """

    def __init__(self, model: nn.Module, anchor: Weights, strength: float, rate: float) -> None:
        super().__init__(model, anchor)
        self.strength, self.rate = strength, rate
        self.local = {name: tensor.clone() for name, tensor in self.anchor.items()}

    def regularizer(self) -> Tensor:
        """Return the term lambda / 2 ||p - w||^2."""
        return self.strength / 2 * squared_distance(self.model, self.local)

    @torch.no_grad()
    def stepped(self) -> None:
        """Move the local copy toward the personal model."""
        named, weight = dict(self.model.named_parameters()), min(self.rate * self.strength, 1.0)
        torch._foreach_lerp_([self.local[name] for name in named], list(named.values()), weight)

    def upload(self) -> dict[str, Tensor]:
        """Return the local copy and the model's running statistics."""
        return {**self.model.state_dict(), **self.local}


class VariationalModel(LocalModel):
    """Variational proxy for FedType: the server averages a Gaussian distribution q over weights.

    Unlike in pFedBayes, there is no separate localized distribution. The parameters of the model
    are the means of q. The loss of a batch is the loss of sampled weights plus zeta KL(q || q_g),
    where q_g is the server's distribution.
    """

    noise = 1.0
    """Factor for the noise that is added to the means. With a factor of 1, weights follow q."""

    def __init__(
        self, model: nn.Module, anchor: Weights, scale: Weights, zeta: float, seed: int
    ) -> None:
        super().__init__(model, anchor)
        self.zeta = zeta
        self.anchor_scale = dict(scale)
        self.raw = {name: nn.Parameter(inverse_softplus(value)) for name, value in scale.items()}
        device = next(model.parameters()).device
        self._draws = torch.Generator(device).manual_seed(seed)

    def parameters(self) -> list[nn.Parameter]:
        """Return the means, and the unconstrained scales to which softplus is applied."""
        return [*self.model.parameters(), *self.raw.values()]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [N, C] for one sample of the weights."""
        named = dict(self.model.named_parameters())
        means = list(named.values())
        sampled = []
        for mean, scale in zip(joined(means), self._scales(), strict=True):
            noise = torch.randn(mean.shape, generator=self._draws, device=mean.device)
            sampled.append(mean + self.noise * scale * noise)
        weights = dict(zip(named, separated(sampled, means), strict=True))
        logits: Tensor = functional_call(self.model, weights, (x,))
        return logits

    def regularizer(self) -> Tensor:
        """Return zeta KL(q || q_g), as a scalar."""
        named = dict(self.model.named_parameters())
        anchors, scales = (
            [tensors[name] for name in named] for tensors in (self.anchor, self.anchor_scale)
        )
        means = joined(list(named.values()))
        return self.zeta * total_gaussian_kl(means, self._scales(), joined(anchors), joined(scales))

    def scale(self) -> dict[str, Tensor]:
        """Return the standard deviations of q, by name."""
        raw = list(self.raw.values())
        scales = separated([scale.detach() for scale in scales_of(raw)], raw)
        return dict(zip(self.raw, scales, strict=True))

    def _scales(self) -> list[Tensor]:
        """Return the standard deviations of q in the model's order, concatenated by `joined`."""
        return scales_of([self.raw[name] for name, _ in self.model.named_parameters()])


class LocalizedModel(VariationalModel):
    """Personal distribution q and localized distribution w, for pFedBayes (Algorithm 1).

    The parameters of the model are the means of q. The loss is the loss of sampled weights plus
    zeta KL(q || w). After the steps on a batch, w takes one Adam step on zeta KL(q || w). Only w is
    averaged. w starts from the server's distribution. The scales of q start from `personal`, i.e.
    from their values after the client's previous round.
    """

    def __init__(
        self,
        model: nn.Module,
        server: Weights,
        scale: Weights,
        zeta: float,
        seed: int,
        *,
        personal: Weights,
        lr: float,
        noise: float,
    ) -> None:
        super().__init__(model, server, personal, zeta, seed)
        self.noise = noise
        means = {name: nn.Parameter(value.clone()) for name, value in self.anchor.items()}
        raw = {name: nn.Parameter(inverse_softplus(value)) for name, value in scale.items()}
        self._means, self._raw = means, raw
        self._adam = Adam([*means.values(), *raw.values()], lr)
        self._localize()

    def stepped(self) -> None:
        """Move w toward q."""
        named = dict(self.model.named_parameters())
        means, scales = joined([p.detach() for p in named.values()]), self._scales()
        divergence = total_gaussian_kl(
            means,
            [scale.detach() for scale in scales],
            joined([self._means[name] for name in named]),
            self._local_scales(named),
        )
        self._adam.zero_grad()
        (self.zeta * divergence).backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self._localize()

    def upload(self) -> dict[str, Tensor]:
        """Return the means of w and the model's running statistics."""
        return {**self.model.state_dict(), **self.anchor}

    def local_scale(self) -> dict[str, Tensor]:
        """Return the standard deviations of w by name, in the model's order."""
        named = dict(self.model.named_parameters())
        scales = separated(self._local_scales(named), list(named.values()))
        return dict(zip(named, scales, strict=True))

    def _local_scales(self, names: Iterable[str]) -> list[Tensor]:
        return scales_of([self._raw[name] for name in names])

    def _localize(self) -> None:
        """Use the current w as the anchor of q."""
        self.anchor = {name: mean.detach() for name, mean in self._means.items()}
        self.anchor_scale = {name: s.detach() for name, s in self.local_scale().items()}


def contrastive_loss(z: Tensor, positive: Tensor, negative: Tensor, temperature: float) -> Tensor:
    """Return MOON's contrastive loss (Eq. 3), the mean over features z [N, D], as a scalar.

    The loss of a sample is -log(p / (p + n)), where p = exp(cos(z, positive) / temperature), and
    n = exp(cos(z, negative) / temperature).
    """
    near, far = (F.cosine_similarity(z.float(), o.float()) for o in (positive, negative))
    return F.softplus((far - near) / temperature).mean()


def squared_distance(model: nn.Module, anchor: Weights) -> Tensor:
    """Return ||p - anchor||^2, summed over the parameters p of a model, as a scalar."""
    named = dict(model.named_parameters())
    pairs = zip(joined(list(named.values())), joined([anchor[n] for n in named]), strict=True)
    return torch.stack([(p - other).square().sum() for p, other in pairs]).sum()


def scales_of(raw: Sequence[Tensor]) -> list[Tensor]:
    """Convert unconstrained values to standard deviations, concatenated by `joined`."""
    return [F.softplus(values).clamp_min(MIN_SCALE) for values in joined(raw)]


def total_gaussian_kl(
    means: Sequence[Tensor],
    scales: Sequence[Tensor],
    other_means: Sequence[Tensor],
    other_scales: Sequence[Tensor],
) -> Tensor:
    """Return KL(N(means, scales^2) || N(other_means, other_scales^2)), summed over all tensors."""
    tensors = zip(means, scales, other_means, other_scales, strict=True)
    return torch.stack([gaussian_kl(*quadruple) for quadruple in tensors]).sum()


def gaussian_kl(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    """Return KL(N(mean, scale^2) || N(other_mean, other_scale^2)), summed over all elements."""
    ratio = (scale / other_scale).square()
    shift = ((mean - other_mean) / other_scale).square()
    return 0.5 * (ratio + shift - 1 - ratio.log()).sum()


def inverse_softplus(value: Tensor) -> Tensor:
    """Return the inverse of softplus for positive values."""
    return value + torch.log(-torch.expm1(-value))
