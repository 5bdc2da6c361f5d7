"""Attacks, the defense against them, and privacy: `[attack]`, `[defense]`, `[privacy]`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from fedhet.settings.schema import CountOrNone, NonNegative, Positive, Schema, refused

Average = Literal["mean", "median", "trimmed-mean", "geometric-median", "krum", "filter"]
"""How replies are averaged; see `algorithms.robust`."""
CHOOSING: tuple[Average, ...] = ("krum", "filter")
"""Averages of those replies alone that do not stand out from the others."""
ROBUST: tuple[Average, ...] = ("median", "trimmed-mean", "geometric-median", *CHOOSING)
"""All averages but the mean."""


class AttackSettings(Schema):
    """Poisoned replies, for experiments on robustness."""

    kind: Literal["none", "paf", "lie", "ofom", "sign-flip", "scale", "alternating", "drift"] = (
        Field(
            "none",
            description="how some clients' replies are poisoned; paf, lie, ofom: logits and "
            "weights, of clients drawn for each round; the others: all numbers, of the same "
            "clients in all rounds, times -1 (sign-flip), times attack.scale (scale), times that "
            "and minus that by turns (alternating), or with a vector added that grows to "
            "attack.scale times the reply's norm in the last round (drift)",
        )
    )
    attackers: CountOrNone = Field(
        0, description="number of clients poisoned in a round; 0 = as in FedGEMS: 1, or 2 for ofom"
    )
    scale: Positive = Field(
        10.0,
        description="paf, ofom: norm of what is added, in norms of the benign mean; scale, "
        "alternating, drift: see attack.kind",
    )
    direction: Literal["round", "run"] = Field(
        "round",
        description="paf, ofom: whether the direction of what is added is drawn for each round, or "
        "once for the run",
    )

    @model_validator(mode="after")
    def _attackers_attack(self) -> AttackSettings:
        if self.attackers and self.kind == "none":
            raise refused("attack.attackers", self.attackers, "0 without an 'attack.kind'")
        return self


class DefenseSettings(Schema):
    """What the server does about replies that stand out from the others."""

    average: Average = Field(
        "mean",
        description="how replies are averaged: their mean; the coordinate-wise median or trimmed "
        "mean, or the geometric median; or the mean of those that Krum or the filter keeps. Each "
        "within an architecture, or the classes that clients share",
    )
    malicious_fraction: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="share of the clients that 'average' withstands if they are hostile"
    )
    clip_factor: NonNegative = Field(
        4.0,
        description="weights are scaled down to this many times the median root mean square of the "
        "other clients with the same architecture, if they are above, features and logits to 2.5 "
        "times as many; 0 = never",
    )


Delta = Annotated[float, Field(gt=0, lt=0.1)]
MIN_NOISE = 0.3
"""Least noise that is accounted, in units of the sensitivity; less noise counts as none.

Below it, dp-accounting's series do not converge at every order, so that its epsilon is not monotone
in the noise, and at last 0 (a NaN inside). Such noise protects nothing: epsilon of one step without
sampling is above 20.
"""
MIN_CLASS_NOISE = 1.0
"""Least noise of class sums and of counts: combined, they stay above `MIN_NOISE`."""


class PrivacySettings(Schema):
    """What each client promises about its samples, and by which noise. Off by default."""

    epsilon: NonNegative = Field(
        0.0,
        description="epsilon that a run costs each client at most; the noise follows from it; 0 = "
        "no privacy, unless 'noise-multiplier' is given",
    )
    delta: Delta = Field(1e-5, description="delta; it must be below 1 / samples of each client")
    noise_multiplier: NonNegative = Field(
        0.0,
        description="noise of DP-SGD in units of 'max-grad-norm', at least 0.3, from which epsilon "
        "follows; 0 = it follows from 'epsilon'",
    )
    max_grad_norm: Positive = Field(
        1.0, description="L2 norm to which the gradient of each sample is scaled down"
    )
    class_clip: Positive = Field(
        5.0,
        description="methods of class means: L2 norm to which each sample's features or logits "
        "are scaled down before they are summed by class; fd's probabilities have one of at most 1",
    )
    class_noise: NonNegative = Field(
        0.0,
        description="methods of class means: noise of the sums of each class in units of "
        "'class-clip', at least 1; 0 = a quarter of 'epsilon' is for these sums, or 4 with "
        "'noise-multiplier'",
    )
    count_noise: NonNegative = Field(
        0.0,
        description="methods of class means: noise of the number of samples of each class, at "
        "least 1; 0 = twice 'class-noise'",
    )

    @property
    def is_on(self) -> bool:
        """Return whether the clients' samples are protected."""
        return bool(self.epsilon or self.noise_multiplier)

    def privacy_mechanism(self, rounds: int) -> str:
        """Return what a private run costs each client, in words."""
        if not self.epsilon:
            return (
                f"the noise multiplier is {self.noise_multiplier:g}: what a run costs a client at "
                f"δ = {self.delta:g} depends on its number of samples; each round shows the most"
            )
        cost = f"cost each client at most ε = {self.epsilon:g} at δ = {self.delta:g}"
        return f"{rounds} round{'s' * (rounds > 1)} {cost}"

    @model_validator(mode="after")
    def _noise_is_enough_and_given_once(self) -> PrivacySettings:
        for name, noise, least in (
            ("noise-multiplier", self.noise_multiplier, MIN_NOISE),
            ("class-noise", self.class_noise, MIN_CLASS_NOISE),
            ("count-noise", self.count_noise, MIN_CLASS_NOISE),
        ):
            if 0 < noise < least:
                raise ValueError(
                    f"setting 'privacy.{name}': too little noise to be accounted, expected 0 or at "
                    f"least {least:g}, got {noise:g}"
                )
        if self.epsilon and self.noise_multiplier:
            rule = f"0 with 'privacy.epsilon' = {self.epsilon:g}, from which it follows"
            raise refused("privacy.noise-multiplier", self.noise_multiplier, rule)
        if not self.is_on and (self.class_noise or self.count_noise):
            raise ValueError(
                "setting 'privacy.class-noise' or 'privacy.count-noise' is not allowed without "
                "'privacy.epsilon' or 'privacy.noise-multiplier': the extractor would be trained "
                "without noise on the same samples"
            )
        return self
