"""The check of messages against their declaration, compared with plain loops."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedhet.base.errors import KnowledgeError
from fedhet.methods.felo import SPEC as FELO
from fedhet.wire.contract import (
    Contract,
    ScalarField,
    Sizes,
    TensorField,
    WeightsField,
    check_finite,
)

SENDER = "client-3"
DIMS = {"C": 4, "D": 2}
MODEL = {"fc.weight": ((4, 2), "float32"), "bn.count": ((), "int64")}

CONTRACT = Contract(
    (
        TensorField("classes", "int64", ("P",), "ids", ids="C"),
        TensorField("features", "float32", ("P", "D"), "means"),
        TensorField("counts", "int64", ("P",), "samples", required=False, low=1),
        TensorField("square", "float64", ("Q", "Q", 3), "square", required=False, low=-1.5),
        WeightsField("weights", "model", required=False),
        ScalarField("loss", float, "loss", low=0.0, high=10.0),
        ScalarField("steps", int, "steps", required=False, low=1, high=5),
        ScalarField("done", bool, "done", required=False),
        ScalarField("note", str, "note", required=False),
    )
)


def sound():
    """Return a valid message with every field."""
    tensors = {
        "classes": np.array([3, 0, 2]),
        "features": np.arange(6, dtype=np.float32).reshape(3, 2),
        "counts": np.array([1, 5, 2]),
        "square": np.full((2, 2, 3), -1.5),
        "weights/fc.weight": np.ones((4, 2), np.float32),
        "weights/bn.count": np.array(7),
    }
    return tensors, {"loss": 0.5, "steps": 5, "done": False, "note": ""}


def check(tensors, scalars, contract=CONTRACT, shapes=MODEL):
    contract.check(SENDER, tensors, scalars, Sizes(DIMS, {"weights": shapes}))


def refusal(field, tensors, scalars, **options):
    """Return the single line of the KnowledgeError, which names the sender and this field."""
    with pytest.raises(KnowledgeError) as caught:
        check(tensors, scalars, **options)
    assert (caught.value.sender, caught.value.field) == (SENDER, field)
    message = str(caught.value)
    assert message.startswith(f"{SENDER}: {field}: ")
    assert len(message.splitlines()) == 1
    return message


def changed(tensors=(), scalars=()):
    """Return a valid message with changed fields; None removes a field."""
    base_tensors, base_scalars = sound()
    for base, changes in ((base_tensors, tensors), (base_scalars, scalars)):
        for name, value in dict(changes).items():
            if value is None:
                del base[name]
            else:
                base[name] = value
    return base_tensors, base_scalars


def f32(*shape):
    return np.zeros(shape, np.float32)


# --- sound messages -------------------------------------------------------------------------


def test_valid_message_is_accepted():
    check(*sound())


@pytest.mark.parametrize(
    ("tensors", "scalars"),
    [
        ({"classes": np.array([0, 1, 3])}, {}),
        ({"counts": np.array([1, 1, 10**12])}, {}),
        ({}, {"loss": 0.0}),
        ({}, {"loss": 10.0}),
        ({}, {"steps": 1}),
        ({}, {"note": "ü\n" * 10}),
        ({"features": np.full((3, 2), np.float32(-9.9e11))}, {}),
        ({"weights/fc.weight": np.full((4, 2), np.float32(9.9e11))}, {}),
    ],
)
def test_values_at_the_edges_are_accepted(tensors, scalars):
    check(*changed(tensors, scalars))


def test_check_does_not_change_the_message_or_the_sizes():
    tensors, scalars = sound()
    dims = dict(DIMS)
    CONTRACT.check(SENDER, tensors, scalars, Sizes(dims, {"weights": MODEL}))
    assert dims == DIMS
    again, _ = sound()
    assert all(np.array_equal(tensors[name], again[name]) for name in again)
    # A free letter of one message does not bind the next.
    two = {"classes": np.array([1, 2]), "features": f32(2, 2), "counts": np.array([1, 1])}
    CONTRACT.check(SENDER, changed(two)[0], scalars, Sizes(dims, {"weights": MODEL}))


def test_empty_contract_accepts_only_an_empty_message():
    check({}, {}, contract=Contract())
    assert "expected no field" in refusal("x", {"x": f32(1)}, {}, contract=Contract())
    refusal("x", {}, {"x": 1}, contract=Contract())


# --- each fault by itself -------------------------------------------------------------------

TENSOR_FAULTS = {
    "missing": ("classes", None, ["missing"]),
    "int32 for int64": ("classes", np.array([0, 1, 2], np.int32), ["int32", "int64"]),
    "uint64 for int64": ("classes", np.array([0, 1, 2], np.uint64), ["uint64", "int64"]),
    "float64 for float32": ("features", np.zeros((3, 2)), ["float64", "float32"]),
    "bool for int64": ("counts", np.ones(3, bool), ["bool", "int64"]),
    "foreign byte order": ("features", np.zeros((3, 2), ">f4"), [">f4", "float32"]),
    "a structure": ("features", np.zeros(3, "f4,f4"), ["float32"]),
    "rank too low": ("features", f32(3), ["[3]", "float32 [P, D]"]),
    "rank too high": ("features", f32(3, 2, 1), ["[3, 2, 1]", "float32 [P, D]"]),
    "rank 0": ("classes", np.array(1), ["[]", "int64 [P]"]),
    "another D": ("features", f32(3, 5), ["[3, 5]", "D = 2"]),
    "D of none": ("features", f32(3, 0), ["[3, 0]", "D = 2"]),
    "another P": ("features", f32(2, 2), ["[2, 2]", "P = 3"]),
    "another P behind": ("counts", np.array([1, 1, 1, 1]), ["[4]", "P = 3"]),
    "a letter twice": ("square", np.zeros((2, 3, 3)), ["[2, 3, 3]", "Q = 2"]),
    "a fixed side": ("square", np.zeros((2, 2, 4)), ["[2, 2, 4]", "[Q, Q, 3]"]),
    "NaN": ("features", np.array([[0, 0], [0, np.nan], [0, 0]], np.float32), ["NaN"]),
    "infinity": ("features", np.array([[0, 0], [0, 0], [np.inf, 0]], np.float32), ["infinity"]),
    "minus infinity": ("square", np.full((1, 1, 3), -np.inf), ["infinity"]),
    "an id twice": ("classes", np.array([2, 0, 2]), ["2", "more than once"]),
    "an id of C": ("classes", np.array([0, 4, 1]), ["4", "0 to 3"]),
    "an id below 0": ("classes", np.array([0, -1, 1]), ["-1", "0 to 3"]),
    "a huge id": ("classes", np.array([0, 1, 2**63 - 1]), [str(2**63 - 1), "0 to 3"]),
    "a huge id below 0": ("classes", np.array([0, 1, -(2**63)]), [str(-(2**63)), "0 to 3"]),
    "below the least": ("counts", np.array([1, 0, 3]), ["0", "1"]),
    "a count that would overflow a sum": (
        "counts",
        np.array([1, 1, 10**12 + 1]),
        ["1000000000001", "1e+12"],
    ),
    "the largest of int64": ("counts", np.array([1, 1, 2**63 - 1]), [str(2**63 - 1), "1e+12"]),
    "the largest of float32": (
        "features",
        np.full((3, 2), np.finfo(np.float32).max),
        ["3.40", "1e+12"],
    ),
    "the least of float32": (
        "features",
        np.full((3, 2), np.finfo(np.float32).min),
        ["-3.40", "1e+12"],
    ),
    "a square's overflow": ("square", np.full((1, 1, 3), 1e200), ["1e+200", "1e+12"]),
    "just below the least": ("square", np.full((1, 1, 3), np.nextafter(-1.5, -2)), ["-1.5"]),
}


@pytest.mark.parametrize("case", TENSOR_FAULTS)
def test_invalid_tensor_raises(case):
    field, value, parts = TENSOR_FAULTS[case]
    message = refusal(field, *changed({field: value}))
    for part in parts:
        assert part in message


def test_message_for_a_fixed_axis():
    message = refusal("square", *changed({"square": np.zeros((2, 2, 4))}))
    assert "3 = 3" not in message


def test_ids_beyond_int64_are_shown_exactly():
    contract = Contract((TensorField("ids", "uint64", ("P",), "ids", ids="C"),))
    message = refusal("ids", {"ids": np.array([2**63], np.uint64)}, {}, contract=contract)
    assert f"got {2**63}" in message


def test_ids_may_number_an_axis_that_the_message_fixes():
    """`ids` is the letter of an axis. Before the message, only the letters of the run are known."""
    contract = Contract(
        (
            TensorField("rows", "float32", ("N", "D"), "rows"),
            TensorField("chosen", "int64", ("K",), "which of them", ids="N"),
        )
    )
    rows = f32(5, 2)
    check({"rows": rows, "chosen": np.array([4, 0])}, {}, contract=contract)
    refusal("chosen", {"rows": rows, "chosen": np.array([5])}, {}, contract=contract)


SCALAR_FAULTS = {
    "missing": ("loss", None, ["missing"]),
    "int for float": ("loss", 1, ["int", "float"]),
    "text for float": ("loss", "1.0", ["str", "float"]),
    "bool for float": ("loss", True, ["bool", "float"]),
    "NaN": ("loss", math.nan, ["nan", "finite"]),
    "infinity": ("loss", math.inf, ["inf", "finite"]),
    "above": ("loss", math.nextafter(10, 11), ["10"]),
    "below": ("loss", -5e-324, ["at least 0"]),
    "bool is not int": ("steps", True, ["bool", "int"]),
    "float for int": ("steps", 2.0, ["float", "int"]),
    "int above": ("steps", 6, ["6", "5"]),
    "int below": ("steps", 0, ["0", "1"]),
    "int is not bool": ("done", 1, ["int", "bool"]),
    "text is not bool": ("done", "false", ["str", "bool"]),
    "bytes are not text": ("note", b"x", ["bytes", "str"]),
    "int is not text": ("note", 3, ["int", "str"]),
}


@pytest.mark.parametrize("case", SCALAR_FAULTS)
def test_invalid_scalar_raises(case):
    field, value, parts = SCALAR_FAULTS[case]
    message = refusal(field, *changed(scalars={field: value}))
    for part in parts:
        assert part in message


def test_scalar_without_range_is_finite_and_bounded():
    contract = Contract((ScalarField("x", float, "x"), ScalarField("n", int, "n", required=False)))
    for value in (math.nan, math.inf, -math.inf, 1.7e308, -1.7e308, 1.1e12):
        refusal("x", {}, {"x": value}, contract=contract)
    for count in (2**63 - 1, -(2**63), 10**12 + 1):
        refusal("n", {}, {"x": 0.0, "n": count}, contract=contract)
    check({}, {"x": -1e12, "n": 10**12}, contract=contract)


@pytest.mark.parametrize("stacked", [False, True])
def test_variance_is_not_negative(stacked):
    """A batch norm takes the root of the variance, so a negative value makes all logits NaN."""
    contract = Contract((WeightsField("weights", "model", stacked="N" if stacked else ""),))
    shapes = {
        "bn.running_mean": ((2,), "float32"),
        "bn.running_var": ((2,), "float32"),
        "running_variety": ((2,), "float32"),
    }

    def sent(**changes):
        one = {name: np.float32([0, -1]) for name in shapes} | {
            "bn.running_var": np.float32([0, 1])
        }
        found = {f"weights/{name}": value for name, value in (one | changes).items()}
        return {name: np.stack([value] * 3) if stacked else value for name, value in found.items()}

    check(sent(), {}, contract=contract, shapes=shapes)
    for least in (-1e-30, -1.0, -1e30):
        bad = sent(**{"bn.running_var": np.float32([1, least])})
        message = refusal("weights/bn.running_var", bad, {}, contract=contract, shapes=shapes)
        assert "must be at least 0" in message


# --- names ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["features2", "", "class", "steps", "Classes", "/weights/x", "x/"])
def test_undeclared_tensor_raises(name):
    message = refusal(name, *changed({name: f32(1)}))
    assert "classes, counts, features, square, weights" in message


@pytest.mark.parametrize("name", ["los", "", "classes", "weights", "LOSS"])
def test_undeclared_scalar_raises(name):
    message = refusal(name, *changed(scalars={name: 1.0}))
    assert "done, loss, note, steps" in message


def test_nearest_name_is_offered():
    assert "'features'" in refusal("feature", *changed({"feature": f32(1)}))
    assert "'loss'" in refusal("los", *changed(scalars={"los": 1.0}))


@pytest.mark.parametrize("name", ["weights", "weights/", "weights//fc.weight", "weights2/x"])
def test_undeclared_weights_raise(name):
    refusal(name, *changed({name: f32(1)}))


# --- complete models --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["weights/fc.weight", "weights/bn.count"])
def test_partial_weights_raise(name):
    assert "missing" in refusal(name, *changed({name: None}))


@pytest.mark.parametrize("name", ["weights/fc.bias", "weights/a/b"])
def test_additional_weight_raises(name):
    refusal(name, *changed({name: f32(1)}))


@pytest.mark.parametrize(
    ("name", "value", "parts"),
    [
        ("weights/fc.weight", f32(2, 4), ["[2, 4]", "[4, 2]"]),
        ("weights/fc.weight", f32(8), ["[8]", "[4, 2]"]),
        ("weights/fc.weight", np.zeros((4, 2)), ["float64", "float32"]),
        ("weights/fc.weight", np.zeros((4, 2), np.float16), ["float16", "float32"]),
        ("weights/bn.count", np.array([7]), ["[1]", "[]"]),
        ("weights/bn.count", np.array(7, np.int32), ["int32", "int64"]),
        ("weights/fc.weight", np.full((4, 2), np.nan, np.float32), ["NaN"]),
        ("weights/fc.weight", np.full((4, 2), -np.inf, np.float32), ["infinity"]),
    ],
)
def test_weight_of_another_shape_or_type_raises(name, value, parts):
    message = refusal(name, *changed({name: value}))
    for part in parts:
        assert part in message


NO_WEIGHTS = {"weights/fc.weight": None, "weights/bn.count": None}


def test_missing_required_weights_raise():
    must = Contract(
        tuple(
            WeightsField("weights", "model") if field.name == "weights" else field
            for field in CONTRACT.fields
        )
    )
    check(*sound(), contract=must)
    with pytest.raises(KnowledgeError, match="missing") as caught:
        check(*changed(NO_WEIGHTS), contract=must)
    assert caught.value.field == "weights"


def test_weights_without_a_known_model_raise():
    with pytest.raises(KnowledgeError, match="tensor"):
        CONTRACT.check(SENDER, *sound(), Sizes(DIMS, {}))


def test_weights_of_another_model_raise():
    contract = Contract((WeightsField("a", "one"), WeightsField("ab", "other")))
    shapes = {"a": {"w": ((1,), "float32")}, "ab": {"w": ((2,), "float32")}}
    contract.check(SENDER, {"a/w": f32(1), "ab/w": f32(2)}, {}, Sizes({}, shapes))
    with pytest.raises(KnowledgeError) as caught:
        contract.check(SENDER, {"a/w": f32(1)}, {}, Sizes({}, shapes))
    assert caught.value.field == "ab"


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_finiteness_of_every_floating_type(dtype):
    check_finite(SENDER, "x", np.array([np.finfo(dtype).max, 0], dtype))
    check_finite(SENDER, "x", np.zeros((0, 3), dtype))
    for value in (np.nan, np.inf, -np.inf):
        with pytest.raises(KnowledgeError, match="x: contains NaN or infinity"):
            check_finite(SENDER, "x", np.array(value, dtype))


# --- fields that need each other ------------------------------------------------------------

PARTS = {"classes": np.array([1, 3]), "features": f32(2, 2), "logits": f32(2, 4)}


@pytest.mark.parametrize("present", [(), ("classes", "features", "logits")])
def test_all_or_none_of_felos_averages_are_accepted(present):
    check({name: PARTS[name] for name in present}, {}, contract=FELO.instructions)


@pytest.mark.parametrize(
    "present",
    [
        ("classes",),
        ("features",),
        ("logits",),
        ("classes", "features"),
        ("classes", "logits"),
        ("features", "logits"),
    ],
    ids="+".join,
)
def test_partial_averages_of_felo_raise(present):
    """Features without classes have no meaning, and classes without features cannot be read."""
    with pytest.raises(KnowledgeError):
        check({name: PARTS[name] for name in present}, {}, contract=FELO.instructions)


# --- against an oracle ----------------------------------------------------------------------


def oracle(tensors, scalars):
    """Return whether a message satisfies CONTRACT, by hand and in plain Python."""
    if set(scalars) - {"loss", "steps", "done", "note"}:
        return False
    weights = {name for name in tensors if name.startswith("weights/")}
    if set(tensors) - weights - {"classes", "features", "counts", "square"}:
        return False
    return (
        oracle_of_scalars(scalars)
        and oracle_of_weights(tensors, weights)
        and oracle_of_tensors(tensors)
    )


def oracle_of_scalars(scalars):
    loss, steps = scalars.get("loss"), scalars.get("steps", 1)
    return (
        type(loss) is float
        and 0 <= loss <= 10
        and type(steps) is int
        and steps in (1, 2, 3, 4, 5)
        and type(scalars.get("done", True)) is bool
        and type(scalars.get("note", "")) is str
    )


def oracle_of_weights(tensors, names):
    if not names:
        return True
    if names != {"weights/fc.weight", "weights/bn.count"}:
        return False
    weight, count = tensors["weights/fc.weight"], tensors["weights/bn.count"]
    return (
        (weight.dtype.str, weight.shape) == ("<f4", (4, 2))
        and (count.dtype.str, count.shape) == ("<i8", ())
        and all(-1e12 <= value <= 1e12 for value in weight.ravel().tolist())
        and -(10**12) <= count.item() <= 10**12
    )


def oracle_of_tensors(tensors):
    if "classes" not in tensors or "features" not in tensors:
        return False
    classes, features = tensors["classes"], tensors["features"]
    if (classes.dtype.str, features.dtype.str) != ("<i8", "<f4") or classes.ndim != 1:
        return False
    if features.shape != (len(classes), 2):
        return False
    ids = classes.tolist()
    if len(set(ids)) < len(ids) or any(label not in (0, 1, 2, 3) for label in ids):
        return False
    if not all(-1e12 <= x <= 1e12 for row in features.tolist() for x in row):
        return False
    counts = tensors.get("counts")
    if counts is not None:
        if counts.dtype.str != "<i8" or counts.shape != classes.shape:
            return False
        if any(count < 1 or count > 10**12 for count in counts.tolist()):
            return False
    square = tensors.get("square")
    if square is None:
        return True
    if square.dtype.str != "<f8" or square.ndim != 3:
        return False
    if square.shape[0] != square.shape[1] or square.shape[2] != 3:
        return False
    return all(-1.5 <= x <= 1e12 for x in square.ravel().tolist())


DTYPES = ("int64", "float32", "float64", "int32")
sides = st.integers(0, 4)
some_scalars = st.one_of(
    st.integers(-1, 6), st.floats(-1, 11), st.sampled_from([math.nan, math.inf]), st.booleans()
)


@st.composite
def some_tensors(draw):
    shape = tuple(draw(st.lists(sides, max_size=3)))
    values = draw(
        st.lists(
            st.one_of(st.integers(-2, 5), st.sampled_from([0.5, np.nan, np.inf])),
            min_size=int(np.prod(shape, dtype=int)),
            max_size=int(np.prod(shape, dtype=int)),
        )
    )
    dtype = draw(st.sampled_from(DTYPES))
    finite = [0 if dtype.startswith("int") and not math.isfinite(v) else v for v in values]
    return np.array(finite).astype(dtype).reshape(shape)


@st.composite
def near_sound(draw):
    """Return a valid message with a random number of entries, changed in up to two places."""
    rows = draw(st.integers(0, 4))
    tensors, scalars = sound()
    tensors["classes"] = np.array(draw(st.permutations(range(4)))[:rows], np.int64)
    tensors["features"] = f32(rows, 2)
    tensors["counts"] = np.ones(rows, np.int64)
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from([*tensors, "loss", "steps", "done", "note", "extra"]))
        kind = draw(st.sampled_from(["remove", "poke", "replace"]))
        if name in scalars or name == "extra":
            if kind == "remove":
                scalars.pop(name, None)
            else:
                scalars[name] = draw(some_scalars)
        elif name in tensors:
            if kind == "remove":
                del tensors[name]
            elif kind == "replace":
                tensors[name] = draw(some_tensors())
            elif tensors[name].size:
                value = draw(st.integers(-2, 5))
                poked = tensors[name].copy()
                poked.ravel()[draw(st.integers(0, poked.size - 1))] = value
                tensors[name] = poked.reshape(tensors[name].shape)
    return tensors, scalars


def accepted(message):
    try:
        check(*message)
    except KnowledgeError as error:
        return error.sender != SENDER
    return True


def test_check_equals_the_oracle():
    verdicts = {True: 0, False: 0}

    @settings(max_examples=600, derandomize=True)
    @given(near_sound())
    def agrees(message):
        expected = oracle(*message)
        verdicts[expected] += 1
        assert accepted(message) == expected

    agrees()
    assert min(verdicts.values()) > 100, "both kinds of message were tried"


def test_oracle_itself():
    assert oracle(*sound())
    for field, value, _ in TENSOR_FAULTS.values():
        assert not oracle(*changed({field: value})), field
    for field, value, _ in SCALAR_FAULTS.values():
        assert not oracle(*changed(scalars={field: value})), field


STACKED = Contract(
    (
        TensorField("numbers", "int64", ("N",), "which", required=False, low=0),
        WeightsField("models", "as many models", required=False, stacked="N"),
    )
)
SHAPES = {"models": {"w": ((2, 3), "float32"), "n": ((), "int64")}}


def stacked(count, others=None):
    return {
        "numbers": np.arange(count if others is None else others),
        "models/w": np.zeros((count, 2, 3), np.float32),
        "models/n": np.zeros(count, np.int64),
    }


@pytest.mark.parametrize("count", [0, 1, 4])
def test_several_models_are_sent_as_one_tensor(count):
    STACKED.check("a", stacked(count), {}, Sizes({}, SHAPES))
    assert STACKED.fields[1].describe() == "weights [N, ...]"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"numbers": np.arange(3)}, r"models/w: expected .*\[3, 2, 3\], got float32 \[2, 2, 3\]"),
        ({"models/n": np.zeros(5, np.int64)}, r"models/n: expected int64 \[2\], got int64 \[5\]"),
        ({"models/n": np.zeros((), np.int64)}, r"models/n: expected int64 \[2\], got int64 \[\]"),
        ({"models/w": np.zeros((2, 3, 2), np.float32)}, r"models/w: .*, got float32 \[2, 3, 2\]"),
        ({"models/w": np.full((2, 2, 3), np.nan, np.float32)}, "contains NaN"),
    ],
)
def test_number_of_stacked_tensors_equals_number_of_models(change, fault):
    with pytest.raises(KnowledgeError, match=fault):
        STACKED.check("a", {**stacked(2), **change}, {}, Sizes({}, SHAPES))
