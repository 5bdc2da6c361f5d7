"""Tests of paired differences against their definitions, and Holm's correction."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate

from fedhet.base.errors import SettingsError
from fedhet.report import compare
from fedhet.report.comparison import holm, p_value


def student(t, freedom):
    """Return the two-sided p-value of Student's t from its density."""
    scale = math.gamma((freedom + 1) / 2) / (math.sqrt(freedom * math.pi) * math.gamma(freedom / 2))
    inside, _ = integrate.quad(
        lambda x: scale * (1 + x * x / freedom) ** (-(freedom + 1) / 2), -abs(t), abs(t)
    )
    return 1 - inside


@pytest.mark.parametrize("seed", range(5))
def test_the_t_test_is_that_of_the_mean_over_its_standard_error(seed):
    differences = np.random.default_rng(seed).normal(0.5, 1, size=3 + seed)
    t = differences.mean() / (differences.std(ddof=1) / math.sqrt(len(differences)))
    expected = student(t, len(differences) - 1)
    assert p_value(differences.tolist(), "t") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(5))
def test_wilcoxons_p_is_the_share_of_signs_as_extreme(seed):
    """Enumerate all signs of the ranks, which are equally likely if the center is 0."""
    differences = np.random.default_rng(seed).normal(0.5, 1, size=4 + seed)
    ranks = abs(differences).argsort().argsort() + 1
    middle = ranks.sum() / 2
    found = abs(ranks[differences > 0].sum() - middle)
    signs = itertools.product((0, 1), repeat=len(ranks))
    share = np.mean([abs(np.dot(sign, ranks) - middle) >= found for sign in signs])
    assert p_value(differences.tolist(), "wilcoxon") == pytest.approx(share)


def test_three_seeds_are_too_few_for_wilcoxon():
    assert p_value([0.1, 0.2, 0.3], "wilcoxon") == 0.25
    assert p_value([0.1, 0.2, 0.3, 0.4, 0.5], "wilcoxon") == 0.0625


@pytest.mark.parametrize("test", ["t", "wilcoxon"])
@pytest.mark.parametrize("differences", [[], [0.1], [0.0, 0.0, 0.0]])
def test_nothing_is_said_of_too_few_or_equal_ones(differences, test):
    assert math.isnan(p_value(differences, test))
    assert math.isnan(p_value([0.1, 0.2, 0.4], "none"))
    assert math.isnan(p_value([0.1, 0.1, 0.1], "t"))
    assert math.isnan(p_value([0.85 - 0.80, 0.75 - 0.70], "t")), "equal but for rounding"


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
def test_a_corrected_p_is_below_a_level_if_holm_rejects_at_it(values, level, unknown):
    values = values + [math.nan] * unknown
    corrected = holm(values)
    at = rejected_by_steps(values, level * (1 + 1e-9))
    below = {place for place, value in enumerate(corrected) if value <= level}
    strictly = rejected_by_steps(values, level * (1 - 1e-9))
    assert strictly <= below <= at
    assert [math.isnan(v) for v in corrected] == [math.isnan(v) for v in values]


def test_an_unknown_test_is_refused():
    with pytest.raises(SettingsError, match="--test: must be one of none, t, wilcoxon, got 'z'"):
        compare([], test="z")
