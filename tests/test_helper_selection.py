"""Algorithms 2 and 3 against a literal transcription, with random Corr matrices."""

from math import fsum

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.model_pool import bounded_cost, greedy_cost
from fedhet.algorithms.uncertainty import (
    Helper,
    filled,
    from_arrays,
    refreshable,
    refreshed,
    replaceable,
    replaced,
    to_arrays,
)


def ranks_lowest(member, members, corr, count):
    """Return whether `corr(member)` is among the `count` lowest; ties are broken by number."""
    lower = [j for j in members if (corr(j), j) < (corr(member), member)]
    return len(lower) < count


def update_helper(k, lists, held, server, corr, R):
    """Run Algorithm 2 line by line, and return the downloaded models."""
    up = []
    for j in lists[k]:
        c = lambda j: corr(k, j, held[k][j])  # noqa: E731
        if not ranks_lowest(j, lists[k], c, R) or j == k:
            up.append(j)
    downloads = []
    for j in up:
        if j != k and server[j] != held[k][j]:
            held[k][j] = server[j]
            downloads.append((j, server[j]))
    return downloads


def replace_helper(k, lists, held, server, corr, R, drawn):
    """Run Algorithm 3 line by line; `drawn` contains the random models of line 7."""
    c = lambda j: corr(k, j, held[k][j])  # noqa: E731
    re = [j for j in lists[k] if ranks_lowest(j, lists[k], c, R) and j != k]
    for r in drawn:
        assert r not in lists[k]
        held[k][r] = server[r]
        if not re:
            continue
        worst = re[0]
        for j in re:
            if (c(j), j) < (c(worst), worst):
                worst = j
        if c(r) > c(worst):
            re[re.index(worst)] = r
            lists[k][lists[k].index(worst)] = r


@settings(max_examples=25)
@given(
    seed=st.integers(0, 100_000),
    clients=st.integers(2, 12),
    size=st.integers(1, 6),
    replace=st.integers(0, 4),
    every=st.integers(1, 4),
    levels=st.sampled_from([3, 1000]),  # few: many equal relations
)
def test_lists_equal_the_algorithms(seed, clients, size, replace, every, levels):
    rng = np.random.default_rng(seed)
    rounds = 15
    matrix = rng.integers(0, levels, (clients, clients, rounds + 1)) / levels

    def corr(k, j, version):
        return float(matrix[k, j, version])

    server = dict.fromkeys(range(clients), 0)
    lists = {k: [k] for k in range(clients)}
    held = {k: {k: 0} for k in range(clients)}
    ours = {k: [Helper(k, 0, corr(k, k, 0))] for k in range(clients)}

    def helper(k, j):
        return Helper(j, server[j], corr(k, j, server[j]))

    for t in range(1, rounds):
        for k in range(clients):
            outside = [j for j in range(clients) if j not in lists[k]]
            drawn = [int(j) for j in rng.permutation(outside)[:replace]]
            replace_helper(k, lists, held, server, corr, replace, drawn)
            ours[k] = replaced(ours[k], [helper(k, j) for j in drawn], k, replace)
            if t % every == 0:
                sampled = {h.number: h.version for h in refreshable(ours[k], k, replace)}
                newer = {j: helper(k, j) for j in sampled if server[j] != sampled[j]}
                assert sorted(update_helper(k, lists, held, server, corr, replace)) == sorted(
                    (j, server[j]) for j in newer
                )
                ours[k] = refreshed(ours[k], newer)
        for k in rng.permutation(clients)[: max(1, clients // 3)].tolist():
            outside = [j for j in range(clients) if j not in lists[k]]
            more = [int(j) for j in rng.permutation(outside)[: max(0, size - len(lists[k]))]]
            for j in more:
                held[k][j] = server[j]
            lists[k] += more
            ours[k] = filled(ours[k], [helper(k, j) for j in more], size)
            server[k] = held[k][k] = t
            ours[k] = [h for h in ours[k] if h.number != k] + [helper(k, k)]
        for k in range(clients):
            expected = {(j, held[k][j], corr(k, j, held[k][j])) for j in lists[k]}
            assert {(h.number, h.version, h.relation) for h in ours[k]} == expected
            assert len(ours[k]) == len(expected) <= max(size, 1)
            assert [h.number for h in ours[k]].count(k) == 1


NUMBERS = st.lists(st.integers(0, 9), min_size=1, max_size=6, unique=True)
RELATION = st.floats(0, 1)


@given(st.data(), NUMBERS, st.integers(0, 5))
def test_searching_never_makes_a_list_worse(data, numbers, replace):
    helpers = [Helper(n, 1, data.draw(RELATION)) for n in numbers]
    candidates = [Helper(n, 2, data.draw(RELATION)) for n in data.draw(NUMBERS)]
    own = numbers[0]
    after = replaced(helpers, candidates, own, replace)
    assert len(after) == len(helpers)
    assert len({h.number for h in after}) == len(after)
    assert helpers[0] in after  # the client itself, as it is
    assert fsum(h.relation for h in after) >= fsum(h.relation for h in helpers)
    gone = [h for h in helpers if h not in after]
    assert len(gone) <= replace
    assert set(gone) <= set(replaceable(helpers, own, replace))
    assert replaced(after, candidates, own, 0) == after


def test_only_newer_versions_replace():
    helpers = [Helper(0, 3, 0.1), Helper(1, 3, 0.2)]
    newer = {0: Helper(0, 4, 0.5), 1: Helper(1, 2, 0.9), 7: Helper(7, 9, 0.9)}
    assert set(refreshed(helpers, newer)) == {Helper(0, 4, 0.5), Helper(1, 3, 0.2)}


@given(st.data(), NUMBERS)
def test_lists_are_sent_as_arrays(data, numbers):
    helpers = [Helper(n, n + 1, data.draw(RELATION)) for n in numbers]
    arrays = to_arrays(helpers)
    assert from_arrays(arrays) == helpers
    assert [str(a.dtype) for a in arrays.values()] == ["int64", "int64", "float64"]
    assert from_arrays(to_arrays([])) == []


def test_papers_costs():
    """Section VI-B: tau K n = 2000, F R = 60, n (M + tau nu) / nu = 120, by K |w|."""
    assert greedy_cost(100, 0.1, 200) == pytest.approx(100 * 2000)
    bound = bounded_cost(100, 0.1, 200, helpers=5, replace=2, search_rounds=30, refresh=10)
    assert bound == pytest.approx(100 * (60 + 120))
    assert 1 - bound / greedy_cost(100, 0.1, 200) > 0.9
