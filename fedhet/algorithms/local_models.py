"""Five ways in which a client trains a model that the server averages, with one interface.

FedAvg (McMahan et al. 2017), FedProx (Li et al. 2020, Eq. 2), pFedMe (T. Dinh et al. 2020,
Algorithm 1) and pFedBayes (Zhang et al. 2022, Algorithm 1). The model is a client's own or, in
FedType, its proxy (Section 3.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedhet.algorithms import MIN_SCALE
from fedhet.base.arrays import Array
from fedhet.base.transfer import joined, separated

Weights = Mapping[str, Tensor]

START_SCALE = 0.01
"""Standard deviation of every weight of a new variational proxy."""


def equal_scales(model: nn.Module, scale: float) -> dict[str, Array]:
    """Return standard deviations of all trained weights that are equal to `scale`."""
    trained = model.named_parameters()
    return {name: np.full(tuple(p.shape), scale, np.float32) for name, p in trained}


class LocalModel:
    """FedAvg: a model that is averaged as it is.

    `model` is the client's; `anchor` holds the server's weights by name, as received.
    """

    def __init__(self, model: nn.Module, anchor: Weights) -> None:
        self.model = model
        self.anchor: Weights = {name: anchor[name] for name, _ in model.named_parameters()}

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters to optimize."""
        return list(self.model.parameters())

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits [N, C] of samples x [N, ...] while training."""
        logits: Tensor = self.model(x)
        return logits

    def regularizer(self) -> Tensor | float:
        """Return the term added to the model's loss; a scalar."""
        return 0.0

    def stepped(self) -> None:
        """Called after each optimizer step."""

    def upload(self) -> dict[str, Tensor]:
        """Return the tensors to send to the server, by their names in the state dict."""
        return dict(self.model.state_dict())


class ProximalModel(LocalModel):
    """FedProx: mu / 2 ||w - w_g||^2 keeps the model near the server's."""

    def __init__(self, model: nn.Module, anchor: Weights, mu: float) -> None:
        super().__init__(model, anchor)
        self.mu = mu

    def regularizer(self) -> Tensor:
        """Return the proximal term."""
        return self.mu / 2 * squared_distance(self.model, self.anchor)


class MoreauModel(LocalModel):
    """pFedMe: the model is the personal one of a Moreau envelope around a local copy w.

    It minimizes its loss + lambda / 2 ||p - w||^2; after each step w moves toward it, w <- w -
    rate lambda (w - p). The server averages the copies w, not the personal models.
    """

    def __init__(self, model: nn.Module, anchor: Weights, strength: float, rate: float) -> None:
        super().__init__(model, anchor)
        self.strength, self.rate = strength, rate
        self.local = {name: tensor.clone() for name, tensor in self.anchor.items()}

    def regularizer(self) -> Tensor:
        """Return the term of the Moreau envelope."""
        return self.strength / 2 * squared_distance(self.model, self.local)

    @torch.no_grad()
    def stepped(self) -> None:
        """Move the local copy toward the personal model."""
        named, share = dict(self.model.named_parameters()), min(self.rate * self.strength, 1.0)
        torch._foreach_lerp_([self.local[name] for name in named], list(named.values()), share)

    def upload(self) -> dict[str, Tensor]:
        """Return the local copy, with the model's running statistics."""
        return {**self.model.state_dict(), **self.local}


class VariationalModel(LocalModel):
    """pFedBayes on one level, as FedType's proxies: what is trained is what is averaged (ours).

    Every weight is a Gaussian. The model's own parameters are the means. The loss of a batch uses
    one draw of the weights, plus zeta KL(q || server's q).
    """

    noise = 1.0
    """Factor of the noise in a draw; 1 draws from the distribution."""

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
        """Return the means and the unconstrained scales (before softplus)."""
        return [*self.model.parameters(), *self.raw.values()]

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits for one draw of the weights."""
        named = dict(self.model.named_parameters())
        means = list(named.values())
        drawn = []
        for mean, scale in zip(joined(means), self._scales(), strict=True):
            noise = torch.randn(mean.shape, generator=self._draws, device=mean.device)
            drawn.append(mean + self.noise * scale * noise)
        weights = dict(zip(named, separated(drawn, means), strict=True))
        logits: Tensor = functional_call(self.model, weights, (x,))
        return logits

    def regularizer(self) -> Tensor:
        """Return zeta KL(q || q_g), summed over the weights."""
        named = dict(self.model.named_parameters())
        anchors, scales = (
            [each[name] for name in named] for each in (self.anchor, self.anchor_scale)
        )
        means = joined(list(named.values()))
        return self.zeta * kl_of(means, self._scales(), joined(anchors), joined(scales))

    def scale(self) -> dict[str, Tensor]:
        """Return the standard deviation of every weight."""
        raw = list(self.raw.values())
        found = separated([each.detach() for each in scales_of(raw)], raw)
        return dict(zip(self.raw, found, strict=True))

    def _scales(self) -> list[Tensor]:
        """Return the standard deviations in the model's order, as `joined` returns them."""
        return scales_of([self.raw[name] for name, _ in self.model.named_parameters()])


class LocalizedModel(VariationalModel):
    """pFedBayes (Algorithm 1): a personal q stays with the client, a localized w is averaged.

    q, whose means are the model's own parameters, learns from draws and from zeta KL(q || w). After
    the steps on a batch, w takes one of Adam on zeta KL(q || w). w starts from the server's, q from
    `personal`, its scales as of the client's last round.
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
        self._adam = torch.optim.Adam([*means.values(), *raw.values()], lr)
        self._localize()

    def stepped(self) -> None:
        """Move w toward q."""
        named = dict(self.model.named_parameters())
        own, scales = joined([p.detach() for p in named.values()]), self._scales()
        means = joined([self._means[name] for name in named])
        apart = kl_of(own, [s.detach() for s in scales], means, self._local_scales(named))
        self._adam.zero_grad()
        (self.zeta * apart).backward()  # type: ignore[no-untyped-call]
        self._adam.step()
        self._localize()

    def upload(self) -> dict[str, Tensor]:
        """Return the means of w, with the model's running statistics."""
        return {**self.model.state_dict(), **self.anchor}

    def local_scale(self) -> dict[str, Tensor]:
        """Return the standard deviations of w, by name, in the model's order."""
        named = dict(self.model.named_parameters())
        found = separated(self._local_scales(named), list(named.values()))
        return dict(zip(named, found, strict=True))

    def _local_scales(self, names: Iterable[str]) -> list[Tensor]:
        return scales_of([self._raw[name] for name in names])

    def _localize(self) -> None:
        """Let q be drawn to w as it is now."""
        self.anchor = {name: mean.detach() for name, mean in self._means.items()}
        self.anchor_scale = {name: s.detach() for name, s in self.local_scale().items()}


def squared_distance(model: nn.Module, anchor: Weights) -> Tensor:
    """Return ||p - anchor||^2 over the parameters of `model`."""
    named = dict(model.named_parameters())
    pairs = zip(joined(list(named.values())), joined([anchor[n] for n in named]), strict=True)
    return torch.stack([(p - other).square().sum() for p, other in pairs]).sum()


def scales_of(raw: Sequence[Tensor]) -> list[Tensor]:
    """Return standard deviations from unconstrained values, as `joined` returns them."""
    return [F.softplus(each).clamp_min(MIN_SCALE) for each in joined(raw)]


def kl_of(
    means: Sequence[Tensor],
    scales: Sequence[Tensor],
    other_means: Sequence[Tensor],
    other_scales: Sequence[Tensor],
) -> Tensor:
    """Return the KL divergence of Gaussians from others, summed over all tensors; a scalar."""
    each = zip(means, scales, other_means, other_scales, strict=True)
    return torch.stack([gaussian_kl(*four) for four in each]).sum()


def gaussian_kl(mean: Tensor, scale: Tensor, other_mean: Tensor, other_scale: Tensor) -> Tensor:
    """Return KL(N(mean, scale^2) || N(other_mean, other_scale^2)), summed over the elements."""
    ratio = (scale / other_scale).square()
    shift = ((mean - other_mean) / other_scale).square()
    return 0.5 * (ratio + shift - 1 - ratio.log()).sum()


def inverse_softplus(value: Tensor) -> Tensor:
    """Return r with softplus(r) = value > 0."""
    return value + torch.log(-torch.expm1(-value))
