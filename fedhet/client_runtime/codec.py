"""A client's side of the wire: reads instructions, and writes replies.

The weights that the server sent are kept on disk next to the client's states, by their digest,
since in a deployment each message is handled by a process of its own. A client that has lost them
says so, and is sent them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import torch
from flwr.common import NDArrays

from fedhet.base.arrays import Arrays, group, grouped
from fedhet.base.errors import StateError
from fedhet.client_runtime.node import Node
from fedhet.client_runtime.state import ClientState
from fedhet.config.resolve import Config
from fedhet.models import to_host_arrays
from fedhet.runs.storage import KEPT_STATES, ClientStore, ModelStore
from fedhet.wire.contract import Sizes
from fedhet.wire.encodings import Coder
from fedhet.wire.identity import SERVER, is_name
from fedhet.wire.knowledge import Envelope, Knowledge, Packing, decode, digest_of, encode, expect

UNSENT = "unsent"
"""The group of the state's tensors that error feedback adds to the next reply."""
LOG = logging.getLogger("fedhet")


class ClientCodec:
    """Reads instructions and packs replies, as `wire.encoding` says."""

    def __init__(self, config: Config, node: Node, state: ClientState) -> None:
        run, self._method = config.run, config.method
        self._node, self._state = node, state
        self._down, self._up = (
            Coder.of(run.wire, contract, run.seed)
            for contract in (self._method.spec.instructions, self._method.spec.replies)
        )

    def read(
        self, arrays: NDArrays, sizes: Callable[[], Sizes], *, may_be_empty: bool = False
    ) -> tuple[Envelope, Knowledge]:
        """Return the server's message, after its weights are kept.

        An instruction to evaluate may be empty. Raises KnowledgeError if the message violates the
        method's contract, LackingError if it builds on weights that the client does not have.
        """
        envelope, knowledge = decode(arrays, SERVER, self._weights, self._node.max_model_bytes)
        expect(envelope, run=None, method=self._method.name, round=None, sender=SERVER)
        if knowledge.tensors or knowledge.scalars or not may_be_empty:
            contract = self._method.spec.instructions
            contract.check(SERVER, knowledge.tensors, knowledge.scalars, sizes())
        if self._down and (weights := self._down.weights_of(knowledge.tensors)):
            # Keep weights that are new, and those of the last few rounds before. Those of later
            # rounds are of a server that has resumed from an earlier one.
            store, digest = self._store(envelope.run), digest_of(weights)
            known = any(key[1] == digest for key in store.contents())
            if not known or self._weights(envelope, digest) is None:
                store.put((envelope.round, digest), weights)
                past = [key for key in store.contents() if key[0] <= envelope.round]
                store.keep(past[-KEPT_STATES:])
        return envelope, knowledge

    def encode(self, envelope: Envelope, instruction: Knowledge, reply: Knowledge) -> NDArrays:
        """Return the reply to an instruction as arrays; what it leaves unsent enters the state."""
        own = replace(envelope, sender=self._node.name)
        if self._up is None or self._down is None:
            return encode(own, reply)
        base = self._down.weights_of(instruction.tensors)
        place = (self._node.name, envelope.round)
        before = to_host_arrays(group(self._state.tensors, UNSENT))
        encoded, unsent = self._up.reply(place, reply.tensors, base, before)
        others = {n: t for n, t in self._state.tensors.items() if not n.startswith(f"{UNSENT}/")}
        left = {name: torch.from_numpy(value) for name, value in unsent.items()}
        self._state.tensors = others | grouped(UNSENT, left)
        builds = any(each.difference for each in encoded.values())
        return encode(own, reply, Packing(encoded, digest_of(base) if builds else 0))

    def _weights(self, envelope: Envelope, digest: int) -> Arrays | None:
        """Return the weights of a digest, if the client still has them, whole."""
        store = self._store(envelope.run) if is_name(envelope.run) else None
        key = next((k for k in store.contents() if k[1] == digest), None) if store else None
        if store is None or key is None:
            return None
        try:
            weights = store.get(key)
        except StateError as error:
            LOG.warning("%s: %s", self._node.name, error)
            return None
        return weights if digest_of(weights) == digest else None

    def _store(self, run: str) -> ModelStore:
        folder = ClientStore(self._node.state_dir, run, self._node.name).folder
        return ModelStore(folder / "received", self._node.state_dir)
