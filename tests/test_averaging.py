"""Weighted averages of models, against exact fractions."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.algorithms.weights import average_weights

FLOATS = ("float16", "float32", "float64")
SIGNED = ("int8", "int16", "int32", "int64")
UNSIGNED = ("uint8", "uint16", "uint32", "uint64")


def exact_mean(values, weights):
    total = sum(map(Fraction, weights))
    pairs = zip(values, weights, strict=True)
    return sum(Fraction(value) * Fraction(weight) for value, weight in pairs) / total


def exact_average(models):
    """Average element by element with fractions, without rounding."""
    weights = [weight for _, weight in models]
    result = {}
    for name, first in models[0][0].items():
        columns = [tensor[name].ravel().tolist() for tensor, _ in models]
        means = [exact_mean(values, weights) for values in zip(*columns, strict=True)]
        result[name] = (first.shape, means)
    return result


@st.composite
def some_models(draw):
    shapes = draw(
        st.dictionaries(
            st.sampled_from(["fc.weight", "fc.bias", "bn.mean", "deep/er"]),
            st.lists(st.integers(0, 3), max_size=3).map(tuple),
            min_size=1,
        )
    )
    rng = np.random.default_rng(draw(st.integers(0, 10_000)))
    count = draw(st.integers(1, 6))
    scale = draw(st.sampled_from([1e-3, 1.0, 1e4]))
    weights = draw(st.lists(st.integers(1, 5000), min_size=count, max_size=count))
    return [
        ({n: np.asarray(scale * rng.normal(size=s), np.float32) for n, s in shapes.items()}, weight)
        for weight in weights
    ]


@settings(max_examples=100, derandomize=True)
@given(some_models())
def test_average_is_exact_to_the_last_bit(models):
    result = average_weights(models)
    for name, (shape, means) in exact_average(models).items():
        assert result[name].shape == shape
        assert result[name].dtype == np.float32
        expected = np.array([float(mean) for mean in means])
        # float64 sums, rounded once: half a unit in the last place, and a little for the sums.
        largest = max([float(np.abs(m[name]).max(initial=0)) for m, _ in models])
        bound = np.spacing(np.abs(expected).astype(np.float32)) * 0.51 + 1e-14 * largest
        assert (np.abs(result[name].ravel() - expected) <= bound).all()
    assert list(result) == list(models[0][0])


def test_order_of_replies_does_not_change_the_average():
    rng = np.random.default_rng(0)
    replies = {
        f"client-{k}": ({"w": rng.normal(size=50).astype(np.float32)}, int(rng.integers(1, 99)))
        for k in range(4)
    }
    results = {
        average_weights([replies[name] for name in sorted(order)])["w"].tobytes()
        for order in itertools.permutations(replies)
    }
    assert len(results) == 1


@settings(max_examples=60, derandomize=True)
@given(some_models())
def test_copies_of_one_model_average_to_that_model(models):
    (first, _), *_ = models
    result = average_weights([(first, weight) for _, weight in models])
    for name, tensor in first.items():
        assert result[name].tobytes() == tensor.tobytes()


@settings(max_examples=60, derandomize=True)
@given(some_models())
def test_zero_weight_has_no_influence(models):
    silent = {name: np.full_like(tensor, 1e30) for name, tensor in models[0][0].items()}
    one, two = average_weights(models), average_weights([*models, (silent, 0)])
    assert all(one[name].tobytes() == two[name].tobytes() for name in one)


def extremes(dtype):
    if dtype == "bool":
        return np.array([True, False])
    if dtype in FLOATS:
        info = np.finfo(dtype)
        edge = [info.max, info.min, info.tiny, info.smallest_subnormal, info.eps, 0.1, 0.0]
        return np.array(edge, dtype)
    info = np.iinfo(dtype)
    return np.array([info.min, info.max, info.max - 1, 0, 1], dtype)


@pytest.mark.parametrize("dtype", ["bool", *FLOATS, *SIGNED, *UNSIGNED])
@pytest.mark.parametrize("weight", [1, 3, 0.1, 10**12])
def test_average_of_one_model_is_identical(dtype, weight):
    model = {"t": extremes(dtype), "scalar": extremes(dtype)[1], "empty": extremes(dtype)[:0]}
    model["scalar"] = np.asarray(model["scalar"])
    result = average_weights([(model, weight)])
    for name, tensor in model.items():
        assert result[name].dtype == tensor.dtype
        assert result[name].shape == tensor.shape
        assert result[name].tobytes() == tensor.tobytes()


@pytest.mark.parametrize("dtype", [*SIGNED, *UNSIGNED])
def test_counters_are_rounded(dtype):
    values, weights = [[10, 3, 0], [20, 4, 1], [60, 9, 0]], [1, 2, 4]
    result = average_weights(
        [({"n": np.array(v, dtype)}, w) for v, w in zip(values, weights, strict=True)]
    )["n"]
    # 290/7 = 41.43, 47/7 = 6.71, 2/7 = 0.29: neither all up nor all down.
    assert result.tolist() == [41, 7, 0]
    assert result.dtype == dtype


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.integers(-(2**40), 2**40), st.integers(1, 999)), min_size=1))
def test_average_of_counters_is_rounded_to_nearest(pairs):
    result = average_weights([({"n": np.array(value)}, weight) for value, weight in pairs])["n"]
    exact = exact_mean([v for v, _ in pairs], [w for _, w in pairs])
    assert abs(int(result) - exact) <= Fraction(1, 2) + Fraction(1, 100)


def test_float16_sums_do_not_overflow():
    big = {"w": np.full(3, 60000, np.float16)}
    assert average_weights([(big, 30000), (big, 40000)])["w"].tolist() == [60000] * 3
    one = {"w": np.full(3, 1.0, np.float16)}
    many = average_weights([(one, 1)] * 5000)["w"]
    assert many.tolist() == [1.0] * 3


def test_inputs_are_unchanged():
    models = [({"w": np.ones(2, np.float32)}, 1), ({"w": np.zeros(2, np.float32)}, 3)]
    for tensors, _ in models:
        tensors["w"].setflags(write=False)
    result = average_weights(models)["w"]
    assert result.tolist() == [0.25, 0.25]
    assert models[0][0]["w"].tolist() == [1, 1]
    alone = average_weights(models[:1])["w"]
    assert not np.shares_memory(alone, models[0][0]["w"])


@pytest.mark.parametrize("weights", [[], [0], [0, 0], [0.0], [-1], [3, -3]])
def test_total_weight_of_zero_raises(weights):
    with pytest.raises(ValueError, match="weight"):
        average_weights([({"w": np.ones(2)}, weight) for weight in weights])
