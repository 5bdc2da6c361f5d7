"""Statistics over seeds: means, and differences between two methods with error and verdict.

A difference has two sources of error, and `Difference` combines them. Every table, comparison, and
sweep uses this class, so that a difference has the same verdict everywhere.

1. Seeds. Differences are paired by seed, and their standard error is s / sqrt(k) for k seeds.
2. Test samples. With few test samples, two equally accurate methods differ by a few samples. This
   error does not decrease with more seeds or clients, if all of them share the test samples.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pandas as pd
from scipy import special

from fedhet.runs.records import COMMON, NAN

LEVEL = 0.05
"""Significance level of a difference; the confidence level of its interval is 1 - LEVEL."""
OUTCOMES = ("holds", "within noise", "does not hold", "not measured")
"""Possible outcomes of a comparison; see `Difference.outcome`."""
DIGITS = 12
"""Number of decimals to which differences are rounded, to remove floating-point errors."""
TESTS = {"none": "", "t": "t-test", "wilcoxon": "Wilcoxon signed-rank test"}
"""Titles of the statistical tests for the differences; see `p_value`."""


def sample_error(difference: float, samples: float) -> float:
    """Return a lower bound on the error of a difference in accuracy due to finite test samples.

    Both accuracies are measured on the same n test samples. Let b samples be correct only with the
    first model, and c samples only with the second model. Then the difference is d = (b - c) / n,
    and b + c samples are discordant (McNemar, Psychometrika 12, 1947). With half a sample added to
    each of the four counts, the squared standard error of d is

        [(b + c + 1) - (b - c)^2 / (n + 2)] / (n + 2)^2

    (Agresti and Min, Simple improved confidence intervals for comparing matched proportions,
    Statistics in Medicine 24, 2005). Runs record accuracies but not which samples are correct.
    Since b + c >= |b - c| = n |d|, the function uses b + c = n |d|, so the result is a lower bound.
    A difference of up to four samples is thus within noise, regardless of the number of seeds.

    A mean over clients that share the test samples counts as the accuracy of one model, because
    more clients do not provide more test samples.

    Args:
        difference: Difference between two accuracies, in [-1, 1].
        samples: Number n of test samples (see `effective_samples`).
    """
    discordant = samples * abs(difference)
    total = samples + 2
    return math.sqrt(max(discordant + 1 - discordant**2 / total, 0.0)) / total


def effective_samples(counts: Collection[int], protocol: str) -> float | None:
    """Return the number of test samples behind a mean accuracy over clients, or None if unknown.

    On the common test set, clients share the test samples, so the result is the harmonic mean of
    `counts`. On the clients' own test splits, the samples differ, so the variance of the mean is
    the mean variance divided by the number of clients K. The result is K times the harmonic mean,
    which is at most the sum of `counts`.
    """
    if not counts or min(counts) < 1:
        return None
    harmonic = len(counts) / sum(1 / count for count in counts)
    return harmonic * (1 if protocol == COMMON else len(counts))


def smallest(counts: Iterable[float | None]) -> float | None:
    """Return the smallest number of test samples, or None if any number is unknown."""
    known = [*counts]
    return None if None in known or not known else min(each for each in known if each is not None)


def samples_text(counts: Iterable[float | None], protocol: str = COMMON) -> str:
    """Format numbers of test samples, e.g. "359 test samples" or "114 to 359 test samples".

    Numbers may be unknown (None). On the clients' own test splits, the numbers are effective
    numbers (see `effective_samples`), and are called so.
    """
    found = [*counts]
    known = sorted({round(each) for each in found if each is not None})
    noun = "test sample" if protocol == COMMON else "effective test sample"
    if not known:
        return f"unknown number of {noun}s"
    ends = dict.fromkeys((f"{known[0]:,}", f"{known[-1]:,}"))
    more = ", partly unknown" if None in found else ""
    return f"{' to '.join(ends)} {noun}{'' if known == [1] else 's'}{more}"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over runs; std is NaN for a single run."""

    mean: float = NAN
    std: float = NAN
    n: int = 0


def spread_of(values: Iterable[float]) -> Spread:
    """Compute the spread of the values, ignoring NaN."""
    series = pd.Series([*values], dtype=float)
    return Spread(float(series.mean()), float(series.std()), int(series.count()))


@dataclass(frozen=True)
class Difference:
    """Mean difference between two methods over their shared seeds, with its error.

    The squared standard error is the sum of the squared errors due to seeds and test samples. The
    degrees of freedom follow from the Welch-Satterthwaite equation (Satterthwaite, Biometrics
    Bulletin 2, 1946; Welch, Biometrika 34, 1947), with k - 1 degrees for k seeds and n - 1 for n
    test samples. Without an error due to test samples, this is the paired t-test, whose interval
    for three seeds is 4.3 standard errors wide on each side.

    With fewer than two shared seeds, the mean and the errors are NaN.
    """

    mean: float = NAN
    seed_error: float = NAN
    """Standard error of the mean over seeds."""
    n: int = 0
    """Number of shared seeds."""
    sample_error: float = 0.0
    """Lower bound on the error due to finite test samples, or 0 if it is unknown."""
    samples: float | None = None
    """Number of test samples, or None if it is unknown or if the score is not an accuracy."""
    per_seed: Mapping[int, float] = field(default_factory=dict)

    @property
    def se(self) -> float:
        """Standard error of the mean difference, due to seeds and test samples."""
        return math.hypot(self.seed_error, self.sample_error)

    @property
    def degrees_of_freedom(self) -> float:
        """Effective degrees of freedom of `se`."""
        if self.n < 2:
            return NAN
        parts = [(self.seed_error**2, float(self.n - 1))]
        if self.samples is not None:
            parts.append((self.sample_error**2, max(self.samples - 1, 1)))
        total = sum(variance for variance, _ in parts)
        if not total:
            return self.n - 1
        return total**2 / sum(variance**2 / degrees for variance, degrees in parts)

    @property
    def margin(self) -> float:
        """Half of the width of the confidence interval: a quantile of Student's t times `se`."""
        return float(special.stdtrit(self.degrees_of_freedom, 1 - LEVEL / 2)) * self.se

    @property
    def is_clear(self) -> bool:
        """Whether the confidence interval excludes zero."""
        return self.outcome() in ("holds", "does not hold")

    @property
    def p(self) -> float:
        """Two-sided p-value of the hypothesis that there is no difference.

        NaN if the standard error is 0 or unknown.
        """
        if not self.se > 0:
            return NAN
        return float(2 * special.stdtr(self.degrees_of_freedom, -abs(self.mean) / self.se))

    def outcome(self, at_least: float = 0.0, at_most: float = math.inf) -> str:
        """Return the outcome of the claim that the difference is between two bounds.

        The claim holds if the confidence interval is between the bounds, and does not hold if it is
        below the lower or above the upper bound. Otherwise, the difference is within noise.
        """
        if math.isnan(self.mean):
            return "not measured"
        low, high = self.mean - self.margin, self.mean + self.margin
        if at_least < low and high < at_most:
            return "holds"
        return "does not hold" if high < at_least or at_most < low else "within noise"


def paired_difference(
    scores: pd.Series, baseline: pd.Series, samples: float | None = None, unit: float = 1.0
) -> Difference:
    """Compute `scores` minus `baseline`; both series are indexed by seed.

    Args:
        scores: Scores of the method, by seed.
        baseline: Scores of the other method, by seed.
        samples: Number of test samples, or None for scores that are not accuracies.
        unit: Value of the accuracy of a perfect model: 1, or 100 for percentages.
    """
    differences = (scores - baseline).dropna().sort_index().round(DIGITS)
    per_seed = {int(seed): float(value) for seed, value in differences.items()}
    count = len(per_seed)
    if count < 2:
        return Difference(n=count, samples=samples, per_seed=per_seed)
    mean = float(differences.mean())
    seed_error = float(differences.sem(ddof=1)) if differences.nunique() > 1 else 0.0
    floor = 0.0 if samples is None else unit * sample_error(mean / unit, samples)
    return Difference(mean, seed_error, count, floor, samples, per_seed)


def paired_ratio(scores: pd.Series, baseline: pd.Series) -> Difference:
    """Compute the mean of `scores` divided by the mean of `baseline`, over their shared seeds.

    The standard error of the ratio r is the error of `scores - r * baseline`, divided by the mean
    of `baseline` (Cochran, Sampling Techniques, 1977, Section 2.11).
    """
    shared = scores.dropna().index.intersection(baseline.dropna().index)
    mean = baseline[shared].mean()
    ratio = scores[shared].mean() / mean
    rest = paired_difference(scores[shared], ratio * baseline[shared])
    is_known = not math.isnan(rest.mean)
    return replace(rest, mean=ratio if is_known else NAN, seed_error=rest.seed_error / abs(mean))


def p_value(difference: Difference, test: str) -> float:
    """Return the two-sided p-value of the hypothesis that the differences are centered at 0.

    Returns NaN if the p-value cannot be computed. The t-test assumes a normal distribution, and
    includes the error due to test samples. The Wilcoxon signed-rank test assumes a symmetric
    distribution, and includes only the differences between seeds. With n seeds, its p-value is at
    least 2^(1-n), e.g. 0.25 for three seeds and 0.0625 for five seeds.
    """
    if test == "t":
        return difference.p
    values = [round(each, DIGITS) for each in difference.per_seed.values()]
    if test == "none" or len(values) < 2 or not any(values):
        return NAN
    from scipy import stats  # Import lazily, because scipy.stats takes about a second.

    return float(stats.wilcoxon(values).pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """Apply Holm's correction to p-values, to bound the family-wise error rate.

    Holm, A Simple Sequentially Rejective Multiple Test Procedure, 1979. The i-th smallest of m
    p-values is multiplied by m - i + 1, and is at least the previous corrected value. NaN is
    unchanged and not counted.
    """
    valid = sorted((value, index) for index, value in enumerate(values) if not math.isnan(value))
    corrected, largest = list(values), 0.0
    for rank, (value, index) in enumerate(valid):
        largest = max(largest, min(1.0, (len(valid) - rank) * value))
        corrected[index] = largest
    return corrected
