"""FedType: conformal prediction sets, and the private model's imitation of the proxy.

Wang et al., Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical
Reciprocity Learning (FedType), Section 3.2 and Appendix B; RAPS is from Angelopoulos et al.,
Uncertainty Sets for Image Classifiers using Conformal Prediction.

N samples, n held-out samples, C classes, P of them in the client's label set. Logits and
probabilities are [N, C], sets are bool masks [N, C], labels [N]; all are tensors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedhet.base.transfer import Numbers, to_device

if TYPE_CHECKING:
    from fedhet.methods.fedtype import FedTypeSettings

START_TEMPERATURE = 1.3
TEMPERATURE_STEPS = 10
TEMPERATURE_RATE = 0.01


@dataclass(frozen=True)
class Raps:
    """RAPS' regularization: lambda, the penalty on a rank beyond k_reg, and k_reg itself."""

    penalty: float = 0.5
    k_reg: int = 5


@dataclass(frozen=True)
class Calibration:
    """The result of Eq. 5 on held-out data: a temperature and the threshold tau (both scalars)."""

    temperature: Tensor
    tau: Tensor


def calibrate(
    logits: Tensor, labels: Tensor, u: Tensor, *, theta: float, raps: Raps, corrected: bool = True
) -> Calibration:
    """Return the conformal model of Eq. 5 from held-out logits [n, C], labels [n], u [n].

    Temperature scaling, RAPS scores of the true labels, and their (1 - theta) quantile.
    """
    temperature = fit_temperature(logits, labels)
    probabilities = (logits / temperature).softmax(1)
    scores = raps_scores(probabilities, u, raps.penalty, raps.k_reg)
    own = scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    return Calibration(temperature, conformal_quantile(own, theta, corrected=corrected))


@torch.no_grad()
def fit_temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the temperature T (a scalar) after a few gradient steps on the likelihood.

    Platt scaling as in Appendix F: SGD with rate 0.01, 10 iterations, from 1.3; each over all n
    samples (ours). With p = softmax(z / T), the gradient of the mean negative log-likelihood is
    the mean of (z_y - sum_k p_k z_k) / T^2.
    """
    temperature = logits.new_full((), START_TEMPERATURE)
    own = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    for _ in range(TEMPERATURE_STEPS):
        expected = ((logits / temperature).softmax(1) * logits).sum(1)
        gradient = (own - expected).mean() / temperature.square()
        temperature = temperature - TEMPERATURE_RATE * gradient
    return temperature


def conformal_quantile(scores: Tensor, theta: float, *, corrected: bool = True) -> Tensor:
    """Return tau, a quantile of scores [n].

    If `corrected`, as printed: the ceil((n + 1)(1 - theta)) / n quantile (Appendix B, step 3),
    infinity if that level exceeds 1; with so few samples only the set of all classes is valid. If
    not, the (1 - theta) quantile, the higher of two neighbors: that of RAPS' published code, which
    is always finite and differs for small n alone.
    """
    position = _position(len(scores), theta, corrected=corrected)
    if position > len(scores):
        return scores.new_full((), torch.inf)
    # kthvalue would find it too, but is not deterministic on CUDA.
    return scores.sort().values[position - 1]


def _position(count: int, theta: float, *, corrected: bool) -> int:
    """Return which of `count` scores, from the smallest, from 1, is the quantile.

    Greater than `count` if so few samples give no finite corrected threshold.
    """
    # 1e-9: in floating point, these may slightly exceed the integer that they equal.
    if corrected:
        return max(math.ceil((count + 1) * (1 - theta) - 1e-9), 1)
    return math.ceil((count - 1) * (1 - theta) - 1e-9) + 1


def free_ranks(labels: int) -> int:
    """Return the number of ranks that RAPS leaves unpenalized, for sets of up to `labels` (ours).

    1 for up to 10 labels, 5 from 100 (the paper's and RAPS' number), in proportion between them.
    """
    return round(1 + 4 * min(max(labels - 10, 0) / 90, 1))


def raps_scores(probabilities: Tensor, u: Tensor, penalty: float | Tensor, k_reg: int) -> Tensor:
    """Return pi(y) u + rho(y) + penalty (o(y) - k_reg)^+ for every class y, [N, C] (Eq. 6)."""
    rho, rank = mass_above_and_rank(probabilities)
    excess = (rank - k_reg).clamp_min(0)
    return probabilities * u.unsqueeze(1) + rho + penalty * excess


def mass_above_and_rank(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho [N, C] and o [N, C] of Eq. 6 for probabilities [N, C].

    rho(y) is the total probability of the labels strictly more likely than y; o(y) is the number of
    labels at least as likely as y, so that equally likely labels share the last of their ranks.
    """
    values, order = probabilities.sort(dim=1, descending=True)
    before = running_sums(values).roll(1, dims=1)
    before[:, 0] = 0
    place = torch.arange(values.shape[1], device=values.device).expand_as(values)
    differs = values[:, 1:] != values[:, :-1]
    edge = torch.ones_like(values[:, :1], dtype=torch.bool)
    first = place.where(torch.cat([edge, differs], 1), 0).cummax(1).values
    after = place.where(torch.cat([differs, edge], 1), values.shape[1] - 1)
    last = after.flip(1).cummin(1).values.flip(1)
    rho = torch.empty_like(values).scatter_(1, order, before.gather(1, first))
    rank = torch.empty_like(order).scatter_(1, order, last + 1)
    return rho, rank


def running_sums(values: Tensor) -> Tensor:
    """Return the sums of each row of values [N, C] up to every column, [N, C].

    On CUDA, where `cumsum` is not deterministic, by a product of matrices in float64.
    """
    if values.device.type != "cuda":
        return values.cumsum(1)
    ones = torch.ones(2 * values.shape[1:], dtype=torch.float64, device=values.device)
    return (values.double() @ ones.triu()).to(values.dtype)


@torch.no_grad()
def prediction_sets(
    logits: Tensor, calibration: Calibration, u: Tensor, *, penalty: float | Tensor, k_reg: int
) -> Tensor:
    """Return the sets of Eq. 6, a mask [N, C], for logits [N, C] and u [N].

    `penalty` is g(delta, lambda). An empty set is replaced by the most likely label.
    """
    probabilities = (logits.float() / calibration.temperature).softmax(1)
    scores = raps_scores(probabilities, u, penalty, k_reg)
    sets = scores <= calibration.tau
    top = torch.zeros_like(sets).scatter_(1, probabilities.argmax(1, keepdim=True), True)
    return sets | (top & ~sets.any(1, keepdim=True))


@torch.no_grad()
def top_sets(logits: Tensor, size: int) -> Tensor:
    """Return the `size` most likely labels as a mask [N, C]: the ablation FedType_TopK."""
    size = min(size, logits.shape[1])
    best = logits.topk(size, dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True)


def dynamic_penalty(delta: float, penalty: float, form: str) -> float:
    """Return g(delta, lambda): Eq. 7 (g1) or one of Section 4.2.4's alternatives (g2, g3, g4).

    delta in [-1, 1] is the change of the proxy's accuracy on the calibration data.
    """
    if delta >= 0:
        return penalty
    return {
        "g1": penalty * delta - delta + penalty,
        "g2": penalty,
        "g3": penalty * delta**2 + penalty,
        "g4": -penalty * delta**2 - delta + penalty,
    }[form]


def consensus(proxy_sets: Tensor, private_sets: Tensor) -> Tensor:
    """Return eta [N] of Eq. 8 from the proxy's sets S and the private model's sets L, [N, C].

    |S and L| / |S or L| if S is at least as large as L, else |S and L| / |S|.
    """
    common = (proxy_sets & private_sets).sum(1)
    either = (proxy_sets | private_sets).sum(1)
    own, other = proxy_sets.sum(1), private_sets.sum(1)
    return common / torch.where(own >= other, either, own)


def imitation_loss(logits: Tensor, sets: Tensor, eta: Tensor, *, averaged: bool = True) -> Tensor:
    """Return FedType's backward loss, the mean of Eq. 3 over samples, with a minus sign (ours).

    - eta sum_{k in S} log softmax(logits)_k, for logits [N, P], sets S [N, P] of bool, eta [N]. As
    printed, without the minus, minimizing it would push the confident labels down. If `averaged`
    (ours), the sum is divided by |S|: a large set then has no more weight than a small one, as
    Section 3.2.4 intends.
    """
    inside = (logits.float().log_softmax(1) * sets).sum(1)
    if averaged:
        inside = inside / sets.sum(1)
    return -(eta * inside).mean()


class Imitation:
    """The sets of a round's epochs, and the loss that they give the private model."""

    def __init__(
        self,
        settings: FedTypeSettings,
        labels: Tensor,
        noise: torch.Generator,
        accuracy: float | None,
    ) -> None:
        """Start a round; sets hold some of `labels` [P], columns of the logits, ascending.

        `accuracy` is the proxy's on the held-out samples as last measured; None: never.
        """
        self.settings, self.labels, self.accuracy = settings, labels, accuracy
        given = settings.k_reg
        self.raps = Raps(
            settings.lambda_, free_ranks(len(labels)) if isinstance(given, str) else given
        )
        self.penalty = self.raps.penalty
        """g of Eq. 7, the penalty in the proxy's sets, and in both models' if `shrinks` is both."""
        self.calibrations: tuple[Calibration, ...] = ()
        """The conformal models of the proxy and of the private model (Eq. 5)."""
        self._of_both: tuple[Tensor, ...] = ()
        """Temperatures, thresholds and penalties: the private model's and the proxy's, [2] each."""
        self._factors_drawn = Numbers(
            lambda count: torch.rand(count, generator=noise), labels.device
        )
        self._sums = torch.zeros(3, device=labels.device)
        """Of eta, and of the sizes of the proxy's and of the private model's sets."""
        self._count = 0

    def calibrate(self, proxy: Tensor, private: Tensor, y: Tensor) -> None:
        """Fit both conformal models (Eq. 5), and how much the sets must shrink (Eq. 7).

        Both models' logits [n, C] on the held-out samples, whose classes are `y` [n].
        """
        own, raps, places = self.settings, self.raps, torch.searchsorted(self.labels, y)
        for_proxy, for_private = self.calibrations = tuple(
            calibrate(
                logits[:, self.labels],
                places,
                self._factors(len(y)),
                theta=own.theta,
                raps=raps,
                corrected=own.quantile == "corrected",
            )
            for logits in (proxy, private)
        )
        accuracy = (proxy.argmax(1) == y).float().mean().item()
        change = 0.0 if self.accuracy is None else accuracy - self.accuracy
        self.penalty = dynamic_penalty(change, raps.penalty, own.g)
        self.accuracy = accuracy
        of_private = self.penalty if own.shrinks == "both" else raps.penalty
        penalties = torch.tensor([of_private, self.penalty])
        self._of_both = (
            torch.stack([for_private.temperature, for_proxy.temperature]),
            torch.stack([for_private.tau, for_proxy.tau]),
            to_device(penalties, self.labels.device),
        )

    def is_silent(self, held_out: int) -> bool:
        """Return whether so few held-out samples make all sets whole, which skips imitation.

        Without any, as with a client of two samples, which trains on both, there is no threshold.
        """
        own = self.settings
        if own.backward == "topk":
            return False
        if not held_out:
            return True
        skips = own.quantile == "corrected" and own.infinite == "skip"
        return skips and _position(held_out, own.theta, corrected=True) > held_out

    def loss(self, private: Tensor, proxy: Tensor, views: tuple[Tensor, Tensor]) -> Tensor:
        """Return Eq. 3 for a batch, a scalar; its gradient flows into the logits `private` alone.

        Logits are [N, C]; `views` are those of the private model and of the proxy that the sets are
        made from.
        """
        own, other = self.sets(*(view.detach().float()[:, self.labels] for view in views))
        eta = consensus(other, own)
        if self.settings.eta == "one":
            eta = torch.ones_like(eta)
        self._sums += torch.stack([value.sum().float() for value in (eta, other, own)])
        self._count += len(eta)
        return imitation_loss(
            private[:, self.labels], other, eta, averaged=self.settings.set_loss == "mean"
        )

    def sets(self, private: Tensor, proxy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sets L of the private model and S of the proxy (Eq. 6), masks [N, P].

        Both from logits [N, P] of the labels alone.
        """
        if not self.calibrations:
            return top_sets(private, self.settings.top_k), top_sets(proxy, self.settings.top_k)
        count, u = len(proxy), self._factors(len(proxy))
        temperature, tau, penalty = (
            each.repeat_interleave(count).unsqueeze(1) for each in self._of_both
        )
        sets = prediction_sets(  # of both at once
            torch.cat([private, proxy]),
            Calibration(temperature, tau),
            u.repeat(2),
            penalty=penalty,
            k_reg=self.raps.k_reg,
        )
        return sets[:count], sets[count:]

    def metrics(self) -> dict[str, float]:
        """Return the round's mean eta and set sizes, and the proxy's last threshold if finite."""
        if (count := self._count) == 0:
            return {}
        eta, proxy, private = self._sums.tolist()
        found = {"eta": eta / count, "proxy_set": proxy / count, "private_set": private / count}
        tau = self.calibrations[0].tau.item() if self.calibrations else torch.inf
        return found if tau == torch.inf else {**found, "tau": tau}

    def _factors(self, count: int) -> Tensor:
        """Return u of Eq. 6, [count]."""
        if isinstance(given := self.settings.u, str):
            return self._factors_drawn.take(count)
        return torch.full((count,), given, device=self.labels.device)
