"""FedType: conformal prediction sets, and the loss for imitating the proxy's sets.

Wang et al., Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical
Reciprocity Learning (FedType), Section 3.2 and Appendix B. RAPS: Angelopoulos et al., Uncertainty
Sets for Image Classifiers using Conformal Prediction.

Shapes: N samples, n held-out samples, C classes, P classes in the client's label set. Logits,
probabilities and sets have the shape [N, C], and labels have the shape [N]. Sets are Boolean masks.
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
    """Regularization in RAPS: the penalty lambda on ranks beyond `k_reg`."""

    penalty: float = 0.5
    k_reg: int = 5


@dataclass(frozen=True)
class Calibration:
    """Conformal model from Eq. 5, i.e. the temperature and the threshold tau, both scalars."""

    temperature: Tensor
    tau: Tensor


def calibrate(
    logits: Tensor, labels: Tensor, u: Tensor, *, theta: float, raps: Raps, corrected: bool = True
) -> Calibration:
    """Fit the conformal model (Eq. 5) to held-out data.

    Fits the temperature, computes the RAPS scores of the true labels, and takes their (1 - theta)
    quantile.

    Args:
        logits: Logits of the held-out samples, of shape [n, C].
        labels: True labels, of shape [n].
        u: Random factors of Eq. 6, of shape [n].
        theta: Fraction of sets that may miss the true label.
        raps: Regularization of the scores.
        corrected: Whether to correct the quantile for the number of samples.
    """
    temperature = fit_temperature(logits, labels)
    probabilities = (logits / temperature).softmax(1)
    scores = raps_scores(probabilities, u, raps.penalty, raps.k_reg)
    true_scores = scores.gather(1, labels.unsqueeze(1)).squeeze(1)
    return Calibration(temperature, conformal_quantile(true_scores, theta, corrected=corrected))


@torch.no_grad()
def fit_temperature(logits: Tensor, labels: Tensor) -> Tensor:
    """Fit the temperature T, a scalar, with gradient steps on the likelihood.

    This is Platt scaling as in Appendix F, with 10 iterations of SGD at a learning rate of 0.01. As
    in the code of RAPS, it starts from T = 1.3. Unlike in the paper, every iteration uses all n
    samples. With p = softmax(z / T), the gradient of the mean negative log-likelihood is the mean
    of (z_y - sum_k p_k z_k) / T^2.
    """
    temperature = logits.new_full((), START_TEMPERATURE)
    true_logits = logits.gather(1, labels.unsqueeze(1)).squeeze(1)
    for _ in range(TEMPERATURE_STEPS):
        expected = ((logits / temperature).softmax(1) * logits).sum(1)
        gradient = (true_logits - expected).mean() / temperature.square()
        temperature = temperature - TEMPERATURE_RATE * gradient
    return temperature


def conformal_quantile(scores: Tensor, theta: float, *, corrected: bool = True) -> Tensor:
    """Return the threshold tau, a quantile of scores [n].

    If `corrected` is set, tau is the ceil((n + 1)(1 - theta)) / n quantile, as printed (Appendix B,
    step 3). tau is infinite if this level exceeds 1, because then only the set of all classes is
    valid. If `corrected` is not set, tau is the (1 - theta) quantile, rounded up to the higher of
    two neighbors, as in the published code of RAPS. This quantile is always finite, and
    differs noticeably from the corrected quantile only for small n.
    """
    rank = _quantile_rank(len(scores), theta, corrected=corrected)
    if rank > len(scores):
        return scores.new_full((), torch.inf)
    # Sort instead of using kthvalue, which is not deterministic on CUDA.
    return scores.sort().values[rank - 1]


def _quantile_rank(count: int, theta: float, *, corrected: bool) -> int:
    """Return the rank of the quantile among `count` ascending scores, starting at 1.

    The rank exceeds `count` if there are too few samples for a finite corrected threshold.
    """
    # Subtract 1e-9, because rounding errors may lift a product slightly above an integer.
    if corrected:
        return max(math.ceil((count + 1) * (1 - theta) - 1e-9), 1)
    return math.ceil((count - 1) * (1 - theta) - 1e-9) + 1


def unpenalized_ranks(labels: int) -> int:
    """Return the default value of k_reg for the given number of labels.

    The default is 1 for up to 10 labels, 5 for 100 or more labels, and interpolated in between. The
    papers of FedType and RAPS state only the value 5.
    """
    return round(1 + 4 * min(max(labels - 10, 0) / 90, 1))


def raps_scores(probabilities: Tensor, u: Tensor, penalty: float | Tensor, k_reg: int) -> Tensor:
    """Return the RAPS scores [N, C] of all classes (Eq. 6).

    The score of class y is pi(y) u + rho(y) + penalty (o(y) - k_reg)^+.
    """
    rho, rank = mass_above_and_rank(probabilities)
    excess = (rank - k_reg).clamp_min(0)
    return probabilities * u.unsqueeze(1) + rho + penalty * excess


def mass_above_and_rank(probabilities: Tensor) -> tuple[Tensor, Tensor]:
    """Return rho [N, C] and o [N, C] of Eq. 6 for probabilities [N, C].

    rho(y) is the total probability of labels that are more likely than y. The rank o(y) is the
    number of labels that are at least as likely as y.
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
    """Return the cumulative sums of each row of values [N, C].

    Uses a matrix product in float64 on CUDA, where `cumsum` is not deterministic.
    """
    if values.device.type != "cuda":
        return values.cumsum(1)
    ones = torch.ones(2 * values.shape[1:], dtype=torch.float64, device=values.device)
    return (values.double() @ ones.triu()).to(values.dtype)


@torch.no_grad()
def prediction_sets(
    logits: Tensor, calibration: Calibration, u: Tensor, *, penalty: float | Tensor, k_reg: int
) -> Tensor:
    """Return the prediction sets (Eq. 6) as a mask [N, C].

    An empty set is replaced with a set that contains the most likely label.

    Args:
        logits: Logits, of shape [N, C].
        calibration: Temperature and threshold, as scalars or tensors of shape [N, 1].
        u: Random factors, of shape [N].
        penalty: Penalty g(delta, lambda), as a number or a tensor of shape [N, 1].
        k_reg: Number of ranks without penalty.
    """
    probabilities = (logits.float() / calibration.temperature).softmax(1)
    scores = raps_scores(probabilities, u, penalty, k_reg)
    sets = scores <= calibration.tau
    top = torch.zeros_like(sets).scatter_(1, probabilities.argmax(1, keepdim=True), True)
    return sets | (top & ~sets.any(1, keepdim=True))


@torch.no_grad()
def top_sets(logits: Tensor, size: int) -> Tensor:
    """Return the sets of the `size` most likely labels as a mask [N, C] (ablation FedType_TopK)."""
    size = min(size, logits.shape[1])
    best = logits.topk(size, dim=1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, best, True)


def dynamic_penalty(delta: float, penalty: float, form: str) -> float:
    """Return the penalty g(delta, lambda) for a change in the proxy's accuracy.

    Args:
        delta: Change in the proxy's accuracy on the calibration data, in [-1, 1].
        penalty: RAPS penalty lambda.
        form: Form of g: "g1" is Eq. 7; "g2", "g3" and "g4" are the alternatives in Section 4.2.4.
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
    """Return eta [N] of Eq. 8 for the proxy's sets S and the private model's sets L, both [N, C].

    eta is |S and L| / |S or L| if S is at least as large as L, and |S and L| / |S| otherwise.
    """
    common = (proxy_sets & private_sets).sum(1)
    either = (proxy_sets | private_sets).sum(1)
    proxy_size, private_size = proxy_sets.sum(1), private_sets.sum(1)
    return common / torch.where(proxy_size >= private_size, either, proxy_size)


def imitation_loss(logits: Tensor, sets: Tensor, eta: Tensor, *, averaged: bool = True) -> Tensor:
    """Return the loss of Eq. 3, -eta sum_{k in S} log softmax(logits)_k, averaged over samples.

    Eq. 3 is printed without the minus sign, but minimizing it would then lower the probabilities of
    the labels in the sets.

    Args:
        logits: Logits of the private model, of shape [N, P].
        sets: Sets S, bool, of shape [N, P].
        eta: Consensus weights, of shape [N].
        averaged: Whether to divide the sum by |S| (not in the paper), so that large and small sets
            have equal weight, as Section 3.2.4 intends.
    """
    inside = (logits.float().log_softmax(1) * sets).sum(1)
    if averaged:
        inside = inside / sets.sum(1)
    return -(eta * inside).mean()


class Imitation:
    """Loss with which the private model learns from the proxy's prediction sets in a round."""

    def __init__(
        self,
        settings: FedTypeSettings,
        labels: Tensor,
        noise: torch.Generator,
        accuracy: float | None,
    ) -> None:
        """Start a round.

        Args:
            settings: Settings of FedType.
            labels: Classes (columns of the logits) that sets may contain, ascending, of shape [P].
            noise: Random generator of the factors u.
            accuracy: Last measured accuracy of the proxy on the held-out samples, or None if it
                was never measured.
        """
        self.settings, self.labels, self.accuracy = settings, labels, accuracy
        k_reg = settings.k_reg
        self.raps = Raps(
            settings.lambda_, unpenalized_ranks(len(labels)) if isinstance(k_reg, str) else k_reg
        )
        self.penalty = self.raps.penalty
        """Penalty g (Eq. 7) on the proxy's sets; with `shrinks = both`, also on the private model's
        sets."""
        self.calibrations: tuple[Calibration, ...] = ()
        """Conformal models of the proxy and of the private model (Eq. 5)."""
        self._parameters: tuple[Tensor, ...] = ()
        """Temperatures, thresholds and penalties. Each tensor [2] contains the value of the private
        model, followed by the value of the proxy."""
        self._random_factors = Numbers(
            lambda count: torch.rand(count, generator=noise), labels.device
        )
        self._sums = torch.zeros(4, device=labels.device)
        """Sums of eta and of both models' set sizes, and the number of the proxy's sets with one
        label."""
        self._count = 0

    def calibrate(self, proxy: Tensor, private: Tensor, y: Tensor) -> None:
        """Fit both conformal models (Eq. 5), and compute the penalty on the sets (Eq. 7).

        Args:
            proxy: Logits of the proxy on the held-out samples, of shape [n, C].
            private: Logits of the private model on the held-out samples, of shape [n, C].
            y: Labels of the held-out samples, of shape [n].
        """
        settings, raps, targets = self.settings, self.raps, torch.searchsorted(self.labels, y)
        for_proxy, for_private = self.calibrations = tuple(
            calibrate(
                logits[:, self.labels],
                targets,
                self._factors(len(y)),
                theta=settings.theta,
                raps=raps,
                corrected=settings.quantile == "corrected",
            )
            for logits in (proxy, private)
        )
        accuracy = (proxy.argmax(1) == y).float().mean().item()
        change = 0.0 if self.accuracy is None else accuracy - self.accuracy
        self.penalty = dynamic_penalty(change, raps.penalty, settings.g)
        self.accuracy = accuracy
        private_penalty = self.penalty if settings.shrinks == "both" else raps.penalty
        penalties = torch.tensor([private_penalty, self.penalty])
        self._parameters = (
            torch.stack([for_private.temperature, for_proxy.temperature]),
            torch.stack([for_private.tau, for_proxy.tau]),
            to_device(penalties, self.labels.device),
        )

    def is_skipped(self, held_out: int) -> bool:
        """Return whether imitation is skipped because there are too few held-out samples.

        With `infinite = skip`, imitation is skipped if the threshold would be infinite. Without
        held-out samples, e.g. for a client with only two samples, imitation is always skipped.
        """
        settings = self.settings
        if settings.backward == "topk":
            return False
        if not held_out:
            return True
        skips = settings.quantile == "corrected" and settings.infinite == "skip"
        return skips and _quantile_rank(held_out, settings.theta, corrected=True) > held_out

    def loss(self, private: Tensor, proxy: Tensor, views: tuple[Tensor, Tensor]) -> Tensor:
        """Return the imitation loss of a batch, as a scalar (Eq. 3).

        The gradient flows only into `private`.

        Args:
            private: Logits of the private model, of shape [N, C].
            proxy: Logits of the proxy, of shape [N, C].
            views: Logits of the private model and of the proxy from which the sets are computed,
                of shape [N, C] each.
        """
        private_sets, proxy_sets = self.sets(
            *(view.detach().float()[:, self.labels] for view in views)
        )
        eta = consensus(proxy_sets, private_sets)
        if self.settings.eta == "one":
            eta = torch.ones_like(eta)
        values = eta, proxy_sets, private_sets, proxy_sets.sum(1) == 1
        self._sums += torch.stack([value.sum().float() for value in values])
        self._count += len(eta)
        return imitation_loss(
            private[:, self.labels], proxy_sets, eta, averaged=self.settings.set_loss == "mean"
        )

    def sets(self, private: Tensor, proxy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the private model's sets L and the proxy's sets S for logits [N, P] (Eq. 6)."""
        if not self.calibrations:
            return top_sets(private, self.settings.top_k), top_sets(proxy, self.settings.top_k)
        count, u = len(proxy), self._factors(len(proxy))
        temperature, tau, penalty = (
            values.repeat_interleave(count).unsqueeze(1) for values in self._parameters
        )
        sets = prediction_sets(  # Compute the sets of both models in one batch.
            torch.cat([private, proxy]),
            Calibration(temperature, tau),
            u.repeat(2),
            penalty=penalty,
            k_reg=self.raps.k_reg,
        )
        return sets[:count], sets[count:]

    def metrics(self) -> dict[str, float]:
        """Return means of the round, and the proxy's threshold if it is finite.

        The means are eta, the set sizes, and the fraction of the proxy's sets with one label.
        """
        if (count := self._count) == 0:
            return {}
        names = ("eta", "proxy_set", "private_set", "single_sets")
        means = {
            name: total / count for name, total in zip(names, self._sums.tolist(), strict=True)
        }
        tau = self.calibrations[0].tau.item() if self.calibrations else torch.inf
        return means if tau == torch.inf else {**means, "tau": tau}

    def _factors(self, count: int) -> Tensor:
        """Return random or constant factors u [count] for Eq. 6."""
        if isinstance(u := self.settings.u, str):
            return self._random_factors.take(count)
        return torch.full((count,), u, device=self.labels.device)
