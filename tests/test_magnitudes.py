"""Replies out of all proportion to the others of their round."""

import sys
import warnings

import numpy as np
import pytest
from flwr.common import ndarrays_to_parameters
from hypothesis import given
from hypothesis import strategies as st

from fedhet.server.reply import ReplySpool, magnitudes_of, medians
from fedhet.server.steps import excesses, out_of_proportion
from fedhet.wire.contract import Contract, WeightsField
from fedhet.wire.knowledge import Envelope, Knowledge, encode

ENVELOPE = Envelope("run-1", "felo", 1, "a")


def reply(rng, scale=1.0):
    return Knowledge(
        {
            "features": (scale * rng.normal(size=(3, 4))).astype(np.float32),
            "weights/a": rng.normal(size=(2, 2)),
            "weights/b": np.float16(rng.normal(size=7)),
            "classes": np.array([1, 2, 10**6]),
            "empty": np.zeros((0, 3), np.float32),
        },
        {"loss": 1e300},
    )


def test_sizes_are_root_mean_squares_of_fields():
    rng = np.random.default_rng(0)
    said = reply(rng)
    flat = {name: value.astype(np.longdouble).ravel() for name, value in said.tensors.items()}
    model = np.concatenate([flat["weights/a"], flat["weights/b"]])
    found = magnitudes_of(said)
    assert found.keys() == {"features", "weights"}, "integers and scalars have their own bounds"
    assert found["features"] == pytest.approx(float(np.sqrt((flat["features"] ** 2).mean())))
    assert found["weights"] == pytest.approx(float(np.sqrt((model**2).mean())), rel=1e-3)


def test_the_largest_floats_are_larger_than_all_else():
    huge = Knowledge({"features": np.full((3, 4), 3e38, np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert magnitudes_of(huge)["features"] > 1e30


def test_a_payload_is_measured_as_it_will_be_read(tmp_path):
    said = reply(np.random.default_rng(1))
    payload = ndarrays_to_parameters(encode(ENVELOPE, said))
    spool = ReplySpool(tmp_path, 10**6, Contract((WeightsField("weights", "w"),)))
    assert spool.put("a", payload).magnitudes == magnitudes_of(said)
    payload.tensors[1] = b"garbage"
    assert spool.put("a", payload).magnitudes == {}


@pytest.mark.parametrize(
    ("sizes", "usual", "refused"),
    [
        ([1.0, 2.0, 3.0, 999.0], 0, ""),
        ([1.0, 2.0, 3.0, 2001.0], 0, "d"),
        ([1e38, 2.0, 3.0, 4.0], 0, "a"),
        ([float("inf"), 2.0, 3.0, 4.0], 0, "a"),
        ([1.0, 1e38], 0, "b"),  # of two, the one that does harm
        ([1e38], 0, ""),  # nothing to compare with
        ([1e38], 5, "a"),
        ([4000.0, 3000.0], 5, ""),  # the others' median grows too
        ([0.0, 0.0, 5.0], 0, ""),  # replies of zeros make nobody odd
        ([0.0, 0.0, 11.0], 0, "c"),
        ([1e38, 1e38, 1.0], 0, ""),  # a majority
        ([1e38, 1e38, 1.0, 1.0, 1.0], 0, "ab"),
    ],
)
def test_who_is_out_of_proportion(sizes, usual, refused):
    by_client = {name: {"features": size} for name, size in zip("abcde", sizes, strict=False)}
    found = out_of_proportion(by_client, {"features": float(usual)} if usual else {}, 1000.0)
    assert "".join(sorted(found)) == refused
    for name, error in found.items():
        assert (error.sender, error.field) == (name, "features")
        assert "'engine.outlier-factor' = 1000" in error.fault


@given(
    st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1.5]), min_size=1, max_size=9),
    st.floats(1, 50),
)
def test_each_is_compared_with_the_median_of_the_others(sizes, limit):
    by_client = {str(k): {"features": size} for k, size in enumerate(sizes)}
    wanted = {}
    for k, size in enumerate(sizes):
        others = np.delete(sizes, k)
        if len(others) and size > (most := limit * max(np.median(others), 0.01)):
            wanted[str(k)] = {"features": pytest.approx(size / most)}
    assert excesses(by_client, limit) == wanted
    assert out_of_proportion(by_client, {}, limit).keys() == wanted.keys()


def test_ten_thousand_replies_are_compared_in_a_moment():
    by_client = {str(k): {"features": 1.0 + k, "logits": 2.0} for k in range(10_000)}
    calls = 0

    def counted(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    try:
        assert not out_of_proportion(by_client, {}, 1000.0)
    finally:
        sys.setprofile(None)
    assert calls < 300_000  # some ten a field; the square would be 10^8


def test_each_field_is_compared_with_its_like():
    sizes = {
        "a": {"logits": 2000.0},
        "b": {"logits": 1900.0, "weights": 0.1},
        "c": {"weights": 2.0},
    }
    assert out_of_proportion(sizes, {}, 1000.0) == {}
    sizes["c"]["logits"] = 1e9
    assert out_of_proportion(sizes, {}, 1000.0).keys() == {"c"}


def test_the_usual_size_is_the_median_of_those_that_have_the_field():
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 7.0}, {"a": 100.0}]) == {"a": 3.0, "b": 7.0}
