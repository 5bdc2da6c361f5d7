"""Encodings: how tensors of float32 travel in fewer bytes, and which ones, by `wire.encoding`.

An encoding turns values into uint8 [bytes] and back. How many bytes there are follows from the
shape (of top-k, from the bits that they begin with), so that this is checked before anything is
allocated, and nothing decodes to more than 32 times its bytes.

| encoding | bytes of a tensor of N numbers in R rows |
|---|---|
| float16 | 2 N: half precision, little endian |
| int8 | 4 R + N: a float32 scale of each row, then each number in units of it |
| top-k | N / 8, rounded up, + 2 K: a bit for each number (is it sent?), then K of float16 |

Bits say which numbers of a sparse tensor follow, not indices: none is out of range, or twice.

Weights are encoded as differences to weights that both sides have, since these are small. Without
such a base they travel in half precision: integers of one byte of the weights themselves cost
accuracy. Other large tensors (class means, logits, features) are encoded as they are. Whole travel:
integers, probabilities and whatever else has a minimum or a sum to keep, statistics of batch
normalization, tensors of less than half a kilobyte, and what an encoding cannot represent.
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
"""The number of bits that are set in each byte."""
MOST = 1e12
"""The largest absolute value that int8 encodes or decodes, as of a number that travels."""


class EncodingError(ValueError):
    """Bytes that do not decode to the tensor that they are said to be."""


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


class Encoding(ABC):
    """A way to write a tensor of float32 as bytes."""

    name: ClassVar[str]
    is_biased: ClassVar[bool] = False
    """Whether what it leaves out must be sent later, lest it is lost."""

    @abstractmethod
    def size(self, shape: Shape) -> int:
        """Return the bytes of a tensor of this shape."""

    @abstractmethod
    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return float32 values as uint8 [bytes]; None: they are beyond its range."""

    def decode(self, data: Array, shape: Shape) -> Array:
        """Return the float32 tensor. Raises EncodingError; allocates nothing before the check."""
        expected = self._expected(data, shape)
        if data.size != expected:
            raise EncodingError(f"{data.size} bytes came, {expected} are of its shape")
        try:
            return self._decoded(data, shape).reshape(shape)
        except ValueError as error:  # numpy has limits of its own for empty shapes
            raise EncodingError(str(error)) from None

    def _expected(self, data: Array, shape: Shape) -> int:
        return self.size(shape)

    @abstractmethod
    def _decoded(self, data: Array, shape: Shape) -> Array:
        """Return the values of data of the expected size."""


class Float16(Encoding):
    """Half precision: up to 65504, with a relative error of at most 2^-11 from 6e-5 on."""

    name = "float16"

    def size(self, shape: Shape) -> int:
        """Return two bytes for each number."""
        return 2 * math.prod(shape)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return the nearest numbers of half precision; None if one would be infinite."""
        halves = halved(values)
        return halves.reshape(-1).view(np.uint8) if np.isfinite(halves).all() else None

    def _decoded(self, data: Array, shape: Shape) -> Array:
        return _finite(data.view("<f2")).astype(np.float32)


class Int8(Encoding):
    """Integers in units of a row's scale, rounded at random without bias."""

    name = "int8"

    def size(self, shape: Shape) -> int:
        """Return four bytes for each row, and one for each number."""
        return 4 * _rows(shape) + math.prod(shape)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return the scales and the rounded numbers; None if one is not finite, or beyond 1e12."""
        rows = _in_rows(values, values.shape)
        scales = scales_of(rows)
        if not (scales <= MOST / LEVELS).all():  # False for NaN
            return None
        numbers = rounded(rows, scales, rng)
        return np.concatenate([_bytes(scales.astype("<f4")), _bytes(numbers)])

    def _decoded(self, data: Array, shape: Shape) -> Array:
        rows = _rows(shape)
        scales = _finite(data[: 4 * rows].view("<f4"))
        if (scales < 0).any() or (scales > MOST / LEVELS).any():
            raise EncodingError(f"a scale must be from 0 to {MOST / LEVELS:.3g}")
        numbers = data[4 * rows :].view(np.int8)
        if (numbers < -LEVELS).any():
            raise EncodingError(f"an integer must be from {-LEVELS} to {LEVELS}")
        return _in_rows(numbers, shape) * scales.astype(np.float32)[:, None]


@dataclass(frozen=True)
class TopK(Encoding):
    """The largest numbers of a tensor; the others count as zero."""

    name = "top-k"
    is_biased = True
    keep: float = 0.15
    """The share of the numbers that is kept, at least one; decoding does not need it."""

    def size(self, shape: Shape) -> int:
        """Return the bits of all numbers, and two bytes for each that is kept."""
        count = math.prod(shape)
        return _bits(count) + 2 * self._kept(count)

    def encode(self, values: Array, rng: np.random.Generator) -> Array | None:
        """Return which numbers are kept, and these; None if one is not finite, or would not be."""
        flat = values.reshape(-1)
        if not np.isfinite(flat).all():
            return None
        chosen = largest(flat, self._kept(len(flat))) if len(flat) else flat > 0
        halves = halved(flat[chosen])
        if not np.isfinite(halves).all():
            return None
        return np.concatenate([np.packbits(chosen), _bytes(halves)])

    def _kept(self, count: int) -> int:
        return min(count, max(1, round(self.keep * count)))

    def _expected(self, data: Array, shape: Shape) -> int:
        bits = _bits(math.prod(shape))
        if data.size < bits:
            return bits
        return bits + 2 * int(_ONES[data[:bits]].sum(dtype=np.int64))

    def _decoded(self, data: Array, shape: Shape) -> Array:
        count = math.prod(shape)
        bits = np.unpackbits(data[: _bits(count)])
        if bits[count:].any():
            raise EncodingError("a bit beyond its last number is set")
        values = np.zeros(count, np.float32)
        values[bits[:count].view(np.bool_)] = _finite(data[_bits(count) :].view("<f2"))
        return values


ENCODINGS: Mapping[str, Encoding] = {each.name: each for each in (Float16(), Int8(), TopK())}
"""What this side decodes, by name."""


def halved(values: Array) -> Array:
    """Return values in half precision, infinite where they are beyond it."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values).astype("<f2")


def _rows(shape: Shape) -> int:
    """Return the number of rows with a scale of their own: of outputs, or of samples."""
    return shape[0] if len(shape) > 1 else 1


def _in_rows(values: Array, shape: Shape) -> Array:
    rows = _rows(shape)
    return values.reshape(rows, math.prod(shape) // max(rows, 1))


def _bits(count: int) -> int:
    return -(-count // 8)


def _bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def _finite(values: Array) -> Array:
    if not np.isfinite(values).all():
        raise EncodingError("holds NaN or infinity")
    return values


RngKey = tuple[str | int, ...]
"""Who sends a message, in which round, and what for: from it and the seed come its draws."""
STATISTICS = ("running_mean", VARIANCES)
"""The ends of the names of what batch normalization keeps: no sum of changes, but averages."""
MIN_BYTES = 512
"""A smaller tensor travels whole."""
HALF = Float16()


@dataclass(frozen=True)
class Rules:
    """The encodings that one value of `wire.encoding` stands for."""

    sent: Encoding | None
    """Of differences of weights that a client sends; None: it sends them as they are."""
    received: Encoding | None
    """Of differences of weights that it is sent; None: it is sent them in half precision."""
    values: Encoding | None
    """Of tensors other than weights; None: they travel as they are."""
    weights: Encoding | None = HALF
    """Of weights without a base; None: they travel as they are."""


def rules_of(settings: WireSettings) -> Rules | None:
    """Return the rules that the settings stand for; None: everything travels as it is."""
    return {
        "float32": None if settings.resend else Rules(None, None, None, None),
        "float16": Rules(HALF, None, HALF),
        "int8": Rules(Int8(), Int8(), Int8()),
        "top-k": Rules(TopK(settings.keep), Int8(), Int8()),
    }[settings.encoding]


@dataclass(frozen=True)
class Coded:
    """A tensor under an encoding."""

    travels: Encoded
    values: Array
    """What the receiver decodes."""


class Coder:
    """Encodes the tensors of one half's messages."""

    def __init__(self, rules: Rules, contract: Contract, seed: int) -> None:
        self.rules, self._seed = rules, seed
        self._fields = {each.name: each for each in contract.fields}

    @classmethod
    def of(cls, settings: WireSettings, contract: Contract, seed: int) -> Coder | None:
        """Return the coder of a contract's messages; None if they travel as they are."""
        rules = rules_of(settings)
        return cls(rules, contract, seed) if rules else None

    def weights_of(self, tensors: Arrays) -> dict[str, Array]:
        """Return the weights of single models, on which other messages may build."""
        return {name: value for name, value in tensors.items() if self._is_one_model(name)}

    def reply(
        self, place: RngKey, tensors: Arrays, base: Arrays, unsent: Arrays
    ) -> tuple[dict[str, Encoded], dict[str, Array]]:
        """Return a reply's tensors under their encodings, and what is left unsent of them.

        `base` are the weights that the client was sent, `unsent` what earlier replies left: error
        feedback adds it to what an encoding with a bias sends.
        """
        encoded, left = {}, {}
        for name, value in self._encodable(tensors):
            before = base.get(name) if self._is_one_model(name) else None
            if before is None or (before.dtype, before.shape) != (value.dtype, value.shape):
                found = self._value(place, name, value)
            elif self.rules.sent is None or not self.rules.sent.is_biased:
                found = coded(self.rules.sent, value, self._rng(place, name), before)
            else:
                whole = value + unsent[name] if name in unsent else value
                found = coded(self.rules.sent, whole, self._rng(place, name), before)
                if found:
                    left[name] = whole - found.values
            if found:
                encoded[name] = found.travels
        return encoded, left

    def values(self, place: RngKey, tensors: Arrays) -> dict[str, Coded]:
        """Return those of a message's tensors that are encoded without a base."""
        found = {name: self._value(place, name, each) for name, each in self._encodable(tensors)}
        return {name: each for name, each in found.items() if each}

    def differences(self, place: RngKey, weights: Arrays, base: Arrays) -> dict[str, Coded]:
        """Return the weights that a client is sent, as differences to those that it has.

        Their sums are rounded to half precision, in which they may also travel whole.
        """
        assert self.rules.received is not None
        found: dict[str, Coded] = {}
        for name, value in self._encodable(weights):
            difference = coded(self.rules.received, value, self._rng(place, name), base[name])
            whole = halved(difference.values) if difference else None
            if difference and whole is not None and np.isfinite(whole).all():
                travels = replace(difference.travels, rounded=True)
                found[name] = Coded(travels, whole.astype(np.float32))
        return found

    def _value(self, place: RngKey, name: str, value: Array) -> Coded | None:
        is_weights = isinstance(self._field(name), WeightsField)
        encoding = self.rules.weights if is_weights else self.rules.values
        return coded(encoding, value, self._rng(place, name))

    def _encodable(self, tensors: Arrays) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of which the contract holds after their encoding, and that it pays."""
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

    def _rng(self, place: RngKey, name: str) -> np.random.Generator:
        """Return the draws of a tensor: its own, whatever else the message holds."""
        return numpy_rng(self._seed, "wire", *place, name)


def coded(
    encoding: Encoding | None, values: Array, rng: np.random.Generator, base: Array | None = None
) -> Coded | None:
    """Return values, or their difference to a base, under an encoding; None: they are sent whole.

    That is so without an encoding, and if the values are beyond its range.
    """
    if encoding is None:
        return None
    with np.errstate(over="ignore", invalid="ignore"):
        data = encoding.encode(values if base is None else values - base, rng)
    if data is None:
        return None
    decoded = encoding.decode(data, values.shape)
    travels = Encoded(encoding.name, data, difference=base is not None)
    return Coded(travels, decoded if base is None else base + decoded)
