"""Replies that are much larger than the other replies of their round."""

import sys
import warnings
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedhet.runs.measures import Measured
from fedhet.server.calls import CallOutcome
from fedhet.server.reply import Reply, ReplySpool, magnitudes_of, medians
from fedhet.server.steps import clip, magnitude_errors, magnitude_ratios
from fedhet.wire.contract import Contract, Sizes, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge

ENVELOPE = Envelope("run-1", "felo", 1, "a")


def reply(rng):
    return Knowledge(
        {
            "features": rng.normal(size=(3, 4)).astype(np.float32),
            "weights/a": rng.normal(size=(2, 2)),
            "weights/b": np.float16(rng.normal(size=7)),
            "weights/norm.running_mean": rng.normal(size=5),
            "weights/norm.running_var": 1000 * rng.uniform(size=5),
            "classes": np.array([1, 2, 10**6]),
            "empty": np.zeros((0, 3), np.float32),
        },
        {"loss": 1e300},
    )


def test_sizes_are_root_mean_squares_of_parts():
    rng = np.random.default_rng(0)
    said = reply(rng)
    flat = {name: value.astype(np.longdouble).ravel() for name, value in said.tensors.items()}
    model = np.concatenate([flat["weights/a"], flat["weights/b"]])
    recorded = np.concatenate([flat[f"weights/norm.running_{each}"] for each in ("mean", "var")])
    found = magnitudes_of(said)
    names = {"features", "weights", "statistics of weights"}
    assert found.keys() == names, "integers and scalars have their own bounds"
    assert found["statistics of weights"] == pytest.approx(float(np.sqrt((recorded**2).mean())))
    assert found["features"] == pytest.approx(float(np.sqrt((flat["features"] ** 2).mean())))
    assert found["weights"] == pytest.approx(float(np.sqrt((model**2).mean())), rel=1e-3)


def test_infinite_norms_are_outliers():
    huge = Knowledge({"features": np.full((3, 4), 3e38, np.float32)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert magnitudes_of(huge)["features"] > 1e30


def test_spooled_reply_is_measured_before_it_is_written(tmp_path):
    said = reply(np.random.default_rng(1))
    spool = ReplySpool(tmp_path, Contract((WeightsField("weights", "w"),)))
    spooled = spool.put(CallOutcome("a", 1, said))
    assert spooled.magnitudes == magnitudes_of(said) == magnitudes_of(spooled.knowledge)


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
def test_disproportionate_replies_are_found(sizes, usual, refused):
    by_client = {name: {"features": size} for name, size in zip("abcde", sizes, strict=False)}
    found = magnitude_errors(by_client, {"features": float(usual)} if usual else {}, 1000.0)
    assert "".join(sorted(found)) == refused
    for name, error in found.items():
        assert (error.sender, error.field) == (name, "features")
        assert "'engine.outlier-factor' = 1000" in error.fault


KINDS = Contract(
    (
        TensorField("features", "float32", ("R", "D"), "f"),
        TensorField("shares", "float32", ("R", "C"), "p", distribution=True),
        TensorField("counts", "float32", ("R",), "n", low=0.0),
        WeightsField("weights", "w"),
        WeightsField("nested", "w", nested=True),
    )
)


def replies_of(parts, models=None):
    """Return replies with the magnitudes `parts` {client: {part: size}}, and their sizes.

    `models` contains the shapes of the model by client and field.
    """
    replies = [
        Reply(ClientInfo(name, "mlp", 1, 10, "image", (1, 8, 8)), Knowledge(), Measured({}), known)
        for name, known in parts.items()
    ]
    return replies, lambda client: Sizes({}, (models or {}).get(client.name, {}))


@given(
    st.lists(st.floats(0, 1e6) | st.sampled_from([0.0, 1.0, 1.5]), min_size=1, max_size=9),
    st.floats(1, 50),
)
def test_replies_are_compared_with_the_median_of_other_clients(sizes, limit):
    by_client = {str(k): {"features": size} for k, size in enumerate(sizes)}
    wanted, odd = {}, set()
    for k, size in enumerate(sizes):
        others = np.delete(sizes, k)
        if len(others):
            wanted[str(k)] = {"features": pytest.approx(size / max(np.median(others), 0.01))}
            odd |= {str(k)} if size > limit * max(np.median(others), 0.01) else set()
    replies, sizes_of = replies_of(by_client)
    assert magnitude_ratios(replies, KINDS, sizes_of) == wanted
    assert magnitude_errors(by_client, {}, limit).keys() == odd


SMALL, LARGE = {"a": (2, 2)}, {"a": (2, 2), "b": (9,)}


def test_weights_are_compared_within_an_architecture():
    parts = {
        name: {"weights": size} for name, size in zip("abcde", [1, 1, 8, 50, 100], strict=True)
    }
    parts["d"]["statistics of weights"], parts["e"]["statistics of weights"] = 2.0, 1000.0
    models = {name: {"weights": SMALL if name in "abc" else LARGE} for name in "abcde"}
    found = magnitude_ratios(*order(replies_of(parts, models)))
    assert found["c"] == {"weights": 8.0}
    assert found["e"] == {"weights": 2.0, "statistics of weights": 500.0}, "not 100: of d alone"
    models["e"] = {"weights": {"a": (2, 3)}}
    found = magnitude_ratios(*order(replies_of(parts, models)))
    assert not {"d", "e"} & found.keys(), "nobody else has their architectures"


def order(replies_and_sizes):
    replies, sizes = replies_and_sizes
    return replies, KINDS, sizes


def test_parts_of_one_model_are_compared_across_shapes():
    parts = {"a": {"nested": 1.0}, "b": {"nested": 3.0}}
    models = {"a": {"nested": {"a": (2, 2)}}, "b": {"nested": {"a": (4, 4)}}}
    assert magnitude_ratios(*order(replies_of(parts, models)))["b"] == {"nested": 3.0}


def test_bounded_fields_are_never_outliers():
    parts = {"a": {"shares": 0.1, "counts": 1.0}, "b": {"shares": 0.9, "counts": 1e6}}
    assert magnitude_ratios(*order(replies_of(parts))) == {}


def test_features_may_differ_more_than_weights(tmp_path):
    """Features come from different architectures, so 2.5 times the factor is allowed."""
    tensors = {
        "features": np.full((2, 3), 20, np.float32),
        "weights/a": np.full((2, 2), 20.0),
        "weights/a.running_var": np.full(2, 20.0),
        "classes": np.array([1, 2]),
    }
    ones = {name: np.ones_like(value) for name, value in tensors.items()}
    client = partial(ClientInfo, model="mlp", samples=1, classes=10, kind="image", shape=(1, 8, 8))
    replies = [
        Reply(client(name), Knowledge(values), Measured({}))
        for name, values in {"a": ones, "b": ones, "c": tensors}.items()
    ]
    notices = []
    state = SimpleNamespace(notice=notices.append, record=SimpleNamespace(round=3))
    sizes = {"weights": {"a": (2, 2), "a.running_var": (2,)}}
    passed = list(
        clip(replies, limit=4.0, contract=KINDS, sizes=lambda c: Sizes({}, sizes), state=state)
    )
    assert passed[:2] == replies[:2]
    found = passed[2].knowledge.tensors
    assert {name: value.flat[0] for name, value in found.items()} == {
        "features": 10, "weights/a": 4, "weights/a.running_var": 4, "classes": 1
    }  # fmt: skip
    (notice,) = notices
    assert notice == (
        "client c's reply in round 3 is scaled down, because it exceeds the limit of "
        "'defense.clip-factor': features by 2, statistics of weights by 5, weights by 5"
    )


def test_ten_thousand_replies_are_compared():
    by_client = {str(k): {"features": 1.0 + k, "logits": 2.0} for k in range(10_000)}
    calls = 0

    def counted(frame, event, arg):
        nonlocal calls
        calls += event == "call"

    sys.setprofile(counted)
    try:
        assert not magnitude_errors(by_client, {}, 1000.0)
    finally:
        sys.setprofile(None)
    assert calls < 300_000  # some ten a field; the square would be 10^8


def test_fields_are_compared_separately():
    sizes = {
        "a": {"logits": 2000.0},
        "b": {"logits": 1900.0, "weights": 0.1},
        "c": {"weights": 2.0},
    }
    assert magnitude_errors(sizes, {}, 1000.0) == {}
    sizes["c"]["logits"] = 1e9
    assert magnitude_errors(sizes, {}, 1000.0).keys() == {"c"}


def test_usual_size_is_the_median_over_replies_with_the_field():
    assert medians([{"a": 1.0}, {"a": 3.0, "b": 7.0}, {"a": 100.0}]) == {"a": 3.0, "b": 7.0}
