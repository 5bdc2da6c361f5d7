"""Replies on disk: the server holds the weights of none of them in memory.

A reply is written to a file of its own as it arrives. Its weights are mapped from there, one tensor
at a time, whenever they are used, so that the server's memory does not grow with the clients.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate
from pathlib import Path

from flwr.common import Parameters

from fedhet.arrays import Array, OnDemand
from fedhet.errors import StateError
from fedhet.server.outliers import sizes_of_payload
from fedhet.wire.contract import Contract, WeightsField
from fedhet.wire.knowledge import (
    Envelope,
    Knowledge,
    check_size,
    decode,
    payload_bytes,
    read_npy,
)


class Inbox:
    """A folder for the replies of one round: at most one file a client, and none between rounds."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: a larger reply is not written, and refused when it is read."""
        self._folder, self._max_bytes = folder, max_bytes

    def put(self, client: str, payload: Parameters) -> StoredReply:
        """Write a client's reply. Raises OSError."""
        return StoredReply(self._folder / client, payload, self._max_bytes)

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Remove all replies at the end of the block, in which they are read."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove all replies, also those that a killed server has left."""
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)


class StoredReply(Parameters):
    """A payload that lies on disk instead of in memory."""

    def __init__(self, path: Path, parameters: Parameters, max_bytes: int) -> None:
        super().__init__(tensors=[], tensor_type=parameters.tensor_type)
        self.size = payload_bytes(parameters)
        """Bytes of the payload."""
        self.field_sizes = {} if self.size > max_bytes else sizes_of_payload(parameters)
        """The root mean square of each field: replies are compared before they are read."""
        self._path, self._max_bytes = path, max_bytes
        ends = list(accumulate(map(len, parameters.tensors)))
        self._places = list(zip([0, *ends], ends, strict=False))
        if self.size <= max_bytes:
            _write(path, parameters)

    def parts(self) -> list[memoryview]:
        """Return the serialised arrays, mapped from the file. Raises StateError."""
        whole = self._mapped()
        return [whole[start:end] for start, end in self._places]

    def read(self, sender: str, contract: Contract) -> tuple[Envelope, Knowledge]:
        """Decode the message; of its tensors, only those that are not weights stay in memory.

        Weights are mapped each time they are used, and can be used until the inbox is cleared.
        Raises KnowledgeError.
        """
        check_size(self.size, sender, self._max_bytes)
        arrays = [read_npy(part, sender, f"array {n}") for n, part in enumerate(self.parts())]
        envelope, knowledge = decode(arrays, sender)
        groups = tuple(f"{f.name}/" for f in contract.fields if isinstance(f, WeightsField))
        sources: dict[str, Array | Callable[[], Array]] = {}
        for number, (name, value) in enumerate(knowledge.tensors.items(), 1):
            weights = name.startswith(groups) and value.size
            sources[name] = partial(self._array, number) if weights else value.copy()
        return envelope, Knowledge(OnDemand(sources), knowledge.scalars)

    def _array(self, number: int) -> Array:
        start, end = self._places[number]
        return read_npy(self._mapped()[start:end], self._path.name, f"array {number}")

    def _mapped(self) -> memoryview:
        if not self.size:
            return memoryview(b"")
        try:
            with self._path.open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise StateError(
                f"cannot read the reply of {self._path.name}: {error}; what a method keeps of a "
                "reply's weights after the round it must copy"
            ) from error


def _write(path: Path, payload: Parameters) -> None:
    """Write a payload to a file that only its owner can read."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        with open(path, "wb", opener=_private) as file:
            file.writelines(payload.tensors)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
