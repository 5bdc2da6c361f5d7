"""The consensus of several models, distillation losses, and gradients, against slow versions."""

import numpy as np
import pytest

from fedhet.algorithms.consensus import (
    entropy_reduced,
    filter_weights,
    mean_scores,
    median_scores,
    trimmed_scores,
    weighted_scores,
)
from fedhet.base.errors import KnowledgeError
from fedhet.server.attacks import nearby_distributions
from fedhet.wire.contract import Contract, Sizes, TensorField


def soft(clients, samples, classes, seed=0, concentration=1.0):
    rng = np.random.default_rng(seed)
    return rng.dirichlet([concentration] * classes, (clients, samples)).astype(np.float32)


def alike(clients, samples, classes, spread=0.02):
    """Return soft labels that differ little between clients."""
    base, own = soft(1, samples, classes), soft(clients, samples, classes, 1)
    return ((1 - spread) * base + spread * own).astype(np.float32)


def test_simple_aggregation_is_the_mean_and_era_tends_to_uniform():
    """As T grows to infinity, ERA becomes uniform, with the first-order deviation of the mean."""
    replies = soft(5, 7, 4)
    mean = np.array([[np.mean([a[r, c] for a in replies]) for c in range(4)] for r in range(7)])
    np.testing.assert_allclose(mean_scores(replies), mean, rtol=1e-6)
    np.testing.assert_allclose(entropy_reduced(replies, 1e6), np.full((7, 4), 0.25), atol=1e-6)
    deviation = 4 * 50 * (entropy_reduced(replies, 50) - 0.25)
    np.testing.assert_allclose(deviation, mean - 0.25, atol=0.01)
    for temperature in (0.1, 1.0, 3.0):
        powers = np.exp(mean / temperature)
        slow = powers / powers.sum(1, keepdims=True)
        np.testing.assert_allclose(entropy_reduced(replies, temperature), slow, rtol=1e-4)


def test_filter_keeps_the_mean_of_agreeing_clients():
    replies = alike(10, 2000, 5)
    weights = filter_weights(replies, 0.1)
    assert (weights == 1).all()
    np.testing.assert_allclose(weighted_scores(replies, weights), mean_scores(replies), atol=1e-6)


def slow_filter(points, sigma):
    """Filter the K vectors of one sample with the explicit covariance."""
    weights = np.ones(len(points))
    while True:
        mean = (weights[:, None] * points).sum(0) / weights.sum()
        centered = points - mean
        values, vectors = np.linalg.eigh((weights[:, None] * centered).T @ centered / weights.sum())
        if values[-1] <= 9 * sigma**2:
            return weights
        distance = (centered @ vectors[:, -1]) ** 2
        lower = weights * (1 - distance / distance[weights > 0].max())
        if lower.sum() < len(points) / 2:
            return weights
        weights = np.where(weights > 0, lower, 0)


def test_filter_equals_its_algorithm():
    replies = soft(9, 60, 4, concentration=0.3)
    found = filter_weights(replies, 0.08)
    assert (found < 1).sum() > 0
    for row in range(60):
        expected = slow_filter(replies[:, row].astype(float), 0.08)
        np.testing.assert_allclose(found[:, row], expected, atol=1e-6)


@pytest.mark.parametrize("malicious", range(5))
def test_one_of_ten_clients_moves_the_filtered_mean_by_at_most_sigma(malicious):
    """If it is kept, it moves the mean by at most sigma. Otherwise, its weight is 0."""
    replies = alike(10, 300, 5)
    honest = replies[1:].mean(0)
    replies[0] = np.eye(5, dtype=np.float32)[malicious]
    estimate = weighted_scores(replies, filter_weights(replies, 0.1))
    assert np.linalg.norm(estimate - honest, axis=1).max() <= 0.105
    assert np.linalg.norm(mean_scores(replies) - honest, axis=1).max() > 0.105


def test_median_and_trimmed_mean_by_coordinate():
    replies = soft(7, 20, 4)
    median = np.median(replies, axis=0)
    np.testing.assert_allclose(
        median_scores(replies), median / median.sum(1, keepdims=True), rtol=1e-5
    )
    middle = np.sort(replies, axis=0)[2:5].mean(0)
    np.testing.assert_allclose(
        trimmed_scores(replies, 0.2), middle / middle.sum(1, keepdims=True), rtol=1e-5
    )
    discord = np.eye(3, dtype=np.float32)[:, None]
    np.testing.assert_allclose(median_scores(discord), np.full((1, 3), 1 / 3), rtol=1e-6)


def test_mean_is_used_without_a_majority():
    split = np.eye(2, dtype=np.float32)[[0, 0, 1, 1]][:, None]
    assert (filter_weights(split, 0.1) == 1).all()


@pytest.mark.parametrize(
    ("row", "fault"),
    [([0.5, 0.6], "1, got 1.1"), ([-0.1, 1.1], "from 0 to 1"), ([0.0, 0.0], "1, got 0")],
)
def test_invalid_distribution_raises(row, fault):
    field = TensorField("probabilities", "float32", ("Q", "C"), "soft", distribution=True)
    value = np.array([[0.25, 0.75], row], np.float32)
    with pytest.raises(KnowledgeError, match=fault):
        Contract((field,)).check("a", {"probabilities": value}, {}, Sizes({"Q": 2, "C": 2}))
    mended = nearby_distributions(value)
    Contract((field,)).check("a", {"probabilities": mended}, {}, Sizes({"Q": 2, "C": 2}))
