"""Settings of attacks, defenses and differential privacy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from fedhet.settings.schema import CountOrNone, NonNegative, Positive, Schema, invalid_setting


@dataclass(frozen=True)
class Rule:
    """Declaration of a robust aggregation rule; its function is in `algorithms.robust`."""

    help: str
    """Noun phrase for the description of the setting."""
    selects: bool
    """Whether the rule selects replies, instead of combining their values into one value."""
    margin: int = 1
    """Number of replies that the rule needs in addition to two for each malicious client."""


RULES: Mapping[str, Rule] = {
    "median": Rule("coordinate-wise median", selects=False),
    "trimmed-mean": Rule("coordinate-wise trimmed mean", selects=False),
    "geometric-median": Rule("geometric median", selects=False),
    "krum": Rule("mean of the replies that Multi-Krum selects", selects=True, margin=3),
    "filter": Rule("mean of the replies that the spectral filter selects", selects=True),
}
"""All robust aggregation rules by name, i.e. all values of 'defense.average' except the mean."""
if TYPE_CHECKING:
    Average = str
else:
    Average = Literal["mean", *RULES]
ROBUST: tuple[Average, ...] = tuple(RULES)
"""Names of all rules except the mean."""
CHOOSING: tuple[Average, ...] = tuple(name for name, rule in RULES.items() if rule.selects)
"""Names of the rules that exclude outlying replies and average the remaining replies."""


class AttackSettings(Schema):
    """Simulated poisoning of client replies, for robustness experiments."""

    kind: Literal[
        "none", "paf", "lie", "ofom", "sign-flip", "scale", "alternating", "drift", "small-tensor",
        "label-flip", "backdoor",
    ] = Field(
        "none",
        description="poisoning attack. paf, lie, and ofom poison the logits and weights of "
        "clients drawn anew in each round. The other attacks use the same clients in all rounds. "
        "All values of a reply are multiplied by -1 (sign-flip), by attack.scale (scale), or "
        "alternately by attack.scale and -attack.scale (alternating). drift adds a vector that "
        "grows to attack.scale times the reply's norm, and small-tensor adds attack.scale to one "
        "value in the smallest tensor, such as a bias. In simulations, label-flip reverses the "
        "order of the labels, and backdoor adds a bright square to half of the images, with the "
        "first class as their label",
    )  # fmt: skip
    attackers: CountOrNone = Field(
        0,
        description="number of malicious clients per round; 0 = as in FedGEMS (2 for ofom, "
        "otherwise 1)",
    )
    scale: Positive = Field(
        10.0,
        description="paf, ofom: norm of the added vector, relative to the norm of the benign "
        "mean; scale, alternating, drift, small-tensor: see attack.kind",
    )
    direction: Literal["round", "run"] = Field(
        "round",
        description="paf, ofom: whether the direction of the added vector is drawn in each round "
        "or once per run",
    )

    claimed_samples: Annotated[int, Field(ge=0, le=10**9)] = Field(
        0,
        description="number of samples that the malicious clients claim in simulations, except for "
        "paf, lie, and ofom; 0 = their true number",
    )

    @property
    def poisons_data(self) -> bool:
        """Whether the malicious clients train on poisoned samples."""
        return self.kind in ("label-flip", "backdoor")

    @model_validator(mode="after")
    def _check_attackers(self) -> AttackSettings:
        if self.claimed_samples and self.kind in ("none", "paf", "lie", "ofom"):
            expected = f"0 if 'attack.kind' is {self.kind}"
            raise invalid_setting("attack.claimed-samples", self.claimed_samples, expected)
        if self.attackers and self.kind == "none":
            expected = "0 if 'attack.kind' is none"
            raise invalid_setting("attack.attackers", self.attackers, expected)
        return self


class DefenseSettings(Schema):
    """Defenses of the server against poisoned or outlying replies."""

    average: Average = Field(
        "mean",
        description="aggregation rule: the mean of the method, or with equal weights for all "
        f"clients: {'; '.join(f'{name} ({rule.help})' for name, rule in RULES.items())}. See "
        "docs/security.md",
    )
    malicious_fraction: Annotated[float, Field(gt=0, lt=0.5)] = Field(
        0.2, description="maximum fraction of malicious clients that 'average' must tolerate"
    )
    clip_factor: NonNegative = Field(
        4.0,
        description="maximum root mean square of weights, as a multiple of the median over the "
        "other clients with the same architecture; larger weights are scaled down. The maximum for "
        "features and logits is 2.5 times as high; 0 = no clipping",
    )


Delta = Annotated[float, Field(gt=0, lt=0.1)]
ClippingNorm = Annotated[float, Field(ge=1e-12, le=1e6)]
"""Norm far from the smallest and largest numbers of float32, where rounding exceeds the norm."""
MIN_NOISE = 0.3
"""Minimum noise multiplier that privacy accounting supports.

Below this value, dp-accounting's series do not converge at every order. Epsilon is then no longer
monotone in the noise, and finally becomes 0 (an internal NaN). Less noise would not protect the
samples anyway, because a single step without sampling already has an epsilon above 20.
"""
MIN_CLASS_NOISE = 1.0
"""Minimum noise multiplier of class sums and of counts. The combined multiplier of both then stays
above `MIN_NOISE`."""


class PrivacySettings(Schema):
    """Differential privacy of each client's samples, disabled by default."""

    epsilon: NonNegative = Field(
        0.0,
        description="maximum privacy budget (epsilon) of a run per client; determines the noise; "
        "0 = no privacy, unless 'noise-multiplier' is set",
    )
    delta: Delta = Field(
        1e-5,
        description="delta of the privacy guarantee; must be below 1 / n for n samples per client",
    )
    noise_multiplier: NonNegative = Field(
        0.0,
        description="standard deviation of DP-SGD's noise, as a multiple of 'max-grad-norm', at "
        "least 0.3; 0 = derived from 'epsilon'",
    )
    max_grad_norm: ClippingNorm = Field(
        1.0, description="clipping norm of per-sample gradients (L2)"
    )
    class_clip: ClippingNorm = Field(
        5.0,
        description="methods based on class means: clipping norm (L2) of each sample's features or "
        "logits before summation over the class; for fd, at most 1",
    )
    class_noise: NonNegative = Field(
        0.0,
        description="methods based on class means: standard deviation of the noise added to each "
        "class sum, as a multiple of 'class-clip', at least 1; 0 = derived from a quarter of "
        "'epsilon', or 4 if 'noise-multiplier' is set",
    )
    count_noise: NonNegative = Field(
        0.0,
        description="methods based on class means: standard deviation of the noise added to each "
        "class's number of samples, at least 1; 0 = twice 'class-noise'",
    )
    secure_aggregation: bool = Field(
        False,
        description="whether the server receives only sums over the clients (experimental); each "
        "site needs the node settings 'peers' and 'peers-key'",
    )

    @property
    def is_on(self) -> bool:
        """Whether differential privacy protects the clients' samples."""
        return bool(self.epsilon or self.noise_multiplier)

    @property
    def hides_samples(self) -> bool:
        """Whether clients send only noisy values, or values that are masked until they are summed.

        A client of such a run sends nothing else that depends on its samples. A site with its own
        data reads the data as it has declared, whatever the other settings are.
        """
        return self.is_on or self.secure_aggregation

    def describe_budget(self, rounds: int) -> str:
        """Return a description of the privacy budget consumed by a run of `rounds` rounds."""
        if not self.epsilon:
            return (
                f"noise multiplier {self.noise_multiplier:g}: a client's ε at δ = {self.delta:g} "
                "depends on its number of samples; the log shows the maximum after each round"
            )
        budget = f"at most ε = {self.epsilon:g} at δ = {self.delta:g} per client"
        return f"{rounds} round{'s' * (rounds > 1)} consume{'s' * (rounds == 1)} {budget}"

    @model_validator(mode="after")
    def _check_noise(self) -> PrivacySettings:
        for name, noise, minimum in (
            ("noise-multiplier", self.noise_multiplier, MIN_NOISE),
            ("class-noise", self.class_noise, MIN_CLASS_NOISE),
            ("count-noise", self.count_noise, MIN_CLASS_NOISE),
        ):
            if 0 < noise < minimum:
                raise ValueError(
                    f"setting 'privacy.{name}': too little noise for privacy accounting, expected "
                    f"0 or at least {minimum:g}, got {noise:g}"
                )
        if self.epsilon and self.noise_multiplier:
            expected = f"0 with 'privacy.epsilon' = {self.epsilon:g}"
            problem = "the noise is derived from epsilon"
            raise invalid_setting(
                "privacy.noise-multiplier", self.noise_multiplier, expected, problem
            )
        if not self.is_on and (self.class_noise or self.count_noise):
            raise ValueError(
                "settings 'privacy.class-noise' and 'privacy.count-noise': the feature extractor "
                "would be trained on the same samples without noise, expected 'privacy.epsilon' or "
                "'privacy.noise-multiplier' to be set too"
            )
        return self
