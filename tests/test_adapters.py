"""Aggregation of adapters against stacking (FLoRA) and dense matrices, in NumPy and float64."""

import numpy as np
import pytest

from fedhet.algorithms.adapters import (
    level_average,
    padded_average,
    product_average,
    product_norm,
    singular_values,
    top_energy,
    truncated,
)
from fedhet.algorithms.weights import average_weights

P, Q = 24, 20
RANKS = (2, 4, 8)
SAMPLES = (30.0, 10.0, 60.0)


def factors(rank, seed, dtype=np.float64):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(P, rank)).astype(dtype), rng.normal(size=(rank, Q)).astype(dtype)


def clients(ranks=RANKS, dtype=np.float64):
    return [
        (factors(rank, seed, dtype), n)
        for seed, (rank, n) in enumerate(zip(ranks, SAMPLES[: len(ranks)], strict=True))
    ]


def before(rank, dtype=np.float64):
    return factors(rank, 99, dtype)


def stacked(parts):
    """FLoRA's oracle: [B_1 ... B_K] times [p_1 A_1; ...; p_K A_K]."""
    total = sum(n for _, n in parts)
    left = np.hstack([b for (b, _), _ in parts])
    return left @ np.vstack([n / total * a for (_, a), n in parts])


def averaged_products(parts):
    """Compute the sum of p_k B_k A_k, entry by entry."""
    total, found = sum(n for _, n in parts), np.zeros((P, Q))
    for (b, a), n in parts:
        for i in range(P):
            for j in range(Q):
                found[i, j] += n / total * sum(b[i, m] * a[m, j] for m in range(len(a)))
    return found


def best(matrix, rank):
    """Compute the truncated SVD of the dense matrix."""
    u, sigma, v = np.linalg.svd(matrix)
    return (u[:, :rank] * sigma[:rank]) @ v[:rank]


def averaged_factors(parts, rank, old):
    """Compute `average` level by level, with the factors of every method that pads with zeros."""
    total = sum(n for _, n in parts)
    b, a = np.zeros((P, rank)), np.zeros((rank, Q))
    for (own_b, own_a), n in parts:
        for m in range(len(own_a)):
            b[:, m] += n / total * own_b[:, m]
            a[m] += n / total * own_a[m]
    for m in range(max(len(own_a) for (_, own_a), _ in parts), rank):
        b[:, m], a[m] = old[0][:, m], old[1][m]
    return b, a


def padded(parts, old):
    rank = max(len(a) for (_, a), _ in parts)
    b = padded_average([(b, n) for (b, _), n in parts], old[0], 1, rank)
    return b, padded_average([(a, n) for (_, a), n in parts], old[1], 0, rank)


# 1. Stacking, and `svd` at full rank, equal the averaged products; averaged factors do not.


def test_stacking_and_svd_are_exact_but_averaging_factors_is_not():
    parts = clients()
    exact = averaged_products(parts)
    np.testing.assert_allclose(stacked(parts), exact, atol=1e-12)
    b, a = product_average(parts, before(sum(RANKS)))
    np.testing.assert_allclose(b @ a, exact, atol=1e-12)
    b, a = padded(parts, before(8))
    assert np.linalg.norm(b @ a - exact) / np.linalg.norm(exact) > 0.5


@pytest.mark.parametrize("rank", [8, 10, 16])
def test_padded_factors_are_the_averages_of_each_level(rank):
    for found, expected in zip(
        padded(clients(), before(rank)),
        averaged_factors(clients(), rank, before(rank)),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected, atol=1e-12)


# 2. The SVD through QR of the stacked factors equals the dense SVD.


@pytest.mark.parametrize("rank", [2, 8, 14, 18])
@pytest.mark.parametrize("rule", [product_average, level_average])
def test_svd_through_qr_equals_the_dense_svd(rank, rule):
    parts = clients()
    if rule is level_average:
        parts = [((b, a), n) for (b, a), n in parts if len(a) <= rank]
        ends = sorted({len(a) for (_, a), _ in parts} | {rank})
        matrix, start = np.zeros((P, Q)), 0
        for end in ends:  # Eq. 8, with the previous value for a level that no client has
            having = [(b, a, n) for (b, a), n in parts if len(a) >= end]
            for b, a, n in having:
                share = n / sum(m for *_, m in having)
                matrix += share * b[:, start:end] @ a[start:end]
            if not having:
                matrix += before(rank)[0][:, start:end] @ before(rank)[1][start:end]
            start = end
    else:
        matrix = averaged_products(parts)
    b, a = rule(parts, before(rank))
    np.testing.assert_allclose(b @ a, best(matrix, rank), atol=1e-11)
    found = min(rank, np.linalg.matrix_rank(matrix))
    np.testing.assert_allclose(a[:found] @ a[:found].T, np.eye(found), atol=1e-12)
    sizes = np.linalg.norm(b, axis=0)
    np.testing.assert_allclose(sizes, np.linalg.svd(matrix)[1][:rank], atol=1e-11)
    np.testing.assert_allclose(singular_values(b, a), sizes, atol=1e-11)
    for smaller in range(1, found):  # so each client's part is the best for its rank
        part = b[:, :smaller] @ a[:smaller]
        np.testing.assert_allclose(part, best(matrix, smaller), atol=1e-11)


def test_missing_direction_stays_trainable():
    """A keeps its previous row and B is zero in this direction, so a gradient reaches B."""
    old = before(8)
    b, a = product_average(clients((2,)), old)
    np.testing.assert_array_equal(b[:, 2:], 0)
    np.testing.assert_array_equal(a[2:], old[1][2:])


def test_signs_do_not_depend_on_the_order_of_clients():
    b, a = product_average(clients(), before(8))
    other_b, other_a = product_average(clients()[::-1], before(8))
    np.testing.assert_allclose(a, other_a, atol=1e-12)
    np.testing.assert_allclose(b, other_b, atol=1e-12)


# 3. `freeze-a` is exact for any ranks, because A is nested.


def test_average_of_padded_b_is_exact_with_one_nested_a():
    a = before(8)[1]
    parts = [((b, a[: b.shape[1]]), n) for (b, _), n in clients()]
    b = padded_average([(b, n) for (b, _), n in parts], before(8)[0], 1, 8)
    np.testing.assert_allclose(b @ a, stacked(parts), atol=1e-12)


# 4. Idle clients: what aggregation alone does to the spectrum.

IDLE = (2, 4, 8, 16, 32)


def idle_rounds(rule, rounds=10):
    """Simulate ten rounds in which clients return their adapters unchanged, each at its rank."""
    rng = np.random.default_rng(0)
    u, _ = np.linalg.qr(rng.normal(size=(48, 32)))
    v, _ = np.linalg.qr(rng.normal(size=(40, 32)))
    sigma = np.linspace(1.0, 0.5, 32)
    b, a = u * sigma, v.T
    spectra = [singular_values(b, a)]
    for _ in range(rounds):
        parts = [((b[:, :r].copy(), a[:r].copy()), 1.0) for r in IDLE]
        if rule == "average":
            b, a = (
                padded_average([(p[0], n) for p, n in parts], b, 1, 32),
                padded_average([(p[1], n) for p, n in parts], a, 0, 32),
            )
        else:
            b, a = rule(parts, (b, a))
        spectra.append(singular_values(b, a))
    return np.array(spectra), (b, a)


def fraction_with(level):
    """Return P_j, the fraction of the clients whose rank includes level j, counted from 1."""
    return sum(r >= level for r in IDLE) / len(IDLE)


@pytest.mark.parametrize(
    ("rule", "power"), [(product_average, 1), ("average", 2), (level_average, 0)]
)
def test_idle_rounds_shrink_the_levels_that_few_clients_have(rule, power):
    spectra, _ = idle_rounds(rule)
    factor = np.array([fraction_with(j) ** power for j in range(1, 33)])
    for number, spectrum in enumerate(spectra):
        expected = np.sort(spectra[0] * factor**number)[::-1]
        np.testing.assert_allclose(spectrum, expected, rtol=1e-9, atol=1e-12)


def test_svd_loses_levels_without_a_client_and_other_rules_keep_them():
    """Two idle clients of rank 2 reply in a round, and the server has rank 8."""
    old = truncated([before(8)], before(8))
    whole, parts = old[0] @ old[1], [((old[0][:, :2], old[1][:2]), n) for n in (1.0, 2.0)]
    b, a = product_average(parts, old)
    np.testing.assert_allclose(b @ a, best(whole, 2), atol=1e-11)
    for b, a in (level_average(parts, old), padded(parts, old)):
        np.testing.assert_allclose(b @ a, whole, atol=1e-11)


def test_ranks_collapse_under_svd_and_not_under_rank_partition():
    (first, *_, last), end = idle_rounds(product_average)
    share = [np.sum(s[:2] ** 2) / np.sum(s**2) for s in (first, last)]
    assert share[0] == pytest.approx(0.105, abs=0.001)
    assert share[1] == pytest.approx(0.989, abs=0.001)
    assert top_energy([end], 2) == pytest.approx(share[1], abs=1e-12)
    _, end = idle_rounds(level_average)
    assert top_energy([end], 2) == pytest.approx(share[0], abs=1e-9)


# 5. Equal ranks.


def test_at_equal_ranks_average_is_fedavg_and_rank_partition_is_svd_bitwise():
    parts, old = clients((4, 4, 4), np.float32), before(4, np.float32)
    plain = average_weights([({"b": b, "a": a}, n) for (b, a), n in parts])
    b, a = padded(parts, old)
    np.testing.assert_array_equal(b, plain["b"])
    np.testing.assert_array_equal(a, plain["a"])
    assert b.dtype == np.float32
    for one, other in zip(level_average(parts, old), product_average(parts, old), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == np.float32


def test_norm_of_products_equals_the_dense_norm():
    layers = [factors(4, 1), factors(4, 2)]
    expected = np.sqrt(sum(np.square(b @ a).sum() for b, a in layers))
    assert product_norm(layers) == pytest.approx(expected, rel=1e-12)
    assert product_norm([(np.zeros((P, 2)), np.zeros((2, Q)))]) == 0


def test_zero_products_are_factored():
    zeros = [((np.zeros((P, 4)), factors(4, 1)[1]), 1.0)] * 2
    b, a = product_average(zeros, before(8))
    assert not b.any()
    assert np.isfinite(a).all()
    assert np.linalg.matrix_rank(a) == 8
    assert top_energy([(b, a)], 2) == 1.0
    assert truncated([(np.zeros((P, 1)), np.zeros((1, Q)))], before(2))[0].shape == (P, 2)
