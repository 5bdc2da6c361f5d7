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

from fedhet.base.arrays import Arrays, group, grouped
from fedhet.base.disk import Folder
from fedhet.base.errors import StateError
from fedhet.runs.measures import Measured
from fedhet.runs.storage import load, load_metadata, save
from fedhet.server.calls import CallOutcome
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
    def has_reply(self) -> bool:
        """Whether the client has replied without reporting an error."""
        return self.outcome is not None and self.outcome.is_reply


class OpenCalls:
    """The open calls of one run, with at most one call per client.

    The codec and the pool's threads may call the methods from any thread.
    """

    def __init__(self, directory: Path = Path(), run: str = "", *, keep_all: bool = False) -> None:
        """Create the object without calls.

        Args:
            directory: Directory of the run, in which late replies are stored.
            run: Name of the run.
            keep_all: Whether to keep the content of every instruction until the reply is used.
                Otherwise, an instruction is kept only if a reply can refer to its weights.
        """
        self._directory, self._folder = directory, Folder(directory / "late", directory)
        self._run, self._keep_all = run, keep_all
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

    def store(self, outcome: CallOutcome) -> CallOutcome:
        """Move a late reply and its instruction to disk, and return the outcome without content.

        Raises StateError if a file cannot be written.
        """
        name, round, measured = outcome.client, outcome.round, outcome.measured
        kept, _ = self.sent(name, round)
        reply, sent = outcome.knowledge, kept or Knowledge()
        tensors = grouped("reply", reply.tensors) | grouped("sent", sent.tensors)
        scores = [[*key, score] for key, score in measured.scores.items()]
        metadata: dict[str, int | float | str] = {
            "run": self._run,
            "client": name,
            "round": round,
            "size": outcome.bytes_received,
            "error": outcome.error,
            "failure": outcome.failure or "",
            "measured": json.dumps({**vars(measured), "scores": scores}),
            "names": json.dumps([*reply.tensors]),  # The file sorts its tensors.
            "scalars": json.dumps(dict(reply.scalars)),
            "has_sent": kept is not None,
            "sent_scalars": json.dumps(dict(sent.scalars)),
        }
        arrays = {key: torch.from_numpy(np.array(v, order="C")) for key, v in tensors.items()}
        save(self._file(name), arrays, metadata, self._directory)
        with self._lock:
            if (call := self._calls.get(name)) and call.round == round:
                call.sent, call.digest = None, 0
        return replace(
            outcome, knowledge=Knowledge(), measured=Measured({}), magnitudes=None, is_late=True
        )

    def collect(self, client: str, round: int) -> CallOutcome:
        """Return the outcome of a client's call, which `round` uses.

        A late reply and its instruction are read from disk. The instruction is kept until `close`.
        Raises StateError if a late reply cannot be read.
        """
        call = self._calls[client]
        outcome, call.outcome, call.is_at_work = call.outcome, None, False
        assert outcome is not None
        if call.round != round:
            self.late_rounds[client] = call.round
        if not outcome.is_stored_late:
            return outcome
        path = self._file(client)
        tensors, metadata = load(path)
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        try:
            if metadata["has_sent"]:
                scalars = json.loads(str(metadata["sent_scalars"]))
                call.sent = Knowledge(group(arrays, "sent"), scalars)
            reply = {name: arrays[f"reply/{name}"] for name in json.loads(str(metadata["names"]))}
            measured = json.loads(str(metadata["measured"]))
            measured["scores"] = {tuple(key): score for *key, score in measured["scores"]}
            return replace(
                outcome,
                knowledge=Knowledge(reply, json.loads(str(metadata["scalars"]))),
                measured=Measured(**measured),
                bytes_received=int(metadata["size"]),
                error=str(metadata["error"]),
                failure=metadata["failure"] or None,  # type: ignore[arg-type]
            )
        except (LookupError, ValueError, TypeError, AttributeError, RecursionError) as error:
            raise StateError(f"{path} is not a late reply saved by fedhet: {error!r}") from error

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
                outcome = CallOutcome(name, round, is_late=True)
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
