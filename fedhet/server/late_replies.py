"""Replies that come when their round has closed: on disk, until a later round uses them.

Each is a file of the run's directory, with what the client was sent: the change that it made is the
difference. So a server that is killed loses none of them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from flwr.common import Code, FitRes, Parameters, Status

from fedhet.base.arrays import group, grouped
from fedhet.base.disk import Folder
from fedhet.base.errors import StateError
from fedhet.runs.storage import load, load_facts, save
from fedhet.wire.identity import is_name
from fedhet.wire.knowledge import Knowledge

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
