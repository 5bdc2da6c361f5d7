"""Robust averages against slow transcriptions, and the influence of a minority."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedhet.algorithms.robust import (
    complete_distances,
    filter_clients,
    geometric_weights,
    krum,
    max_malicious,
    mean_squares,
    relative_distances,
    trimmed_mean,
    typical_distance,
    weighted_mean,
)
from fedhet.settings.defense import RULES

EACH = list(RULES)
SHARE = 0.2


def averaged(points, kind, share=SHARE):
    """Return an average of points [K, D], computed as in the server's step."""
    squared = mean_squares(points) * points.shape[1]
    if kind in ("median", "trimmed-mean"):
        return trimmed_mean(points, 0.5 if kind == "median" else share)
    if kind == "geometric-median":
        return weighted_mean(points, geometric_weights(squared))
    kept = (krum if kind == "krum" else filter_clients)(squared, share)
    return points[kept].mean(0)


@st.composite
def some_points(draw):
    clients, width = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e4]))
    return scale * rng.normal(size=(clients, width)) + scale * rng.normal(size=width)


@settings(max_examples=60, derandomize=True)
@given(some_points(), st.sampled_from(EACH), st.integers(0, 1000))
def test_order_of_clients_does_not_matter(points, kind, seed):
    """Except for Krum with up to four clients.

    Each client then has a single neighbor, so two clients that are each other's neighbors have
    equal scores, and Krum resolves ties by order.
    """
    assume(kind != "krum" or len(points) > 4)
    order = np.random.default_rng(seed).permutation(len(points))
    one, other = averaged(points, kind), averaged(points[order], kind)
    np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6 * np.abs(points).max())


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 1000), st.sampled_from(EACH))
def test_rule_equals_the_mean_if_all_agree(clients, width, seed, kind):
    point = np.random.default_rng(seed).normal(size=width)
    same = np.tile(point, (clients, 1))
    np.testing.assert_allclose(averaged(same, kind), point, rtol=1e-12)
    squared = mean_squares(same)
    assert not squared.any(), "rounding errors are no differences"
    assert filter_clients(squared, SHARE).all()


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(3, 15),
    st.sampled_from(EACH),
    st.sampled_from([30.0, 1e3, 1e5]),
    st.integers(0, 1000),
    st.booleans(),
)
def test_tolerated_attackers_move_the_result_no_farther_than_honest_clients(
    clients, kind, far, seed, together
):
    """Krum requires 2 f + 2 < K; the distance is in standard deviations of honest replies."""
    rng, f = np.random.default_rng(seed), max_malicious(clients, SHARE)
    if kind == "krum" and clients < 2 * f + 3:
        return
    honest = rng.normal(size=(clients - f, 8))
    direction = rng.normal(size=(1 if together else f, 8))
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    points = np.concatenate([honest, np.broadcast_to(far * direction, (f, 8))])
    moved = np.linalg.norm(averaged(points, kind) - honest.mean(0))
    assert moved <= np.linalg.norm(honest - honest.mean(0), axis=1).max() * 1.5
    assert np.linalg.norm(points.mean(0) - honest.mean(0)) > 0.05 * far, "the mean is moved"


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 200), st.floats(0.01, 0.5))
def test_excluded_fraction_is_rounded_up_but_keeps_a_majority(clients, share):
    f = max_malicious(clients, share)
    assert f < clients / 2 or clients == f == 0
    assert f >= min(share * clients - 1e-6, math.ceil(clients / 2) - 1)
    assert f <= share * clients + 1
    assert max_malicious(5, 0.2) == 1
    assert max_malicious(10, 0.1) == 1
    assert max_malicious(30, 0.1) == 3


# --- each by its definition -----------------------------------------------------------------


@settings(max_examples=60, derandomize=True)
@given(some_points(), st.floats(0.05, 0.45), st.integers(0, 100), st.floats(0, 0.6))
def test_trimmed_mean_and_the_median_are_of_those_that_have_a_value(points, share, seed, gaps):
    """Yin et al., Definitions 1 and 2, coordinate by coordinate; NaN marks a missing value."""
    points = points.copy()
    points[np.random.default_rng(seed).random(points.shape) < gaps] = np.nan
    found, middle = trimmed_mean(points, share), trimmed_mean(points, 0.5)
    for d in range(points.shape[1]):
        known = sorted(v for v in points[:, d].tolist() if not math.isnan(v))
        if not known:
            assert math.isnan(found[d])
            continue
        cut = min(math.ceil(share * len(known) - 1e-9), (len(known) - 1) // 2)
        kept = known[cut : len(known) - cut]
        assert found[d] == pytest.approx(sum(kept) / len(kept), rel=1e-9, abs=1e-9)
        assert middle[d] == pytest.approx(float(np.median(known)), rel=1e-9, abs=1e-9)


@settings(max_examples=40, derandomize=True)
@given(some_points())
def test_geometric_median_has_the_least_sum_of_distances(points):
    """Neither a nearby point nor a client's reply has a smaller sum of distances."""
    squared = mean_squares(points) * points.shape[1]
    weights = geometric_weights(squared)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    median = weights @ points

    def total(at):
        return np.linalg.norm(points - at, axis=1).sum()

    rng, scale = np.random.default_rng(0), np.abs(points).max()
    near = [median + 0.01 * scale * rng.normal(size=median.shape) for _ in range(20)]
    assert total(median) <= min(map(total, [*near, *points])) * (1 + 1e-3) + 1e-12


@settings(max_examples=60, derandomize=True)
@given(some_points(), st.floats(0.05, 0.45))
def test_krum_keeps_clients_nearest_to_their_neighbors(points, share):
    """Blanchard et al.: scores use the K - f - 2 nearest replies.

    The K - f replies with the lowest scores are kept.
    """
    clients = len(points)
    f = min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)
    scores = []
    for i in range(clients):
        away = sorted(((points[i] - points[j]) ** 2).sum() for j in range(clients) if j != i)
        scores.append(sum(away[: max(clients - f - 2, 1)]))
    kept = krum(mean_squares(points) * points.shape[1], share)
    assert kept.sum() == clients - f
    if f > 0:
        most, least = max(np.array(scores)[kept]), min(np.array(scores)[~kept])
        assert most <= least * (1 + 1e-6)


def slow_filter(points, share):
    """Run Diakonikolas' filter with an explicit covariance until its top eigenvalue is normal."""
    clients = len(points)
    f = min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)
    pairs = sorted(((a - b) ** 2).sum() for a, b in itertools.combinations(points, 2))
    if not f:
        return np.ones(clients, bool)
    limit = pairs[math.comb(clients - f, 2) - 1] / 2
    weights = np.ones(clients)
    while True:
        mean = (weights[:, None] * points).sum(0) / weights.sum()
        centered = points - mean
        values, vectors = np.linalg.eigh((weights[:, None] * centered).T @ centered / weights.sum())
        along = np.where(weights > 0, (centered @ vectors[:, -1]) ** 2, 0)
        lower = weights * (1 - along / along.max())
        if values[-1] <= limit or (lower < 0.5).sum() > f:
            return weights >= 0.5
        weights = lower


@settings(max_examples=80, derandomize=True)
@given(some_points(), st.integers(0, 3), st.sampled_from([2.0, 6.0, 50.0]))
def test_filter_equals_its_algorithm(points, malicious, far):
    points = points.copy()
    points[:malicious] *= far
    squared = mean_squares(points) * points.shape[1]
    np.testing.assert_array_equal(filter_clients(squared, SHARE), slow_filter(points, SHARE))


@pytest.mark.parametrize("clients", [4, 5, 8, 10, 25])
def test_filter_keeps_equally_different_clients(clients):
    for seed in range(20):
        points = np.random.default_rng(seed).normal(size=(clients, 200))
        assert filter_clients(mean_squares(points), SHARE).all()


@settings(max_examples=40, derandomize=True)
@given(some_points(), st.integers(0, 100), st.floats(0, 0.7))
def test_differences_use_common_entries(points, seed, gaps):
    points = points.copy()
    points[np.random.default_rng(seed).random(points.shape) < gaps] = np.nan
    found = mean_squares(points)
    for i, j in itertools.product(range(len(points)), repeat=2):
        both = [
            (a - b) ** 2
            for a, b in zip(points[i], points[j], strict=True)
            if not math.isnan(a) and not math.isnan(b)
        ]
        if i == j or both:
            expected = 0.0 if i == j else sum(both) / len(both)
            assert found[i, j] == pytest.approx(expected, rel=1e-6, abs=1e-9 * np.nanmax(points**2))
        else:
            assert math.isnan(found[i, j])


def test_rounding_errors_are_no_differences():
    """Otherwise, an unchanged tensor would count as much as a trained tensor."""
    point = np.random.default_rng(0).normal(size=50)
    points = point + 1e-8 * np.random.default_rng(1).normal(size=(5, 50))
    assert not mean_squares(points).any()
    assert mean_squares(points + 1e-4 * np.arange(5)[:, None]).any()


def test_usual_distance_is_an_honest_one():
    """One of five clients may be malicious, so six of the ten pairs are honest."""
    points = np.array([[0.0], [1.0], [2.0], [4.0], [1000.0]])
    assert typical_distance(mean_squares(points), SHARE) == pytest.approx(16)
    assert math.isnan(typical_distance(np.full((3, 3), np.nan), SHARE))
    three = np.array([[0.0], [1.0], [1000.0]])
    assert typical_distance(mean_squares(three), SHARE) == pytest.approx(1)


def slow_relative(tensors, share):
    """Combine tensors [K, D] pair by pair; each is divided by its own honest distance."""
    clients = len(tensors[0])
    f = min(math.ceil(share * clients - 1e-9), (clients - 1) // 2)
    result = np.zeros((clients, clients))
    pairs = list(itertools.combinations(range(clients), 2))
    apart = [{(i, j): ((t[i] - t[j]) ** 2).mean() for i, j in pairs} for t in tensors]
    usual = [sorted(each.values())[math.comb(clients - f, 2) - 1] for each in apart]
    size = sum(t.shape[1] for t in tensors)
    for i, j in pairs:
        ratios = [each[i, j] / of for each, of in zip(apart, usual, strict=True)]
        widths = [t.shape[1] for t in tensors]
        mean = sum(r * n for r, n in zip(ratios, widths, strict=True)) / size
        alone = max(r / (2 + 8 / n**0.5) for r, n in zip(ratios, widths, strict=True))
        result[i, j] = result[j, i] = min(max(mean, alone), 100)
    return result


@settings(max_examples=60, derandomize=True)
@given(
    st.integers(3, 12), st.lists(st.integers(1, 400), min_size=1, max_size=4), st.integers(0, 999),
    st.sampled_from([0.0, 1.0, 7.0, 1e3]), st.sampled_from([0.1, 0.2, 0.3]),
)  # fmt: skip
def test_relative_distances_are_those_of_all_tensors_or_of_one(clients, widths, seed, far, share):
    rng = np.random.default_rng(seed)
    tensors = [10 ** rng.uniform(-3, 3) * rng.normal(size=(clients, n)) for n in widths]
    tensors[-1][0] += far * tensors[-1].std()
    found = relative_distances([(mean_squares(t), t.shape[1], 0.0) for t in tensors], share)
    np.testing.assert_allclose(found, slow_relative(tensors, share), rtol=1e-6, atol=1e-9)


def test_tensor_changed_by_one_client_has_maximal_distance():
    """Its typical distance is 0; in an unchanged tensor, all distances are 0."""
    frozen = np.ones((5, 3))
    frozen[2, 1] = 1.5
    moved, still = mean_squares(frozen), mean_squares(np.ones((5, 3)))
    trained = mean_squares(np.random.default_rng(0).normal(size=(5, 900)))
    found = relative_distances([(trained, 900, 0.0), (moved, 3, 0.0), (still, 3, 0.0)], SHARE)
    others = [0, 1, 3, 4]
    assert (found[2, others] == 100).all()
    assert found[np.ix_(others, others)].max() < 2
    bounded = relative_distances([(trained, 900, 0.0), (moved, 3, 1.0)], SHARE)
    assert bounded.max() < 2, "the typical distance is at least 1"


def test_unknown_distance_is_that_of_both_clients_to_others():
    n = np.nan
    squared = np.array(
        [
            [0, 1, 4, 2, n, n],
            [1, 0, 3, 1, n, n],
            [4, 3, 0, 9, n, n],
            [2, 1, 9, 0, 5, n],
            [n, n, n, 5, 0, n],
            [n, n, n, n, n, 0],
        ]
    )
    found = complete_distances(squared)
    medians = {0: 2, 1: 1, 2: 4, 3: 2, 4: 5}  # the lower of the two middle distances
    for i, j in itertools.permutations(range(6), 2):
        if not np.isnan(squared[i, j]):
            assert found[i, j] == squared[i, j]
        elif 5 in (i, j):
            assert np.isnan(found[i, j])
        else:
            assert found[i, j] == (medians[i] + medians[j]) / 2
    assert np.isnan(complete_distances(np.full((3, 3), n))).all()


def test_weighted_mean_is_of_those_that_have_a_value():
    points = np.array([[1.0, np.nan], [3.0, np.nan], [np.nan, np.nan]])
    found = weighted_mean(points, np.array([1.0, 3.0, 5.0]))
    assert found[0] == pytest.approx(2.5)
    assert math.isnan(found[1])
