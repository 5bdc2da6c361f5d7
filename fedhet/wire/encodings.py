"""Compressed encodings of float32 tensors in messages, selected by `wire.encoding`.

An encoding converts values to a byte array and back. The number of bytes is determined by the shape
(for top-k, also by the leading bit mask). This number is checked before any memory is allocated,
and decoded data is at most 32 times as large as encoded data.

| encoding | bytes for a tensor of N values in R rows |
|---|---|
| float16 | 2 N: half precision, little endian |
| int8 | 4 R + N: a float32 scale for each row, then each value in units of its row's scale |
| top-k | N / 8, rounded up, + 2 K: a bit mask of the K values sent, then these values in float16 |

Top-k uses a bit mask rather than indices, so an index can be neither out of range nor repeated.

Weights are encoded as differences from base weights that both sides have, because differences are
small. Without a base, weights are sent in half precision, because int8 weights would reduce
accuracy. Other large tensors (class means, logits, features) are encoded directly.

The following are never encoded: integers, fields with a minimum value, probabilities, statistics of
batch normalization, tensors below 512 bytes, and values that the encoding cannot represent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from fedhet.algorithms.weights import LEVELS, largest, rounded, scales_of
from fedhet.base.arrays import Array, Arrays
from fedhet.base.seeding import numpy_rng
from fedhet.settings.engine import WireSettings
from fedhet.wire.contract import VARIANCES, Contract, Field, TensorField, WeightsField

Shape = tuple[int, ...]
_ONES = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(1, dtype=np.uint8)
"""Number of set bits, by byte value."""
MAX_MAGNITUDE = 1e12
"""Maximum absolute value for int8, which equals the limit on all numbers in messages."""


class EncodingError(ValueError):
    """Raised if data is not a valid encoding of the declared tensor."""


@dataclass(frozen=True)
class Encoded:
    """Encoded tensor, ready to be sent."""

    encoding: str
    data: Array
    """Encoded data, as a uint8 array of shape [bytes]."""
    difference: bool = False
    """Whether the values are a difference from the tensor of the same name in the base weights."""
    rounded: bool = False
    """Whether the receiver rounds the sum of base and difference to half precision."""


class Encoding(ABC):
    """Base class for encodings of float32 tensors."""

    name: ClassVar[str]
    is_biased: ClassVar[bool] = False
    """Whether the encoding is biased, so that the sender must use error feedback."""

    @abstractmethod
    def size(self, shape: Shape) -> int:
        """Return the size in bytes of an encoded tensor of this shape."""

    @abstractmethod
    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Encode float32 values as a byte array, or return None if a value is out of range."""

    def decode(self, data: Array, shape: Shape) -> Array:
        """Decode a float32 tensor.

        Raises EncodingError, before allocating, if the size is wrong.
        """
        expected = self._expected(data, shape)
        if data.size != expected:
            raise EncodingError(f"expected {expected} bytes for this shape, got {data.size}")
        try:
            return self._decoded(data, shape).reshape(shape)
        except ValueError as error:  # numpy also limits the size of empty arrays.
            raise EncodingError(str(error)) from None

    def _expected(self, data: Array, shape: Shape) -> int:
        return self.size(shape)

    @abstractmethod
    def _decoded(self, data: Array, shape: Shape) -> Array:
        """Decode data whose size has been checked."""


class Float16(Encoding):
    """Half precision, for magnitudes up to 65504.

    For magnitudes above 6e-5, the relative error is at most 2^-11.
    """

    name = "float16"

    def size(self, shape: Shape) -> int:
        """Return the size: two bytes for each value."""
        return 2 * math.prod(shape)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Round values to half precision, or return None if a value would become infinite."""
        halves = to_half(values)
        return halves.reshape(-1).view(np.uint8) if np.isfinite(halves).all() else None

    def _decoded(self, data: Array, shape: Shape) -> Array:
        return _check_finite(data.view("<f2")).astype(np.float32)


class Int8(Encoding):
    """8-bit integer encoding with a scale for each row and unbiased stochastic rounding."""

    name = "int8"

    def size(self, shape: Shape) -> int:
        """Return the size: four bytes for each row, and one byte for each value."""
        return 4 * _num_rows(shape) + math.prod(shape)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return the scales and the integers, or None if a value is not finite or exceeds 1e12."""
        rows = _in_rows(values, values.shape)
        scales = scales_of(rows)
        if not (scales <= MAX_MAGNITUDE / LEVELS).all():  # This comparison is False for NaN.
            return None
        numbers = rounded(rows, scales, rng)
        return np.concatenate([_as_bytes(scales.astype("<f4")), _as_bytes(numbers)])

    def _decoded(self, data: Array, shape: Shape) -> Array:
        rows = _num_rows(shape)
        scales = _check_finite(data[: 4 * rows].view("<f4"))
        if (scales < 0).any() or (scales > MAX_MAGNITUDE / LEVELS).any():
            raise EncodingError(f"scales must be from 0 to {MAX_MAGNITUDE / LEVELS:.3g}")
        numbers = data[4 * rows :].view(np.int8)
        if (numbers < -LEVELS).any():
            raise EncodingError(f"integers must be from {-LEVELS} to {LEVELS}")
        return _in_rows(numbers, shape) * scales.astype(np.float32)[:, None]


@dataclass(frozen=True)
class TopK(Encoding):
    """Sparse encoding of the values with the largest magnitudes. All other values become zero."""

    name = "top-k"
    is_biased = True
    keep: float = 0.15
    """Fraction of the values to keep (at least one value). Decoding does not need this fraction."""

    def size(self, shape: Shape) -> int:
        """Return the size: one bit for each value, and two bytes for each kept value."""
        count = math.prod(shape)
        return _mask_bytes(count) + 2 * self._num_kept(count)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return the bit mask and the kept values, or None if a value is out of range."""
        flat = values.reshape(-1)
        if not np.isfinite(flat).all():
            return None
        mask = largest(flat, self._num_kept(len(flat))) if len(flat) else flat > 0
        halves = to_half(flat[mask])
        if not np.isfinite(halves).all():
            return None
        return np.concatenate([np.packbits(mask), _as_bytes(halves)])

    def _num_kept(self, count: int) -> int:
        return min(count, max(1, round(self.keep * count)))

    def _expected(self, data: Array, shape: Shape) -> int:
        mask_bytes = _mask_bytes(math.prod(shape))
        if data.size < mask_bytes:
            return mask_bytes
        return mask_bytes + 2 * int(_ONES[data[:mask_bytes]].sum(dtype=np.int64))

    def _decoded(self, data: Array, shape: Shape) -> Array:
        count = math.prod(shape)
        bits = np.unpackbits(data[: _mask_bytes(count)])
        if bits[count:].any():
            raise EncodingError("padding bits of the mask must be 0")
        values = np.zeros(count, np.float32)
        values[bits[:count].view(np.bool_)] = _check_finite(data[_mask_bytes(count) :].view("<f2"))
        return values


ENCODINGS: Mapping[str, Encoding] = {each.name: each for each in (Float16(), Int8(), TopK())}
"""Supported encodings by name."""


def to_half(values: Array) -> Array:
    """Convert values to half precision. Values out of range become infinite."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype("<f2")


def _num_rows(shape: Shape) -> int:
    """Return the number of rows with separate scales, such as the outputs of a linear layer."""
    return shape[0] if len(shape) > 1 else 1


def _in_rows(values: Array, shape: Shape) -> Array:
    rows = _num_rows(shape)
    return values.reshape(rows, math.prod(shape) // max(rows, 1))


def _mask_bytes(count: int) -> int:
    return -(-count // 8)


def _as_bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _check_finite(values: Array) -> Array:
    if not np.isfinite(values).all():
        raise EncodingError("contains NaN or infinity")
    return values


RngKey = tuple[str | int, ...]
"""Key of a message's random generators: sender, round and purpose."""
STATISTICS = ("running_mean", VARIANCES)
"""Suffixes of the names of batch-norm statistics, which are averages instead of weights."""
MIN_BYTES = 512
"""Minimum size of an encoded tensor; smaller tensors are sent unchanged."""
HALF = Float16()


@dataclass(frozen=True)
class Rules:
    """Encodings for the tensors in a message, for one value of `wire.encoding`."""

    sent: Encoding | None
    """Encoding for weight differences in replies, or None to send weights unchanged."""
    received: Encoding | None
    """Encoding for weight differences in instructions, or None to send weights without a base."""
    values: Encoding | None
    """Encoding for tensors other than weights, or None to send these tensors unchanged."""
    weights: Encoding | None = HALF
    """Encoding for weights without a base, or None to send these weights unchanged."""


def rules_of(settings: WireSettings) -> Rules | None:
    """Return the encoding rules in the settings, or None if all tensors are sent unchanged."""
    return {
        "float32": None if settings.resend else Rules(None, None, None, None),
        "float16": Rules(HALF, None, HALF),
        "int8": Rules(Int8(), Int8(), Int8()),
        "top-k": Rules(TopK(settings.keep), Int8(), Int8()),
    }[settings.encoding]


@dataclass(frozen=True)
class Coded:
    """Encoded tensor together with its decoded values."""

    encoded: Encoded
    values: Array
    """Values as decoded by the receiver."""


class Coder:
    """Encoder for the tensors in the messages from the server or from a client."""

    def __init__(self, rules: Rules, contract: Contract, seed: int) -> None:
        self.rules, self._seed = rules, seed
        self._fields = {each.name: each for each in contract.fields}

    @classmethod
    def for_contract(cls, settings: WireSettings, contract: Contract, seed: int) -> Coder | None:
        """Create the coder for a contract, or return None if all tensors are sent unchanged."""
        rules = rules_of(settings)
        return cls(rules, contract, seed) if rules else None

    def weights_of(self, tensors: Arrays) -> dict[str, Array]:
        """Return the tensors that can be base weights, i.e. the weights of single models."""
        return {name: value for name, value in tensors.items() if self._is_one_model(name)}

    def reply(
        self, key: RngKey, tensors: Arrays, base: Arrays, unsent: Arrays
    ) -> tuple[dict[str, Encoded], dict[str, Array]]:
        """Encode the tensors of a reply, and return them with the new compression errors.

        `base` contains the weights in the instruction, and `unsent` the compression errors of
        earlier replies, which are added to the weights if the encoding is biased (error feedback).
        """
        encoded, errors = {}, {}
        for name, value in self._encodable(tensors):
            before = base.get(name) if self._is_one_model(name) else None
            if before is None or (before.dtype, before.shape) != (value.dtype, value.shape):
                coded = self._value(key, name, value)
            elif self.rules.sent is None or not self.rules.sent.is_biased:
                coded = encode_tensor(self.rules.sent, value, self._rng(key, name), before)
            else:
                target = value + unsent[name] if name in unsent else value
                coded = encode_tensor(self.rules.sent, target, self._rng(key, name), before)
                if coded:
                    errors[name] = target - coded.values
            if coded:
                encoded[name] = coded.encoded
        return encoded, errors

    def values(self, key: RngKey, tensors: Arrays) -> dict[str, Coded]:
        """Encode tensors without base weights. Tensors that are sent unchanged are omitted."""
        coded = {name: self._value(key, name, value) for name, value in self._encodable(tensors)}
        return {name: each for name, each in coded.items() if each}

    def differences(self, key: RngKey, weights: Arrays, base: Arrays) -> dict[str, Coded]:
        """Encode weights as differences from the base weights that a client has.

        The decoded weights are rounded to half precision. Clients that receive the full weights in
        half precision thus get the same values.
        """
        assert self.rules.received is not None
        differences: dict[str, Coded] = {}
        for name, value in self._encodable(weights):
            coded = encode_tensor(self.rules.received, value, self._rng(key, name), base[name])
            half = to_half(coded.values) if coded else None
            if coded and half is not None and np.isfinite(half).all():
                encoded = replace(coded.encoded, rounded=True)
                differences[name] = Coded(encoded, half.astype(np.float32))
        return differences

    def _value(self, key: RngKey, name: str, value: Array) -> Coded | None:
        is_weights = isinstance(self._field(name), WeightsField)
        encoding = self.rules.weights if is_weights else self.rules.values
        return encode_tensor(encoding, value, self._rng(key, name))

    def _encodable(self, tensors: Arrays) -> Iterator[tuple[str, Array]]:
        """Yield the float32 tensors to encode.

        Small tensors, and tensors whose values are constrained by the contract, are not encoded.
        """
        for name, value in tensors.items():
            field = self._field(name)
            if isinstance(field, WeightsField):
                has_rule = field.low is not None or name.endswith(STATISTICS)
            elif isinstance(field, TensorField):
                has_rule = field.low is not None or field.distribution
            else:
                continue
            if value.dtype == np.float32 and value.nbytes >= MIN_BYTES and not has_rule:
                yield name, value

    def _is_one_model(self, name: str) -> bool:
        field = self._field(name)
        return isinstance(field, WeightsField) and not field.stacked

    def _field(self, name: str) -> Field | None:
        return self._fields.get(name.partition("/")[0])

    def _rng(self, key: RngKey, name: str) -> np.random.Generator:
        """Return the random generator for a tensor, independent of other tensors in the message."""
        return numpy_rng(self._seed, "wire", *key, name)


def encode_tensor(
    encoding: Encoding | None, values: Array, rng: np.random.Generator, base: Array | None = None
) -> Coded | None:
    """Encode values, or their difference from `base` if it is given.

    Returns None if `encoding` is None or cannot represent the values; they are then sent unchanged.
    """
    if encoding is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        data = encoding.encode(values if base is None else values - base, rng)
    if data is None:
        return None
    decoded = encoding.decode(data, values.shape)
    encoded = Encoded(encoding.name, data, difference=base is not None)
    return Coded(encoded, decoded if base is None else base + decoded)
