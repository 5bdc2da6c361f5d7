"""The message codec: every message is restored, and every error is named."""

import io
import os
import pickle
import struct
import tracemalloc

import numpy as np
import pytest
from flwr.common import Parameters, ndarrays_to_parameters
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedhet._generated import knowledge_pb2 as wire
from fedhet.base.arrays import grouped
from fedhet.base.errors import KnowledgeError
from fedhet.wire.identity import is_name
from fedhet.wire.knowledge import (
    DTYPES,
    JOINED,
    MAX_MANIFEST_BYTES,
    Envelope,
    Knowledge,
    decode,
    encode,
    expect,
    join,
    payload_bytes,
    read_arrays,
)

SENDER = "client-7"
ENVELOPE = Envelope("run-1", "felo", 3, SENDER)
PLENTY = 10**9


def send(knowledge, envelope=ENVELOPE):
    """Return the bytes that Flower sends: one .npy per array."""
    return list(ndarrays_to_parameters(encode(envelope, knowledge)).tensors)


def receive(payload, limit=PLENTY):
    return decode(read_arrays(Parameters(list(payload), "numpy.ndarray"), SENDER, limit), SENDER)


def refusal(call, field=None):
    """Return the single line of a KnowledgeError with the sender and, if given, this field."""
    with pytest.raises(KnowledgeError) as caught:
        call()
    assert caught.value.sender == SENDER
    assert field is None or caught.value.field == field
    message = str(caught.value)
    assert message.startswith(f"{SENDER}: {caught.value.field}: ")
    assert len(message.splitlines()) == 1
    return message


def saved(array, **options):
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npy(header, body=b"", version=(1, 0)):
    """Return an .npy with any header."""
    text = header.encode("latin1")
    size = struct.pack("<H" if version == (1, 0) else "<I", len(text))
    return b"\x93NUMPY" + bytes(version) + size + text + body


def npy_of(descr, shape, body=b"", fortran="False"):
    return npy(f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}\n", body)


def manifest(**changes):
    base = {"schema_version": 1, "run": "r", "method": "felo", "round": 1, "sender": SENDER}
    return wire.Manifest(**(base | changes))


def part_arrays(message, *tensors):
    return [np.frombuffer(message.SerializeToString(), np.uint8), *tensors]


def same_bits(left, right):
    return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())


# --- what is sent comes back ----------------------------------------------------------------

keys = st.text(max_size=30)
tensors = hnp.arrays(
    st.sampled_from(sorted(DTYPES)).map(np.dtype),
    hnp.array_shapes(min_dims=0, max_dims=5, min_side=0, max_side=3),
)
scalars = st.one_of(
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.sampled_from([-(2**63), 2**63 - 1, 0]),
    st.floats(),
    st.sampled_from([5e-324, -5e-324, -0.0, float("inf"), 1.7976931348623157e308]),
    st.text(),
)


@settings(max_examples=200, derandomize=True)
@given(st.dictionaries(keys, tensors, max_size=4), st.dictionaries(keys, scalars, max_size=4))
def test_round_trip_through_flower(sent_tensors, sent_scalars):
    envelope, knowledge = receive(send(Knowledge(sent_tensors, sent_scalars)))
    assert envelope == ENVELOPE
    assert list(knowledge.tensors) == list(sent_tensors)
    for name, tensor in sent_tensors.items():
        assert same_bits(knowledge.tensors[name], tensor)
    assert knowledge.scalars.keys() == sent_scalars.keys()
    for name, value in sent_scalars.items():
        came = knowledge.scalars[name]
        assert type(came) is type(value)
        if isinstance(value, float):
            assert struct.pack("d", came) == struct.pack("d", value) or came != came != value
        else:
            assert came == value


@settings(max_examples=200, derandomize=True)
@given(st.lists(tensors, min_size=1, max_size=5))
def test_joined_arrays_are_read_separately(arrays):
    parameters = ndarrays_to_parameters(arrays)
    joined = join(parameters)
    assert joined == Parameters([b"".join(parameters.tensors)], JOINED)
    came = read_arrays(joined, SENDER, payload_bytes(parameters))
    assert len(came) == len(arrays)
    for array, sent in zip(came, arrays, strict=True):
        assert same_bits(array, sent)
        assert array.flags.aligned


def test_empty_and_large_payloads_are_not_joined(monkeypatch):
    empty, two = Parameters([], "numpy.ndarray"), Parameters([b"a" * 6, b"b" * 5], "numpy.ndarray")
    assert join(empty) is empty
    monkeypatch.setattr("fedhet.wire.knowledge.MAX_JOINED_BYTES", 11)
    assert join(two).tensors == [b"aaaaaabbbbb"]
    monkeypatch.setattr("fedhet.wire.knowledge.MAX_JOINED_BYTES", 10)
    assert join(two) is two


@pytest.mark.parametrize("size", range(0, 340, 7))
def test_truncated_joined_payload_raises(size):
    """The second array begins at byte 136, and the payload ends at byte 340."""
    whole = join(ndarrays_to_parameters([np.arange(8, dtype=np.uint8), np.arange(76.0) > 3]))
    assert len(whole.tensors[0]) == 136 + 204
    cut = Parameters([whole.tensors[0][:size]], JOINED)
    if size == 0:
        assert read_arrays(cut, SENDER, PLENTY) == []
    else:
        position = int(size > 136)
        refusal(lambda: read_arrays(cut, SENDER, PLENTY), f"array {position}")


def test_number_of_joined_arrays_is_limited(monkeypatch):
    parameters = ndarrays_to_parameters([np.zeros(1, np.uint8)] * 4)
    joined = join(parameters)
    monkeypatch.setattr("fedhet.wire.knowledge.MAX_JOINED", 4)
    assert join(parameters) == joined
    assert len(read_arrays(joined, SENDER, PLENTY)) == 4
    monkeypatch.setattr("fedhet.wire.knowledge.MAX_JOINED", 3)
    assert join(parameters) is parameters
    assert "at most 3" in refusal(lambda: read_arrays(joined, SENDER, PLENTY), "payload")


def test_bytes_after_the_last_joined_array_raise():
    joined = join(ndarrays_to_parameters([np.arange(8, dtype=np.uint8)]))
    longer = Parameters([joined.tensors[0] + b"\0"], JOINED)
    refusal(lambda: read_arrays(longer, SENDER, PLENTY), "array 1")


def test_round_trip_in_any_memory_order():
    base = np.arange(24, dtype=np.float32).reshape(4, 6)
    views = {
        "fortran": np.asfortranarray(base),
        "transposed": base.T,
        "strided": base[::2, ::-3],
        "broadcast": np.broadcast_to(np.float32(3), (2, 2)),
        "fortran-empty": np.zeros((3, 0), np.int16, order="F"),
        "rank 8": np.zeros((1, 2, 1, 2, 1, 2, 1, 2), np.int8),
    }
    _, knowledge = receive(send(Knowledge(views)))
    for name, view in views.items():
        came = knowledge.tensors[name]
        assert (came.shape, came.dtype) == (view.shape, view.dtype)
        assert came.tolist() == view.tolist()


@settings(max_examples=50, derandomize=True)
@given(st.text(), st.text(), st.integers(0, 2**32 - 1), st.text())
def test_round_trip_of_the_envelope(run, method, round, sender):
    sent = Envelope(run, method, round, sender)
    assert receive(send(Knowledge(), sent))[0] == sent


def test_group_inverts_grouped():
    weights = {"conv.weight": np.ones(2), "a/b": np.ones(1)}
    others = {"weightsx/y": np.ones(1), "weights": np.ones(1)}
    knowledge = Knowledge(grouped("weights", weights) | others)
    assert knowledge.group("weights") == weights
    assert set(knowledge.tensors) == {"weights/conv.weight", "weights/a/b", *others}


def test_manifest_is_the_documented_message():
    head, tensor = encode(ENVELOPE, Knowledge({"t": np.zeros((2, 3), np.int8)}, {"x": 1.5}))
    assert (head.dtype, head.ndim) == (np.uint8, 1)
    read = wire.Manifest.FromString(head.tobytes())
    said = (read.schema_version, read.run, read.method, read.round, read.sender)
    assert said == (1, "run-1", "felo", 3, SENDER)
    assert [(s.name, s.dtype, list(s.shape)) for s in read.tensors] == [("t", "int8", [2, 3])]
    assert read.scalars["x"].real == 1.5
    assert tensor.shape == (2, 3)


# --- what cannot be sent --------------------------------------------------------------------

TOO_MUCH = [2**63, -(2**63) - 1, 10**30, None, b"bytes", "\ud800", [1], np.int64(3)]


@pytest.mark.parametrize("value", TOO_MUCH, ids=[repr(v)[:30] for v in TOO_MUCH])
def test_unsupported_scalar_raises(value):
    refusal(lambda: encode(ENVELOPE, Knowledge({}, {"much": value})), "much")


@pytest.mark.parametrize("dtype", ["complex64", "U4", "S3", "M8[s]", "m8[ns]", "O", "f4,i2"])
def test_unsupported_dtype_raises(dtype):
    refusal(lambda: encode(ENVELOPE, Knowledge({"odd": np.zeros(2, dtype)})), "odd")


@pytest.mark.parametrize(
    "tensor", [np.zeros((1,) * 9), np.ones(2, ">f4")], ids=["rank 9", "foreign byte order"]
)
def test_encoded_message_decodes(tensor):
    """The reader rejects these values unchanged, so the sender rejects or converts them."""
    try:
        payload = send(Knowledge({"t": tensor}))
    except KnowledgeError as error:
        refused = error
    else:
        came = receive(payload)[1].tensors["t"]
        assert came.dtype.isnative
        assert came.tolist() == tensor.tolist()
        return
    assert (refused.sender, refused.field) == (SENDER, "t")


# --- damaged on the way ---------------------------------------------------------------------

SAMPLE = Knowledge(
    {
        "classes": np.arange(3),
        "features": np.ones((3, 2), np.float32),
        "empty": np.zeros((0, 2), np.uint8),
        "one": np.array(True),
    },
    {"x": 1.5, "n": -7, "s": "é", "b": True},
)


def test_message_truncated_at_every_position_raises():
    whole = send(SAMPLE)
    for position, data in enumerate(whole):
        for end in range(len(data)):
            cut = [*whole[:position], data[:end], *whole[position + 1 :]]
            refusal(lambda cut=cut: receive(cut), f"array {position}")


def test_additional_bytes_raise():
    whole = send(SAMPLE)
    for position, data in enumerate(whole):
        longer = [*whole[:position], data + b"\0", *whole[position + 1 :]]
        refusal(lambda longer=longer: receive(longer), f"array {position}")


def test_missing_or_additional_arrays_raise():
    whole = send(SAMPLE)
    for count in range(1, len(whole)):
        assert "tensors" in refusal(lambda count=count: receive(whole[:count]), "manifest")
    refusal(lambda: receive([*whole, whole[-1]]), "manifest")
    refusal(lambda: receive([]), "manifest")
    refusal(lambda: receive(whole[1:]), "manifest")


def whole_or_refused(payload):
    """Return valid arrays, or None after a KnowledgeError; no other error is raised."""
    try:
        _, knowledge = receive(payload)
    except KnowledgeError:
        return None
    for tensor in knowledge.tensors.values():
        assert tensor.dtype.name in DTYPES
        assert tensor.nbytes == len(tensor.tobytes())
    return knowledge


@settings(max_examples=1500, derandomize=True)
@given(st.data())
def test_flipped_bytes_raise_or_decode(data):
    payload = [bytearray(part) for part in send(SAMPLE)]
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from(payload))
        # The text of the header, where one byte turns a number into a name, or the manifest.
        part[data.draw(st.integers(0, len(part) - 1))] = data.draw(st.integers(0, 255))
    whole_or_refused([bytes(part) for part in payload])


def test_header_mutations_raise_or_decode():
    head, *rest = send(Knowledge({"t": np.ones((2, 3), np.float32)}))
    (tensor,) = rest
    start, end = 10, tensor.index(b"\n")
    for position in range(start, min(end, start + 70)):
        for sign in b"{}()[]',:<>=|-0129OVUTFL\\#\"\n\0\xff":
            changed = tensor[:position] + bytes([sign]) + tensor[position + 1 :]
            whole_or_refused([head, changed])


@settings(max_examples=300, derandomize=True)
@given(st.integers(0, 200), st.binary(max_size=40))
def test_overwritten_manifest_raises(position, noise):
    head, *rest = encode(ENVELOPE, SAMPLE)
    message = bytearray(head.tobytes())
    message[position : position + len(noise)] = noise
    changed = [np.frombuffer(bytes(message), np.uint8), *rest]
    whole_or_refused(ndarrays_to_parameters(changed).tensors)


def test_truncated_manifest_raises():
    head, *rest = encode(ENVELOPE, SAMPLE)
    for end in range(head.size):
        whole_or_refused(ndarrays_to_parameters([head[:end], *rest]).tensors)


@settings(max_examples=300, derandomize=True)
@given(st.binary(max_size=300))
def test_random_bytes_raise(noise):
    refusal(lambda: receive([noise]), "array 0")


SIGNS = ("{", "}", "(", ")", "[", "]", ",", ":", "-", "+", "0", "1", "2", "9" * 21, "True", "None")
SIGNS += ("'descr'", "'shape'", "'fortran_order'", "'f4'", "'<f4'", "'", "'''", "\\", "#", "\n")


@settings(max_examples=300, derandomize=True)
@given(st.lists(st.sampled_from(SIGNS), max_size=25).map(" ".join))
def test_random_headers_raise(header):
    refusal(lambda: receive([npy(header)]), "array 0")


# --- made to do harm ------------------------------------------------------------------------

FOUR = b"\0" * 4
HEADERS = {
    "no bytes": b"",
    "only the magic": b"\x93NUMPY",
    "another magic": b"\x93NUMPX\x01\x00\x10\x00" + b" " * 16,
    "version 3": npy("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", FOUR, (3, 0)),
    "version 9": b"\x93NUMPY\x09\x00" + b"\0" * 20,
    "a header of 4 GB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}",
    "a header too long": npy(" " * 60_000),
    "2**50 elements": npy_of("'<f4'", f"({2**50},)"),
    "2**50 elements, few bytes": npy_of("'<f4'", f"({2**50},)", FOUR),
    "2**62 rows of nothing": npy_of("'<f4'", f"({2**62}, 0)"),
    "rows times rows of nothing": npy_of("'<f4'", f"({10**17}, {10**17}, 0)"),
    "2**70 rows of nothing": npy_of("'<f4'", f"({2**70}, 0)"),
    "a product that wraps around to 4 bytes": npy_of("'|u1'", f"({2**32}, {2**32 + 1})", FOUR),
    "negative sides": npy_of("'<f4'", "(-1, -1)", FOUR),
    "a side that is a truth": npy_of("'<f4'", "(True,)", FOUR),
    "a side that is a fraction": npy_of("'<f4'", "(1.0,)", FOUR),
    "a side of 5000 digits": npy_of("'<f4'", "(" + "9" * 5000 + ",)"),
    "a side of 9000 hex digits": npy_of("'<f4'", "(0x" + "f" * 9000 + ",)"),
    "a shape that is no tuple": npy_of("'<f4'", "[1]", FOUR),
    "rank 9": npy_of("'<f4'", "(" + "1, " * 9 + ")", FOUR),
    "rank 100": npy_of("'<f4'", "(" + "1, " * 100 + ")", FOUR),
    "not closed": npy("{'descr': '<f4'"),
    "text not closed": npy("'''"),
    "minus 3000 times": npy("-" * 3000 + "1"),
    "minus 9000 times": npy("-" * 9000 + "1"),
    "brackets 90 deep": npy("[" * 90),
    "brackets 9000 deep": npy("[" * 9000 + "]" * 9000),
    "a list as a key": npy("{[]: 1}"),
    "keys of two types": npy(
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 1: 1}\n", FOUR
    ),
    "an expression": npy("__import__('os').abort()"),
    "a zero byte": npy("{'descr\0': 1}"),
    "dtype: tuple of one": npy_of("('<f4',)", "(1,)", FOUR),
    "dtype: tuple of none": npy_of("()", "(1,)", FOUR),
    "dtype: nothing": npy_of("None", "(1,)", FOUR),
    "dtype: number": npy_of("4", "(1,)", FOUR),
    "dtype: empty text": npy_of("''", "(1,)", FOUR),
    "dtype: unknown": npy_of("'<q9'", "(1,)", FOUR),
    "dtype: dictionary": npy_of("{'names': ['a'], 'formats': ['f4']}", "(1,)", FOUR),
    "dtype: object": npy_of("'|O'", "(1,)", FOUR * 2),
    "dtype: structure": npy_of("[('a', '<f4')]", "(1,)", FOUR),
    "dtype: empty structure": npy_of("[]", "(1,)"),
    "dtype: comma": npy_of("'f4,f4'", "(1,)", FOUR * 2),
    "dtype: sub-array": npy_of("('<f4', (2,))", "(1,)", FOUR * 2),
    "dtype: text": npy_of("'<U1'", "(1,)", FOUR),
    "dtype: text of no width": npy_of("'<U0'", f"({2**60},)"),
    "dtype: raw": npy_of("'|V4'", "(1,)", FOUR),
    "dtype: raw of no width": npy_of("'|V0'", f"({2**60},)"),
    "dtype: time": npy_of("'<M8[s]'", "(1,)", FOUR * 2),
    "dtype: complex": npy_of("'<c8'", "(1,)", FOUR * 2),
    "dtype: foreign byte order": npy_of("'>f4'", "(1,)", FOUR),
    "fortran order is a number": npy_of("'<f4'", "(1,)", FOUR, fortran="1"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_invalid_array_raises_without_allocating_its_claimed_size(case):
    tracemalloc.start()
    try:
        refusal(lambda: receive([HEADERS[case]]), "array 0")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


LONG = {
    "a shape without end": b"(" + b"1," * 2**20,
    "a shape of spaces": b"(" + b" " * 2**21,
    "a shape of zeros": b"(" + b"0" * 2**21,
    "a whole shape": b"(" + b"1," * 2**20 + b"), }\n",
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("claim", [b"\xff\xff", b"\x00\x04", b"\x00\x00"])
def test_header_size_is_limited(case, claim):
    """Matching a header takes hundreds of times its size in memory."""
    start = b"\x93NUMPY\x01\x00" + claim + b"{'descr': '<f4', 'fortran_order': False, 'shape': "
    payload = [start + LONG[case]]
    tracemalloc.start()
    try:
        refusal(lambda: receive(payload), "array 0")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**18


def test_manifest_size_is_limited_by_its_tensors():
    """A field of two bytes becomes an object of seventy bytes."""
    head = np.frombuffer(manifest().SerializeToString() + b"\x32\x00" * 50_000, np.uint8)
    assert "bytes" in refusal(lambda: decoded(head), "manifest")
    many = {f"weights/{'layer.' * 30}{n}": np.zeros(1, np.float32) for n in range(2000)}
    _, knowledge = receive(send(Knowledge(many)))
    assert list(knowledge.tensors) == list(many)


@pytest.mark.parametrize("case", ["no bytes", "2**50 elements", "dtype: structure"])
def test_invalid_array_raises_with_its_position(case):
    head = part_arrays(manifest())[0]
    refusal(lambda: receive([saved(head), HEADERS[case]]), "array 1")


class Bomb:
    """An object that runs code if it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_pickles_are_not_loaded(tmp_path):
    trap = str(tmp_path / "exploded")
    packed = saved(np.array([Bomb(trap)], dtype=object), allow_pickle=True)
    refusal(lambda: receive([packed]), "array 0")
    refusal(lambda: receive([pickle.dumps(Bomb(trap))]), "array 0")
    assert not os.path.exists(trap)
    pickle.loads(pickle.dumps(Bomb(trap)))
    assert os.path.exists(trap), "the bomb works"


def test_foreign_byte_order_raises():
    swapped = np.arange(3, dtype=">i8")
    assert ">i8" in refusal(lambda: receive([saved(swapped)]), "array 0")


def test_boolean_bytes_are_zero_or_one():
    """numpy and torch expect 0 or 1; other bytes corrupt sums and comparisons."""
    payload = send(Knowledge({"t": np.array([False, True, True])}))
    payload[1] = payload[1][:-2] + b"\x02\xff"
    knowledge = whole_or_refused(payload)
    if knowledge is not None:
        assert set(knowledge.tensors["t"].view(np.uint8).tolist()) <= {0, 1}


def test_oversized_payload_raises():
    payload = send(Knowledge({"t": np.zeros(1000)}))
    size = sum(map(len, payload))
    assert payload_bytes(Parameters(payload, "numpy.ndarray")) == size
    receive(payload, limit=size)
    fault = refusal(lambda: receive(payload, limit=size - 1), "payload")
    assert "0.0 MB" in fault
    fault = refusal(lambda: receive([b"\0" * 3_500_000], limit=1_250_000), "payload")
    assert "3.5 MB" in fault
    assert "1.2 MB" in fault or "1.3 MB" in fault


# --- manifests ------------------------------------------------------------------------------


def decoded(*arrays):
    return decode(list(arrays), SENDER)


@pytest.mark.parametrize(
    "head",
    [
        np.zeros(3, np.int8),
        np.zeros((1, 3), np.uint8),
        np.array(3, np.uint8),
        np.zeros(3, np.float32),
    ],
    ids=["int8", "rank 2", "rank 0", "float32"],
)
def test_manifest_must_be_a_byte_vector(head):
    refusal(lambda: decoded(head), "manifest")


@pytest.mark.parametrize("noise", [b"\xff\xff\xff", b"\x12\x05ab", b"\x12\x02\xff\xfe"])
def test_manifest_without_protobuf_raises(noise):
    refusal(lambda: decoded(np.frombuffer(noise, np.uint8)), "manifest")


def test_empty_manifest_raises():
    refusal(lambda: decoded(np.zeros(0, np.uint8)), "schema_version")


@pytest.mark.parametrize("version", [0, 3, 2**32 - 1])
def test_other_schema_version_raises(version):
    head = part_arrays(manifest(schema_version=version))
    assert str(version) in refusal(lambda: decoded(*head), "schema_version")


def test_oversized_manifest_raises():
    start = manifest(run="r" * 1000).ByteSize() - 1000
    for spare in (-1, 0, 1):
        # The length of `run` takes three bytes rather than two.
        head = part_arrays(manifest(run="r" * (MAX_MANIFEST_BYTES - start - 1 - spare)))
        assert head[0].size == MAX_MANIFEST_BYTES - spare
        if spare < 0:
            refusal(lambda head=head: decoded(*head), "manifest")
        else:
            decoded(*head)


def spec(name, dtype, *shape):
    return wire.TensorSpec(name=name, dtype=dtype, shape=shape)


def test_duplicate_name_raises():
    head = part_arrays(manifest(tensors=[spec("t", "int64", 1), spec("t", "int64", 1)]))
    refusal(lambda: decoded(*head, np.zeros(1, np.int64), np.zeros(1, np.int64)), "t")


@pytest.mark.parametrize(
    "listed",
    [
        spec("t", "float64", 2, 3), spec("t", "float32", 3, 2), spec("t", "float32", 6),
        spec("t", "float32", 2, 3, 1), spec("t", "float32"), spec("t", "float32", 2**63, 3),
        spec("t", "<f4", 2, 3), spec("t", "", 2, 3), spec("t", "FLOAT32", 2, 3),
    ],
    ids=lambda s: f"{s.dtype}{list(s.shape)}",
)  # fmt: skip
def test_tensor_unlike_its_manifest_raises(listed):
    head = part_arrays(manifest(tensors=[listed]))
    fault = refusal(lambda: decoded(*head, np.zeros((2, 3), np.float32)), "t")
    assert "float32 [2, 3]" in fault


def test_undeclared_dtype_raises():
    head = part_arrays(manifest(tensors=[spec("t", "complex64", 1)]))
    refusal(lambda: decoded(*head, np.zeros(1, np.complex64)), "t")


def test_scalar_without_value_raises():
    head = part_arrays(manifest(scalars={"x": wire.Scalar()}))
    refusal(lambda: decoded(*head), "x")


@pytest.mark.parametrize("name", ["n" * 100_000, "two\nlines", "\x1b[31mred", "a\r\u2028b"])
def test_foreign_name_is_printable_in_the_error(name):
    """Messages appear in logs and terminals, so a peer's names must make one short line."""
    head = part_arrays(manifest(tensors=[spec(name, "int8", 1)]))
    with pytest.raises(KnowledgeError) as caught:
        decoded(*head, np.zeros(1))
    message = str(caught.value)
    assert message.startswith(f"{SENDER}: ")
    assert len(message) < 2000
    assert message.isprintable()


# --- whose message it is --------------------------------------------------------------------


def expected(**changes):
    said = {"run": "run-1", "method": "felo", "round": 3, "sender": SENDER}
    envelope = Envelope(**(said | changes))
    expect(envelope, run="run-1", method="felo", round=3, sender=SENDER)


def test_expected_message_is_accepted():
    expected()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("run", "run-2"), ("method", "local"), ("method", ""), ("round", 2), ("round", 4),
        ("round", 0), ("sender", "client-8"), ("sender", ""),
    ],
)  # fmt: skip
def test_unexpected_envelope_raises_with_the_field(field, value):
    assert repr(value) in refusal(lambda: expected(**{field: value}), field)


BAD_NAMES = ["", ".", "..", "../x", ".hidden", "a/b", "/etc", "a\\b", "x" * 101, "x" * 200]
BAD_NAMES += ["a b", "a\n", "\n", "a\0", "ü", "٣", "-x", "_x", "~", "$HOME", "a:b", "CON\t"]


@pytest.mark.parametrize("run", BAD_NAMES, ids=repr)
def test_invalid_run_name_raises(run):
    assert not is_name(run)
    envelope = Envelope(run, "felo", 3, "server")
    with pytest.raises(KnowledgeError) as caught:
        expect(envelope, run=None, method="felo", round=None, sender="server")
    assert caught.value.field == "run"
    assert len(str(caught.value).splitlines()) == 1
    # Not even where the reader itself is called so.
    with pytest.raises(KnowledgeError):
        expect(envelope, run=run, method="felo", round=None, sender="server")


@pytest.mark.parametrize("run", ["a", "0", "felo-digits-2026", "a..b", "A_b.c-d", "x" * 100])
def test_valid_run_name_is_accepted(run):
    assert is_name(run)
    expect(Envelope(run, "felo", 1, "server"), run=None, method="felo", round=None, sender="server")


@pytest.mark.parametrize("round", [0, -1])
def test_any_round_means_any_from_1(round):
    envelope = Envelope("r", "felo", round, "server")
    with pytest.raises(KnowledgeError, match="round"):
        expect(envelope, run=None, method="felo", round=None, sender="server")


@settings(max_examples=200, derandomize=True)
@given(st.text(max_size=20))
def test_name_is_one_path_component(text):
    if is_name(text):
        assert os.path.normpath(os.path.join("/root", text)) == f"/root/{text}"
        assert os.path.basename(text) == text
