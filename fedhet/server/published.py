"""What clients are sent under an encoding: of weights, the versions that they have.

The server decodes what it sends as its clients do. From the version that they have and the new
weights comes the next version, whose numbers are those of half precision: a client is sent the
difference to the version before it, nothing if it has this one, or the whole, and in each case has
the same numbers. So nothing that is computed depends on what a client has lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from flwr.common import Parameters, ndarrays_to_parameters

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.methods.spec import MethodSpec
from fedhet.runs.storage import Facts
from fedhet.settings.run import RunSettings
from fedhet.wire.encodings import Coder, Encoded, Place, rules_of
from fedhet.wire.knowledge import Envelope, Knowledge, Packing, digest_of, encode

VERSIONS = "wire"
"""The group of a checkpoint's tensors, and its fact, that the publisher keeps."""
MOST_VERSIONS = 8
"""Versions of weights in memory; a client that has none of them is sent the whole."""


@dataclass(frozen=True)
class Version:
    """Weights as clients decode them."""

    digest: int
    source: int
    """Digest of the weights that the method sent."""
    tensors: Arrays
    whole: Mapping[str, Encoded]
    """Those that travel in half precision, where the whole is sent."""
    before: int = 0
    """Digest of the version to which `differences` are; 0: there are none."""
    differences: Mapping[str, Encoded] = field(default_factory=dict)


NONE = Version(0, 0, {}, {})


class Instruction:
    """A message to clients that all decode to the same, in each of the ways to send it."""

    def __init__(
        self,
        envelope: Envelope,
        sent: Knowledge,
        version: Version = NONE,
        values: Mapping[str, Encoded] | None = None,
    ) -> None:
        """`sent` is what clients decode; `values`: what of it travels encoded, besides weights."""
        self.knowledge, self.version = sent, version
        self._envelope, self._values = envelope, values or {}

    def anew(self) -> Instruction:
        """Return the same message without the payloads that were made of it."""
        return Instruction(self._envelope, self.knowledge, self.version, self._values)

    def payload_for(self, held: int) -> Parameters:
        """Return the message for a client that has the version of digest `held`."""
        if held and held == self.version.digest:
            return self._nothing
        return self._difference if held and held == self.version.before else self.whole

    @cached_property
    def whole(self) -> Parameters:
        """The message without a base."""
        return self._payload(self.knowledge, Packing({**self._values, **self.version.whole}))

    @cached_property
    def _difference(self) -> Parameters:
        encoded = {**self._values, **self.version.differences}
        return self._payload(self.knowledge, Packing(encoded, self.version.before))

    @cached_property
    def _nothing(self) -> Parameters:
        weights = self.version.tensors
        rest = {name: v for name, v in self.knowledge.tensors.items() if name not in weights}
        packing = Packing(self._values, self.version.digest, held=True)
        return self._payload(Knowledge(rest, self.knowledge.scalars), packing)

    def _payload(self, knowledge: Knowledge, packing: Packing) -> Parameters:
        return ndarrays_to_parameters(encode(self._envelope, knowledge, packing))


class Publisher:
    """Makes instructions under an encoding, and knows which weights each client has."""

    def __init__(self, coder: Coder | None) -> None:
        """`coder` is that of the instructions; None: they travel as they are."""
        self.held: dict[str, int] = {}
        """The digest of the version that each client was last sent."""
        self._coder, self._lock = coder, threading.Lock()
        self._versions: dict[int, Version] = {}
        """By digest, the one published last at the end."""

    def instruction(
        self, envelope: Envelope, use: str, knowledge: Knowledge, clients: Collection[str]
    ) -> Instruction:
        """Return the message that carries `knowledge` to `clients`.

        Differences are to the newest version that one of them has; of no clients, there are none.
        `use` tells the messages of a round apart, whose draws differ.
        """
        if self._coder is None:
            return Instruction(envelope, knowledge)
        place = (envelope.sender, envelope.round, use)
        weights = self._coder.weights_of(knowledge.tensors)
        others = {name: v for name, v in knowledge.tensors.items() if name not in weights}
        values = self._coder.values(place, others)
        with self._lock:
            version = self._version(self._coder, place, weights, clients) if weights else NONE
        decoded = {name: each.values for name, each in values.items()}
        sent = knowledge.replacing({**decoded, **version.tensors})
        travels = {name: each.travels for name, each in values.items()}
        return Instruction(envelope, sent, version, travels)

    def payload(self, client: str, instruction: Instruction) -> Parameters:
        """Return the message for one client, which then has its weights."""
        payload = instruction.payload_for(self.held.get(client, 0))
        if instruction.version.digest:
            self.held[client] = instruction.version.digest
        return payload

    def tidy(self) -> None:
        """Forget the versions that no client has, and the oldest of too many."""
        with self._lock:
            wanted = self._wanted()[-MOST_VERSIONS:]
            self._versions = {digest: self._versions[digest] for digest in wanted}

    def state_dict(self) -> dict[str, Array]:
        """Return the versions that clients have; `facts` returns the rest of the state."""
        kept: dict[str, Array] = {}
        for digest in self._wanted():
            kept |= grouped(f"{VERSIONS}/{digest}", self._versions[digest].tensors)
        return kept

    def facts(self) -> dict[str, str]:
        """Return what a checkpoint keeps of the versions and the clients."""
        if self._coder is None:
            return {}
        sources = [(digest, self._versions[digest].source) for digest in self._wanted()]
        return {VERSIONS: json.dumps({"sources": sources, "held": self.held}, sort_keys=True)}

    def load(self, state: Arrays, facts: Facts) -> dict[str, Array]:
        """Restore what the two returned; return the other tensors, which are the method's.

        Raises ValueError, TypeError or LookupError.
        """
        if self._coder is not None:
            known = json.loads(str(facts[VERSIONS]))
            self.held = {str(client): int(digest) for client, digest in known["held"].items()}
            for digest, source in known["sources"]:
                weights = group(state, f"{VERSIONS}/{int(digest)}")
                self._keep(replace(_whole(self._coder, (), weights), source=int(source)))
        return without_versions(state)

    def _version(
        self, coder: Coder, place: Place, weights: Arrays, clients: Collection[str]
    ) -> Version:
        source = digest_of(weights)
        known = [each for each in self._versions.values() if each.source == source]
        if known:
            return known[-1]
        before = self._newest_of(clients) if coder.rules.received else None
        if before is None or not _alike(before.tensors, weights):
            return self._keep(replace(_whole(coder, place, weights), source=source))
        found = coder.differences(place, weights, before.tensors)
        decoded = {name: each.values for name, each in found.items()}
        differences = {name: each.travels for name, each in found.items()}
        whole = _whole(coder, place, {**weights, **decoded})
        next_one = replace(whole, source=source, before=before.digest, differences=differences)
        return self._keep(next_one)

    def _newest_of(self, clients: Collection[str]) -> Version | None:
        theirs = {self.held.get(client, 0) for client in clients}
        return next((v for d, v in reversed(self._versions.items()) if d in theirs), None)

    def _keep(self, version: Version) -> Version:
        """Keep a version as the newest."""
        self._versions.pop(version.digest, None)
        self._versions[version.digest] = version
        return version

    def _wanted(self) -> list[int]:
        return [digest for digest in self._versions if digest in self.held.values()]


def publisher_of(run: RunSettings, spec: MethodSpec) -> Publisher:
    """Return what makes the instructions of a run."""
    rules = rules_of(run.wire)
    return Publisher(Coder(rules, spec.instructions, run.seed) if rules else None)


def without_versions(state: Arrays) -> dict[str, Array]:
    """Return the tensors of a checkpoint that are the method's own."""
    return {name: value for name, value in state.items() if not name.startswith(f"{VERSIONS}/")}


def _whole(coder: Coder, place: Place, weights: Arrays) -> Version:
    """Return weights as a version that is sent in half precision, as far as that is possible.

    Weights of half precision stay as they are.
    """
    halves = coder.values(place, weights)
    tensors = {**weights, **{name: each.values for name, each in halves.items()}}
    travels = {name: each.travels for name, each in halves.items()}
    return Version(digest_of(tensors), 0, tensors, travels)


def _alike(one: Arrays, other: Arrays) -> bool:
    """Return whether two models have the same tensors, by name, type and shape."""
    return one.keys() == other.keys() and all(
        (one[name].dtype, one[name].shape) == (other[name].dtype, other[name].shape) for name in one
    )
