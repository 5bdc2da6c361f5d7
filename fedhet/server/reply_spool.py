"""Replies on disk: the server holds the weights of none of them in memory.

A reply is decoded and written to a file of its own as it arrives. Its weights are mapped from
there, one tensor at a time, when they are used: the server's memory does not grow with the clients.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

from flwr.common import Parameters, ndarrays_to_parameters

from fedhet.base.arrays import Array, OnDemand
from fedhet.base.disk import Folder
from fedhet.base.errors import KnowledgeError, StateError, reason_of
from fedhet.server.magnitudes import Magnitudes, magnitudes_of
from fedhet.server.reply import from_outside
from fedhet.wire.contract import Contract
from fedhet.wire.knowledge import (
    Bases,
    Envelope,
    Knowledge,
    decode,
    encode,
    no_bases,
    payload_bytes,
    read_arrays,
    read_npy,
)


class ReplySpool:
    """A folder for the replies of one round: at most one file a client, and none between rounds."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        contract: Contract,
        bases_of: Callable[[str], Bases] = lambda client: no_bases,
    ) -> None:
        """`max_bytes`: a larger reply is not written; `contract` says which tensors are weights.

        `bases_of` returns what has the weights on which a client's reply builds.
        """
        self._folder, self._max_bytes, self._bases_of = folder, max_bytes, bases_of
        self._weights = tuple(f"{name}/" for name in contract.weights)

    def put(self, client: str, payload: Parameters) -> SpooledReply:
        """Decode a client's reply and write it. Raises OSError."""
        bases = self._bases_of(client)
        return SpooledReply(self._folder / client, payload, self._max_bytes, self._weights, bases)

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Remove all replies at the end of the block, in which they are read."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove all replies, also those that a killed server has left."""
        _folder(self._folder).clear()


class SpooledReply(Parameters):
    """A payload that lies on disk instead of in memory.

    It is decoded once, as it arrives. Of its tensors, only those that are not weights stay in
    memory. Weights are mapped each time they are used, until the spool is cleared.
    """

    def __init__(
        self,
        path: Path,
        payload: Parameters,
        max_bytes: int,
        weights: tuple[str, ...],
        bases: Bases,
    ) -> None:
        super().__init__(tensors=[], tensor_type=payload.tensor_type)
        self.size = payload_bytes(payload)
        """Bytes of the payload."""
        self.magnitudes: Magnitudes = {}
        """The root mean square of each field."""
        self._path = path
        self._fault: tuple[str, str] | None = None
        """The field and the fault for which it is refused: an error would keep its frames alive."""
        self._places: list[tuple[int, int]] = []
        """Where each array is in the file."""
        try:
            with from_outside(path.name):
                arrays = read_arrays(payload, path.name, max_bytes)
                envelope, knowledge = decode(arrays, path.name, bases, max_bytes)
                self.magnitudes = magnitudes_of(knowledge)
                values = knowledge.tensors.values()
                if not all(one is other for one, other in zip(values, arrays[1:], strict=False)):
                    payload = ndarrays_to_parameters(encode(envelope, knowledge))
                ends = list(accumulate(map(len, payload.tensors)))
                self._places = list(zip([0, *ends], ends, strict=False))
                self._message = envelope, self._on_disk(knowledge, weights)
        except KnowledgeError as error:  # raised when the round's replies are read
            self._fault = error.field, error.fault
        else:
            _write(path, payload)

    def payload(self) -> Parameters:
        """Return the payload, read from the disk."""
        content = self._mapped()
        return Parameters([bytes(content[a:b]) for a, b in self._places], self.tensor_type)

    def message(self) -> tuple[Envelope, Knowledge]:
        """Return the decoded reply. Raises KnowledgeError."""
        if self._fault is not None:
            raise KnowledgeError(self._path.name, *self._fault)
        size = self._places[-1][1] if self._places else 0
        if len(self._mapped()) != size:
            fault = f"its file has changed: it had {size} bytes"
            raise KnowledgeError(self._path.name, "payload", fault)
        return self._message

    def _on_disk(self, knowledge: Knowledge, weights: tuple[str, ...]) -> Knowledge:
        sources: dict[str, Array | Callable[[], Array]] = {}
        for number, (name, value) in enumerate(knowledge.tensors.items(), 1):
            mapped = name.startswith(weights) and value.size
            sources[name] = partial(self._array, number) if mapped else value.copy()
        return Knowledge(OnDemand(sources), knowledge.scalars)

    def _array(self, number: int) -> Array:
        start, end = self._places[number]
        return read_npy(self._mapped()[start:end], self._path.name, f"array {number}")

    def _mapped(self) -> memoryview:
        if not self._places:
            return memoryview(b"")
        try:
            with self._path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StateError(
                f"cannot read the reply of {self._path.name}: {reason_of(error)}; what a method "
                "keeps of a reply's weights after the round it must copy"
            ) from error


def bytes_of(payload: Parameters) -> int:
    """Return the bytes of a payload, wherever it lies."""
    return payload.size if isinstance(payload, SpooledReply) else payload_bytes(payload)


def _write(path: Path, payload: Parameters) -> None:
    """Write a payload to a file that only its owner can read."""
    folder = _folder(path.parent)
    try:
        written = folder.open(path.name, os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(written, "wb") as file:
            file.writelines(payload.tensors)
    except OSError:
        folder.remove([path.name])
        raise


def _folder(path: Path) -> Folder:
    return Folder(path, path.parent, private=True)
