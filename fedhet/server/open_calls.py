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

SUFFIX = ".safetensors"


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

    def __init__(
        self,
        directory: Path = Path(),
        run: str = "",
        max_bytes: float = math.inf,
        *,
        keep_all: bool = False,
    ) -> None:
        """Create the object without calls.

        Args:
            directory: Directory of the run, in which late replies are stored.
            run: Name of the run.
            max_bytes: Maximum size of a late reply. Of a larger reply, only the size is stored, so
                the reply is refused later.
            keep_all: Whether to keep the content of every instruction until the reply is used.
                Otherwise, an instruction is kept only if a reply can refer to its weights.
        """
        self._directory, self._folder = directory, Folder(directory / "late", directory)
        self._run, self._max_bytes, self._keep_all = run, max_bytes, keep_all
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
        payload, size = result.parameters, bytes_of(result.parameters)
        if isinstance(payload, SpooledPayload):
            payload = payload.read_parameters()
        arrays = {
            str(number): torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
            for number, data in enumerate(payload.tensors if size <= self._max_bytes else ())
        }
        sent, digest = self.sent(call.name, call.round)
        instruction = sent or Knowledge()
        base = {
            name: torch.from_numpy(np.array(value, order="C"))
            for name, value in instruction.tensors.items()
        }
        metadata: dict[str, int | float | str] = {
            "run": self._run,
            "client": call.name,
            "round": call.round,
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
        save(self._file(call.name), tensors, metadata, self._directory)
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
        return self._read_late_reply(outcome, call) if outcome.is_on_disk else outcome

    def _read_late_reply(self, outcome: CallOutcome, call: OpenCall) -> CallOutcome:
        """Read a late reply and its instruction from disk."""
        path = self._file(outcome.call.name)
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
            scalars = json.loads(str(metadata["scalars"]))
            instruction = Knowledge({name: v.numpy() for name, v in base.items()}, scalars)
            call.sent = instruction if metadata["sent"] else None
            call.digest = int(metadata["digest"])
        except (LookupError, ValueError, TypeError, RecursionError) as error:
            raise StateError(f"{path} is not a late reply saved by fedhet: {error!r}") from error
        return replace(outcome, result=result)

    def close(self, client: str, round: int) -> None:
        """Forget a client's call of a round, whose reply was used or cannot arrive."""
        with self._lock:
            if client in self._calls and self._calls[client].round == round:
                del self._calls[client]

    def remove_used(self) -> None:
        """Remove from disk the late replies that the current round has used.

        Call this after the checkpoint of the round is written.
        """
        self._remove(self.late_rounds.keys() - self.at_work)

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
            for name in sorted(self.at_work)
            for call in [self._calls[name]]
        }

    def load_dict(self, saved: Mapping[str, Any], *, is_simulated: bool) -> None:
        """Restore the state returned by `to_dict`; `is_simulated` keeps the times on the clock.

        Raises ValueError, KeyError or TypeError if the state is invalid.

        Only clients whose late replies are stored on disk are restored as busy. All other busy
        clients were still training when the server ended, so they are called again. All other
        replies on disk are removed.
        """
        rounds = {name: int(call[0]) for name, call in saved.items()}
        paths = self._folder.path.glob(f"*{SUFFIX}")
        names = {path.stem for path in paths if is_name(path.stem)}
        self._calls.clear()
        for name in names & rounds.keys():
            with contextlib.suppress(StateError):
                metadata, round = load_metadata(self._file(name)), rounds[name]
                if (metadata.get("run"), metadata.get("round")) != (self._run, round):
                    continue
                began, due = map(float, saved[name][1:] if is_simulated else (0.0, 0.0))
                result = FitRes(Status(Code.OK, ""), NOTHING, 0, {})
                outcome = CallOutcome(Call(NamedProxy(name), round, None), result, is_late=True)
                self._calls[name] = OpenCall(round, None, 0, True, began, outcome, due)
        self._remove(names - self._calls.keys())

    def _file(self, client: str) -> Path:
        return self._folder.path / f"{client}{SUFFIX}"

    def _remove(self, clients: Collection[str]) -> None:
        if clients:
            self._folder.remove(self._file(client).name for client in clients)

    def _call(self, client: str, round: int) -> OpenCall:
        """Return the client's call of a round, which replaces a call of another round."""
        call = self._calls.get(client)
        if call is None or call.round != round:
            call = self._calls[client] = OpenCall(round)
        return call
