"""Tests of paired differences against their definitions, and Holm's correction."""

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from fedhet.base.errors import SettingsError
from fedhet.report import compare
from fedhet.report.differences import (
    effective_samples,
    holm,
    p_value,
    paired_difference,
    paired_ratio,
    sample_error,
    samples_text,
)


def of(differences, samples=None, unit=1.0):
    """Return the difference of a method whose scores exceed zero by `differences`."""
    scores = pd.Series(differences, dtype=float)
    return paired_difference(scores, 0 * scores, samples, unit)


def student(t, freedom):
    """Return the two-sided p-value of Student's t from its density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    inside, _ = integrate.quad(
        lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), -abs(t), abs(t)
    )
    return 1 - inside


@pytest.mark.parametrize("seed", range(5))
def test_t_test_uses_the_mean_over_its_standard_error(seed):
    differences = np.random.default_rng(seed).normal(0.5, 1, size=3 + seed)
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences)))
    expected = student(t, len(differences) - 1)
    assert p_value(of(differences), "t") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_wilcoxon_p_is_the_fraction_of_signs_as_extreme(seed):
    """Enumerate all signs of the ranks, which are equally likely if the center is 0."""
    differences = np.random.default_rng(seed).normal(0.5, 1, size=4 + seed)
    ranks = abs(differences).argsort().argsort() + 1
    middle = ranks.sum() / 2
    found = abs(ranks[differences > 0].sum() - middle)
    signs = itertools.product((0, 1), repeat=len(ranks))
    share = np.mean([abs(np.dot(sign, ranks) - middle) >= found for sign in signs])
    assert p_value(of(differences), "wilcoxon") == pytest.approx(share)


def test_three_seeds_are_too_few_for_wilcoxon():
    assert p_value(of([0.1, 0.2, 0.3]), "wilcoxon") == 0.25
    assert p_value(of([0.1, 0.2, 0.3, 0.4, 0.5]), "wilcoxon") == 0.0625


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
@pytest.mark.parametrize("differences", [[], [0.1], [0.0, 0.0, 0.0]])
def test_too_few_or_equal_differences_have_no_p_value(differences, test):
    assert math.isnan(p_value(of(differences), test))
    assert math.isnan(p_value(of([0.1, 0.2, 0.4]), "none"))
    assert math.isnan(p_value(of([0.1, 0.1, 0.1]), "t"))
    assert math.isnan(p_value(of([0.85 - 0.80, 0.75 - 0.70]), "t")), "equal but for rounding"


# The error due to test samples


@pytest.mark.parametrize("seed", range(5))
def test_without_test_samples_a_difference_has_the_paired_t_test(seed):
    rng = np.random.default_rng(seed)
    ours, theirs = rng.normal(0.6, 0.1, 3 + seed), rng.normal(0.5, 0.1, 3 + seed)
    oracle = stats.ttest_rel(ours, theirs)
    found = paired_difference(pd.Series(ours), pd.Series(theirs))
    assert found.p == pytest.approx(oracle.pvalue)
    low, high = oracle.confidence_interval(0.95)
    assert found.mean - found.margin == pytest.approx(low)
    assert found.mean + found.margin == pytest.approx(high)
    assert found.is_clear is bool(oracle.pvalue < 0.05)
    assert found.se == pytest.approx(stats.sem(ours - theirs))


def test_with_many_test_samples_the_t_test_is_the_limit():
    differences = [0.31, 0.28, 0.35]
    oracle = stats.ttest_1samp(differences, 0.0)
    assert of(differences, 1e9).p == pytest.approx(oracle.pvalue, rel=1e-4)


@pytest.mark.parametrize(("images", "clear"), [(0, False), (1, False), (4, False), (5, True)])
def test_equal_difference_in_every_seed_is_clear_from_five_test_images(images, clear):
    """The spread over the seeds is zero: one image of 359 was a claim that holds."""
    found = of([images / 359] * 3, 359)
    assert found.seed_error == 0
    assert found.se > 0
    assert found.is_clear is clear


@pytest.mark.parametrize(("only_first", "n"), [(0, 10), (1, 359), (7, 100), (40, 1000), (9, 9)])
def test_error_follows_from_the_fewest_discordant_samples(only_first, n):
    """Agresti and Min, from the table of counts [both, first only, second only, neither]."""
    counts = np.array([n - only_first, only_first, 0, 0]) + 0.5
    p = counts / counts.sum()
    value = np.array([0, 1, -1, 0])
    variance = (p @ value**2 - (p @ value) ** 2) / counts.sum()
    for sign in (1, -1):
        assert sample_error(sign * only_first / n, n) == pytest.approx(math.sqrt(variance))


def test_errors_add_with_welch_satterthwaite_degrees():
    differences, n = np.array([0.01, 0.03, 0.05]), 359
    found = of(differences, n)
    a, b = differences.var(ddof=1) / 3, sample_error(0.03, n) ** 2
    degrees = (a + b) ** 2 / (a**2 / 2 + b**2 / (n - 1))
    assert found.se == pytest.approx(math.sqrt(a + b))
    assert found.degrees_of_freedom == pytest.approx(degrees)
    assert found.margin == pytest.approx(stats.t.ppf(0.975, degrees) * math.sqrt(a + b))
    assert found.p == pytest.approx(2 * stats.t.sf(0.03 / math.sqrt(a + b), degrees))


def test_percentages_have_the_errors_of_fractions():
    fractions, percentages = of([0.01, 0.02, 0.04], 200), of([1, 2, 4], 200, unit=100)
    assert percentages.se == pytest.approx(100 * fractions.se)
    assert percentages.p == pytest.approx(fractions.p)


def test_three_seeds_need_more_than_four_standard_errors():
    """The mean is three standard errors from zero, which two standard errors counted as clear."""
    values = np.array([-1.0, 0.0, 1.0]) + 3 / math.sqrt(3)
    found = of(values)
    assert found.mean / found.se == pytest.approx(3)
    assert found.outcome() == "within noise"
    assert of(np.array([-1.0, 0.0, 1.0]) + 4.4 / math.sqrt(3)).outcome() == "holds"


@pytest.mark.parametrize(
    ("bounds", "outcome"),
    [
        ((0.0,), "holds"),
        ((0.08,), "holds"),
        ((0.1,), "within noise"),
        ((0.12,), "does not hold"),
        ((-math.inf, 0.12), "holds"),
        ((-math.inf, 0.1), "within noise"),
        ((-math.inf, 0.08), "does not hold"),
        ((0.08, 0.12), "holds"),
        ((0.08, 0.1), "within noise"),
        ((0.1, 0.12), "within noise"),
        ((0.0999, 0.1001), "within noise"),
        ((0.0, 0.08), "does not hold"),
        ((0.12, 0.2), "does not hold"),
    ],
)
def test_difference_is_compared_with_the_stated_bounds(bounds, outcome):
    assert of([0.1, 0.101, 0.099], 100_000).outcome(*bounds) == outcome


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("side", [0.999, 1.001])
def test_bound_at_the_end_of_the_interval_decides(sign, side):
    values = np.array([1.0, 3.0, 5.0])
    end = 3 + sign * side * stats.t.ppf(0.975, 2) * values.std(ddof=1) / math.sqrt(3)
    found = of(values)
    outside = "does not hold" if side > 1 else "within noise"
    inside = "holds" if side > 1 else "within noise"
    above, below = found.outcome(at_least=end), found.outcome(-math.inf, end)
    assert (above, below) == ((outside, inside) if sign > 0 else (inside, outside))


def test_equal_values_at_a_bound_are_within_noise():
    assert of([2.0, 2.0, 2.0]).outcome(at_least=2) == "within noise"
    assert of([2.0, 2.0, 2.0]).outcome(-math.inf, 2) == "within noise"


def test_ratio_of_means_has_the_error_of_a_ratio_estimator():
    """Leave-one-out (jackknife) estimates the same error from other sums."""
    rng = np.random.default_rng(0)
    baseline = rng.normal(50, 2, 40)
    scores = 0.4 * baseline + rng.normal(0, 0.5, 40)
    found = paired_ratio(pd.Series(scores), pd.Series(baseline))
    assert found.mean == pytest.approx(scores.mean() / baseline.mean())
    left = np.array(
        [np.delete(scores, k).mean() / np.delete(baseline, k).mean() for k in range(40)]
    )
    jackknife = math.sqrt(39 / 40 * ((left - left.mean()) ** 2).sum())
    assert found.se == pytest.approx(jackknife, rel=0.02)
    assert found.n == 40
    assert math.isnan(paired_ratio(pd.Series([1.0]), pd.Series([2.0])).mean)
    several = paired_ratio(pd.Series([1.0, 2.0, 9.0]), pd.Series({0: 2.0, 1: 4.0, 7: 1.0}))
    assert (several.mean, several.se, several.n) == (0.5, 0, 2), "of the shared seeds"


def test_clients_share_the_common_test_set_and_not_their_own_splits():
    assert effective_samples([359] * 10, "common") == pytest.approx(359)
    assert effective_samples([20, 20, 20], "personal") == pytest.approx(60)
    counts = [10, 90]  # The variance of the mean is (v / 10 + v / 90) / 4.
    assert effective_samples(counts, "personal") == pytest.approx(1 / ((1 / 10 + 1 / 90) / 4))
    assert effective_samples([], "common") is effective_samples([0, 3], "common") is None


def test_numbers_of_test_samples_are_named():
    assert samples_text([359.2, 359]) == "359 test samples"
    assert samples_text([1000, 114]) == "114 to 1,000 test samples"
    assert samples_text([1, None]) == "1 test sample, partly unknown"
    assert samples_text([None]) == "unknown number of test samples"
    assert samples_text([359.2, 114], "personal") == "114 to 359 effective test samples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "images", "noise"), [(3, 359, 0.02), (3, 114, 0.005), (5, 359, 0.01)]
)
def test_equal_methods_seldom_differ(seeds, images, noise):
    """Simulate equally accurate methods with seed noise; few images differ between seeds only.

    Two standard errors over the seeds report a difference in more than 15 % of the cases.
    """
    rng = np.random.default_rng(seeds)
    trials, clear, by_seeds = 4000, 0, 0
    for _ in range(trials):
        # Each image is correct with either method with its own probability, equal for both.
        likely = rng.beta(8, 0.5, images)
        drift = rng.normal(0, noise, (2, seeds, 1))
        correct = rng.random((2, seeds, images)) < np.clip(likely + drift, 0, 1)
        ours, theirs = (pd.Series(each) for each in correct.mean(-1))
        found = paired_difference(ours, theirs, images)
        clear += found.is_clear
        by_seeds += abs(found.mean) > 2 * found.seed_error
    assert clear / trials < 0.06
    assert by_seeds / trials > 0.1


def rejected_by_steps(values, level):
    """Holm's procedure: start with the smallest p-value, and stop at the first large one."""
    order = sorted((v, k) for k, v in enumerate(values) if not math.isnan(v))
    found = set()
    for step, (value, place) in enumerate(order):
        if value > level / (len(order) - step):
            break
        found.add(place)
    return found


@given(st.lists(st.floats(0, 1), max_size=8), st.floats(0.001, 0.5), st.integers(0, 3))
def test_corrected_p_is_below_a_level_if_holm_rejects_at_it(values, level, unknown):
    values = values + [math.nan] * unknown
    corrected = holm(values)
    at = rejected_by_steps(values, level * (1 + 1e-9))
    below = {place for place, value in enumerate(corrected) if value <= level}
    strictly = rejected_by_steps(values, level * (1 - 1e-9))
    assert strictly <= below <= at
    assert [math.isnan(v) for v in corrected] == [math.isnan(v) for v in values]


def test_unknown_test_raises():
    with pytest.raises(SettingsError, match=r"^--test: .*'z'"):
        compare([], test="z")
