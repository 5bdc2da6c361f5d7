"""Client replies before the method receives them, in memory or on disk.

A reply that contains weights is decoded and written to a file when it arrives. When its weights are
used, they are mapped from the file one tensor at a time, so the server's memory does not grow with
the number of clients. Only the codec needs to know whether a payload is in memory or on disk.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import numpy as np
from flwr.common import Parameters, ndarrays_to_parameters

from fedhet.algorithms.rounds import staleness_weight
from fedhet.base.arrays import Array, OnDemand
from fedhet.base.disk import Folder
from fedhet.base.errors import (
    REPLY,
    FedhetError,
    KnowledgeError,
    StateError,
    error_reason,
    error_text,
)
from fedhet.runs.measures import Measured
from fedhet.wire.contract import Contract
from fedhet.wire.encodings import STATISTICS
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import (
    Bases,
    Envelope,
    Knowledge,
    check_size,
    decode,
    encode,
    no_bases,
    payload_bytes,
    read_arrays,
    read_npy,
)

Magnitudes = Mapping[str, float]
"""Root mean square of each floating-point part (`part_of`) of a reply."""


@dataclass(frozen=True)
class Reply:
    """A client's decoded reply to a training instruction."""

    client: ClientInfo
    knowledge: Knowledge
    """Content of the reply."""
    measured: Measured
    """Metrics and durations that the client reported."""
    cached_magnitudes: Magnitudes | None = field(default=None, repr=False)
    """Magnitudes of `knowledge`, if they were measured when the reply arrived."""
    age: int = 0
    """Number of rounds since the client received its instruction; 0 if the reply is not late."""
    sent: Knowledge | None = field(default=None, repr=False)
    """Content of the client's instruction, or None if it was not kept."""
    clients: tuple[str, ...] = ()
    """Names of the clients whose replies are summed in this reply; empty for a single client."""
    is_scaled: bool = False
    """Whether the client's update has already been multiplied by `freshness` (asynchronous
    rounds)."""

    @property
    def samples(self) -> int:
        """The client's number of training samples, as reported when it joined.

        With a robust aggregation rule, the number is 1, so that all clients have the same weight.
        """
        return self.client.samples

    @property
    def freshness(self) -> float:
        """Weight of the reply given its age; 1 if the reply is not late."""
        return staleness_weight(self.age)

    @property
    def update_factor(self) -> float:
        """Factor for the reply's age in an average of weights; 1 if the update is scaled."""
        return 1.0 if self.is_scaled else self.freshness

    @property
    def weight(self) -> float:
        """Weight of the reply in a sample-weighted average of weights, reduced if it is late."""
        return self.samples * self.update_factor

    def magnitudes(self) -> Magnitudes:
        """Return the root mean square of each floating-point part of the reply."""
        if self.cached_magnitudes is not None:
            return self.cached_magnitudes
        return magnitudes_of(self.knowledge)

    def with_knowledge(self, knowledge: Knowledge) -> Reply:
        """Return a copy of this reply with other content."""
        return replace(self, knowledge=knowledge, cached_magnitudes=None)

    def with_equal_weight(self, counts: Iterable[str]) -> Reply:
        """Return a copy without claimed numbers of samples, which would be weights in averages.

        The client's number of samples and all values of the tensors in `counts` become 1. The
        factor for the reply's age remains.
        """
        tensors = self.knowledge.tensors
        ones = {name: np.ones_like(tensors[name]) for name in counts if name in tensors}
        client = replace(self.client, samples=1)
        return replace(self, client=client, knowledge=self.knowledge.replacing(ones))


def medians(replies: Iterable[Magnitudes]) -> dict[str, float]:
    """Return the median magnitude of each part over several replies."""
    parts: dict[str, list[float]] = {}
    for magnitudes in replies:
        for part, size in magnitudes.items():
            parts.setdefault(part, []).append(size)
    return {part: float(median(sizes)) for part, sizes in sorted(parts.items())}


STATISTICS_OF = "statistics of "
"""Prefix of the name of the part that contains a field's batch normalization statistics."""


def part_of(tensor: str) -> str:
    """Return the part of a reply that a tensor belongs to: by default, the tensor's field.

    Statistics of batch normalization (`running_mean`, `running_var`) are a separate part, because
    variances are squares of activations and are often much larger than all weights.
    """
    field, _, name = tensor.partition("/")
    return f"{STATISTICS_OF}{field}" if name.endswith(STATISTICS) else field


def magnitudes_of(knowledge: Knowledge) -> Magnitudes:
    """Return the root mean square of each floating-point part of a reply.

    The result is infinity if the squares of a part overflow.
    """
    parts: dict[str, list[Array]] = {}
    for name, value in knowledge.tensors.items():
        if np.issubdtype(value.dtype, np.floating) and value.size:
            parts.setdefault(part_of(name), []).append(value)

    def sum_of_squares(value: Array) -> float:
        flat = value.ravel() if value.dtype.itemsize > 2 else value.ravel().astype(np.float32)
        return float(np.vdot(flat, flat))

    with np.errstate(over="ignore"):
        totals = {part: sum(map(sum_of_squares, values)) for part, values in parts.items()}
    return {
        part: float(np.sqrt(total / sum(value.size for value in parts[part])))
        for part, total in totals.items()
    }


@contextlib.contextmanager
def from_outside(sender: str) -> Iterator[None]:
    """Convert errors to KnowledgeError in a `with` block that reads data from `sender`.

    Any exception is caught, because no list of exceptions would be complete. A reply may exhaust
    the memory or the recursion limit, or cause an exception in a library, and must not end the
    round.
    """
    try:
        yield
    except FedhetError:
        raise
    except Exception as error:
        fault = f"cannot be read ({type(error).__name__}: {error_text(error)})"
        raise KnowledgeError(sender, REPLY, fault) from error


def bytes_of(payload: Parameters) -> int:
    """Return the size of a payload as it was received, in bytes."""
    return payload.size if isinstance(payload, StoredPayload) else payload_bytes(payload)


class StoredPayload(Parameters):
    """The payload of a reply that may have been decoded before it was written to disk."""

    def __init__(self, tensors: list[bytes], tensor_type: str, size: int) -> None:
        super().__init__(tensors=tensors, tensor_type=tensor_type)
        self.size = size
        """Size of the payload as it was received, in bytes."""


class ReplySpool:
    """Directory that contains the replies of one round, in at most one file per client."""

    def __init__(
        self,
        directory: Path,
        max_bytes: int,
        contract: Contract,
        bases_of: Callable[[str], Bases] = lambda client: no_bases,
    ) -> None:
        """Create the spool.

        Args:
            directory: Path of the directory, which is created with the first reply.
            max_bytes: Maximum size of a reply; a larger reply is not written.
            contract: Contract of the replies, which declares the tensors that are weights.
            bases_of: Function that maps a client's name to a function that finds the base weights
                of the client's reply.
        """
        self._directory = Folder(directory, directory.parent, private=True)
        self._max_bytes, self._bases_of = max_bytes, bases_of
        self._weights = tuple(f"{name}/" for name in contract.weights)

    def put(self, client: str, payload: Parameters) -> SpooledPayload:
        """Decode a client's reply and write it to disk. Raises OSError if writing fails."""
        bases = self._bases_of(client)
        return SpooledPayload(
            client, payload, self._directory, self._max_bytes, self._weights, bases
        )

    @contextlib.contextmanager
    def open_replies(self) -> Iterator[None]:
        """Keep the replies readable during the `with` block, and remove them afterward."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove all replies, including replies left behind by a killed server process."""
        self._directory.clear()


class SpooledPayload(StoredPayload):
    """The payload of a reply, which is written to disk instead of being kept in memory.

    The payload is decoded once, when the reply arrives. Tensors other than weights stay in memory.
    Weights are mapped from the file each time they are used, until the spool is cleared.
    """

    def __init__(
        self,
        client: str,
        payload: Parameters,
        directory: Folder,
        max_bytes: int,
        weights: tuple[str, ...],
        bases: Bases,
    ) -> None:
        super().__init__([], payload.tensor_type, bytes_of(payload))
        self._path = directory.path / client
        self._content: tuple[Envelope, Knowledge, Magnitudes] | None = None
        """Decoded content, or None if the payload cannot be decoded."""
        self._fault = "", ""
        """Field and text of the decoding error. The exception itself would keep its frames in
        memory."""
        self._offsets: list[tuple[int, int]] = []
        """Start and end of each array in the file."""
        try:
            with from_outside(client):
                check_size(self.size, client, max_bytes)
                arrays = read_arrays(payload, client, max_bytes)
                envelope, knowledge = decode(arrays, client, bases, max_bytes)
                magnitudes = magnitudes_of(knowledge)
                # Write the decoded tensors if some tensors were sent with an encoding.
                if [*map(id, knowledge.tensors.values())] != [*map(id, arrays[1:])]:
                    payload = ndarrays_to_parameters(encode(envelope, knowledge))
                ends = list(accumulate(map(len, payload.tensors)))
                self._offsets = list(zip([0, *ends], ends, strict=False))
                sources: dict[str, Array | Callable[[], Array]] = {}
                for number, (name, value) in enumerate(knowledge.tensors.items(), 1):
                    mapped = name.startswith(weights) and value.size
                    sources[name] = partial(self._array, number) if mapped else value.copy()
                knowledge = Knowledge(OnDemand(sources), knowledge.scalars)
                self._content = envelope, knowledge, magnitudes
        # The error is raised again when the round's replies are opened.
        except KnowledgeError as error:
            self._fault = error.field, error.fault
            return
        try:
            written = directory.open(client, os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(written, "wb") as file:
                file.writelines(payload.tensors)
        except OSError:
            directory.remove([client])
            raise

    def open(self) -> tuple[Envelope, Knowledge, Magnitudes]:
        """Return the envelope, the content, and the magnitudes of the content.

        Raises KnowledgeError if the payload is invalid or too large.
        """
        if self._content is None:
            raise KnowledgeError(self._path.name, *self._fault)
        size = self._offsets[-1][1] if self._offsets else 0
        if len(self._mapped()) != size:
            fault = f"its file has changed: expected {size} bytes, got {len(self._mapped())}"
            raise KnowledgeError(self._path.name, "payload", fault)
        return self._content

    def read_parameters(self) -> Parameters:
        """Return the payload, read from the disk into memory."""
        content = self._mapped()
        return Parameters([bytes(content[a:b]) for a, b in self._offsets], self.tensor_type)

    def _array(self, number: int) -> Array:
        start, end = self._offsets[number]
        return read_npy(self._mapped()[start:end], self._path.name, f"array {number}")

    def _mapped(self) -> memoryview:
        if not self._offsets:
            return memoryview(b"")
        try:
            with self._path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StateError(
                f"cannot read the reply of {self._path.name}: {error_reason(error)}. A method "
                "that uses the weights of a reply after the round must copy them."
            ) from error
