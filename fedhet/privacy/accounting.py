"""Privacy accounting with dp-accounting: epsilon at a given delta, and noise for a given epsilon.

The accounting uses Renyi differential privacy (Mironov 2017; for Poisson sampling, Mironov, Talwar
and Zhang 2019), with one accountant for all of a client's mechanisms.

Two datasets are adjacent if one sample is replaced by a null sample, which contributes to no
gradient, sum or count (zero-out adjacency, Kairouz et al. 2021). Both datasets have the same number
of rows. The bounds for adding or removing a sample also hold for this adjacency.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from fedhet.base.errors import SettingsError
from fedhet.methods.spec import Passes
from fedhet.settings.defense import MIN_NOISE, PrivacySettings

EXTRA = "pip install 'fedhet[privacy]'"
CLASS_FRACTION = 0.25
"""Maximum fraction of epsilon that the class sums of all rounds may consume."""
DEFAULT_CLASS_NOISE = 4.0
MAX_NOISE = 1e6
MAX_COUNT = 10**15
MIN_SAMPLING = 1e-6
"""Minimum sampling rate for accounting, relative to the noise.

Lower rates are replaced with this minimum, which gives an upper bound on epsilon. The Renyi
divergence of a step is about (sampling / noise)^2. Below 1e-12, rounding errors could make the
divergence negative.
"""


@dataclass(frozen=True)
class Release:
    """A sequence of `count` identical Gaussian mechanisms on Poisson samples of the rows."""

    noise: float
    """Noise multiplier, i.e. the standard deviation relative to the L2 sensitivity."""
    sampling: float = 1.0
    """Probability that a row is in the Poisson sample; with probability 1, all rows are used."""
    count: int = 1


@dataclass(frozen=True)
class Noise:
    """A client's noise multipliers in a run."""

    gradients: float
    sums: float = 0.0
    """Noise multiplier for class sums."""
    counts: float = 0.0
    """Noise multiplier for class counts."""


@dataclass(frozen=True)
class Plan:
    """A client's planned releases in a run."""

    rows: int
    """Number of training samples."""
    passes: tuple[Passes, ...]
    """Training passes over the samples."""
    rounds: int = 0
    """Number of rounds in which class sums are released."""
    vectors: int = 0
    """Number of class sums released per round, for example 2 for features and logits."""

    def steps(self, noise: float) -> list[Release]:
        """Return the releases of all DP-SGD steps."""
        epochs = [(epoch(self.rows, each.batch_size, noise), each) for each in self.passes]
        return [replace(one, count=one.count * each.epochs * each.rounds) for one, each in epochs]

    def sums(self, noise: float, counts: float) -> list[Release]:
        """Return the releases of all class sums."""
        if not self.vectors:
            return []
        return [Release(combined_noise(noise, counts, self.vectors), count=self.rounds)]


def epoch(rows: int, batch_size: int, noise: float) -> Release:
    """Return the release for one epoch of DP-SGD, with ceil(rows / batch_size) Poisson samples."""
    return Release(noise, min(1.0, batch_size / rows), math.ceil(rows / batch_size))


def combined_noise(sums: float, counts: float, vectors: int) -> float:
    """Return the noise multiplier of a mechanism equivalent to `vectors` sums and a count.

    A sample changes one row of each class sum by at most the clipping norm, and one class count by
    1. As for all Gaussian mechanisms on the same samples, the inverse squares of the noise
    multipliers add up.
    """
    return math.sqrt(1 / (vectors * sums**-2 + counts**-2))


def epsilon_of(releases: Iterable[Release], delta: float) -> float:
    """Return epsilon at `delta` for all releases composed on the same samples.

    Returns infinity if the noise, sampling or count of a release is out of range, such as 0 or NaN.
    """
    counted: Counter[tuple[float, float]] = Counter()
    for each in releases:
        # The condition also rejects NaN, because comparisons with NaN are false.
        if not (
            MIN_NOISE <= each.noise <= 2 * MAX_NOISE
            and 0 < each.sampling <= 1
            and 0 < each.count <= MAX_COUNT
        ):
            return math.inf
        sampling = min(1.0, max(each.sampling, MIN_SAMPLING * each.noise))
        counted[each.noise, sampling] += each.count
    return _epsilon(tuple(sorted(counted.items())), delta)


@lru_cache(maxsize=1024)
def _epsilon(counted: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    with root_handlers_kept():
        try:
            import dp_accounting as dp
            from dp_accounting import rdp
        except ImportError as error:
            raise SettingsError(
                f"setting 'privacy.epsilon' requires dp-accounting: {EXTRA} ({error})"
            ) from None
        # Silence warnings about skipped RDP orders.
        logging.getLogger("absl").setLevel(logging.ERROR)
        accountant = rdp.RdpAccountant()
        bound = 0.0  # The Renyi divergence at order 2 has a closed form.
        for (noise, sampling), count in counted:
            event = dp.GaussianDpEvent(noise)
            if sampling < 1:
                event = dp.PoissonSampledDpEvent(sampling, event)
            accountant.compose(event, count)
            bound += count * math.log1p(sampling**2 * math.expm1(noise**-2))
        epsilon = float(accountant.get_epsilon(delta))
    # Epsilon 0 is valid only if the total variation distance is at most delta. Because the
    # accountant may return 0 due to numerical errors, check this for two Gaussians whose Renyi
    # divergence at order 2 is `bound`.
    may_be_zero = math.erf(math.sqrt(bound / 8)) <= 1.01 * delta
    return epsilon if epsilon > 0 or (epsilon == 0 and may_be_zero) else math.inf


def calibrate_noise(
    settings: PrivacySettings, plan: Plan, epsilon: float, consumed: tuple[Release, ...] = ()
) -> Noise:
    """Return the smallest noise with which `plan` fits the budget after the `consumed` releases.

    Noise multipliers in the settings are used unchanged. If `epsilon` is 0, all other multipliers
    have default values. Raises SettingsError if no noise is sufficient.
    """
    sums, counts = settings.class_noise or DEFAULT_CLASS_NOISE, settings.count_noise
    if plan.vectors and epsilon and not settings.class_noise:
        remaining = epsilon
        if consumed:
            remaining = max(epsilon - epsilon_of(consumed, settings.delta), 0.0)
        sums = _min_noise(
            lambda z: plan.sums(z, counts or 2 * z), CLASS_FRACTION * remaining, settings.delta
        )
    counts = counts or 2 * sums
    fixed = [*consumed, *plan.sums(sums, counts)]
    gradients = settings.noise_multiplier
    if epsilon:
        gradients = _min_noise(lambda z: [*fixed, *plan.steps(z)], epsilon, settings.delta)
    return Noise(gradients, sums, counts)


def _min_noise(releases: Callable[[float], list[Release]], epsilon: float, delta: float) -> float:
    """Return the smallest noise, within 0.1 %, for which `releases` consume at most `epsilon`."""
    if epsilon_of(releases(MAX_NOISE), delta) > epsilon:
        raise SettingsError(
            f"setting 'privacy.epsilon': {epsilon:.3g} is too small for the number of rounds, even "
            "with the maximum training noise. Use fewer rounds, or more noise in class sums."
        )
    low, high = MIN_NOISE, 1.0
    if epsilon_of(releases(low), delta) <= epsilon:
        return low
    while epsilon_of(releases(high), delta) > epsilon:
        low, high = high, 2 * high
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        if epsilon_of(releases(middle), delta) > epsilon:
            low = middle
        else:
            high = middle
    return high


@contextlib.contextmanager
def root_handlers_kept() -> Iterator[None]:
    """Remove handlers that the block (e.g. an import of Opacus or absl) adds to the root logger."""
    handlers = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = handlers
