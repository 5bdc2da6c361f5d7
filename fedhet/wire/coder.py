"""Which tensors of a message travel under which encoding: what `wire.encoding` stands for.

Weights are encoded as differences to weights that both sides have, since these are small. Without
such a base they travel in half precision: integers of one byte of the weights themselves cost
accuracy. Other large tensors (class means, logits, features) are encoded as they are. Whole travel:
integers, probabilities and whatever else has a minimum or a sum to keep, statistics of batch
normalisation, tensors of less than half a kilobyte, and what an encoding cannot represent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from fedhet.base.arrays import Array, Arrays
from fedhet.base.seeding import numpy_rng
from fedhet.settings.engine import WireSettings
from fedhet.wire.contract import VARIANCES, Contract, Field, TensorField, WeightsField
from fedhet.wire.encodings import Encoding, Float16, Int8, TopK, Whole, halved
from fedhet.wire.packing import Encoded

Place = tuple[str | int, ...]
"""Who sends a message, in which round, and what for: from it and the seed come its draws."""
STATISTICS = ("running_mean", VARIANCES)
"""The ends of the names of what batch normalisation keeps: no sum of changes, but averages."""
LEAST_BYTES = 512
"""A smaller tensor travels whole."""
HALF, WHOLE = Float16(), Whole()


@dataclass(frozen=True)
class Rules:
    """The encodings that one value of `wire.encoding` stands for."""

    sent: Encoding
    """Of differences of weights that a client sends."""
    received: Encoding | None
    """Of differences of weights that it is sent; None: it is sent them in half precision."""
    values: Encoding
    """Of tensors other than weights."""
    weights: Encoding = HALF
    """Of weights without a base."""


def rules_of(settings: WireSettings) -> Rules | None:
    """Return the rules that the settings stand for; None: everything travels as it is."""
    exact = Rules(WHOLE, None, WHOLE, WHOLE)
    return {
        "float32": None if settings.resend else exact,
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

    def weights_of(self, tensors: Arrays) -> dict[str, Array]:
        """Return the weights of single models, on which other messages may build."""
        return {name: value for name, value in tensors.items() if self._is_one_model(name)}

    def reply(
        self, place: Place, tensors: Arrays, base: Arrays, unsent: Arrays
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
            elif not self.rules.sent.is_biased:
                found = coded(self.rules.sent, value, self._rng(place, name), before)
            else:
                whole = value + unsent[name] if name in unsent else value
                found = coded(self.rules.sent, whole, self._rng(place, name), before)
                if found:
                    left[name] = whole - found.values
            if found:
                encoded[name] = found.travels
        return encoded, left

    def values(self, place: Place, tensors: Arrays) -> dict[str, Coded]:
        """Return those of a message's tensors that are encoded without a base."""
        found = {name: self._value(place, name, each) for name, each in self._encodable(tensors)}
        return {name: each for name, each in found.items() if each}

    def differences(self, place: Place, weights: Arrays, base: Arrays) -> dict[str, Coded]:
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

    def _value(self, place: Place, name: str, value: Array) -> Coded | None:
        is_weights = isinstance(self._field(name), WeightsField)
        encoding = self.rules.weights if is_weights else self.rules.values
        return coded(encoding, value, self._rng(place, name))

    def _encodable(self, tensors: Arrays) -> Iterator[tuple[str, Array]]:
        """Yield the tensors of which the contract holds after their encoding, and that it pays."""
        for name, value in tensors.items():
            is_large = value.dtype == np.float32 and value.nbytes >= LEAST_BYTES
            if is_large and self._has_no_rule(name):
                yield name, value

    def _has_no_rule(self, name: str) -> bool:
        field = self._field(name)
        if isinstance(field, WeightsField):
            return field.low is None and not name.endswith(STATISTICS)
        return isinstance(field, TensorField) and field.low is None and not field.distribution

    def _is_one_model(self, name: str) -> bool:
        field = self._field(name)
        return isinstance(field, WeightsField) and not field.stacked

    def _field(self, name: str) -> Field | None:
        return self._fields.get(name.partition("/")[0])

    def _rng(self, place: Place, name: str) -> np.random.Generator:
        """Return the draws of a tensor: its own, whatever else the message holds."""
        return numpy_rng(self._seed, "wire", *place, name)


def coded(
    encoding: Encoding, values: Array, rng: np.random.Generator, base: Array | None = None
) -> Coded | None:
    """Return values, or their difference to a base, under an encoding; None: it cannot."""
    with np.errstate(over="ignore", invalid="ignore"):
        data = encoding.encode(values if base is None else values - base, rng)
    if data is None:
        return None
    decoded = encoding.decode(data, values.shape)
    travels = Encoded(encoding.name, data, difference=base is not None)
    return Coded(travels, decoded if base is None else base + decoded)
