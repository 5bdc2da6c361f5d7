"""A client's reply, as it passes from the wire to the method, in memory or on disk.

Large replies are decoded and written to a file each as they arrive. Their weights are mapped from
there, one tensor at a time, when they are used: the server's memory does not grow with the clients.
A reply that comes when its round has closed is a file of the run's directory until a later round
uses it, with what the client was sent: the change that it made is the difference. So a server that
is killed loses none of them.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median

import numpy as np
import torch
from flwr.common import Code, FitRes, Parameters, Status, ndarrays_to_parameters

from fedhet.base.arrays import Array, OnDemand, group, grouped
from fedhet.base.disk import Folder
from fedhet.base.errors import FedhetError, KnowledgeError, StateError, reason_of, words_of
from fedhet.runs.measures import Measured
from fedhet.runs.storage import load, load_metadata, save
from fedhet.wire.contract import Contract
from fedhet.wire.encodings import STATISTICS
from fedhet.wire.identity import ClientInfo, is_name
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

Magnitudes = Mapping[str, float]
"""The root mean square of each part of a reply (`part_of`) that holds floating-point numbers."""


@dataclass(frozen=True)
class Reply:
    """A client's reply."""

    client: ClientInfo
    knowledge: Knowledge
    measured: Measured
    known: Magnitudes | None = field(default=None, repr=False)
    """The magnitudes of `knowledge`, if they were measured when the reply arrived."""
    age: int = 0
    """The rounds since the client was asked; 0: it was asked in this round."""
    sent: Knowledge | None = field(default=None, repr=False)
    """What the client was sent to train on, if replies may be late."""

    @property
    def samples(self) -> int:
        """The client's number of training samples, as reported when it joined."""
        return self.client.samples

    @property
    def freshness(self) -> float:
        """The factor by which the reply counts for its age: 1 if it is not late."""
        return staleness_weight(self.age)

    @property
    def weight(self) -> float:
        """The reply's weight in an average by samples; one that is late counts less."""
        return self.samples * self.freshness

    def magnitudes(self) -> Magnitudes:
        """Return the root mean square of each floating-point part."""
        return magnitudes_of(self.knowledge) if self.known is None else self.known

    def with_knowledge(self, knowledge: Knowledge) -> Reply:
        """Return this reply with its knowledge replaced."""
        return replace(self, knowledge=knowledge, known=None)


def medians(replies: Iterable[Magnitudes]) -> dict[str, float]:
    """Return the median of each field's magnitude over replies."""
    fields: dict[str, list[float]] = {}
    for each in replies:
        for name, size in each.items():
            fields.setdefault(name, []).append(size)
    return {name: float(median(sizes)) for name, sizes in sorted(fields.items())}


def staleness_weight(age: int) -> float:
    """Return s(tau) = (1 + tau)^(-1/2), the weight of a reply that is `age` rounds old.

    FedBuff, Section 5.1 (polynomial, a = 1/2).
    """
    return float((1 + age) ** -0.5)


OF_STATISTICS = "statistics of "


def part_of(tensor: str) -> str:
    """Return the part of a reply whose magnitude a tensor counts toward: the tensor's field.

    What batch normalization records (`running_mean`, `running_var`) is a part of its own: variances
    are squares of activations, and often much larger than all weights.
    """
    field, _, name = tensor.partition("/")
    return f"{OF_STATISTICS}{field}" if name.endswith(STATISTICS) else field


def magnitudes_of(knowledge: Knowledge) -> Magnitudes:
    """Return the root mean square of each part of a reply that holds floating-point numbers.

    It is infinity if the squares of a part overflow.
    """
    parts: dict[str, list[Array]] = {}
    for name, value in knowledge.tensors.items():
        if np.issubdtype(value.dtype, np.floating) and value.size:
            parts.setdefault(part_of(name), []).append(value)

    def square(value: Array) -> float:
        flat = value.ravel() if value.dtype.itemsize > 2 else value.ravel().astype(np.float32)
        return float(np.vdot(flat, flat))

    with np.errstate(over="ignore"):
        totals = {part: sum(map(square, values)) for part, values in parts.items()}
    return {
        part: float(np.sqrt(total / sum(value.size for value in parts[part])))
        for part, total in totals.items()
    }


@contextlib.contextmanager
def from_outside(sender: str) -> Iterator[None]:
    """Raise KnowledgeError for any error of the block, which reads what `sender` has sent.

    No list of exceptions is complete: memory, recursion, a library's own. One reply must not cost
    the others, and the reason is in the notice.
    """
    try:
        yield
    except FedhetError:
        raise
    except Exception as error:
        fault = f"cannot be read ({type(error).__name__}: {words_of(error)})"
        raise KnowledgeError(sender, "answer", fault) from error


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
        self._folder = Folder(folder, folder.parent, private=True)
        self._max_bytes, self._bases_of = max_bytes, bases_of
        self._weights = tuple(f"{name}/" for name in contract.weights)

    def put(self, client: str, payload: Parameters) -> SpooledPayload:
        """Decode a client's reply and write it. Raises OSError."""
        bases = self._bases_of(client)
        return SpooledPayload(client, payload, self._folder, self._max_bytes, self._weights, bases)

    @contextlib.contextmanager
    def read(self) -> Iterator[None]:
        """Remove all replies at the end of the block, in which they are read."""
        try:
            yield
        finally:
            self.clear()

    def clear(self) -> None:
        """Remove all replies, also those that a killed server has left."""
        self._folder.clear()


class SpooledPayload(Parameters):
    """A reply's payload that lies on disk instead of in memory.

    It is decoded once, as it arrives. Of its tensors, only those that are not weights stay in
    memory. Weights are mapped each time they are used, until the spool is cleared.
    """

    def __init__(
        self,
        client: str,
        payload: Parameters,
        folder: Folder,
        max_bytes: int,
        weights: tuple[str, ...],
        bases: Bases,
    ) -> None:
        super().__init__(tensors=[], tensor_type=payload.tensor_type)
        self.size = payload_bytes(payload)
        """Bytes of the payload."""
        self.magnitudes: Magnitudes = {}
        """The root mean square of each field."""
        self._path = folder.path / client
        self._fault: tuple[str, str] | None = None
        """The field and the fault for which it is refused: an error would keep its frames alive."""
        self._places: list[tuple[int, int]] = []
        """Where each array is in the file."""
        try:
            with from_outside(client):
                arrays = read_arrays(payload, client, max_bytes)
                envelope, knowledge = decode(arrays, client, bases, max_bytes)
                self.magnitudes = magnitudes_of(knowledge)
                values = knowledge.tensors.values()
                if not all(one is other for one, other in zip(values, arrays[1:], strict=False)):
                    payload = ndarrays_to_parameters(encode(envelope, knowledge))
                ends = list(accumulate(map(len, payload.tensors)))
                self._places = list(zip([0, *ends], ends, strict=False))
                sources: dict[str, Array | Callable[[], Array]] = {}
                for number, (name, value) in enumerate(knowledge.tensors.items(), 1):
                    mapped = name.startswith(weights) and value.size
                    sources[name] = partial(self._array, number) if mapped else value.copy()
                self._message = envelope, Knowledge(OnDemand(sources), knowledge.scalars)
        except KnowledgeError as error:  # raised when the round's replies are read
            self._fault = error.field, error.fault
            return
        try:
            written = folder.open(client, os.O_WRONLY | os.O_TRUNC, 0o600)
            with os.fdopen(written, "wb") as file:
                file.writelines(payload.tensors)
        except OSError:
            folder.remove([client])
            raise

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
    return payload.size if isinstance(payload, SpooledPayload) else payload_bytes(payload)


FOLDER, SUFFIX = "late", ".safetensors"


class LateReplies:
    """The late replies of one run: at most one of each client."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._path, self._run = directory, directory / FOLDER, run

    def put(
        self, client: str, result: FitRes, round: int, sent: Knowledge | None, digest: int
    ) -> None:
        """Write a client's reply to a round atomically. Raises StateError.

        `sent` is what the client was sent to train on, None if that is not known or not needed;
        `digest` that of its weights, if the reply is encoded as the difference to them.
        """
        payload = {
            str(number): torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            for number, data in enumerate(result.parameters.tensors)
        }
        known = sent or Knowledge()
        base = {
            name: torch.from_numpy(np.array(value, order="C"))
            for name, value in known.tensors.items()
        }
        metadata: dict[str, int | float | str] = {
            "run": self._run,
            "client": client,
            "round": round,
            "code": result.status.code.value,
            "message": result.status.message,
            "samples": result.num_examples,
            "metrics": json.dumps(dict(result.metrics), default=repr),
            "arrays": len(payload),
            "sent": sent is not None,
            "digest": digest,
            "scalars": json.dumps(dict(known.scalars)),
        }
        tensors = grouped("payload", payload) | grouped("sent", base)
        save(self._file(client), tensors, metadata, self._directory)

    def get(self, client: str) -> tuple[FitRes, int, Knowledge | None, int]:
        """Return a client's late reply, and the rest of what `put` was given. Raises StateError."""
        path = self._file(client)
        tensors, metadata = load(path)
        payload, base = group(tensors, "payload"), group(tensors, "sent")
        try:
            arrays = [payload[str(n)].numpy().tobytes() for n in range(int(metadata["arrays"]))]
            result = FitRes(
                Status(Code(metadata["code"]), str(metadata["message"])),
                Parameters(arrays, "numpy.ndarray"),
                int(metadata["samples"]),
                json.loads(str(metadata["metrics"])),
            )
            sent = Knowledge(
                {name: value.numpy() for name, value in base.items()},
                json.loads(str(metadata["scalars"])),
            )
            known = sent if metadata["sent"] else None
            return result, int(metadata["round"]), known, int(metadata["digest"])
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a late reply that fedhet saved: {error!r}") from error

    def remove(self, clients: Collection[str]) -> None:
        """Remove the replies of these clients."""
        if clients:
            folder = Folder(self._path, self._directory)
            folder.remove(self._file(client).name for client in clients)

    def restore(self, rounds: Mapping[str, int]) -> dict[str, int]:
        """Return which of these clients' replies to these rounds are there; remove all others."""
        names = {path.stem for path in self._path.glob(f"*{SUFFIX}") if is_name(path.stem)}
        found: dict[str, int] = {}
        for name in names & rounds.keys():
            with contextlib.suppress(StateError):
                metadata = load_metadata(self._file(name))
                if (metadata.get("run"), metadata.get("round")) == (self._run, rounds[name]):
                    found[name] = rounds[name]
        self.remove(names - found.keys())
        return found

    def _file(self, client: str) -> Path:
        return self._path / f"{client}{SUFFIX}"
