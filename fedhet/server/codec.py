"""The server's codec between `Knowledge` and Flower's records.

`Codec` encodes the instructions to clients, remembers what each was sent, and decodes replies.

Under an encoding, the server decodes what it sends as its clients do. From the version of the
weights that clients have, and the new weights, comes the next version, whose numbers are those of
half precision: a client is sent the difference to the version before it, nothing if it has this
one, or the whole, and in each case has the same numbers. So nothing that is computed depends on
what a client has lost.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.common import Code, EvaluateRes, FitRes, Parameters, ndarrays_to_parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.errors import ReportedError
from fedhet.base.metrics import ACCURACY, measured_names
from fedhet.methods.registry import Method
from fedhet.runs.measures import SPENT, Measured, read_measures
from fedhet.runs.storage import Metadata
from fedhet.server.calls import Failures, name_of, reasons
from fedhet.server.members import Member
from fedhet.server.reply import Reply, SpooledPayload, bytes_of, from_outside
from fedhet.server.round import RoundState
from fedhet.wire.encodings import Coder, Encoded, RngKey
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import (
    Bases,
    Envelope,
    Knowledge,
    Packing,
    decode,
    digest_of,
    encode,
    expect,
    payload_bytes,
    read_arrays,
)

VERSIONS = "wire"
"""The group of a checkpoint's tensors, and its fact, that the versions of weights are kept in."""
MAX_VERSIONS = 8
"""Versions of weights in memory; a client that has none of them is sent the whole."""


class Codec:
    """The codec between a method's server side and its clients in one run."""

    def __init__(
        self,
        run: str,
        method: Method,
        max_bytes: int,
        state: RoundState,
        metrics: Sequence[str] = (ACCURACY,),
        *,
        remember: bool = False,
        max_age: int = 0,
        encoder: InstructionEncoder | None = None,
    ) -> None:
        """Create the codec of a run.

        Args:
            run: The run's name, which each message carries.
            method: The method whose messages are encoded and decoded.
            max_bytes: Maximum size of a reply.
            state: The round, which counts the bytes sent and received.
            metrics: Names of the metrics that clients measure.
            remember: Whether to keep every training instruction until `forget_sent`; else only
                those of the current round are kept on which a reply can build.
            max_age: Maximum age of a late reply, in rounds ('pace.max-age').
            encoder: Encodes the instructions; None sends them unchanged.
        """
        self._run, self._method, self._state = run, method, state
        self._max_bytes, self._metrics, self._max_age = max_bytes, metrics, max_age
        self._remember, self.encoder = remember, encoder or InstructionEncoder(None)
        self._lock = threading.Lock()
        self._sent: dict[str, dict[int, tuple[Knowledge, int]]] = {}
        """By client and round: its training instruction, and the digest of the weights in it."""
        self._sent_round = 0
        self._last: dict[str, Instruction] = {}
        """The last message of each client that may lack its base weights, without payloads."""
        self._last_occasion = (0, True)
        """The round of these messages, and whether they are to train."""
        self._sizes: dict[tuple[str, bool], tuple[int, int]] = {}
        """The round and the bytes of each client's last message to train (True) or to evaluate."""

    # Instructions: from Knowledge to Flower's Parameters.

    def encode(self, round: int, client: str, knowledge: Knowledge) -> Parameters:
        """Return one client's training instruction as a payload, and count its bytes.

        Its weights are not sent as differences, which would depend on the other clients.
        """
        return self.encode_all(round, {client: knowledge}, differences=False)[client]

    def encode_all(
        self,
        round: int,
        instructions: Mapping[str, Knowledge],
        *,
        training: bool = True,
        differences: bool = True,
    ) -> dict[str, Parameters]:
        """Return each client's payload, and count their bytes as those of training or evaluation.

        An object shared by several clients is encoded once. What clients are sent is remembered.
        """
        envelope = Envelope(self._run, self._method.name, round, SERVER)
        sharing: dict[int, list[str]] = {}
        for name, knowledge in instructions.items():
            sharing.setdefault(id(knowledge), []).append(name)
        made: dict[str, Instruction] = {}
        for names in sharing.values():
            use, clients = "train" if training else "evaluate", names if differences else ()
            knowledge = instructions[names[0]]
            instruction = self.encoder.instruction(envelope, use, knowledge, clients)
            made |= dict.fromkeys(names, instruction)
        payloads: dict[str, Parameters] = {}
        for client in instructions:
            instruction = made[client]
            payloads[client] = self.encoder.payload(client, instruction)
            size = payload_bytes(payloads[client])
            self._sizes[client, training] = round, size
            self._state.sent(size, training=training)
            digest = instruction.version.digest
            if digest:
                with self._lock:
                    if self._last_occasion != (round, training):
                        self._last.clear()
                    self._last_occasion = round, training
                    self._last[client] = replace(instruction, made={})
            if training and (self._remember or digest):
                self.keep_sent(client, round, instruction.knowledge, digest)
        self.encoder.tidy()
        return payloads

    def without_base(self, client: str) -> Parameters | None:
        """Return the last message to a client without base weights, and count its bytes.

        None if the message has no base weights.
        """
        with self._lock:
            instruction, (_, training) = self._last.get(client), self._last_occasion
        if instruction is None:
            return None
        payload = replace(instruction, made={}).payload_for()
        self._state.sent(payload_bytes(payload), training=training)
        return payload

    def withdraw(self, round: int, clients: Iterable[str], *, training: bool = True) -> None:
        """Neither count nor remember messages of a round that were not sent after all."""
        for name in clients:
            of, size = self._sizes.get((name, training), (round, 0))
            if of == round:
                self._state.sent(-size, training=training)
            if training:
                self.forget_sent(name, round)

    # The instructions that clients were sent, as they decode them; from any thread.

    def sent(self, client: str, round: int) -> tuple[Knowledge | None, int]:
        """Return a client's training instruction of a round, and the digest of the weights in it.

        (None, 0) if there was none, or it is forgotten. The digest is 0 if no reply can build on
        the instruction.
        """
        with self._lock:
            return self._sent.get(client, {}).get(round, (None, 0))

    def keep_sent(self, client: str, round: int, knowledge: Knowledge, digest: int = 0) -> None:
        """Keep a client's training instruction of a round; it replaces an earlier one.

        That of a late reply comes back from disk: those of the current round are kept besides it.
        """
        with self._lock:
            if not self._remember and round > self._sent_round:
                self._sent.clear()
            self._sent_round = max(round, self._sent_round)
            self._sent.setdefault(client, {})[round] = knowledge, digest

    def forget_sent(self, client: str, round: int) -> None:
        """Forget a client's training instruction of a round, if it is kept."""
        with self._lock:
            rounds = self._sent.get(client, {})
            rounds.pop(round, None)
            if not rounds:
                self._sent.pop(client, None)

    def bases_of(self, client: str) -> Bases:
        """Return a function that finds the weights on which a client's reply builds."""

        def weights(envelope: Envelope, digest: int) -> Arrays | None:
            sent, known = self.sent(client, envelope.round)
            return sent.tensors if sent is not None and known == digest else None

        return weights

    # Replies: from Flower's FitRes and EvaluateRes to Reply and Measured.

    def decode_all(
        self,
        results: Sequence[tuple[ClientProxy, FitRes]],
        failures: Failures,
        members: Mapping[str, Member],
    ) -> Iterator[Reply]:
        """Yield the replies of this round's clients, by name, as they are decoded.

        A client without a reply, or with one that cannot be decoded, is dropped from the round. A
        late one whose method has no use for it, or that has left, is refused without a mark.
        """
        arrived = {name_of(proxy): result for proxy, result in results}
        why = reasons(failures)
        for name in self._state.expected:
            age, why_not = self._state.age_of(name), ""
            if age and name not in members:
                why_not = "it has left"
            elif age and self._method.spec.late == "refused":
                why_not = f"what {self._method.name} sends belongs to its round"
            elif age > self._max_age:
                why_not = f"it is {age} rounds old ('pace.max-age' = {self._max_age})"
            if name not in arrived:
                self._state.drop(name, why.get(name, "did not answer in time"), "silent")
            elif why_not:
                of = self._state.arrived[name]
                self._state.notice(f"client {name}'s answer to round {of} is not used: {why_not}")
                self._state.received(bytes_of(arrived[name].parameters))
            else:
                with self._state.dropping(name):
                    yield self.decode(members[name].info, arrived[name])
            self.forget_sent(name, self._state.record.round - age)

    def decode(self, client: ClientInfo, result: FitRes) -> Reply:
        """Return a client's reply to this round. Raises KnowledgeError."""
        payload, name, known = result.parameters, client.name, None
        with from_outside(name):
            self._state.received(bytes_of(payload))
            if result.status.code != Code.OK or "error" in result.metrics:
                raise _error_of(name, result.metrics, result.status.message)
            if isinstance(payload, SpooledPayload):
                (envelope, knowledge), known = payload.message(), payload.magnitudes
            else:
                arrays = read_arrays(payload, name, self._max_bytes)
                envelope, knowledge = decode(arrays, name, self.bases_of(name), self._max_bytes)
            age = self._state.age_of(name)
            number = self._state.record.round - age
            expect(envelope, run=self._run, method=self._method.name, round=number, sender=name)
            known_metrics = measured_names(self._metrics, client.classes)
            measured = read_measures(name, result.metrics, self._method.spec.kinds, known_metrics)
        return Reply(client, knowledge, measured, known, age, self.sent(name, number)[0])

    def decode_evaluation(
        self, client: ClientInfo, result: EvaluateRes, kinds: Sequence[str]
    ) -> Measured:
        """Return a client's measurements of models of the `kinds`. Raises KnowledgeError."""
        with from_outside(client.name):
            if "error" in result.metrics:
                raise _error_of(client.name, result.metrics)
            known_metrics = measured_names(self._metrics, client.classes)
            return read_measures(client.name, result.metrics, kinds, known_metrics)


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


@dataclass(frozen=True)
class Instruction:
    """A message to clients that all decode to the same, in each of the ways to send it."""

    envelope: Envelope
    knowledge: Knowledge
    """What clients decode."""
    version: Version = NONE
    values: Mapping[str, Encoded] = field(default_factory=dict)
    """The tensors that travel encoded, besides weights."""
    made: dict[int, Parameters] = field(default_factory=dict)
    """The payloads that were made, by the digest of their base."""

    def payload_for(self, held: int = 0) -> Parameters:
        """Return the message for a client that has the version of digest `held`; 0: none."""
        version, knowledge = self.version, self.knowledge
        base = held if held in (version.digest, version.before) else 0
        if base in self.made:
            return self.made[base]
        if not base:
            packing = Packing({**self.values, **version.whole})
        elif base == version.digest:
            own = knowledge.tensors
            rest = {name: own[name] for name in own if name not in version.tensors}
            knowledge = Knowledge(rest, knowledge.scalars)
            packing = Packing(self.values, base, held=True)
        else:
            packing = Packing({**self.values, **version.differences}, base)
        payload = ndarrays_to_parameters(encode(self.envelope, knowledge, packing))
        return self.made.setdefault(base, payload)


class InstructionEncoder:
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
            wanted = self._wanted()[-MAX_VERSIONS:]
            self._versions = {digest: self._versions[digest] for digest in wanted}

    def state_dict(self) -> dict[str, Array]:
        """Return the versions that clients have; `metadata` returns the rest of the state."""
        kept: dict[str, Array] = {}
        for digest in self._wanted():
            kept |= grouped(f"{VERSIONS}/{digest}", self._versions[digest].tensors)
        return kept

    def metadata(self) -> dict[str, str]:
        """Return what a checkpoint keeps of the versions and the clients."""
        if self._coder is None:
            return {}
        sources = [(digest, self._versions[digest].source) for digest in self._wanted()]
        return {VERSIONS: json.dumps({"sources": sources, "held": self.held}, sort_keys=True)}

    def load(self, state: Arrays, metadata: Metadata) -> dict[str, Array]:
        """Restore what the two returned; return the other tensors, which are the method's.

        Raises ValueError, TypeError or LookupError.
        """
        if self._coder is not None:
            known = json.loads(str(metadata[VERSIONS]))
            self.held = {str(client): int(digest) for client, digest in known["held"].items()}
            for digest, source in known["sources"]:
                weights = group(state, f"{VERSIONS}/{int(digest)}")
                self._keep(replace(_whole(self._coder, (), weights), source=int(source)))
        return without_versions(state)

    def _version(
        self, coder: Coder, place: RngKey, weights: Arrays, clients: Collection[str]
    ) -> Version:
        source = digest_of(weights)
        known = [each for each in self._versions.values() if each.source == source]
        if known:
            return known[-1]
        theirs = {self.held.get(client, 0) for client in clients} if coder.rules.received else set()
        before = next((v for d, v in reversed(self._versions.items()) if d in theirs), NONE)
        if _types(before.tensors) != _types(weights):
            return self._keep(replace(_whole(coder, place, weights), source=source))
        found = coder.differences(place, weights, before.tensors)
        decoded = {name: each.values for name, each in found.items()}
        differences = {name: each.travels for name, each in found.items()}
        whole = _whole(coder, place, {**weights, **decoded})
        next_one = replace(whole, source=source, before=before.digest, differences=differences)
        return self._keep(next_one)

    def _keep(self, version: Version) -> Version:
        """Keep a version as the newest."""
        self._versions.pop(version.digest, None)
        self._versions[version.digest] = version
        return version

    def _wanted(self) -> list[int]:
        return [digest for digest in self._versions if digest in self.held.values()]


def without_versions(state: Arrays) -> dict[str, Array]:
    """Return the tensors of a checkpoint that are the method's own."""
    return {name: value for name, value in state.items() if not name.startswith(f"{VERSIONS}/")}


def _whole(coder: Coder, place: RngKey, weights: Arrays) -> Version:
    """Return weights as a version that is sent in half precision, as far as that is possible.

    Weights of half precision stay as they are.
    """
    halves = coder.values(place, weights)
    tensors = {**weights, **{name: each.values for name, each in halves.items()}}
    travels = {name: each.travels for name, each in halves.items()}
    return Version(digest_of(tensors), 0, tensors, travels)


def _types(weights: Arrays) -> dict[str, object]:
    return {name: (value.dtype, value.shape) for name, value in weights.items()}


def _error_of(name: str, metrics: Mapping[str, object], message: str = "") -> ReportedError:
    """Return a client's own error."""
    fault = str(metrics.get("error", message))[:300]
    return ReportedError(name, fault, spent=metrics.get(SPENT) is True)
