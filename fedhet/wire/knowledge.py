"""Serialization of messages: converts `Knowledge` to Flower's arrays and back.

The first array is the manifest (proto/fedhet/v1/knowledge.proto). The tensors that it lists follow,
either unchanged or encoded, and either as values or as differences from base weights. A message
identifies its base weights by their digest, which both sides compute from their own copies. In
deployments, `join` combines the arrays of a message of up to 64 MB into one.

Decoding never unpickles, checks the sizes in headers before allocating memory, and does not depend
on the order of the tensors.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from google.protobuf.message import DecodeError

from fedhet._generated import knowledge_pb2 as wire
from fedhet.base.arrays import Array, Arrays, OnDemand, group_of
from fedhet.base.errors import KnowledgeError
from fedhet.wire.contract import DIGEST_BITS, Contract, unknown_field
from fedhet.wire.encodings import ENCODINGS, Encoded, EncodingError, to_half
from fedhet.wire.identity import is_name

if TYPE_CHECKING:
    from flwr.common import Parameters

JOINED = "fedhet.joined"
"""Type of Flower's parameters whose tensors contain several arrays in .npy format each."""
MAX_JOINED_BYTES = 2**26
"""Maximum size of a payload whose arrays are joined, in bytes, because joining copies it."""
MAX_JOINED = 2**16
"""Maximum number of joined arrays, because an array of 70 bytes needs many times as much memory."""
DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
MAX_RANK = 8
SCHEMA_VERSION = 2
"""Schema version of messages with encoded tensors."""
PLAIN_VERSION = 1
"""Schema version of messages without encoded tensors; older versions can also read them."""
MAX_MANIFEST_BYTES = 2**16
"""Maximum size of a manifest without tensors, in bytes. Parsed fields need many times as much
memory."""
MAX_SPEC_BYTES = 1024
"""Additional manifest size permitted for each tensor in the message, in bytes."""
MAX_HEADER_BYTES = 1024
"""Maximum size of an .npy header, checked before parsing; numpy usually writes 118 bytes."""
_DTYPES = {np.dtype(name).str.encode(): np.dtype(name) for name in DTYPES}
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '(..\d)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n"
)
"""Pattern of the headers that numpy writes for the supported dtypes. Other headers are rejected."""

_SCALARS = {bool: "flag", int: "integer", float: "real", str: "text"}
"""Protobuf field for a scalar, by type. bool comes first, because it is a subclass of int."""

Scalars = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Envelope:
    """Run, method, round (starting at 1) and sender of a message."""

    run: str
    method: str
    round: int
    sender: str


@dataclass(frozen=True)
class Knowledge:
    """Content of a message: named tensors and named scalars.

    Example:
        >>> reply = Knowledge({"means": means}, {"samples": 120})
        >>> reply.tensors["means"].shape
        (10, 64)
    """

    tensors: Mapping[str, Array] = field(default_factory=dict)
    """NumPy arrays by name. The weights of a model are named `<field>/<name in the state dict>`."""
    scalars: Scalars = field(default_factory=dict)
    """Numbers, booleans and strings by name."""
    declared: frozenset[str] | None = field(default=None, compare=False, repr=False)
    """Names of the fields in the contract of a received message; None if it is not received."""

    def group(self, name: str) -> Arrays:
        """Return the weights of one model, i.e. the tensors named `name/<key>`, by key.

        If the reply is stored on disk, each access reads the tensor again. The file is deleted at
        the end of the round.

        Args:
            name: Name of a `WeightsField` in the contract.

        Returns:
            A mapping from names in the model's state dict to arrays.

        Raises:
            LookupError: If the message is received and its contract does not declare the field.
        """
        if self.declared is not None and name not in self.declared:
            raise LookupError(f"{name}: {unknown_field(name, self.declared)}")
        return group_of(self.tensors, name)

    def replacing(self, tensors: Arrays) -> Knowledge:
        """Return a copy in which `tensors` replace the tensors of the same names.

        Args:
            tensors: New arrays by name. Tensors not named here are unchanged.
        """
        current = self.tensors
        if isinstance(current, OnDemand):
            return replace(self, tensors=current.replacing(tensors))
        return replace(self, tensors={**current, **tensors})

    def declaring(self, contract: Contract) -> Knowledge:
        """Return a copy in which `group` rejects fields that `contract` does not declare."""
        return replace(self, declared=frozenset(field.name for field in contract.fields))


@dataclass(frozen=True)
class Packing:
    """Encoded tensors of a message, and the digest of the base weights that they refer to."""

    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    """Encoded tensors by name; tensors not listed here are sent unchanged."""
    base: int = 0
    """Digest of base weights that the receiver must have; 0 if no base is needed."""
    held: bool = False
    """Whether the message refers to all tensors in the base instead of sending them again."""

    @property
    def is_plain(self) -> bool:
        """Whether all tensors are sent unchanged."""
        return not (self.encoded or self.base or self.held)


PLAIN = Packing()


Bases = Callable[[Envelope, int], Arrays | None]
"""Function that returns the base weights with a given digest, or None if they are missing."""


class MissingBaseError(KnowledgeError):
    """Raised if the receiver does not have the base weights of a message."""


def no_bases(envelope: Envelope, digest: int) -> None:
    """Return None, because no base weights are available by default."""


def encode(envelope: Envelope, knowledge: Knowledge, packing: Packing = PLAIN) -> list[Array]:
    """Serialize a message to arrays: the manifest as a byte array, followed by the tensors.

    Raises KnowledgeError if a tensor or a scalar has an unsupported type.
    """
    manifest = wire.Manifest(
        schema_version=PLAIN_VERSION if packing.is_plain else SCHEMA_VERSION,
        run=envelope.run,
        method=envelope.method,
        round=envelope.round,
        sender=envelope.sender,
        base=packing.base,
        held=packing.held,
    )
    encoded = packing.encoded
    for name, tensor in knowledge.tensors.items():
        if not isinstance(tensor, np.ndarray | np.generic):
            fault = f"expected a NumPy array, got {type(tensor).__name__}"
            raise KnowledgeError(envelope.sender, name, fault)
        if tensor.dtype.str.encode() not in _DTYPES or tensor.ndim > MAX_RANK:
            fault = f"unsupported tensor, {tensor.dtype} with {tensor.ndim} dimensions"
            raise KnowledgeError(envelope.sender, name, fault)
        spec = manifest.tensors.add(name=name, dtype=tensor.dtype.name, shape=tensor.shape)
        if name in encoded:
            spec.encoding, spec.difference = encoded[name].encoding, encoded[name].difference
            spec.rounded = encoded[name].rounded
    for name, value in knowledge.scalars.items():
        try:
            kind = next(kind for kind in _SCALARS if isinstance(value, kind))
            setattr(manifest.scalars[name], _SCALARS[kind], value)
        except (StopIteration, TypeError, ValueError):
            raise KnowledgeError(envelope.sender, name, f"unsupported scalar {value!r}") from None
    header = np.frombuffer(manifest.SerializeToString(deterministic=True), dtype=np.uint8)
    tensors = knowledge.tensors
    return [header, *(encoded[n].data if n in encoded else tensors[n] for n in tensors)]


def decode(
    arrays: Sequence[Array], sender: str, bases: Bases = no_bases, max_bytes: int | None = None
) -> tuple[Envelope, Knowledge]:
    """Deserialize a message from its arrays, without checking it against a contract.

    `bases` returns base weights by their digest. `max_bytes` limits the total size of the decoded
    tensors, and is checked before decoding. Raises KnowledgeError if the manifest is invalid or
    does not match the arrays, and MissingBaseError if this side does not have the base weights.
    """
    manifest = _read_manifest(arrays, sender)
    specs = manifest.tensors
    if len(specs) != len(arrays) - 1:
        fault = f"lists {len(specs)} tensors, got {len(arrays) - 1}"
        raise KnowledgeError(sender, "manifest", fault)
    envelope = Envelope(manifest.run, manifest.method, manifest.round, manifest.sender)
    if manifest.held and not manifest.base:
        raise KnowledgeError(sender, "held", "requires base weights, got none")
    base = bases(envelope, manifest.base) if manifest.base else {}
    if base is None:
        fault = f"weights with digest {manifest.base} not found"
        raise MissingBaseError(sender, "base", fault)
    if max_bytes is not None:  # All encoded tensors decode to float32.
        size = sum(4 * math.prod(spec.shape) for spec in specs if spec.encoding)
        check_size(size, sender, max_bytes)
    tensors: dict[str, Array] = dict(base) if manifest.held else {}
    for spec, array in zip(specs, arrays[1:], strict=True):
        if spec.name in tensors:
            raise KnowledgeError(sender, spec.name, "duplicate tensor")
        tensors[spec.name] = _tensor(spec, array, sender, base)
    scalars: dict[str, bool | int | float | str] = {}
    for name, scalar in manifest.scalars.items():
        if (kind := scalar.WhichOneof("value")) is None:
            raise KnowledgeError(sender, name, "missing value")
        scalars[name] = getattr(scalar, kind)
    return envelope, Knowledge(tensors, scalars)


def expect(
    envelope: Envelope, *, run: str | None, method: str, round: int | None, sender: str
) -> None:
    """Check an envelope. Raises KnowledgeError if the run, method, round or sender differs.

    `run=None` accepts any valid name, and `round=None` accepts any round, starting at 1.
    """
    if not is_name(envelope.run) or (run is not None and envelope.run != run):
        rule = repr(run) if run else "a valid name"
        raise KnowledgeError(sender, "run", f"expected {rule}, got {envelope.run!r}")
    if envelope.method != method:
        raise KnowledgeError(sender, "method", f"expected {method!r}, got {envelope.method!r}")
    if envelope.round < 1 or (round is not None and envelope.round != round):
        fault = f"expected {round or '1 or later'}, got {envelope.round}"
        raise KnowledgeError(sender, "round", fault)
    if envelope.sender != sender:
        raise KnowledgeError(sender, "sender", f"expected {sender!r}, got {envelope.sender!r}")


def payload_bytes(parameters: Parameters) -> int:
    """Return the payload size of a Flower message, in bytes."""
    return sum(len(tensor) for tensor in parameters.tensors)


def read_arrays(parameters: Parameters, sender: str, max_bytes: int) -> list[Array]:
    """Read the arrays in Flower's `parameters` without pickle.

    Raises KnowledgeError if the arrays exceed `max_bytes` or are not valid .npy data.
    """
    check_size(payload_bytes(parameters), sender, max_bytes)
    return [
        np.require(read_npy(data, sender, f"array {position}"), requirements="A")
        for position, data in enumerate(separate(parameters, sender))
    ]


def join(parameters: Parameters) -> Parameters:
    """Return a payload of type JOINED with all arrays in one tensor, in the same order.

    Flower transfers each tensor separately, which takes most of the time of a short round. The
    number of bytes does not change. A payload that is empty or above a limit is returned unchanged.
    """
    count = len(parameters.tensors)
    if not 0 < count <= MAX_JOINED or payload_bytes(parameters) > MAX_JOINED_BYTES:
        return parameters
    return replace(parameters, tensors=[b"".join(parameters.tensors)], tensor_type=JOINED)


def separate(parameters: Parameters, sender: str) -> Sequence[bytes | memoryview]:
    """Return the arrays of a payload, which may be joined. Each array is in .npy format.

    Raises KnowledgeError if there are too many joined arrays, or one has no valid header. The data
    of the last array may be incomplete.
    """
    if parameters.tensor_type != JOINED:
        return parameters.tensors
    parts: list[memoryview] = []
    for joined in parameters.tensors:
        rest = memoryview(joined)
        while rest:
            if len(parts) == MAX_JOINED:
                fault = f"must contain at most {MAX_JOINED} joined arrays"
                raise KnowledgeError(sender, "payload", fault)
            dtype, shape, _, start = _read_header(rest, sender, f"array {len(parts)}")
            end = start + math.prod(shape) * dtype.itemsize
            parts.append(rest[:end])
            rest = rest[end:]
    return parts


def check_size(size: int, sender: str, max_bytes: int) -> None:
    """Check a payload's size. Raises KnowledgeError if `size` is larger than `max_bytes`."""
    if size > max_bytes:
        fault = f"must be at most {max_bytes / 1e6:.1f} MB, got {size / 1e6:.1f} MB"
        raise KnowledgeError(sender, "payload", fault)


def read_npy(data: bytes | memoryview, sender: str, name: str) -> Array:
    """Read an array in .npy format. The array shares the memory of `data`.

    Raises KnowledgeError if the header does not match the actual number of bytes.
    """
    dtype, shape, order, start = _read_header(data, sender, name)
    body = memoryview(data)[start:]
    if len(shape) > MAX_RANK or math.prod(shape) * dtype.itemsize != len(body):
        fault = f"header declares {dtype} {list(shape)}, got {len(body)} bytes"
        raise KnowledgeError(sender, name, fault)
    if dtype == np.bool_ and np.frombuffer(body, np.uint8).max(initial=0) > 1:
        raise KnowledgeError(sender, name, "bool values must be stored as 0 or 1")
    try:
        flat = np.frombuffer(body, dtype=dtype)
        return flat.reshape(shape, order=order)
    except ValueError as error:
        fault = f"invalid shape {list(shape)} ({error})"
        raise KnowledgeError(sender, name, fault) from None


def _read_header(
    data: bytes | memoryview, sender: str, name: str
) -> tuple[np.dtype[Any], tuple[int, ...], Literal["C", "F"], int]:
    """Return the dtype, shape and order of an array in .npy format, and where its data start."""
    start = len(_MAGIC) + 2
    end = start + int.from_bytes(data[start - 2 : start], "little")
    header = _HEADER.fullmatch(data[start:end]) if end <= start + MAX_HEADER_BYTES else None
    if header is None or data[: len(_MAGIC)] != _MAGIC:
        raise KnowledgeError(sender, name, "not a valid .npy array of a supported dtype")
    if (dtype := _DTYPES.get(header[1])) is None:
        raise KnowledgeError(sender, name, f"unsupported dtype {header[1].decode('latin1')!r}")
    shape = tuple(int(side) for side in header[3].split(b",") if side.strip())
    return dtype, shape, "F" if header[2] == b"True" else "C", end


def _read_manifest(arrays: Sequence[Array], sender: str) -> wire.Manifest:
    if not arrays or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        raise KnowledgeError(sender, "manifest", "the first array must be uint8 [bytes]")
    limit = MAX_MANIFEST_BYTES + MAX_SPEC_BYTES * (len(arrays) - 1)
    if arrays[0].size > limit:
        fault = f"must be at most {limit} bytes, got {arrays[0].size}"
        raise KnowledgeError(sender, "manifest", fault)
    manifest = wire.Manifest()
    try:
        manifest.ParseFromString(arrays[0].tobytes())
    except DecodeError as error:
        raise KnowledgeError(sender, "manifest", f"not a valid protobuf ({error})") from None
    if not PLAIN_VERSION <= manifest.schema_version <= SCHEMA_VERSION:
        fault = f"expected {PLAIN_VERSION} to {SCHEMA_VERSION}, got {manifest.schema_version}"
        raise KnowledgeError(sender, "schema_version", fault)
    packed = (
        manifest.base or manifest.held or any(s.encoding or s.difference for s in manifest.tensors)
    )
    if packed and manifest.schema_version < SCHEMA_VERSION:
        fault = f"must be {SCHEMA_VERSION} for encoded tensors, got {manifest.schema_version}"
        raise KnowledgeError(sender, "schema_version", fault)
    return manifest


def digest_of(weights: Arrays) -> int:
    """Return a positive digest of named tensors, or 0 if `weights` is empty."""
    if not weights:
        return 0
    digest = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        value = weights[name]
        digest.update(f"{name}\0{value.dtype.str}{value.shape}\0".encode())
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return (int.from_bytes(digest.digest(), "big") >> (64 - DIGEST_BITS)) or 1


def _tensor(spec: wire.TensorSpec, array: Array, sender: str, base: Arrays) -> Array:
    """Decode one tensor from the received array. Raises KnowledgeError if it is invalid."""

    def fault(text: str) -> KnowledgeError:
        return KnowledgeError(sender, spec.name, text)

    shape, received = tuple(spec.shape), f"{array.dtype} {list(array.shape)}"
    if not spec.encoding:
        if spec.difference:
            raise fault("a difference must have an encoding")
        if spec.dtype not in DTYPES or (spec.dtype, shape) != (array.dtype.name, array.shape):
            raise fault(f"manifest declares {spec.dtype} {list(shape)}, got {received}")
        return array
    encoding = ENCODINGS.get(spec.encoding)
    if encoding is None:
        known = ", ".join(ENCODINGS)
        raise fault(f"unsupported encoding {spec.encoding!r}, expected one of {known}")
    if spec.dtype != "float32" or len(shape) > MAX_RANK:
        raise fault(
            f"{spec.encoding} encodes float32 tensors of at most {MAX_RANK} dimensions, got "
            f"{spec.dtype} with {len(shape)} dimensions"
        )
    if array.dtype != np.uint8 or array.ndim != 1:
        raise fault(f"encoded data must be uint8 [bytes], got {received}")
    before = base.get(spec.name) if spec.difference else None
    if spec.difference and (
        before is None or before.dtype.name != spec.dtype or before.shape != shape
    ):
        raise fault("no matching tensor in the base weights")
    try:
        values = encoding.decode(array, shape)
    except EncodingError as error:
        raise fault(f"{spec.encoding}: {error}") from None
    if before is None:
        return values
    if not spec.rounded:
        return before + values
    halves = to_half(before + values)
    if not np.isfinite(halves).all():
        raise fault("values exceed the range of half precision")
    return halves.astype(np.float32)
