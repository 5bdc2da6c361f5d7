"""Randomly damaged replies of every method are rejected in one line, or valid.

The ordinary run tries a few thousand; `make fuzz` tries a million (FEDHET_FUZZ).
"""

import contextlib
import io
import json
import math
import os
import random
import struct
import tracemalloc

import numpy as np
import pytest
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters

from fedhet._generated import knowledge_pb2 as wire
from fedhet.base.errors import KnowledgeError
from fedhet.methods.registry import find_method, shipped_names
from fedhet.runs.directory import record_line
from fedhet.runs.measures import relative, spread, summarize
from fedhet.runs.records import RoundRecord
from fedhet.server import codec as exchanges
from fedhet.server.codec import Codec, InstructionEncoder
from fedhet.server.round import RoundState
from fedhet.settings.engine import WireSettings
from fedhet.wire.contract import ScalarField, Sizes, TensorField, WeightsField
from fedhet.wire.encodings import Coder, Encoded, Float16, Int8, TopK
from fedhet.wire.factors import FactorsField
from fedhet.wire.identity import ClientInfo, read_properties
from fedhet.wire.knowledge import PLAIN, Envelope, Knowledge, Packing, digest_of, encode, join

METHODS = sorted(shipped_names())
TRIES = int(os.environ.get("FEDHET_FUZZ", "4200")) // len(METHODS)
AXES = {"C": 3, "D": 2, "N": 5, "Q": 4, "K": 4, "S": 2, "L": 4}
ENCODINGS = float(os.environ.get("FEDHET_FUZZ_ENCODED", "0.4"))
"""The share of the replies that are encoded."""
FREE = 2
"""The size of an axis that the message itself fixes."""
MODEL = {
    "fc.weight": ((3, 2), "float32"),
    "bn.running_var": ((2,), "float32"),
    "bn.num_batches_tracked": ((), "int64"),
}
FACTORS = {"fc.weight/left": ((3, 1), "float32"), "fc.weight/right": ((1, 2), "float32")}
"""The factors of its matrix: of rank 1, as those of rank 2 would be larger than the matrix."""
NUMBERS = (
    0, 1, -1, 2, 5e-324, -5e-324, 1e-12, 1e11, -1e11, 1e13, -1e13, 1e20, 3.4e38, -3.4e38, 1.797e308,
    2**31, 2**63 - 1, -(2**63), 2**64 - 1, math.nan, math.inf, -math.inf,
)  # fmt: skip
WORDS = ("", "server", "a", "b", "run-1", "weights/", "x" * 5000)
WORDS += ("\x1b[2J\nnote: all well", "\u202e")
ENCODED = {"float16": Float16(), "int8": Int8(), "top-k": TopK(0.5)}
TYPES = ("float32", "float64", "int64", "int32", "uint8", "bool", "float16", "uint64", "object")


def is_factored(field):
    return isinstance(field, FactorsField)


def sound(method, rng):
    """Return a message that satisfies the contract, and metrics of the method's kinds."""
    tensors, scalars = {}, {}
    for field in method.spec.replies.fields:
        if isinstance(field, WeightsField):
            for name, (shape, dtype) in MODEL.items():
                whole = (FREE, *shape) if field.stacked else shape
                tensors[f"{field.name}/{name}"] = np.full(whole, max(field.low or 0, 1), dtype)
            if is_factored(field):
                del tensors[f"{field.name}/fc.weight"]
                for name, (shape, dtype) in FACTORS.items():
                    tensors[f"{field.name}/{name}"] = np.ones(shape, dtype)
        elif isinstance(field, TensorField):
            shape = tuple(a if isinstance(a, int) else AXES.get(a, FREE) for a in field.axes)
            dtype = "uint8" if field.dtype == "uint" else field.dtype
            flat = np.arange(math.prod(shape)) if field.ids else np.ones(math.prod(shape))
            flat = flat / shape[-1] if field.distribution else flat
            tensors[field.name] = flat.reshape(shape).astype(dtype)
        else:
            scalars[field.name] = {bool: True, int: 1, float: 0.5, str: "a"}[field.type]
    metrics = {"seconds.train": 1.0, "seconds.evaluate": 0.5, "memory": 100.0, "loss": 1.5}
    for kind in method.spec.kinds:
        metrics[f"accuracy.common.{kind}"] = rng.random()
    return tensors, scalars, metrics


def number_of(rng):
    return rng.choice([*NUMBERS, rng.uniform(-2, 2), rng.randrange(-5, 300)])


def change_knowledge(tensors, scalars, rng):
    """Change a tensor or a scalar; the result is encoded correctly."""
    name = rng.choice([*tensors, *scalars] * 4 + ["extra", "weights/extra"])
    kind = rng.randrange(8)
    if name in scalars or (name == "extra" and kind < 3):
        odd = rng.choice([number_of(rng), rng.choice(WORDS), True, None])
        scalars[name] = odd if not isinstance(odd, int) or -(2**63) <= odd < 2**63 else 0
        if odd is None:
            del scalars[name]
    elif name in tensors and kind == 0:
        del tensors[name]
    elif name in tensors and kind < 7 and tensors[name].size:
        with np.errstate(all="ignore"):
            changed = tensors[name].copy()
            flat = changed.reshape(-1)
            odd = np.array([number_of(rng)], np.float64).astype(changed.dtype)
            odd = rng.choice([odd[0], odd[0], odd[0], flat[rng.randrange(len(flat))]])
            flat[rng.randrange(len(flat))] = odd
        tensors[name] = changed
    else:
        shape = tuple(rng.randrange(5) for _ in range(rng.randrange(4)))
        dtype = rng.choice(TYPES[:-1])
        if name in tensors and rng.random() < 0.5:
            shape = tensors[name].shape
        with np.errstate(all="ignore"):
            tensors[name] = np.full(shape, float(number_of(rng))).astype(dtype)


def change_bytes(parts, rng):
    """Damage the bytes of an array or the list of arrays, the first of which is the manifest."""
    at = rng.randrange(len(parts))
    data = bytearray(parts[at])
    place = rng.randrange(min(len(data), rng.choice([12, 140, 10**9])) or 1)
    match rng.randrange(9):
        case 0:
            data[place : place + 1] = bytes([rng.randrange(256)])
        case 1:
            del data[place:]
        case 2:
            data[place:place] = rng.choice([b"1,", b"(", b"0", b"\x00", b"9" * 30]) * rng.choice(
                [1, 3, 5000]
            )
        case 3:
            number = rng.choice(NUMBERS[4:15] + NUMBERS[-3:])
            packed = struct.pack("<d", number) if rng.random() < 0.5 else None
            data[-8:] = packed or struct.pack("<f", max(min(number, 3.4e38), -3.4e38)) * 2
        case 4:
            data += bytes(rng.randrange(20))
        case 5:
            parts.append(parts[rng.randrange(len(parts))])
        case 6:
            other = rng.randrange(len(parts))
            parts[at], parts[other] = parts[other], parts[at]
            return
        case 7:
            parts.pop()
            return
        case _:
            stream = io.BytesIO()
            np.save(stream, np.zeros(rng.randrange(4), rng.choice(TYPES)), allow_pickle=True)
            data = bytearray(stream.getvalue())
    parts[at] = bytes(data)


def change_manifest(parts, rng):
    """Change one entry of the manifest."""
    manifest = wire.Manifest()
    manifest.ParseFromString(np.load(io.BytesIO(parts[0])).tobytes())
    match rng.randrange(7):
        case 0:
            manifest.schema_version = rng.choice([0, 1, 2, 3, 2**32 - 1])
        case 1:
            setattr(manifest, rng.choice(["run", "method", "sender"]), rng.choice(WORDS))
        case 2:
            manifest.round = rng.choice([0, 2, 2**32 - 1])
        case 3 if manifest.tensors:
            rng.choice(manifest.tensors).name = rng.choice([*WORDS, manifest.tensors[0].name])
        case 4 if manifest.tensors:
            rng.choice(manifest.tensors).dtype = rng.choice([*TYPES, *WORDS])
        case 5 if manifest.tensors:
            rng.choice(manifest.tensors).shape.append(rng.choice([0, 1, 2**63, 2**64 - 1]))
        case _:
            manifest.scalars[rng.choice(WORDS)].SetInParent()
    head = np.frombuffer(manifest.SerializeToString(), np.uint8)
    parts[0] = ndarrays_to_parameters([head]).tensors[0]


def base_of(method):
    """Return the weights that the client received, on which its reply may build."""
    return {
        f"{field.name}/{name}": np.full(shape, 0.75, dtype)
        for field in method.spec.instructions.fields
        if isinstance(field, WeightsField) and not field.stacked
        for name, (shape, dtype) in MODEL.items()
    }


def packed(method, tensors, rng):
    """Encode some tensors of a message as values or as differences, regardless of their size."""
    base, found = base_of(method), {}
    for name, value in tensors.items():
        if value.dtype != np.float32 or rng.random() < 0.3:
            continue
        encoding = rng.choice(list(ENCODED))
        known = name in base and base[name].shape == value.shape and rng.random() < 0.8
        with np.errstate(all="ignore"):
            values = value - base[name] if known else value
            data = ENCODED[encoding].encode(values, np.random.default_rng(rng.randrange(99)))
        if data is not None:
            found[name] = Encoded(encoding, data, known, rng.random() < 0.1)
    return Packing(found, digest_of(base))


def change_encoding(parts, rng):
    """Change the declared encoding of a tensor, or its bytes."""
    manifest = wire.Manifest()
    manifest.ParseFromString(np.load(io.BytesIO(parts[0])).tobytes())
    at = rng.randrange(len(manifest.tensors))
    spec = manifest.tensors[at]
    match rng.randrange(9):
        case 0:
            spec.encoding = rng.choice([*ENCODED, *ENCODED, "", "zip", "x" * 5000])
        case 1:
            spec.difference = not spec.difference
        case 2:
            spec.rounded = not spec.rounded
        case 3:
            manifest.base = rng.choice([0, 1, 2**64 - 1])
        case 4:
            manifest.held = not manifest.held
        case 5:
            del spec.shape[rng.randrange(3) :]
            spec.shape.extend(
                rng.choices([0, 1, 2, 8, 10**5, 2**31, 2**62, 2**64 - 1], k=rng.randrange(10))
            )
        case 6:
            spec.dtype = rng.choice(TYPES)
        case 7:
            data = rng.choice(
                [b"", b"\xff" * rng.randrange(3000), rng.randbytes(rng.randrange(40))]
            )
            parts[at + 1] = ndarrays_to_parameters([np.frombuffer(data, np.uint8)]).tensors[0]
        case _:
            data = bytearray(parts[at + 1])
            number = rng.choice([0.0, -1.0, 1e-45, 1e9, 1e13, 3e38, math.nan, math.inf, -math.inf])
            data[128:132] = struct.pack("<f", number)
            parts[at + 1] = bytes(data)
    head = np.frombuffer(manifest.SerializeToString(), np.uint8)
    parts[0] = ndarrays_to_parameters([head]).tensors[0]


def change_metrics(metrics, rng):
    others = ["accuracy.common.server", "accuracy.personal.local", "error", "x"]
    name = rng.choice(
        [*metrics, *(name for name in metrics if "accuracy" in name), rng.choice(others)]
    )
    if rng.random() < 0.1:
        metrics.pop(name, None)
    elif rng.random() < 0.7:
        metrics[name] = number_of(rng)
    else:
        metrics[name] = rng.choice([rng.choice(WORDS), True, None, b"", [1], -5e-324, 5e-324])


def damaged(method, rng):
    """Return a reply that is damaged in up to three places."""
    tensors, scalars, metrics = sound(method, rng)
    parts, encoding = None, rng.random() < ENCODINGS
    weights = (5, 1, 2, 3, 6 * encoding)
    for step in sorted(rng.choices(range(5), weights, k=rng.choice([0, 1, 1, 1, 2, 3]))):
        if step == 0:
            change_knowledge(tensors, scalars, rng)
            continue
        packing = packed(method, tensors, rng) if encoding else PLAIN
        parts = parts or payload(method, tensors, scalars, packing)
        if step == 1 and parts:
            try:
                change_manifest(parts, rng)
            except Exception:  # it is damaged already
                change_bytes(parts, rng)
        elif step == 2 and parts:
            change_bytes(parts, rng)
        elif step == 4 and parts:
            with contextlib.suppress(Exception):  # it is damaged already
                change_encoding(parts, rng)
        else:
            change_metrics(metrics, rng)
    packing = packed(method, tensors, rng) if encoding else PLAIN
    return parts or payload(method, tensors, scalars, packing), metrics


def payload(method, tensors, scalars, packing):
    envelope = Envelope("run-1", method.name, 1, "a")
    message = encode(envelope, Knowledge(tensors, scalars), packing)
    return list(ndarrays_to_parameters(message).tensors)


# --- what may be accepted, written out once more ----------------------------------------------


def assert_allowed(method, parts, metrics, reply):
    """Check that an accepted message equals the received message and satisfies the contract."""
    manifest = wire.Manifest()
    arrays = [np.load(io.BytesIO(part), allow_pickle=False) for part in parts]
    manifest.ParseFromString(arrays[0].tobytes())
    signed = (manifest.run, manifest.method, manifest.round, manifest.sender)
    assert signed == ("run-1", method.name, 1, "a")
    base = base_of(method)
    expected = dict(base) if manifest.held else {}
    for spec, array in zip(manifest.tensors, arrays[1:], strict=True):
        assert spec.name not in expected
        expected[spec.name] = literal(spec, array, base) if spec.encoding else array
    assert list(reply.knowledge.tensors) == list(expected)
    assert manifest.schema_version == 2 or not (manifest.base or manifest.held)
    assert manifest.base in (0, digest_of(base))
    for name, array in expected.items():
        came = reply.knowledge.tensors[name]
        assert (came.dtype, came.shape) == (array.dtype, array.shape)
        assert came.tobytes() == array.tobytes()
    fields = {field.name: field for field in method.spec.replies.fields}
    bound: dict[str, int] = dict(AXES)
    for name, array in reply.knowledge.tensors.items():
        values = array.reshape(-1).tolist()
        assert all(-1e12 <= value <= 1e12 for value in values), name
        field = fields[name.partition("/")[0]]
        low = field.low
        if isinstance(field, WeightsField):
            key = name.partition("/")[2]
            shape, dtype = (MODEL | FACTORS)[key] if is_factored(field) else MODEL[key]
            assert array.dtype == dtype
            assert array.shape[1 if field.stacked else 0 :] == shape
            low = 0 if key.endswith("running_var") and not is_factored(field) else low
        else:
            assert array.dtype == ("uint8" if field.dtype == "uint" else field.dtype)
            assert array.ndim == len(field.axes)
            for axis, size in zip(field.axes, array.shape, strict=True):
                assert size == (axis if isinstance(axis, int) else bound.setdefault(axis, size))
            if letter := field.ids or field.numbers:
                assert all(0 <= value < bound[letter] for value in values)
            assert not field.ids or len(set(values)) == len(values)
            if field.distribution:
                assert array.min(initial=0) >= 0
                assert np.allclose(array.sum(-1, dtype=float), 1, atol=1.1e-3)
            assert all(other in reply.knowledge.tensors for other in field.needs)
        assert low is None or all(value >= low for value in values), name
    assert_whole(fields, reply.knowledge)
    assert_measures(method, metrics, reply)


def literal(spec, array, base):
    """Decode a tensor number by number."""
    shape, raw = tuple(spec.shape), array.tobytes()
    count, rows = math.prod(shape), shape[0] if len(shape) > 1 else 1
    assert (array.dtype, array.ndim, spec.dtype) == (np.uint8, 1, "float32")
    if spec.encoding == "float16":
        numbers = struct.unpack(f"<{count}e", raw)
    elif spec.encoding == "int8":
        scales = struct.unpack(f"<{rows}f", raw[: 4 * rows])
        assert all(0 <= scale <= 1e12 / 127 for scale in scales)
        whole = struct.unpack(f"{count}b", raw[4 * rows :])
        assert all(-127 <= each <= 127 for each in whole)
        numbers = [q * np.float32(scales[k * rows // count]) for k, q in enumerate(whole)]
    else:
        assert spec.encoding == "top-k"
        size = -(-count // 8)
        bits = "".join(f"{byte:08b}" for byte in raw[:size])
        assert "1" not in bits[count:]
        kept = iter(struct.unpack(f"<{bits.count('1')}e", raw[size:]))
        numbers = [next(kept) if bit == "1" else 0.0 for bit in bits[:count]]
    assert all(map(math.isfinite, numbers))
    value = np.array(numbers, np.float32).reshape(shape)
    if spec.difference:
        value = base[spec.name] + value
        value = value.astype(np.float16).astype(np.float32) if spec.rounded else value
    return value


def assert_whole(fields, knowledge):
    """Check that required fields exist, models are complete, and scalars are in range."""
    for name, field in fields.items():
        there = {key for key in knowledge.tensors if key.partition("/")[0] == name}
        if isinstance(field, WeightsField):
            wholes = [MODEL.keys()]
            if is_factored(field):
                wholes.append(MODEL.keys() - {"fc.weight"} | FACTORS.keys())
            found = {key.partition("/")[2] for key in there}
            assert found in wholes or not (there or field.required)
        elif isinstance(field, TensorField):
            assert there or not field.required
        else:
            assert isinstance(field, ScalarField)
            value = knowledge.scalars.get(name)
            if value is None:
                assert not field.required
                continue
            assert type(value) is field.type
            if field.type in (int, float):
                low = -1e12 if field.low is None else field.low
                assert low <= value <= (1e12 if field.high is None else field.high)
    assert knowledge.scalars.keys() <= fields.keys()


def assert_measures(method, metrics, reply):
    """Check that all values derived from the metrics are finite and JSON-serializable."""
    measured = reply.measured
    assert "error" not in metrics
    said = {".".join(place): value for place, value in measured.scores.items()}
    assert {kind for *_, kind in measured.scores} <= set(method.spec.kinds)
    assert said.items() <= metrics.items()
    assert metrics.keys() - said.keys() <= {"loss", "seconds.train", "seconds.evaluate", "memory"}
    assert all(value == 0 or 1e-12 <= value <= 1 for value in said.values())
    accuracy = {}
    for (_, protocol, kind), value in measured.scores.items():
        for name, each in (("a", value), ("b", 1.0)):
            accuracy.setdefault(protocol, {}).setdefault(kind, {})[name] = each
    record = RoundRecord(1, accuracy=summarize(accuracy), relative=relative(accuracy))
    losses = {} if measured.loss is None else {"a": measured.loss, "b": -measured.loss}
    record.loss = spread(losses) if losses else None
    record.seconds.train = measured.train_seconds + measured.evaluate_seconds
    assert "null" not in record_line(record)
    assert json.loads(record_line(record))["round"] == 1


# --- the run ----------------------------------------------------------------------------------


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.timeout(0)  # a million take half an hour
@pytest.mark.parametrize("name", METHODS)
def test_damaged_reply_is_dropped_or_satisfies_the_contract(name, traced, monkeypatch):
    # It turns any exception into a KnowledgeError, and here none but that may come.
    monkeypatch.setattr(exchanges, "from_outside", lambda sender: contextlib.nullcontext())
    method, rng = find_method(name), random.Random(f"replies of {name}")
    state = RoundState(1, print)
    state.start(1)
    coder = Coder.for_contract(WireSettings(encoding="int8"), method.spec.instructions, 0)
    exchange = Codec("run-1", method, 10**6, state, encoder=InstructionEncoder(coder))
    exchange.encode_all(1, {"a": Knowledge(base_of(method))})
    weights = [f.name for f in method.spec.replies.fields if isinstance(f, WeightsField)]
    sizes = Sizes(AXES, dict.fromkeys(weights, MODEL))
    client = ClientInfo("a", "mlp", 10, 3, "table", (4,))
    verdicts, encodings = {True: 0, False: 0}, set()
    for attempt in range(TRIES):
        parts, metrics = damaged(method, rng)
        parameters = Parameters(parts, "numpy.ndarray")
        if attempt % 2:  # as in a deployment
            parameters = join(parameters)
        result = FitRes(Status(Code.OK, ""), parameters, 1, metrics)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        reply = exchange.read(client, method.spec.kinds, result, 1)
        message, content = reply.error, reply.knowledge
        if not message:
            try:
                method.spec.replies.check("a", content.tensors, content.scalars, sizes)
            except KnowledgeError as error:
                message = error.reason
        taken = tracemalloc.get_traced_memory()[1] - before
        # A bit of a sparse tensor is four bytes when it is decoded, and one while it is read.
        assert taken < 64 * sum(map(len, parts)) + 200_000
        if message:
            verdicts[False] += 1
            assert message.isprintable()
        else:
            verdicts[True] += 1
            assert_allowed(method, parts, metrics, reply)
            encodings |= {each for each in ENCODED if each.encode() in parts[0]}
    if base_of(method) or any("logits" in field.name for field in method.spec.replies.fields):
        assert encodings == ENCODED.keys()
    assert min(verdicts.values()) > TRIES // 20, verdicts


def test_damaged_description_is_rejected_or_in_range():
    rng, verdicts, senders = random.Random("descriptions"), {True: 0, False: 0}, set()
    for _ in range(TRIES):
        info = ClientInfo("a", "mlp", 10, 3, "image", (1, 8, 8), "0123456789abcdef")
        properties = dict(info.properties())
        for _ in range(rng.randrange(3)):
            odd = [number_of(rng), *WORDS, True, None, "1," * 3, "9" * 6, "8,8", "cnn2", b"mlp"]
            properties[rng.choice([*properties, "error", "more"])] = rng.choice(odd)
        try:
            found = read_properties(properties, "node 1")
        except KnowledgeError as error:
            verdicts[False] += 1
            senders.add(error.sender)
            continue
        verdicts[True] += 1
        assert found.name.isascii()
        assert found.name != "server"
        assert 2 <= found.samples <= 10**9
        assert 2 <= found.classes <= 100_000
        assert 1 <= math.prod(found.shape) <= 2**28
    assert senders <= {"node 1", "a", "b", "run-1", "cnn2", "9" * 6}  # names, each allowed
    assert min(verdicts.values()) > TRIES // 20, verdicts
