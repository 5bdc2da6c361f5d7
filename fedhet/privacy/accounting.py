"""What noised steps cost: epsilon at a delta, by dp-accounting, and the noise for an epsilon.

Renyi differential privacy (Mironov 2017; Mironov, Talwar and Zhang 2019 for Poisson sampling), one
accountant for all mechanisms of a client. Two data sets are neighbors if one sample is replaced by
none: it contributes to no gradient, sum or count, while the number of rows stays. This is zero-out
adjacency (Kairouz et al. 2021), for which the bounds of adding or removing a sample hold.
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
CLASS_SHARE = 0.25
"""Share of epsilon that the class sums of all rounds may cost by themselves."""
USUAL_CLASS_NOISE = 4.0
MAX_NOISE = 1e6
MAX_COUNT = 10**15
MIN_SAMPLING = 1e-6
"""Least sampling rate that is accounted, in units of the noise.

A lower rate counts as this one, which consumes more: the Renyi divergence of one step is about the
square of sampling / noise, and below 1e-12 rounding errors can make it negative, that is, free.
"""


@dataclass(frozen=True)
class Release:
    """`count` Gaussian mechanisms of the same kind.

    Each is on a Poisson sample of the rows: a row is in it with probability `sampling`, 1 for all.
    `noise` is the standard deviation in units of the L2 sensitivity.
    """

    noise: float
    sampling: float = 1.0
    count: int = 1


@dataclass(frozen=True)
class Noise:
    """The noise of a run at one client, each in units of what it hides."""

    gradients: float
    sums: float = 0.0
    counts: float = 0.0


@dataclass(frozen=True)
class Plan:
    """What a client does in a run: `passes` over its `rows`.

    `vectors`: the sums per class that it releases in each of `rounds`, of features and of logits.
    """

    rows: int
    passes: tuple[Passes, ...]
    rounds: int = 0
    vectors: int = 0

    def steps(self, noise: float) -> list[Release]:
        """Return all steps of DP-SGD."""
        epochs = [(epoch(self.rows, each.batch_size, noise), each) for each in self.passes]
        return [replace(one, count=one.count * each.epochs * each.rounds) for one, each in epochs]

    def sums(self, noise: float, counts: float) -> list[Release]:
        """Return all releases of class sums."""
        if not self.vectors:
            return []
        return [Release(combined(noise, counts, self.vectors), count=self.rounds)]


def epoch(rows: int, batch_size: int, noise: float) -> Release:
    """Return the steps of one epoch of DP-SGD: ceil(rows / batch) Poisson samples."""
    return Release(noise, min(1.0, batch_size / rows), math.ceil(rows / batch_size))


def combined(sums: float, counts: float, vectors: int) -> float:
    """Return the noise of one mechanism that equals `vectors` sums and a count by class.

    A sample changes one row of each sum, by at most the clipping norm, and one count by 1. The
    squares of the inverses add up, as for any Gaussian mechanisms on the same samples.
    """
    return math.sqrt(1 / (vectors * sums**-2 + counts**-2))


def epsilon_of(releases: Iterable[Release], delta: float) -> float:
    """Return epsilon at `delta` of all releases on the same samples.

    It is infinite for noise, sampling or counts out of the accountant's range, such as 0 and NaN.
    """
    counted: Counter[tuple[float, float]] = Counter()
    for each in releases:
        # Comparisons with NaN are false.
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
            raise SettingsError(f"'privacy.epsilon' needs an extra: {EXTRA} ({error})") from None
        logging.getLogger("absl").setLevel(logging.ERROR)  # orders that it leaves out, harmlessly
        accountant = rdp.RdpAccountant()
        bound = 0.0  # of the Renyi divergence at order 2, in closed form
        for (noise, sampling), count in counted:
            event = dp.GaussianDpEvent(noise)
            if sampling < 1:
                event = dp.PoissonSampledDpEvent(sampling, event)
            accountant.compose(event, count)
            bound += count * math.log1p(sampling**2 * math.expm1(noise**-2))
        epsilon = float(accountant.get_epsilon(delta))
    # 0 is right if the total variation is at most delta, here that of Gaussians of equal
    # divergence; otherwise the accountant has erred.
    is_nothing = math.erf(math.sqrt(bound / 8)) <= 1.01 * delta
    return epsilon if epsilon > 0 or (epsilon == 0 and is_nothing) else math.inf


def solved(
    settings: PrivacySettings, plan: Plan, epsilon: float, spent: tuple[Release, ...] = ()
) -> Noise:
    """Return the noise with which `plan`, after what was `spent`, costs `epsilon`.

    The settings' own noise is kept where it is given; `epsilon` 0 only fills in the usual one.
    Raises SettingsError if no noise is enough.
    """
    given = settings.class_noise, settings.count_noise
    sums, counts = given[0] or USUAL_CLASS_NOISE, given[1]
    if plan.vectors and epsilon and not given[0]:
        left = max(epsilon - epsilon_of(spent, settings.delta), 0.0) if spent else epsilon
        share = CLASS_SHARE * left
        sums = _least(lambda z: plan.sums(z, counts or 2 * z), share, settings.delta)
    counts = counts or 2 * sums
    fixed = [*spent, *plan.sums(sums, counts)]
    gradients = settings.noise_multiplier
    if epsilon:
        gradients = _least(lambda z: [*fixed, *plan.steps(z)], epsilon, settings.delta)
    return Noise(gradients, sums, counts)


def _least(releases: Callable[[float], list[Release]], epsilon: float, delta: float) -> float:
    """Return the least noise, to a thousandth, with which `releases` cost at most `epsilon`."""
    if epsilon_of(releases(MAX_NOISE), delta) > epsilon:
        raise SettingsError(
            f"setting 'privacy.epsilon': {epsilon:.3g} is too little for the rounds of this run, "
            "whatever the noise of its training: fewer rounds, or more noise in class sums, fit"
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
    """Remove what the block adds to Python's root logger, as Opacus and absl do."""
    before = list(logging.root.handlers)
    try:
        yield
    finally:
        logging.root.handlers[:] = before
