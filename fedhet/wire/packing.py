"""How tensors travel: as they are, or under an encoding, as values or as differences.

A message that builds on weights names them by their digest; both sides compute it from what they
have, and none is taken for another.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from fedhet._generated import knowledge_pb2 as wire
from fedhet.base.arrays import Array, Arrays
from fedhet.base.errors import KnowledgeError
from fedhet.wire.encodings import ENCODINGS, EncodingError, halved

DTYPES = frozenset(
    "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()
)
MAX_RANK = 8
DIGEST_BITS = 59
"""Bits of a digest of weights: 18 decimal digits, which may be a part of a file's name."""


@dataclass(frozen=True)
class Encoded:
    """A tensor as it travels under an encoding."""

    encoding: str
    data: Array
    """uint8 [bytes]."""
    difference: bool = False
    """Whether it is the difference to the base's tensor of its name."""
    rounded: bool = False
    """Whether the sum of base and difference is rounded to half precision."""


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


def decoded_bytes(specs: Iterable[wire.TensorSpec]) -> int:
    """Return the bytes of all tensors that travel under an encoding, as they are decoded."""
    return sum(math.prod(s.shape) * np.dtype(np.float32).itemsize for s in specs if s.encoding)


def unpacked(spec: wire.TensorSpec, array: Array, sender: str, base: Arrays) -> Array:
    """Return a message's tensor from the array that came for it. Raises KnowledgeError."""
    if spec.difference and not spec.encoding:
        raise KnowledgeError(sender, spec.name, "is a difference without an encoding")
    return _decoded(spec, array, sender, base) if spec.encoding else _as_listed(spec, array, sender)


def _as_listed(spec: wire.TensorSpec, array: Array, sender: str) -> Array:
    """Return a tensor that travels as it is."""
    if spec.dtype not in DTYPES or (spec.dtype, tuple(spec.shape)) != (
        array.dtype.name,
        array.shape,
    ):
        listed, came = f"{spec.dtype} {list(spec.shape)}", f"{array.dtype} {list(array.shape)}"
        raise KnowledgeError(sender, spec.name, f"listed as {listed}, came as {came}")
    return array


def _decoded(spec: wire.TensorSpec, array: Array, sender: str, base: Arrays) -> Array:
    """Return a tensor that travels under an encoding."""
    encoding, shape = ENCODINGS.get(spec.encoding), tuple(spec.shape)
    if encoding is None:
        fault = f"is encoded as {spec.encoding!r}, this side decodes {', '.join(ENCODINGS)}"
        raise KnowledgeError(sender, spec.name, fault)
    if spec.dtype != "float32" or len(shape) > MAX_RANK:
        fault = f"{spec.dtype} of rank {len(shape)} cannot be encoded as {spec.encoding}"
        raise KnowledgeError(sender, spec.name, fault)
    if array.dtype != np.uint8 or array.ndim != 1:
        fault = f"came as {array.dtype} {list(array.shape)}, must be uint8 [bytes]"
        raise KnowledgeError(sender, spec.name, fault)
    before = base.get(spec.name) if spec.difference else None
    if spec.difference and (
        before is None or before.dtype.name != spec.dtype or before.shape != shape
    ):
        raise KnowledgeError(sender, spec.name, "is a difference to a tensor that the base lacks")
    try:
        values = encoding.decode(array, shape)
    except EncodingError as error:
        raise KnowledgeError(sender, spec.name, f"{spec.encoding}: {error}") from None
    if before is None:
        return values
    return _rounded(sender, spec.name, before + values) if spec.rounded else before + values


def _rounded(sender: str, name: str, values: Array) -> Array:
    halves = halved(values)
    if not np.isfinite(halves).all():
        raise KnowledgeError(sender, name, "is beyond half precision, to which it is rounded")
    return halves.astype(np.float32)
