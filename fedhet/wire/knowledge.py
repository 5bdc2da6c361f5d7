"""Knowledge <-> Flower arrays: the one place that encodes and decodes messages.

The first array is the manifest (proto/fedhet/v1/knowledge.proto), the others are the tensors it
lists: as they are, or under an encoding, as values or as differences. A message that builds on
weights names them by their digest; both sides compute it from what they have, and none is taken for
another.

Decoding never unpickles, never allocates by a header's claim, and never relies on an order.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError

from fedhet._generated import knowledge_pb2 as wire
from fedhet.base.arrays import Array, Arrays, OnDemand, group_of
from fedhet.base.errors import KnowledgeError
from fedhet.wire.encodings import ENCODINGS, Encoded, EncodingError, halved
from fedhet.wire.identity import is_name

if TYPE_CHECKING:
    from flwr.common import Parameters

DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
MAX_RANK = 8
DIGEST_BITS = 59
"""Bits of a digest of weights: 18 decimal digits, which may be a part of a file's name."""
SCHEMA_VERSION = 2
"""Version of a message with encodings."""
PLAIN_VERSION = 1
"""Version of a message without, which a reader of that version understands."""
MAX_MANIFEST_BYTES = 2**16
"""Limit on a manifest without tensors: once read, fields cost many times their bytes."""
MAX_SPEC_BYTES = 1024
"""By how much a manifest may be larger for each tensor that came with it."""
MAX_HEADER_BYTES = 1024
"""Limit on an .npy header, read before anything in it; numpy writes 118 bytes for most shapes."""
_DTYPES = {np.dtype(name).str.encode(): np.dtype(name) for name in DTYPES}
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '(..\d)', 'fortran_order': (True|False), "
    rb"'shape': \(((?:\d{1,18}, ?)*(?:\d{1,18})?)\), \} *\n"
)
"""The header that numpy writes for the allowed types; any other valid header is rejected."""

_SCALARS = {bool: "flag", int: "integer", float: "real", str: "text"}
"""The field of a manifest's scalar for each type; a truth is an integer too, so it comes first."""

Scalars = Mapping[str, bool | int | float | str]


@dataclass(frozen=True)
class Envelope:
    """The sender, run, method and round (from 1) of a message."""

    run: str
    method: str
    round: int
    sender: str


@dataclass(frozen=True)
class Knowledge:
    """The content of a message: named tensors and named scalars."""

    tensors: Mapping[str, Array] = field(default_factory=dict)
    scalars: Scalars = field(default_factory=dict)

    def group(self, name: str) -> Arrays:
        """Return the tensors `name/<key>` by key: a model's weights.

        Those of a reply on disk are read each time they are used, and only during the round.
        """
        return group_of(self.tensors, name)

    def replacing(self, tensors: Arrays) -> Knowledge:
        """Return the same with `tensors` in the places of those of the same names."""
        own = self.tensors
        if isinstance(own, OnDemand):
            return Knowledge(own.replacing(tensors), self.scalars)
        return Knowledge({**own, **tensors}, self.scalars)


@dataclass(frozen=True)
class Packing:
    """Which tensors of a message travel under an encoding, and on which weights it builds."""

    encoded: Mapping[str, Encoded] = field(default_factory=dict)
    base: int = 0
    """Digest of the weights that the receiver has; 0: it needs none."""
    held: bool = False
    """Whether all tensors of the base are part of the message, and not sent."""

    @property
    def is_plain(self) -> bool:
        """Return whether all tensors travel as they are."""
        return not (self.encoded or self.base or self.held)


PLAIN = Packing()


Bases = Callable[[Envelope, int], Arrays | None]
"""Returns the weights of a digest that this side has for a message; None: it does not."""


class LackingError(KnowledgeError):
    """A message builds on weights that its receiver does not have."""


def no_bases(envelope: Envelope, digest: int) -> None:
    """Have no weights on which a message could build."""


def encode(envelope: Envelope, knowledge: Knowledge, packing: Packing = PLAIN) -> list[Array]:
    """Return the arrays of a message: the manifest as uint8 [bytes], then each tensor.

    Raises KnowledgeError for a tensor or a scalar of a type that messages do not support.
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
        if tensor.dtype.str.encode() not in _DTYPES or tensor.ndim > MAX_RANK:
            fault = f"{tensor.dtype} of rank {tensor.ndim} cannot travel"
            raise KnowledgeError(envelope.sender, name, fault)
        spec = manifest.tensors.add(name=name, dtype=tensor.dtype.name, shape=tensor.shape)
        if name in encoded:
            how = encoded[name]
            spec.encoding, spec.difference = how.encoding, how.difference
            spec.rounded = how.rounded
    for name, value in knowledge.scalars.items():
        try:
            kind = next(kind for kind in _SCALARS if isinstance(value, kind))
            setattr(manifest.scalars[name], _SCALARS[kind], value)
        except (StopIteration, TypeError, ValueError):
            raise KnowledgeError(envelope.sender, name, f"{value!r} cannot travel") from None
    head = np.frombuffer(manifest.SerializeToString(deterministic=True), dtype=np.uint8)
    tensors = knowledge.tensors
    return [head, *(encoded[n].data if n in encoded else tensors[n] for n in tensors)]


def decode(
    arrays: Sequence[Array], sender: str, bases: Bases = no_bases, max_bytes: int | None = None
) -> tuple[Envelope, Knowledge]:
    """Decode the arrays of a message; `sender` is named in errors.

    `bases` has the weights on which the message may build; `max_bytes` limits what the tensors
    under an encoding decode to, before one is decoded.

    Raises KnowledgeError if the manifest is invalid, has another schema version, or does not match
    the arrays that follow it, LackingError if it builds on weights that this side does not have.
    The method's fields are checked by its Contract.
    """
    manifest = _read_manifest(arrays, sender)
    specs = manifest.tensors
    if len(specs) != len(arrays) - 1:
        fault = f"lists {len(specs)} tensors, {len(arrays) - 1} came"
        raise KnowledgeError(sender, "manifest", fault)
    envelope = Envelope(manifest.run, manifest.method, manifest.round, manifest.sender)
    if manifest.held and not manifest.base:
        raise KnowledgeError(sender, "held", "is set, but there is no base that could be held")
    base = bases(envelope, manifest.base) if manifest.base else {}
    if base is None:
        fault = f"{manifest.base} names weights that this side does not have"
        raise LackingError(sender, "base", fault)
    if max_bytes is not None:  # of the tensors under an encoding, all float32
        size = sum(4 * math.prod(spec.shape) for spec in specs if spec.encoding)
        check_size(size, sender, max_bytes)
    tensors: dict[str, Array] = dict(base) if manifest.held else {}
    for spec, array in zip(specs, arrays[1:], strict=True):
        if spec.name in tensors:
            raise KnowledgeError(sender, spec.name, "appears twice")
        tensors[spec.name] = _tensor(spec, array, sender, base)
    scalars: dict[str, bool | int | float | str] = {}
    for name, scalar in manifest.scalars.items():
        if (kind := scalar.WhichOneof("value")) is None:
            raise KnowledgeError(sender, name, "has no value")
        scalars[name] = getattr(scalar, kind)
    return envelope, Knowledge(tensors, scalars)


def expect(
    envelope: Envelope, *, run: str | None, method: str, round: int | None, sender: str
) -> None:
    """Raise KnowledgeError unless a message is from this run, method, round and sender.

    None accepts any run, or any round from 1.
    """
    if not is_name(envelope.run) or (run is not None and envelope.run != run):
        raise KnowledgeError(sender, "run", f"is {envelope.run!r}, must be {run or 'a name'!r}")
    if envelope.method != method:
        raise KnowledgeError(sender, "method", f"is {envelope.method!r}, must be {method!r}")
    if envelope.round < 1 or (round is not None and envelope.round != round):
        raise KnowledgeError(sender, "round", f"is {envelope.round}, must be {round or 'from 1'}")
    if envelope.sender != sender:
        raise KnowledgeError(sender, "sender", f"signs as {envelope.sender!r}")


def payload_bytes(parameters: Parameters) -> int:
    """Return the size in bytes of a message's payload as Flower sends it."""
    return sum(len(tensor) for tensor in parameters.tensors)


def read_arrays(parameters: Parameters, sender: str, max_bytes: int) -> list[Array]:
    """Return the arrays in Flower's `parameters`, read without pickle.

    Raises KnowledgeError if they exceed `max_bytes` or are not well-formed .npy.
    """
    check_size(payload_bytes(parameters), sender, max_bytes)
    return [
        read_npy(data, sender, f"array {position}")
        for position, data in enumerate(parameters.tensors)
    ]


def check_size(size: int, sender: str, max_bytes: int) -> None:
    """Raise KnowledgeError if a payload of `size` bytes is larger than `max_bytes`."""
    if size > max_bytes:
        fault = f"is {size / 1e6:.1f} MB, the most allowed is {max_bytes / 1e6:.1f} MB"
        raise KnowledgeError(sender, "payload", fault)


def read_npy(data: bytes | memoryview, sender: str, name: str) -> Array:
    """Return the array of an .npy file, which shares the memory of `data`.

    Raises KnowledgeError if its header does not match the actual number of bytes.
    """
    start = len(_MAGIC) + 2
    end = start + int.from_bytes(data[start - 2 : start], "little")
    header = _HEADER.fullmatch(data[start:end]) if end <= start + MAX_HEADER_BYTES else None
    if header is None or data[: len(_MAGIC)] != _MAGIC:
        raise KnowledgeError(sender, name, "is not an .npy array of a type that travels")
    dtype, body = _DTYPES.get(header[1]), memoryview(data)[end:]
    if dtype is None:
        raise KnowledgeError(
            sender, name, f"holds {header[1].decode('latin1')}, which cannot travel"
        )
    shape = tuple(int(side) for side in header[3].split(b",") if side.strip())
    if len(shape) > MAX_RANK or math.prod(shape) * dtype.itemsize != len(body):
        fault = f"claims {dtype} {list(shape)}, {len(body)} bytes came"
        raise KnowledgeError(sender, name, fault)
    if dtype == np.bool_ and np.frombuffer(body, np.uint8).max(initial=0) > 1:
        raise KnowledgeError(sender, name, "holds a truth that is neither 0 nor 1")
    try:
        flat = np.frombuffer(body, dtype=dtype)
        return flat.reshape(shape, order="F" if header[2] == b"True" else "C")
    except ValueError as error:
        raise KnowledgeError(sender, name, f"claims {list(shape)} ({error})") from None


def _read_manifest(arrays: Sequence[Array], sender: str) -> wire.Manifest:
    if not arrays or arrays[0].dtype != np.uint8 or arrays[0].ndim != 1:
        raise KnowledgeError(sender, "manifest", "the first array must be uint8 [bytes]")
    most = MAX_MANIFEST_BYTES + MAX_SPEC_BYTES * (len(arrays) - 1)
    if arrays[0].size > most:
        fault = f"is {arrays[0].size} bytes, the most allowed is {most}"
        raise KnowledgeError(sender, "manifest", fault)
    manifest = wire.Manifest()
    try:
        manifest.ParseFromString(arrays[0].tobytes())
    except DecodeError as error:
        raise KnowledgeError(sender, "manifest", f"cannot be read ({error})") from None
    if not PLAIN_VERSION <= manifest.schema_version <= SCHEMA_VERSION:
        fault = f"is {manifest.schema_version}, this side reads {PLAIN_VERSION} to {SCHEMA_VERSION}"
        raise KnowledgeError(sender, "schema_version", fault)
    packed = (
        manifest.base or manifest.held or any(s.encoding or s.difference for s in manifest.tensors)
    )
    if packed and manifest.schema_version < SCHEMA_VERSION:
        fault = f"is {manifest.schema_version}, encodings need {SCHEMA_VERSION}"
        raise KnowledgeError(sender, "schema_version", fault)
    return manifest


def digest_of(weights: Arrays) -> int:
    """Return a digest of named tensors, from 1; 0: there are none."""
    if not weights:
        return 0
    found = hashlib.blake2b(digest_size=8)
    for name in sorted(weights):
        value = weights[name]
        found.update(f"{name}\0{value.dtype.str}{value.shape}\0".encode())
        found.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    return (int.from_bytes(found.digest(), "big") >> (64 - DIGEST_BITS)) or 1


def _tensor(spec: wire.TensorSpec, array: Array, sender: str, base: Arrays) -> Array:
    """Return a message's tensor from the array that came for it. Raises KnowledgeError."""

    def fault(text: str) -> KnowledgeError:
        return KnowledgeError(sender, spec.name, text)

    shape, came = tuple(spec.shape), f"came as {array.dtype} {list(array.shape)}"
    if not spec.encoding:
        if spec.difference:
            raise fault("is a difference without an encoding")
        if spec.dtype not in DTYPES or (spec.dtype, shape) != (array.dtype.name, array.shape):
            raise fault(f"listed as {spec.dtype} {list(shape)}, {came}")
        return array
    encoding = ENCODINGS.get(spec.encoding)
    if encoding is None:
        known = ", ".join(ENCODINGS)
        raise fault(f"is encoded as {spec.encoding!r}, this side decodes {known}")
    if spec.dtype != "float32" or len(shape) > MAX_RANK:
        raise fault(f"{spec.dtype} of rank {len(shape)} cannot be encoded as {spec.encoding}")
    if array.dtype != np.uint8 or array.ndim != 1:
        raise fault(f"{came}, must be uint8 [bytes]")
    before = base.get(spec.name) if spec.difference else None
    if spec.difference and (
        before is None or before.dtype.name != spec.dtype or before.shape != shape
    ):
        raise fault("is a difference to a tensor that the base lacks")
    try:
        values = encoding.decode(array, shape)
    except EncodingError as error:
        raise fault(f"{spec.encoding}: {error}") from None
    if before is None:
        return values
    if not spec.rounded:
        return before + values
    halves = halved(before + values)
    if not np.isfinite(halves).all():
        raise fault("is beyond half precision, to which it is rounded")
    return halves.astype(np.float32)
