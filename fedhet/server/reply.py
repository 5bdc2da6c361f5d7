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
from fedhet.runs.storage import load, load_facts, save
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
    """Return s(tau) = (1 + tau)^(-1/2), the weight of an answer that is `age` rounds old.

    FedBuff, Section 5.1 (polynomial, a = 1/2).
    """
    return float((1 + age) ** -0.5)


OF_STATISTICS = "statistics of "


def part_of(tensor: str) -> str:
    """Return the part of a reply whose magnitude a tensor counts towards: the tensor's field.

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
                sources: dict[str, Array | Callable[[], Array]] = {}
                for number, (name, value) in enumerate(knowledge.tensors.items(), 1):
                    mapped = name.startswith(weights) and value.size
                    sources[name] = partial(self._array, number) if mapped else value.copy()
                self._message = envelope, Knowledge(OnDemand(sources), knowledge.scalars)
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


FOLDER, SUFFIX = "late", ".safetensors"


@dataclass(frozen=True)
class LateReply:
    """A client's reply to a round, as it came, and what it was sent to train on."""

    round: int
    result: FitRes
    sent: Knowledge | None
    """None: it is not known, or was not asked for."""
    digest: int = 0
    """That of the weights in `sent`, if the reply is encoded as the difference to them."""


class LateReplies:
    """The late replies of one run: at most one of each client."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._path, self._run = directory, directory / FOLDER, run

    def put(self, client: str, reply: LateReply) -> None:
        """Write a reply atomically. Raises StateError."""
        result, sent = reply.result, reply.sent or Knowledge()
        payload = {
            str(number): torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            for number, data in enumerate(result.parameters.tensors)
        }
        base = {
            name: torch.from_numpy(np.array(value, order="C"))
            for name, value in sent.tensors.items()
        }
        facts: dict[str, int | float | str] = {
            "run": self._run,
            "client": client,
            "round": reply.round,
            "code": result.status.code.value,
            "message": result.status.message,
            "samples": result.num_examples,
            "metrics": json.dumps(dict(result.metrics), default=repr),
            "arrays": len(payload),
            "sent": reply.sent is not None,
            "digest": reply.digest,
            "scalars": json.dumps(dict(sent.scalars)),
        }
        tensors = grouped("payload", payload) | grouped("sent", base)
        save(self._file(client), tensors, facts, self._directory)

    def get(self, client: str) -> LateReply:
        """Return a client's late reply. Raises StateError."""
        path = self._file(client)
        tensors, facts = load(path, torch.device("cpu"))
        payload, base = group(tensors, "payload"), group(tensors, "sent")
        try:
            arrays = [payload[str(n)].numpy().tobytes() for n in range(int(facts["arrays"]))]
            sent = Knowledge(
                {name: value.numpy() for name, value in base.items()},
                json.loads(str(facts["scalars"])),
            )
            result = FitRes(
                Status(Code(facts["code"]), str(facts["message"])),
                Parameters(arrays, "numpy.ndarray"),
                int(facts["samples"]),
                json.loads(str(facts["metrics"])),
            )
            known, digest = sent if facts["sent"] else None, int(facts["digest"])
            return LateReply(int(facts["round"]), result, known, digest)
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a late reply that fedhet saved: {error!r}") from error

    def remove(self, clients: Collection[str]) -> None:
        """Remove the replies of these clients."""
        if clients:
            self._folder.remove(self._file(client).name for client in clients)

    def restore(self, rounds: Mapping[str, int]) -> dict[str, int]:
        """Return which of these clients' replies to these rounds are there; remove all others."""
        names = {path.stem for path in self._path.glob(f"*{SUFFIX}") if is_name(path.stem)}
        found = {name: rounds[name] for name in names if self._is_of(name, rounds.get(name))}
        self.remove(names - found.keys())
        return found

    def _is_of(self, client: str, round: int | None) -> bool:
        """Return whether a client's file is of this run and round."""
        try:
            facts = load_facts(self._file(client))
        except StateError:
            return False
        return (facts.get("run"), facts.get("round")) == (self._run, round)

    @property
    def _folder(self) -> Folder:
        return Folder(self._path, self._directory)

    def _file(self, client: str) -> Path:
        return self._path / f"{client}{SUFFIX}"
