"""The client's codec: decodes instructions and encodes replies.

Received weights are stored on disk under their digest, next to the client's states, because a
deployment handles each message in a new process. If a client no longer has the weights, it reports
this, and the server sends them again.
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
"""State group with the compression errors that error feedback adds to the next reply."""
LOG = logging.getLogger("fedhet")


class ClientCodec:
    """Codec for instructions and replies, with the encoding set by `wire.encoding`."""

    def __init__(self, config: Config, node: Node, state: ClientState) -> None:
        run, self._method = config.run, config.method
        self._node, self._state = node, state
        self._instructions, self._replies = (
            Coder.of(run.wire, contract, run.seed)
            for contract in (self._method.spec.instructions, self._method.spec.replies)
        )
        if run.privacy.secure_aggregation:  # Masked vectors cannot be compressed.
            self._replies = None

    def read(
        self, arrays: NDArrays, sizes: Callable[[], Sizes], *, may_be_empty: bool = False
    ) -> tuple[Envelope, Knowledge]:
        """Decode the server's message, validate it, and store its weights.

        With `may_be_empty`, accepts a message without content, for evaluation. Raises
        KnowledgeError if the message violates the contract, and MissingBaseError if the client does
        not have the base weights of the message.
        """
        envelope, knowledge = decode(arrays, SERVER, self._weights, self._node.max_model_bytes)
        expect(envelope, run=None, method=self._method.name, round=None, sender=SERVER)
        if knowledge.tensors or knowledge.scalars or not may_be_empty:
            contract = self._method.spec.instructions
            contract.check(SERVER, knowledge.tensors, knowledge.scalars, sizes())
        if self._instructions and (weights := self._instructions.weights_of(knowledge.tensors)):
            # Keep the weights from the last few rounds. Delete weights from later rounds, which
            # were sent before the server resumed from an earlier round.
            store, digest = self._store(envelope.run), digest_of(weights)
            is_stored = any(key[1] == digest for key in store.contents())
            if not is_stored or self._weights(envelope, digest) is None:
                store.put((envelope.round, digest), weights)
                past = [key for key in store.contents() if key[0] <= envelope.round]
                store.keep(past[-KEPT_STATES:])
        return envelope, knowledge

    def encode(self, envelope: Envelope, instruction: Knowledge, reply: Knowledge) -> NDArrays:
        """Encode the reply to an instruction, and save the compression errors in the state."""
        reply_envelope = replace(envelope, sender=self._node.name)
        if self._replies is None or self._instructions is None:
            return encode(reply_envelope, reply)
        base = self._instructions.weights_of(instruction.tensors)
        key = (self._node.name, envelope.round)
        unsent = to_host_arrays(group(self._state.tensors, UNSENT))
        encoded, unsent = self._replies.reply(key, reply.tensors, base, unsent)
        tensors = {n: t for n, t in self._state.tensors.items() if not n.startswith(f"{UNSENT}/")}
        errors = {name: torch.from_numpy(value) for name, value in unsent.items()}
        self._state.tensors = tensors | grouped(UNSENT, errors)
        needs_base = any(each.difference for each in encoded.values())
        packing = Packing(encoded, digest_of(base) if needs_base else 0)
        return encode(reply_envelope, reply, packing)

    def _weights(self, envelope: Envelope, digest: int) -> Arrays | None:
        """Return the stored weights with a digest, or None if they are missing or damaged."""
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
