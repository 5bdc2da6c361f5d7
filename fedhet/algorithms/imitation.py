"""The private model imitates the proxy: FedType's backward loss over one round (Section 3.2).

Wang et al., Bridging Model Heterogeneity in Federated Learning via Uncertainty-based Asymmetrical
Reciprocity Learning. N samples, n held-out samples, C classes, P of them in the client's label set.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedhet.algorithms.conformal import (
    Calibration,
    Raps,
    calibrate,
    consensus,
    dynamic_penalty,
    imitation_loss,
    is_informative,
    prediction_sets,
    top_sets,
)
from fedhet.base.transfer import Numbers, to_device


@dataclass(frozen=True)
class SetRules:
    """How the sets of labels are made, and how much each sample counts."""

    kind: Literal["conformal", "topk"] = "conformal"
    top_k: int = 3
    """Labels in a set, for topk."""
    raps: Raps = field(default_factory=Raps)
    theta: float = 0.1
    corrected: bool = True
    """Is the threshold's quantile corrected for few samples (Appendix B)?"""
    g: str = "g1"
    """The form of the dynamic penalty (Eq. 7, Section 4.2.4)."""
    shrinks_both: bool = False
    """Does the dynamic penalty also apply to the private model's sets (Algorithm 1, Eq. 6)?"""
    u: float | None = None
    """RAPS' u of Eq. 6; None is uniform in [0, 1) for each sample."""
    weighted: bool = True
    """Is a sample weighted by the consensus (Eq. 8), or by 1?"""
    averaged: bool = True
    """Is Eq. 3 the mean over the labels of a set, or, as printed, the sum?"""
    skips_infinite: bool = True
    """Is imitation skipped if there are too few held-out samples for a finite threshold?"""


class Imitation:
    """The sets of a round's epochs, and the loss that they give the private model."""

    def __init__(
        self, rules: SetRules, labels: Tensor, noise: torch.Generator, accuracy: float | None
    ) -> None:
        """Start a round; sets hold some of `labels` [P], columns of the logits, ascending.

        `accuracy` is the proxy's on the held-out samples as last measured; None: never.
        """
        self.rules, self.labels = rules, labels
        self.accuracy = accuracy
        self.penalty = rules.raps.penalty
        """g of Eq. 7, the penalty in the proxy's sets, and in both models' if `shrinks_both`."""
        self.calibrations: tuple[Calibration, Calibration] | None = None
        """The conformal models of the proxy and of the private model (Eq. 5)."""
        self._of_both: tuple[Tensor, ...] = ()
        """Temperatures, thresholds and penalties: the private model's and the proxy's, [2] each."""
        self._factors_drawn = Numbers(partial(_uniform, noise), labels.device)
        self._sums = torch.zeros(3, device=labels.device)
        """Of eta, and of the sizes of the proxy's and of the private model's sets."""
        self._count = 0

    def calibrate(self, proxy: Tensor, private: Tensor, y: Tensor) -> None:
        """Fit both conformal models (Eq. 5), and how much the sets must shrink (Eq. 7).

        Both models' logits [n, C] on the held-out samples, whose classes are `y` [n].
        """
        self.calibrations = (self._calibration(proxy, y), self._calibration(private, y))
        accuracy = (proxy.argmax(1) == y).float().mean().item()
        change = 0.0 if self.accuracy is None else accuracy - self.accuracy
        self.penalty = dynamic_penalty(change, self.rules.raps.penalty, self.rules.g)
        self.accuracy = accuracy
        for_proxy, for_private = self.calibrations
        of_private = self.penalty if self.rules.shrinks_both else self.rules.raps.penalty
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
        chosen = self.rules
        if chosen.kind == "conformal" and not held_out:
            return True
        may_be_infinite = chosen.kind == "conformal" and chosen.corrected
        silent = may_be_infinite and chosen.skips_infinite
        return silent and not is_informative(held_out, chosen.theta)

    def loss(self, private: Tensor, proxy: Tensor, views: tuple[Tensor, Tensor]) -> Tensor:
        """Return Eq. 3 for a batch, a scalar; its gradient flows into the logits `private` alone.

        Logits are [N, C]; `views` are those of the private model and of the proxy that the sets are
        made from.
        """
        own, other = self.sets(*(view.detach().float()[:, self.labels] for view in views))
        eta = consensus(other, own)
        if not self.rules.weighted:
            eta = torch.ones_like(eta)
        self._note(eta, other, own)
        return imitation_loss(private[:, self.labels], other, eta, averaged=self.rules.averaged)

    def sets(self, private: Tensor, proxy: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sets L of the private model and S of the proxy (Eq. 6), masks [N, P].

        Both from logits [N, P] of the labels alone.
        """
        if self.calibrations is None:
            return top_sets(private, self.rules.top_k), top_sets(proxy, self.rules.top_k)
        count, u = len(proxy), self._factors(len(proxy))
        temperature, tau, penalty = (
            each.repeat_interleave(count).unsqueeze(1) for each in self._of_both
        )
        sets = prediction_sets(  # of both at once
            torch.cat([private, proxy]),
            Calibration(temperature, tau),
            u.repeat(2),
            penalty=penalty,
            k_reg=self.rules.raps.k_reg,
        )
        return sets[:count], sets[count:]

    def figures(self) -> dict[str, float]:
        """Return the round's mean eta and set sizes, and the proxy's last threshold if finite."""
        if (count := self._count) == 0:
            return {}
        eta, proxy, private = self._sums.tolist()
        found = {"eta": eta / count, "proxy_set": proxy / count, "private_set": private / count}
        tau = torch.inf if self.calibrations is None else self.calibrations[0].tau.item()
        return found if tau == torch.inf else {**found, "tau": tau}

    def _calibration(self, logits: Tensor, y: Tensor) -> Calibration:
        chosen, u = self.rules, self._factors(len(y))
        places = torch.searchsorted(self.labels, y)
        return calibrate(
            logits[:, self.labels],
            places,
            u,
            theta=chosen.theta,
            raps=chosen.raps,
            corrected=chosen.corrected,
        )

    def _factors(self, count: int) -> Tensor:
        """Return u of Eq. 6, [count]."""
        if self.rules.u is not None:
            return torch.full((count,), self.rules.u, device=self.labels.device)
        return self._factors_drawn.take(count)

    def _note(self, eta: Tensor, proxy: Tensor, private: Tensor) -> None:
        sums = [eta.sum(), proxy.sum(), private.sum()]
        self._sums += torch.stack([value.float() for value in sums])
        self._count += len(eta)


def _uniform(generator: torch.Generator, count: int) -> Tensor:
    return torch.rand(count, generator=generator)
