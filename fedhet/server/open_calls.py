"""Open calls: the clients' calls to train, from the instruction until the reply is used.

`OpenCalls` knows what a client was sent, in which round, whether its reply is late, and the weights
that the reply refers to. The codec, the collector, and the state of the round ask it.

A late reply and its instruction are stored in the run's directory until a later round uses them,
because the client's update is the difference between them. No late reply is lost if the server is
killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.common import Code, FitRes, Status

from fedhet.base.arrays import Arrays, group, grouped
from fedhet.base.disk import Folder
from fedhet.base.errors import StateError
from fedhet.runs.storage import load, load_metadata, save
from fedhet.server.calls import NOTHING, Call, CallOutcome, NamedProxy
from fedhet.server.reply import SpooledPayload, StoredPayload, bytes_of
from fedhet.wire.identity import is_name
from fedhet.wire.knowledge import Bases, Envelope, Knowledge


@dataclass(eq=False)
class OpenCall:
    """A client's call to train whose reply has not been used yet."""

    round: int
    """The round of the instruction."""
    sent: Knowledge | None = field(default=None, repr=False)
    """Content of the instruction, or None if the reply does not refer to it, or if it is stored on
    disk with a late reply."""
    digest: int = 0
    """Digest of the weights in `sent`, if the reply may be encoded as a difference from them."""
    is_at_work: bool = False
    """Whether the client has been called, and its reply has not been collected yet."""
    began: float = 0.0
    """Start time of the round on the run's clock, in seconds."""
    outcome: CallOutcome | None = None
    """Outcome of the call, or None until the client has replied or failed."""
    due: float = math.inf
    """Time at which the reply arrives on the run's clock; infinity if unknown."""

    @property
    def is_usable(self) -> bool:
        """Whether the client has replied successfully."""
        return self.outcome is not None and self.outcome.is_usable


class OpenCalls:
    """The open calls of one run, with at most one call per client.

    The codec and the pool's threads may call the methods from any thread.
    """

    def __init__(self, late: LateReplies | None = None, *, keep_all: bool = False) -> None:
        """Create the object without calls.

        Args:
            late: Store for late replies, or None if no reply can be late.
            keep_all: Whether to keep the content of every instruction until the reply is used.
                Otherwise, an instruction is kept only if a reply can refer to its weights.
        """
        self._late, self._keep_all = late, keep_all
        self._lock = threading.Lock()
        self._calls: dict[str, OpenCall] = {}
        self.late_rounds: dict[str, int] = {}
        """Round of the instruction for each late reply collected in the current round, by
        client."""

    def __getitem__(self, client: str) -> OpenCall:
        """Return a client's call."""
        return self._calls[client]

    @property
    def at_work(self) -> set[str]:
        """Clients that were called to train, and whose replies have not been collected."""
        with self._lock:
            return {name for name, call in self._calls.items() if call.is_at_work}

    def start_round(self) -> None:
        """Start a round, in which no late reply has been collected yet."""
        self.late_rounds = {}

    # Methods for instructions.

    def keep(self, client: str, round: int, sent: Knowledge, digest: int = 0) -> None:
        """Keep the content of a client's instruction, if the reply may refer to it.

        `digest` is the digest of the weights that the reply may be encoded as a difference from, or
        0 if there are no such weights.
        """
        if self._keep_all or digest:
            with self._lock:
                call = self._call(client, round)
                call.sent, call.digest = sent, digest

    def begin(self, clients: Iterable[str], round: int, began: float) -> None:
        """Record that clients are called to train in a round, which began at the time `began`."""
        with self._lock:
            for client in clients:
                call = self._call(client, round)
                call.is_at_work, call.began = True, began

    def sent(self, client: str, round: int) -> tuple[Knowledge | None, int]:
        """Return the content of a client's instruction for a round, and the digest of its weights.

        Returns (None, 0) if the content is not kept. The digest is 0 if the instruction has no
        weights that a reply can refer to.
        """
        with self._lock:
            call = self._calls.get(client)
            return (call.sent, call.digest) if call and call.round == round else (None, 0)

    def bases_of(self, client: str) -> Bases:
        """Return a function that finds the base weights of a client's reply."""

        def find_weights(envelope: Envelope, digest: int) -> Arrays | None:
            sent, sent_digest = self.sent(client, envelope.round)
            return sent.tensors if sent is not None and sent_digest == digest else None

        return find_weights

    # Methods for replies.

    def store(self, call: Call, result: FitRes) -> FitRes:
        """Move a late reply and its instruction to disk, and return the reply without its payload.

        Raises StateError if a file cannot be written.
        """
        assert self._late is not None
        self._late.put(call.name, result, call.round, *self.sent(call.name, call.round))
        with self._lock:
            if (kept := self._calls.get(call.name)) and kept.round == call.round:
                kept.sent, kept.digest = None, 0
        return replace(result, parameters=NOTHING)

    def collect(self, client: str, round: int) -> CallOutcome:
        """Return the outcome of a client's call, which `round` uses.

        The instruction is kept until `close`. Raises StateError if a late reply cannot be read.
        """
        call = self._calls[client]
        outcome, call.outcome, call.is_at_work = call.outcome, None, False
        assert outcome is not None
        if call.round != round:
            self.late_rounds[client] = call.round
        if outcome.is_on_disk:
            assert self._late is not None
            result, _, call.sent, call.digest = self._late.get(client)
            outcome = replace(outcome, result=result)
        return outcome

    def close(self, client: str, round: int) -> None:
        """Forget a client's call of a round, whose reply was used or cannot arrive."""
        with self._lock:
            if client in self._calls and self._calls[client].round == round:
                del self._calls[client]

    def remove_used(self) -> None:
        """Remove from disk the late replies that the current round has used.

        Call this after the checkpoint of the round is written.
        """
        if self._late is not None:
            self._late.remove(self.late_rounds.keys() - self.at_work)

    def end(self) -> None:
        """Stop waiting for replies. Late replies that still arrive are stored on disk."""
        with self._lock:
            for call in self._calls.values():
                call.is_at_work, call.outcome = False, None

    # Methods for checkpoints.

    def to_dict(self) -> dict[str, list[float | None]]:
        """Return the clients at work, with round, start and due time, for a checkpoint."""
        return {
            name: [call.round, call.began, call.due if call.outcome else None]
            for name in self.at_work
            for call in [self._calls[name]]
        }

    def load_dict(self, saved: Mapping[str, Any], *, is_simulated: bool) -> None:
        """Restore the state returned by `to_dict`; `is_simulated` keeps the times on the clock.

        Raises ValueError, KeyError or TypeError if the state is invalid.

        Only clients whose late replies are stored on disk are restored as busy. All other busy
        clients were still training when the server ended, so they are called again.
        """
        assert self._late is not None
        rounds = {str(name): int(call[0]) for name, call in saved.items()}
        for name, round in self._late.restore(rounds).items():
            began, due = map(float, saved[name][1:] if is_simulated else (0.0, 0.0))
            result = FitRes(Status(Code.OK, ""), NOTHING, 0, {})
            outcome = CallOutcome(Call(NamedProxy(name), round, None), result, is_late=True)
            self._calls[name] = OpenCall(round, None, 0, True, began, outcome, due)

    def _call(self, client: str, round: int) -> OpenCall:
        """Return the client's call of a round, which replaces a call of another round."""
        call = self._calls.get(client)
        if call is None or call.round != round:
            call = self._calls[client] = OpenCall(round)
        return call


LATE_DIRECTORY, SUFFIX = "late", ".safetensors"


class LateReplies:
    """On-disk store for the late replies of one run, with at most one reply per client."""

    def __init__(self, directory: Path, run: str, max_bytes: float = math.inf) -> None:
        """Create the store for the run named `run`, in the run's directory.

        Of a reply larger than `max_bytes`, only the size is written, so the reply is refused later.
        """
        self._directory, self._path, self._run = directory, directory / LATE_DIRECTORY, run
        self._max_bytes = max_bytes

    def put(
        self, client: str, result: FitRes, round: int, sent: Knowledge | None, digest: int
    ) -> None:
        """Write a client's reply to disk atomically. Raises StateError if writing fails.

        Args:
            client: Name of the client.
            result: The client's reply.
            round: The round of the instruction to which the client replied.
            sent: Content of the instruction, or None if it was not kept.
            digest: Digest of the weights in `sent`, if the reply is encoded as a difference from
                these weights.
        """
        payload, size = result.parameters, bytes_of(result.parameters)
        if isinstance(payload, SpooledPayload):
            payload = payload.read()
        arrays = {
            str(number): torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            for number, data in enumerate(payload.tensors if size <= self._max_bytes else ())
        }
        instruction = sent or Knowledge()
        base = {
            name: torch.from_numpy(np.array(value, order="C"))
            for name, value in instruction.tensors.items()
        }
        metadata: dict[str, int | float | str] = {
            "run": self._run,
            "client": client,
            "round": round,
            "code": result.status.code.value,
            "message": result.status.message,
            "samples": result.num_examples,
            "metrics": json.dumps(dict(result.metrics), default=repr),
            "arrays": len(arrays),
            "size": size,
            "sent": sent is not None,
            "digest": digest,
            "scalars": json.dumps(dict(instruction.scalars)),
        }
        tensors = grouped("payload", arrays) | grouped("sent", base)
        save(self._file(client), tensors, metadata, self._directory)

    def get(self, client: str) -> tuple[FitRes, int, Knowledge | None, int]:
        """Return the arguments that `put` received for a client.

        Raises StateError if the reply cannot be read.
        """
        path = self._file(client)
        tensors, metadata = load(path)
        payload, base = group(tensors, "payload"), group(tensors, "sent")
        try:
            arrays = [payload[str(n)].numpy().tobytes() for n in range(int(metadata["arrays"]))]
            result = FitRes(
                Status(Code(metadata["code"]), str(metadata["message"])),
                StoredPayload(arrays, "numpy.ndarray", int(metadata["size"])),
                int(metadata["samples"]),
                json.loads(str(metadata["metrics"])),
            )
            instruction = Knowledge(
                {name: value.numpy() for name, value in base.items()},
                json.loads(str(metadata["scalars"])),
            )
            sent = instruction if metadata["sent"] else None
            return result, int(metadata["round"]), sent, int(metadata["digest"])
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a late reply saved by fedhet: {error!r}") from error

    def remove(self, clients: Collection[str]) -> None:
        """Remove the replies of some clients."""
        if clients:
            folder = Folder(self._path, self._directory)
            folder.remove(self._file(client).name for client in clients)

    def restore(self, rounds: Mapping[str, int]) -> dict[str, int]:
        """Find this run's replies for the given rounds, and remove all other replies.

        Args:
            rounds: The round of each client's late reply.

        Returns:
            The entries of `rounds` whose replies are on disk.
        """
        names = {path.stem for path in self._path.glob(f"*{SUFFIX}") if is_name(path.stem)}
        restored: dict[str, int] = {}
        for name in names & rounds.keys():
            with contextlib.suppress(StateError):
                metadata = load_metadata(self._file(name))
                if (metadata.get("run"), metadata.get("round")) == (self._run, rounds[name]):
                    restored[name] = rounds[name]
        self.remove(names - restored.keys())
        return restored

    def _file(self, client: str) -> Path:
        return self._path / f"{client}{SUFFIX}"
