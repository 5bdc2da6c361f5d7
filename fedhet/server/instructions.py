"""Encoding of instructions, as full weights or as differences from earlier weights.

If an encoding is set, the server decodes its messages as the clients do. Each version of the
weights is computed from the version that clients have and from the method's new weights, and
rounded to half precision. A client that has the previous version receives the difference. A client
that has the new version receives no weights, and any other client receives the full weights. All
clients decode the same numbers, so results do not depend on lost messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from flwr.common import Parameters, ndarrays_to_parameters

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.runs.storage import Metadata
from fedhet.wire.encodings import Coder, Encoded, RngKey
from fedhet.wire.knowledge import Envelope, Knowledge, Packing, digest_of, encode

VERSIONS = "wire"
"""Name prefix of tensors, and metadata key, for the versions of weights in a checkpoint."""
MAX_VERSIONS = 8
"""Maximum number of versions in memory; a client with an older version receives full weights."""


@dataclass(frozen=True)
class Version:
    """A version of the weights, as decoded by the clients."""

    digest: int
    source: int
    """Digest of the method's weights, before encoding."""
    tensors: Arrays
    full: Mapping[str, Encoded]
    """Tensors to send in half precision if a client needs the full weights."""
    previous: int = 0
    """Digest of the version that `differences` are based on; 0 if there are no differences."""
    differences: Mapping[str, Encoded] = field(default_factory=dict)


NO_VERSION = Version(0, 0, {}, {})


@dataclass(frozen=True)
class Instruction:
    """A message to several clients. Its payloads may differ, but decode to the same content."""

    envelope: Envelope
    knowledge: Knowledge
    """Content of the message, as decoded by the clients."""
    version: Version = NO_VERSION
    values: Mapping[str, Encoded] = field(default_factory=dict)
    """Encoded tensors other than weights."""
    payloads: dict[int, Parameters] = field(default_factory=dict)
    """Payloads built so far, by the digest of their base weights."""

    def payload_for(self, held: int = 0) -> Parameters:
        """Return the payload for a client that has the version with the digest `held`; 0 = none."""
        version, knowledge = self.version, self.knowledge
        base = held if held in (version.digest, version.previous) else 0
        if base in self.payloads:
            return self.payloads[base]
        if not base:
            packing = Packing({**self.values, **version.full})
        elif base == version.digest:
            tensors = knowledge.tensors
            unsent = {name: tensors[name] for name in tensors if name not in version.tensors}
            knowledge = Knowledge(unsent, knowledge.scalars)
            packing = Packing(self.values, base, held=True)
        else:
            packing = Packing({**self.values, **version.differences}, base)
        payload = ndarrays_to_parameters(encode(self.envelope, knowledge, packing))
        return self.payloads.setdefault(base, payload)


class InstructionEncoder:
    """Encoder of instructions. It tracks the version of the weights that each client has."""

    def __init__(self, coder: Coder | None) -> None:
        """Create the encoder; without a coder, instructions are sent unchanged."""
        self.held: dict[str, int] = {}
        """Digest of the version that each client last received, by client name."""
        self._coder, self._lock = coder, threading.Lock()
        self._versions: dict[int, Version] = {}
        """Versions by digest, with the newest version last."""

    def instruction(
        self, envelope: Envelope, use: str, knowledge: Knowledge, clients: Collection[str]
    ) -> Instruction:
        """Encode a message to several clients.

        Args:
            envelope: Sender, run, method and round of the message.
            use: Purpose of the message, "train" or "evaluate", which seeds its stochastic rounding.
            knowledge: Content of the message.
            clients: Names of the recipients. Differences are computed from the newest version
                that a recipient has. Without recipients, the message has no differences.
        """
        if self._coder is None:
            return Instruction(envelope, knowledge)
        key = (envelope.sender, envelope.round, use)
        weights = self._coder.weights_of(knowledge.tensors)
        others = {name: v for name, v in knowledge.tensors.items() if name not in weights}
        values = self._coder.values(key, others)
        with self._lock:
            version = self._version(self._coder, key, weights, clients) if weights else NO_VERSION
        decoded = {name: value.values for name, value in values.items()}
        content = knowledge.replacing({**decoded, **version.tensors})
        encoded = {name: value.encoded for name, value in values.items()}
        return Instruction(envelope, content, version, encoded)

    def payload(self, client: str, instruction: Instruction) -> Parameters:
        """Return the payload for one client, and record that the client has its weights."""
        payload = instruction.payload_for(self.held.get(client, 0))
        if instruction.version.digest:
            self.held[client] = instruction.version.digest
        return payload

    def drop_unused(self) -> None:
        """Drop versions that no client has, and the oldest versions beyond MAX_VERSIONS."""
        with self._lock:
            used = self._used()[-MAX_VERSIONS:]
            self._versions = {digest: self._versions[digest] for digest in used}

    def state_dict(self) -> dict[str, Array]:
        """Return the tensors of the versions that clients have, to save in a checkpoint."""
        tensors: dict[str, Array] = {}
        for digest in self._used():
            tensors |= grouped(f"{VERSIONS}/{digest}", self._versions[digest].tensors)
        return tensors

    def metadata(self) -> dict[str, str]:
        """Return all state other than tensors, to save in a checkpoint."""
        if self._coder is None:
            return {}
        sources = [(digest, self._versions[digest].source) for digest in self._used()]
        return {VERSIONS: json.dumps({"sources": sources, "held": self.held}, sort_keys=True)}

    def load(self, tensors: Arrays, metadata: Metadata) -> dict[str, Array]:
        """Restore the state from a checkpoint, and return the tensors that belong to the method.

        Raises ValueError, TypeError or LookupError if the checkpoint is invalid.
        """
        if self._coder is not None:
            saved = json.loads(str(metadata[VERSIONS]))
            self.held = {str(client): int(digest) for client, digest in saved["held"].items()}
            for digest, source in saved["sources"]:
                weights = group(tensors, f"{VERSIONS}/{int(digest)}")
                self._add(replace(_full_version(self._coder, (), weights), source=int(source)))
        return without_versions(tensors)

    def _version(
        self, coder: Coder, key: RngKey, weights: Arrays, clients: Collection[str]
    ) -> Version:
        source = digest_of(weights)
        same = [version for version in self._versions.values() if version.source == source]
        if same:
            return same[-1]
        held = {self.held.get(client, 0) for client in clients} if coder.rules.received else set()
        newest_first = reversed(self._versions.items())
        previous = next((v for digest, v in newest_first if digest in held), NO_VERSION)
        if _types(previous.tensors) != _types(weights):
            return self._add(replace(_full_version(coder, key, weights), source=source))
        changes = coder.differences(key, weights, previous.tensors)
        decoded = {name: change.values for name, change in changes.items()}
        differences = {name: change.encoded for name, change in changes.items()}
        full = _full_version(coder, key, {**weights, **decoded})
        return self._add(
            replace(full, source=source, previous=previous.digest, differences=differences)
        )

    def _add(self, version: Version) -> Version:
        """Add a version as the newest."""
        self._versions.pop(version.digest, None)
        self._versions[version.digest] = version
        return version

    def _used(self) -> list[int]:
        return [digest for digest in self._versions if digest in self.held.values()]


def without_versions(tensors: Arrays) -> dict[str, Array]:
    """Return the tensors in a checkpoint that belong to the method."""
    return {name: value for name, value in tensors.items() if not name.startswith(f"{VERSIONS}/")}


def _full_version(coder: Coder, key: RngKey, weights: Arrays) -> Version:
    """Return a version of full weights, rounded to half precision where possible."""
    halves = coder.values(key, weights)
    tensors = {**weights, **{name: half.values for name, half in halves.items()}}
    encoded = {name: half.encoded for name, half in halves.items()}
    return Version(digest_of(tensors), 0, tensors, encoded)


def _types(weights: Arrays) -> dict[str, object]:
    return {name: (value.dtype, value.shape) for name, value in weights.items()}
