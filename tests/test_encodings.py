"""Encodings of tensors: decoded values, errors, and rejected messages."""

import io
import math
import struct
import tracemalloc

import numpy as np
import pytest
from flwr.common import Parameters, ndarrays_to_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedhet._generated import knowledge_pb2 as wire
from fedhet.algorithms.weights import largest, rounded, scales_of
from fedhet.base.errors import KnowledgeError
from fedhet.settings.engine import WireSettings
from fedhet.wire.contract import Contract, ScalarField, TensorField, WeightsField
from fedhet.wire.encodings import Coder, Encoded, Float16, Int8, TopK, rules_of
from fedhet.wire.knowledge import (
    PLAIN,
    Envelope,
    Knowledge,
    MissingBaseError,
    Packing,
    decode,
    digest_of,
    encode,
    read_arrays,
)

PLENTY = 10**9
RNG = np.random.default_rng
shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=9)
numbers = st.floats(-(2.0**16) + 64, 2.0**16 - 64, width=32)
values = hnp.arrays(np.float32, shapes, elements=numbers)
CONTRACT = Contract(
    (
        WeightsField("weights", "a model"),
        WeightsField("scale", "deviations", required=False, low=1e-3),
        WeightsField("models", "several", required=False, stacked="N"),
        TensorField("logits", "float32", ("N", "C"), "logits", required=False),
        TensorField("shares", "float32", ("N", "C"), "p", required=False, distribution=True),
        TensorField("counts", "int64", ("N",), "numbers", required=False),
        ScalarField("eta", float, "a scalar", required=False),
    )
)


def rows_of(x):
    """Return the rows that share a scale: the outputs of a layer, or a vector as one row."""
    return x.reshape(x.shape[0], -1) if x.ndim > 1 else x.reshape(1, -1)


def coder(encoding="int8", seed=0, **own):
    return Coder(rules_of(WireSettings(encoding=encoding, **own)), CONTRACT, seed)


def model(seed=0, size=(40, 25)):
    rng = RNG(seed)
    return {
        "weights/fc.weight": rng.normal(size=size).astype(np.float32),
        "weights/fc.bias": rng.normal(size=size[0]).astype(np.float32),
        "weights/bn.running_mean": rng.normal(size=200).astype(np.float32),
        "weights/bn.running_var": rng.random(200).astype(np.float32),
        "weights/bn.num_batches_tracked": np.array(7),
    }


# --- what comes back, and how far it is off ----------------------------------------------------


@settings(max_examples=150, derandomize=True)
@given(values)
def test_half_precision_rounds_to_nearest(x):
    data = Float16().encode(x, RNG(0))
    assert data.nbytes == Float16().size(x.shape) == 2 * x.size
    back = Float16().decode(data, x.shape)
    assert (back.dtype, back.shape) == (np.float32, x.shape)
    for one, other in zip(x.reshape(-1).tolist(), back.reshape(-1).tolist(), strict=True):
        assert struct.pack("<e", one) == struct.pack("<e", other)
        assert abs(one - other) <= max(abs(one) * 2**-11, 2**-25)


@settings(max_examples=150, derandomize=True)
@given(values, st.integers(0, 2**32))
def test_int8_error_is_below_one_step_of_the_row(x, seed):
    data = Int8().encode(x, RNG(seed))
    rows = x.shape[0] if x.ndim > 1 else 1
    assert data.nbytes == Int8().size(x.shape) == 4 * rows + x.size
    back = Int8().decode(data, x.shape)
    assert (back.dtype, back.shape) == (np.float32, x.shape)
    if x.size:
        for row, found in zip(rows_of(x), rows_of(back), strict=True):
            unit = float(np.abs(row).max()) / 127
            assert np.abs(row.astype(float) - found).max() <= unit * (1 + 1e-5) + 1e-44
            assert not np.any(found[row == 0])


def test_int8_is_unbiased():
    x = np.array([[0.0, 0.3, -0.3, 1.27, -1.27, 0.011, 1e-4]], np.float32)
    rng, draws = RNG(3), 20_000
    total = np.zeros(x.shape)
    for _ in range(draws):
        total += Int8().decode(Int8().encode(x, rng), x.shape)
    # The standard error of a mean of draws that are one unit, 0.01, apart.
    assert np.abs(total / draws - x).max() < 4 * 0.5 * 0.01 / math.sqrt(draws)
    assert total[0, 3] == pytest.approx(1.27 * draws, rel=1e-5)  # the largest is exact


@settings(max_examples=100, derandomize=True)
@given(hnp.arrays(np.float32, (3, 7), elements=numbers), st.integers(0, 2**32))
def test_stochastic_rounding_selects_a_neighbor(x, seed):
    scales = scales_of(x)
    q = rounded(x, scales, RNG(seed)).astype(float)
    assert (np.abs(x.astype(float)) <= 127 * scales[:, None].astype(float)).all()
    for row, scale, found in zip(x.astype(float), scales.astype(float), q, strict=True):
        units = row / scale if scale else row * 0
        assert ((found >= np.floor(units - 1e-4)) & (found <= np.ceil(units + 1e-4))).all()


@settings(max_examples=150, derandomize=True)
@given(values, st.sampled_from([0.01, 0.05, 0.3, 0.5]))
def test_top_k_keeps_the_largest(x, keep):
    encoding = TopK(keep)
    data = encoding.encode(x, RNG(0))
    assert data.nbytes == encoding.size(x.shape)
    back = TopK().decode(data, x.shape).reshape(-1)
    flat = x.reshape(-1)
    count = min(len(flat), max(1, round(keep * len(flat))))
    # The literal definition: sort by size, of equal ones the first.
    order = sorted(range(len(flat)), key=lambda i: (-abs(float(flat[i])), i))[:count]
    expected = np.zeros(len(flat), np.float32)
    for place in order:
        expected[place] = np.float16(flat[place])
    assert back.tolist() == expected.tolist()


def test_top_k_prefers_the_first_of_equal_values():
    assert largest(np.array([1, -2, 2, 2, 0], np.float32), 2).tolist() == [0, 1, 1, 0, 0]


@settings(max_examples=50, derandomize=True)
@given(st.permutations(list(range(6))))
def test_encoding_does_not_depend_on_the_order_of_tensors(order):
    x = RNG(1).normal(size=(6, 50)).astype(np.float32)
    assert scales_of(x[order]).tolist() == scales_of(x)[order].tolist()
    for encoding in (Float16(),):
        back = encoding.decode(encoding.encode(x[order], RNG(0)), x.shape)
        assert np.array_equal(back, encoding.decode(encoding.encode(x, RNG(0)), x.shape)[order])
    names = [f"weights/{n}" for n in "abcdef"]
    tensors = dict(zip(names, x.reshape(6, 2, 25).repeat(6, 1), strict=True))
    base = {name: np.zeros_like(v) for name, v in tensors.items()}
    one, _ = coder().reply(("a", 1), tensors, base, {})
    turned = {names[i]: tensors[names[i]] for i in order}
    other, _ = coder().reply(("a", 1), turned, base, {})
    assert {n: e.data.tobytes() for n, e in one.items()} == {
        n: e.data.tobytes() for n, e in other.items()
    }


def test_draws_differ_by_seed_client_round_and_tensor():
    same = RNG(0).normal(size=(20, 30)).astype(np.float32)
    tensors = {"weights/a": same, "weights/b": same}
    base = {name: np.zeros_like(same) for name in tensors}
    found = set()
    for seed, place in [(0, ("a", 1)), (1, ("a", 1)), (0, ("b", 1)), (0, ("a", 2))]:
        encoded, _ = coder(seed=seed).reply(place, tensors, base, {})
        found |= {each.data.tobytes() for each in encoded.values()}
    assert len(found) == 8
    again, _ = coder().reply(("a", 1), tensors, base, {})
    assert again["weights/a"].data.tobytes() in found


# --- beyond an encoding's range ---------------------------------------------------------------


@pytest.mark.parametrize("odd", [65520.0, -1e6, math.inf, math.nan])
def test_half_precision_overflow_raises(odd):
    x = np.ones(300, np.float32)
    x[5] = odd
    assert Float16().encode(x, RNG(0)) is None
    assert TopK().encode(x, RNG(0)) is None
    tensors = {"weights/w": x}
    for encoding in ("float16", "int8", "top-k"):  # without a base: half precision
        assert coder(encoding).reply(("a", 1), tensors, {}, {}) == ({}, {})  # it travels whole


@pytest.mark.parametrize("odd", [2e12, math.inf, math.nan])
def test_int8_with_unsendable_values_raises(odd):
    x = np.ones((4, 100), np.float32)
    x[2, 5] = odd
    assert Int8().encode(x, RNG(0)) is None
    assert coder("int8").reply(("a", 1), {"logits": x}, {}, {}) == ({}, {})


def test_overflowing_difference_is_sent_uncompressed():
    big = np.full(300, 3e38, np.float32)
    for encoding in ("float16", "int8", "top-k"):
        encoded, left = coder(encoding).reply(("a", 1), {"weights/w": big}, {"weights/w": -big}, {})
        assert encoded == {}
        assert left == {}


# --- which tensors are encoded ----------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["float16", "int8", "top-k"])
def test_statistics_are_sent_uncompressed(encoding):
    rng = RNG(0)
    tensors = model() | {
        "scale/fc.weight": np.full((40, 25), 0.002, np.float32),
        "models/fc.weight": rng.normal(size=(2, 40, 25)).astype(np.float32),
        "logits": rng.normal(size=(50, 10)).astype(np.float32),
        "shares": np.full((50, 10), 0.1, np.float32),
        "counts": np.arange(500),
    }
    base = {name: value + value.dtype.type(1) for name, value in model().items()}
    encoded, _ = coder(encoding).reply(("a", 1), tensors, base, {})
    others = {"float16": "float16", "int8": "int8", "top-k": "int8"}[encoding]
    assert tensors["weights/bn.running_mean"].nbytes > 512
    assert {name: (e.encoding, e.difference) for name, e in encoded.items()} == {
        "weights/fc.weight": (encoding, True),
        "models/fc.weight": ("float16", False),
        "logits": (others, False),
    }


def test_tensor_missing_from_the_base_is_sent_uncompressed():
    tensors = model()
    base = {"weights/fc.weight": np.zeros((25, 40), np.float32)}
    encoded, _ = coder().reply(("a", 1), tensors, base, {})
    assert {e.encoding for e in encoded.values()} == {"float16"}
    assert not any(e.difference for e in encoded.values())


# --- error feedback ---------------------------------------------------------------------------


def test_error_feedback_recovers_the_sum():
    """Sent and remaining changes sum to all changes so far, compared with an independent sum."""
    rng, name = RNG(5), "weights/w"
    base = {name: np.zeros(400, np.float32)}
    unsent, sent, changes = {}, np.zeros(400), np.zeros(400)
    for round in range(1, 30):
        change = rng.normal(size=400).astype(np.float32)
        changes += change
        encoded, unsent = coder("top-k", keep=0.1).reply(("a", round), {name: change}, base, unsent)
        bits = np.unpackbits(encoded[name].data[:50]).astype(bool)
        came = encoded[name].data[50:].view("<f2").astype(float)
        assert bits.sum() == len(came) == 40
        sent[bits] += came
        np.testing.assert_allclose(sent + unsent[name], changes, atol=1e-4)
    assert np.abs(unsent[name]).max() < 15  # each number is sent in the end


def test_unbiased_encodings_have_no_residual():
    for encoding in ("float16", "int8"):
        base = {name: value * 0 for name, value in model().items()}
        _, left = coder(encoding).reply(("a", 1), model(), base, {"weights/fc.weight": base})
        assert left == {}


# --- the message ------------------------------------------------------------------------------

ENVELOPE = Envelope("run-1", "felo", 3, "a")


def sent(tensors, packing=PLAIN):
    return list(ndarrays_to_parameters(encode(ENVELOPE, Knowledge(tensors), packing)).tensors)


def came(parts, base=None, limit=PLENTY):
    bases = {digest_of(base): base} if base else {}
    arrays = read_arrays(Parameters(parts, "numpy.ndarray"), "a", limit)
    return decode(arrays, "a", lambda envelope, digest: bases.get(digest), limit)[1]


@pytest.mark.parametrize("encoding", ["float16", "int8", "top-k"])
def test_reply_is_decoded_as_base_plus_difference(encoding):
    tensors, base = model(1), model(2)
    encoded, left = coder(encoding).reply(("a", 3), tensors, base, {})
    found = came(sent(tensors, Packing(encoded, digest_of(base))), base).tensors
    assert list(found) == list(tensors)
    for name, value in tensors.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape)
        if name not in encoded:
            assert found[name].tobytes() == value.tobytes()
        elif encoding == "top-k":
            np.testing.assert_allclose(found[name] + left[name], value, atol=1e-5)
        else:
            unit = np.abs(value - base[name]).max() * (1 / 127 if encoding == "int8" else 2**-11)
            assert np.abs(found[name] - value).max() <= unit * 1.001


def test_message_without_encodings_is_unchanged():
    tensors = model()
    manifest = wire.Manifest(
        schema_version=1, run="run-1", method="felo", round=3, sender="a",
        tensors=[
            wire.TensorSpec(name=n, dtype=v.dtype.name, shape=v.shape) for n, v in tensors.items()
        ],
    )  # fmt: skip
    head = np.load(io.BytesIO(sent(tensors)[0]))
    assert head.tobytes() == manifest.SerializeToString(deterministic=True)


def test_held_weights_are_not_sent():
    base, rest = model(), {"logits": np.ones((2, 3), np.float32)}
    parts = sent(rest, Packing(base=digest_of(base), held=True))
    assert len(parts) == 2
    found = came(parts, base).tensors
    assert set(found) == {*base, "logits"}
    assert all(found[name] is value for name, value in base.items())


def test_missing_base_weights_raise():
    base = model()
    with pytest.raises(MissingBaseError, match=rf"^a: base: .*{digest_of(base)}"):
        came(sent({}, Packing(base=digest_of(base), held=True)))


def test_held_weights_without_a_base_raise():
    with pytest.raises(KnowledgeError, match=r"^a: held: "):
        came(sent({}, Packing(held=True)))


def test_digests_distinguish_weights():
    base = model()
    assert digest_of({}) == 0
    assert digest_of(base) == digest_of(dict(reversed(base.items()))) == digest_of(model())
    others = [
        base | {"weights/fc.bias": base["weights/fc.bias"] * np.float32(1.0000001)},
        base | {"weights/fc.weight": base["weights/fc.weight"].reshape(25, 40)},
        base | {"weights/fc.bias": base["weights/fc.bias"].view(np.int32)},
        {f"{name}x": value for name, value in base.items()},
        {name: value for name, value in base.items() if "bias" not in name},
    ]
    assert len({digest_of(each) for each in [base, *others]}) == 6
    assert all(0 < digest_of(each) < 10**18 for each in others)


# --- what is refused --------------------------------------------------------------------------


def altered(change, data=None, encoding="int8", shape=(4, 100), base=None, **spec):
    """Return a message with one encoded tensor, after `change` has modified its manifest."""
    x = np.ones(shape, np.float32)
    how = {"int8": Int8(), "float16": Float16(), "top-k": TopK()}[encoding]
    data = how.encode(x, RNG(0)) if data is None else data
    parts = sent({"w": x}, Packing({"w": Encoded(encoding, data)}))
    manifest = wire.Manifest()
    manifest.ParseFromString(np.load(io.BytesIO(parts[0])).tobytes())
    for name, value in spec.items():
        setattr(manifest.tensors[0], name, value)
    change(manifest)
    head = np.frombuffer(manifest.SerializeToString(), np.uint8)
    return [ndarrays_to_parameters([head]).tensors[0], *parts[1:]]


def as_it_is(manifest):
    pass


def int8_of(scales, numbers):
    return np.concatenate(
        [np.array(scales, "<f4").view(np.uint8), np.array(numbers, np.int8).view(np.uint8)]
    )


def bits_of(bits, count, values):
    return np.concatenate([np.array(bits, np.uint8), np.array(values, "<f2").view(np.uint8)])


def shaped(*shape):
    def change(manifest):
        del manifest.tensors[0].shape[:]
        manifest.tensors[0].shape.extend(shape)

    return change


def version(number):
    return lambda manifest: setattr(manifest, "schema_version", number)


REFUSED = {
    "a scale that is not a number": (
        altered(as_it_is, int8_of([math.nan] * 4, [1] * 400)), "w: int8: contains NaN or infinity"
    ),
    "an infinite scale": (
        altered(as_it_is, int8_of([math.inf] * 4, [1] * 400)), "w: int8: contains NaN or infinity"
    ),
    "a negative scale": (altered(as_it_is, int8_of([-1] * 4, [1] * 400)), "w: int8: scales must"),
    "a huge scale": (altered(as_it_is, int8_of([1e11] * 4, [1] * 400)), "w: int8: scales must"),
    "an integer out of range": (
        altered(as_it_is, int8_of([1] * 4, [-128] * 400)), "w: int8: integers must be from -127"
    ),
    "too few bytes": (
        altered(as_it_is, int8_of([1] * 4, [1] * 399)), "w: int8: expected 416 bytes"
    ),
    "a huge shape": (altered(shaped(10**6, 10**6)), "payload: must be at most "),
    "a shape beyond numbers": (altered(shaped(*[2**62] * 8)), "payload: must be at most "),
    "an empty shape beyond numpy": (altered(shaped(0, 2**62, 2**62)), "w: int8: "),
    "too many axes": (altered(shaped(*[1] * 9)), "w: int8 encodes float32 tensors of at"),
    "a sparse tensor of a huge shape": (
        altered(shaped(9 * 10**7), bits_of([255] * 50, 400, [1] * 400), "top-k", (400,)),
        "w: top-k: expected 11250000 bytes",
    ),
    "more bits than numbers": (
        altered(as_it_is, bits_of([255] * 50, 400, [1] * 399), "top-k", (400,)),
        "w: top-k: expected 850 bytes for this shape, got 848",
    ),
    "a bit beyond the last number": (
        altered(as_it_is, bits_of([0] * 49 + [1], 399, [1]), "top-k", (399,)),
        "w: top-k: padding bits of the mask",
    ),
    "a sparse infinity": (
        altered(as_it_is, bits_of([1] + [0] * 49, 400, [math.inf]), "top-k", (400,)),
        "w: top-k: contains NaN or infinity",
    ),
    "an infinite half": (
        altered(as_it_is, np.full(400, math.inf, "<f2").view(np.uint8), "float16"),
        "w: float16: contains NaN or infinity",
    ),
    "an encoding that does not exist": (
        altered(lambda m: setattr(m.tensors[0], "encoding", "zip")),
        "w: unsupported encoding 'zip', expected one of float16, int8, top-k",
    ),
    "a type that is not encoded": (
        altered(as_it_is, dtype="int64"), "w: int8 encodes float32 tensors"
    ),
    "a difference to nothing": (
        altered(as_it_is, difference=True), "w: no matching tensor in the base"
    ),
    "a difference without an encoding": (
        altered(lambda m: (setattr(m.tensors[0], "encoding", ""),
                           setattr(m.tensors[0], "difference", True))),
        "w: a difference must have an encoding",
    ),
    "an array that is not bytes": (
        altered(as_it_is, np.ones(416, np.int8)), "w: encoded data must be uint8 [bytes]"
    ),
    "an older version": (altered(version(1)), "schema_version: must be 2 for encoded"),
    "a newer version": (altered(version(3)), "schema_version: expected 1 to 2, got 3"),
    "a base that is not there": (
        altered(lambda m: setattr(m, "base", 77)), "base: weights with digest 77 not found"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_invalid_encoding_raises(name):
    parts, message = REFUSED[name]
    with pytest.raises(KnowledgeError) as caught:
        came(parts, limit=10**9)
    assert str(caught.value).startswith(f"a: {message}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    "name", ["a huge shape", "a shape beyond numbers", "a sparse tensor of a huge shape"]
)
def test_oversized_tensor_raises_before_allocation(name):
    parts, _ = REFUSED[name]
    tracemalloc.start()
    try:
        with pytest.raises(KnowledgeError):
            came(parts)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


def test_size_limit_applies_to_decoded_values():
    bits = np.zeros(12_500, np.uint8)
    parts = altered(as_it_is, bits_of(bits, 0, []), "top-k", (100_000,))
    assert came(parts).tensors["w"].tolist() == [0.0] * 100_000
    with pytest.raises(KnowledgeError, match=r"^a: payload: .*0\.1 MB.*0\.4 MB"):
        came(parts, limit=100_000)


def test_sum_beyond_half_precision_raises():
    base = {"w": np.full((4, 100), 65504, np.float32)}
    data = Int8().encode(np.full((4, 100), 127, np.float32), RNG(0))
    how = Encoded("int8", data, difference=True, rounded=True)
    with pytest.raises(KnowledgeError, match="w: "):
        came(sent(base, Packing({"w": how}, digest_of(base))), base)
