"""Vectors of secure aggregation: fixed-point encoding, masks, and contexts.

Bonawitz et al., Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. For
each lane, the vectors of the sites in a cohort are added up. A lane consists of the fields of one
`Sum`. A site i sends

    y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij),

where b_i is a secret of site i, and s_ij is a secret of sites i and j. The sum of all y_i, minus
all PRG(b_i), is the sum of the x_i. Unlike in the paper, the sites' keys are known in advance, and
the shares of b_i are sent with y_i.

A vector starts with 64-bit words, followed by 32-bit words; sums are modulo 2^64 and 2^32. For n
sites, f = 25 - ceil(log2 n), and a site with weight w of at most `cap`, a value x is encoded as:

| words | values | encoding |
|---|---|---|
| 64 bits | counters of the vector (`HEADER`) | integers |
| 64 bits | class rows, statistics of batch norms | rint(w x 2^20), at most 2^62 / n |
| 64 bits | numbers of samples per class; integers of a model | integers; w x |
| 32 bits | other weights, and scores | rint(w / cap x 2^f), for |w / cap x| < 64 |

Values outside these bounds are clipped. Only the site logs their number, because the number could
depend on how many of its samples have a property that the server chooses. Without clipping, the
error of a mean over m sites is at most (m / 2) 2^-f / (sum of w / cap) for 32-bit words.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from fedhet.algorithms.shamir import SHARE_BYTES
from fedhet.base.arrays import Array, Arrays, Shapes
from fedhet.wire.contract import (
    Contract,
    ScalarField,
    Sizes,
    Sum,
    TensorField,
    WeightsField,
    ids_of,
)
from fedhet.wire.encodings import STATISTICS

MASKED, SHARES, COMMITMENT = "masked", "shares", "commitment"
"""Fields of a masked reply, with one tensor per lane: the vector [words], the encrypted shares
[sites, bytes] of the mask's seed, and the commitments [1 + sites, bytes] to seed and shares."""
REQUEST, REVEAL, SEEDS, FAULT = "masking", "unmasking", "seeds", "fault"
"""Entries of messages: a request for a masked reply and a request for shares, in JSON; the secrets
shared with lost sites; and the reason why a site refuses lanes or reveals nothing for them."""
NONCE_BYTES, BOX_BYTES, COMMITMENT_BYTES = 12, 12 + SHARE_BYTES + 16, 32
"""Size of the nonce of an encrypted share, of nonce, ciphertext and tag together, and of a
commitment, in bytes."""


class LanesField(WeightsField):
    """Declaration of one tensor per lane, except for lanes that the site refuses."""

    def expected(self, sender: str, received: Arrays, shapes: Shapes) -> Shapes:
        """Return the expected shape and dtype of each known lane that was received."""
        return {lane: shapes[lane] for lane in received if lane in shapes}


MASKED_CONTRACT = Contract(
    (
        LanesField(MASKED, "masked vectors of secure aggregation"),
        LanesField(SHARES, "encrypted shares of the masks"),
        LanesField(COMMITMENT, "commitments to the seeds of the masks and to their shares"),
        ScalarField(FAULT, str, "reason why the site refuses lanes", required=False),
    )
)
HEADER = ("sites", "cap", "weight")
"""Counters in a vector: the constant 1, the sites' common cap, and the weight.

The sum of the first counter equals the number of sites only if all masks cancel. A weight is the
site's weight in the peers file. It is never the number of samples, because two cohorts that differ
by one site would reveal this number as the difference of two sums."""
WIDE_BITS, NARROW_BITS, NARROW_RANGE = 20, 25, 6
"""Number of fractional bits of 64-bit words, and of 32-bit words if the cohort has one site; and
log2 of the bound 64 on values in 32-bit words."""
BLOCK = 2**16
"""Number of words masked at a time, chosen so that the words fit into the CPU cache."""


@dataclass(frozen=True)
class Part:
    """Tensor in the vector of a lane."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    low: float | None
    """Minimum value, or None if the tensor has no minimum."""
    kind: Literal["narrow", "wide", "integer", "rows", "totals"]
    """Encoding (see the table in the module's docstring). Tensors of the kinds "rows" and "totals"
    have one row per class; "totals" are summed, and all other tensors are averaged."""

    @property
    def size(self) -> int:
        """Number of values in the tensor."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """Layout of a lane's vector: the order, shape, and encoding of each tensor."""

    weight: str
    """Weight of a site (see `Sum.weight`)."""
    sites: int
    """Number of sites in the cohort."""
    classes: int
    """Number of classes if the lane has class rows, otherwise 0."""
    ids: str
    """Name of the tensor with class ids if the lane has class rows, otherwise ""."""
    parts: tuple[Part, ...]
    """Tensors in order; tensors in 64-bit words precede tensors in 32-bit words."""

    @classmethod
    def for_reply(
        cls, lane: Sum, contract: Contract, sizes: Sizes, sites: int, settings: object
    ) -> Layout:
        """Return the layout of a lane for replies with the given contract and sizes."""
        parts: list[Part] = []
        ids, weight = "", lane.weight
        if weight == "classes" and getattr(settings, "weighting", weight) == "clients":
            weight = "clients"
        for field in (each for each in contract.fields if each.name in lane.fields):
            if isinstance(field, WeightsField):
                for name, (shape, dtype) in sorted(sizes.models.get(field.name, {}).items()):
                    kind: Literal["narrow", "wide", "integer"] = "narrow"
                    if not np.issubdtype(dtype, np.floating):
                        kind = "integer"
                    elif name.endswith(STATISTICS):
                        kind = "wide"
                    low = field.min_value(name)
                    parts.append(Part(f"{field.name}/{name}", shape, dtype, low, kind))
            elif isinstance(field, TensorField):
                of_class = ids_of(contract, field)
                ids = of_class or ids
                axes = ("C", *field.axes[1:]) if of_class else field.axes
                shape = tuple(a if isinstance(a, int) else sizes.axes[a] for a in axes)
                is_total = of_class and np.issubdtype(field.dtype, np.integer)
                rows = ("totals" if is_total else "rows") if of_class else "narrow"
                parts.append(Part(field.name, shape, field.dtype, field.low, rows))  # type: ignore[arg-type]
        parts.sort(key=lambda part: part.kind == "narrow")
        classes = sizes.axes["C"] if ids else 0
        return cls(weight, sites, classes, ids, tuple(parts))

    @cached_property
    def wide(self) -> int:
        """Number of 64-bit words in the vector."""
        values = sum(part.size for part in self.parts if part.kind != "narrow")
        return len(HEADER) + self.classes + values

    @cached_property
    def size(self) -> int:
        """Size of the vector, in 32-bit words."""
        return 2 * self.wide + sum(part.size for part in self.parts if part.kind == "narrow")

    def describe(self) -> str:
        """Return a description that is different for each layout."""
        parts = [[part.name, part.shape, part.dtype, part.low, part.kind] for part in self.parts]
        bits = WIDE_BITS, NARROW_BITS, NARROW_RANGE
        return json.dumps([self.weight, self.sites, self.classes, self.ids, parts, bits])

    def encode(
        self, sent: Arrays, weight: int, cap: int, rows: Collection[int] = ()
    ) -> tuple[Array, int]:
        """Encode a site's finite tensors as a vector, i.e. a uint32 array of shape [size].

        `weight` is the site's weight, and `cap` the largest weight of a site. Only the rows of the
        classes in `rows` are encoded. Also returns the number of clipped values.
        """
        vector = np.zeros(self.size, np.uint32)
        weight, cap = (weight, cap) if self.weight == "samples" else (1, 1)
        header, class_weights = self._counters(vector)
        clipped, present, by_row = 0, np.zeros(0, np.intp), np.zeros(0, np.int64)
        kept = np.zeros(0, bool)
        if self.ids:
            kept = np.isin(sent[self.ids], list(rows))
            present = sent[self.ids][kept].astype(np.intp)
            by_row = np.ones(len(present), np.int64)
            if self.weight == "classes":
                counts = next(part.name for part in self.parts if part.kind == "totals")
                by_row = sent[counts][kept].astype(np.int64)
            class_weights[present] = by_row
        for part, section in self._sections(vector):
            value, limit = sent[part.name], 2**62 // self.sites
            factor = 1.0 if part.kind in ("integer", "totals") else 2.0**WIDE_BITS
            if part.kind in ("rows", "totals"):
                scales = (by_row if part.kind == "rows" else np.ones(len(present))) * factor
                scales = scales.reshape(-1, *[1] * (value.ndim - 1))
                integers, outside = _integers(value[kept], scales, limit)
                section[present] = integers.reshape(len(present), *part.shape[1:])
            else:
                scale = weight * factor
                if part.kind == "narrow":
                    scale = weight / cap * 2.0**self._fraction
                    limit = 2 ** (self._fraction + NARROW_RANGE)
                integers, outside = _integers(value, scale, limit)
                section[...] = integers.reshape(part.shape)
            clipped += outside
        header[:] = 1, cap, weight
        return vector, clipped

    def decode(self, total: Array, sites: int) -> tuple[dict[str, Array], int]:
        """Decode a sum of `sites` vectors into tensors and total weight.

        Tensors are averaged, except for the numbers of samples per class, which are summed. Raises
        ValueError if the masks did not cancel, or if the counters have impossible values.
        """
        header, class_weights = self._counters(total := np.array(total))
        count, caps, weight = map(int, header)
        if count != sites:
            raise ValueError(
                "the masks do not cancel, because a client sent a wrong vector, or because the "
                "clients' instructions, settings, cohorts, or peers files differ"
            )
        bounds = 0 < caps <= sites * 2**31 and caps % sites == 0 and sites <= weight <= caps
        if not bounds:
            raise ValueError("a site sent impossible counters")
        if (class_weights < 0).any():
            raise ValueError("a site sent a negative number of samples")
        present = np.flatnonzero(class_weights)
        tensors: dict[str, Array] = {self.ids: present.astype(np.int64)} if self.ids else {}
        mean: Array
        for part, section in self._sections(total):
            if part.kind == "narrow":
                mean = section * (caps / sites / (weight * 2.0**self._fraction))
            elif part.kind == "rows":
                by_row = class_weights[present].reshape(-1, *[1] * (len(part.shape) - 1))
                mean = section[present] / (by_row * 2.0**WIDE_BITS)
            elif part.kind == "totals":
                mean = section[present]
            elif part.kind == "integer":
                mean = np.rint(section / weight)
            else:
                mean = section / (weight * 2.0**WIDE_BITS)
            decoded = np.asarray(mean, part.dtype)
            if part.low is not None:
                decoded = np.maximum(decoded, np.asarray(part.low, part.dtype))
            tensors[part.name] = decoded
        return tensors, weight

    def empty(self) -> dict[str, Array]:
        """Return the tensors of a lane with class rows if no class has a row."""
        tensors: dict[str, Array] = {self.ids: np.zeros(0, np.int64)}
        return tensors | {p.name: np.zeros((0, *p.shape[1:]), p.dtype) for p in self.parts}

    def add(self, vector: Array, other: Array) -> None:
        """Add the vector `other` to `vector` in place."""
        for mine, others in zip(self._views(vector), self._views(other), strict=True):
            mine += others

    def add_mask(self, vector: Array, seed: bytes, sign: int) -> None:
        """Add PRG(seed) in place, or subtract it if `sign` is negative.

        The seed is the 32-byte key of a ChaCha20 stream, and must not be used for two vectors.
        """
        stream = Cipher(algorithms.ChaCha20(seed, bytes(16)), None).encryptor()
        for words in self._views(vector):
            for start in range(0, len(words), BLOCK):
                part = words[start : start + BLOCK]
                mask = np.frombuffer(stream.update(bytes(part.nbytes)), part.dtype)
                if sign > 0:
                    part += mask
                else:
                    part -= mask

    @property
    def _fraction(self) -> int:
        """Number of fractional bits in each 32-bit word."""
        return NARROW_BITS - math.ceil(math.log2(self.sites))

    def _counters(self, vector: Array) -> tuple[Array, Array]:
        """Return views of a vector's header and of its weights by class, as int64."""
        counters = self._views(vector)[0][: len(HEADER) + self.classes].view(np.int64)
        return counters[: len(HEADER)], counters[len(HEADER) :]

    def _sections(self, vector: Array) -> Iterator[tuple[Part, Array]]:
        """Yield each part with a view of its integers in a vector, in the shape of the tensor."""
        words, narrow = self._views(vector)
        wide: Array = words.view(np.int64)[len(HEADER) + self.classes :]
        rest: dict[bool, Array] = {True: narrow.view(np.int32), False: wide}
        for part in self.parts:
            is_narrow = part.kind == "narrow"
            yield part, rest[is_narrow][: part.size].reshape(part.shape)
            rest[is_narrow] = rest[is_narrow][part.size :]

    def _views(self, vector: Array) -> tuple[Array, Array]:
        """Return the 64-bit words and the 32-bit words of a vector, as views of its memory."""
        return vector[: 2 * self.wide].view(np.uint64), vector[2 * self.wide :]


def context(*parts: bytes | str | int | Sequence[str]) -> bytes:
    """Return the SHA-256 digest of an unambiguous encoding of a list of values."""
    listed = [part.hex() if isinstance(part, bytes) else part for part in parts]
    return hashlib.sha256(json.dumps(["fedhet masking 2", *listed]).encode()).digest()


def commitment(kind: Literal["seed", "share"], value: bytes) -> Array:
    """Return a commitment to a mask's random seed or to a share, i.e. a uint8 array of shape [32].

    With commitments, the server recognizes wrong shares. Without them, two malicious clients could
    reveal shares with which a share of an honest client, or an honest client's seed, seems wrong.
    """
    return np.frombuffer(context(kind, value), np.uint8)


def content_digest(tensors: Arrays, scalars: Mapping[str, bool | int | float | str]) -> bytes:
    """Return the SHA-256 digest of the content of a message."""
    digest = hashlib.sha256(json.dumps(dict(scalars), sort_keys=True).encode())
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name])
        digest.update(json.dumps([name, value.dtype.str, value.shape]).encode())
        digest.update(value.reshape(-1).view(np.uint8).data)
    return digest.digest()


def _integers(value: Array, scale: float | Array, limit: int) -> tuple[Array, int]:
    """Return rint(value * scale) as an int64 array [N], with magnitudes clipped below `limit`.

    Also returns the number of clipped values.
    """
    scaled = np.rint(value.astype(np.float64) * scale).reshape(-1)
    # Use the largest float64 below the limit, because conversion rounds a limit of 62 bits up.
    bound = min(float(limit - 1), math.nextafter(float(limit), 0))
    outside = int((np.abs(scaled) > bound).sum())
    return np.clip(scaled, -bound, bound).astype(np.int64), outside
