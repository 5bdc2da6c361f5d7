"""The server's codec: encodes instructions to clients and decodes their replies.

`Codec` also counts the bytes of all messages.

`InstructionEncoder` sends full weights, or differences from earlier weights. If an encoding is set,
the server also decodes its own messages, as the clients do. Each version of the weights is computed
from the version that clients have and from the method's new weights, and rounded to half precision.
A client that has the previous version receives the difference. A client that has the new version
receives no weights, and any other client receives the full weights. All clients decode the same
values, so results do not depend on lost messages.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from flwr.common import (
    Code,
    EvaluateRes,
    FitRes,
    Parameters,
    Scalar,
    Status,
    ndarrays_to_parameters,
)

from fedhet.base.arrays import Array, Arrays, group, grouped
from fedhet.base.errors import KnowledgeError, one_line
from fedhet.base.metrics import ACCURACY, measured_names
from fedhet.methods.registry import Method
from fedhet.runs.measures import BUDGET_EXHAUSTED, EVALUATION, WORK, read_measures
from fedhet.runs.storage import Metadata
from fedhet.runs.units import plural
from fedhet.server.calls import NOTHING, CallOutcome, Failure, Result
from fedhet.server.members import Member
from fedhet.server.reply import Reply, from_outside
from fedhet.server.round import RoundState
from fedhet.wire.encodings import Coder, Encoded, RngKey
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import (
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
"""Prefix of tensor names, and metadata key, for the versions of the weights in a checkpoint."""
MAX_VERSIONS = 8
"""Maximum number of versions in memory; a client with an older version receives full weights."""


@dataclass(frozen=True)
class Version:
    """A version of the weights, as decoded by the clients."""

    digest: int
    source: int
    """Digest of the method's weights before they are encoded."""
    tensors: Arrays
    full: Mapping[str, Encoded]
    """Encoded tensors in half precision, for clients that need the full weights."""
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
        """Return the payload for a client that has the version `held`.

        `held` is the digest of the version, or 0 if the client has no version.
        """
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
    """Encoder that builds instructions, and tracks each client's version of the weights."""

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
            use: Purpose of the message, "train" or "evaluate", which seeds the stochastic rounding.
            knowledge: Content of the message.
            clients: Names of the recipients. Differences are relative to the newest version that
                any recipient has. Without recipients, the message has no differences.
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
        """Return the payload for one client, and record the version that the client receives."""
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
        """Return the non-tensor state, to save in a checkpoint."""
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
        """Add a version as the newest version."""
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


class Codec:
    """Codec for messages between a method's server side and its clients in one run."""

    def __init__(
        self,
        run: str,
        method: Method,
        max_bytes: int,
        state: RoundState,
        metrics: Sequence[str] = (ACCURACY,),
        *,
        max_age: int = 0,
        encoder: InstructionEncoder | None = None,
        per_target: int = 1,
    ) -> None:
        """Create the codec of a run.

        Args:
            run: Name of the run, which is part of each message.
            method: The method whose messages are encoded and decoded.
            max_bytes: Maximum size of a reply, in bytes.
            state: State of the current round, which counts the bytes sent and received. Its open
                calls keep the instructions that replies refer to.
            metrics: Names of the metrics that clients measure.
            max_age: Maximum age of a late reply, in rounds ('pace.max-age').
            encoder: Encoder for the instructions; None sends the instructions unchanged.
            per_target: Number of a model's outputs for each class or target column.
        """
        self._per_target = per_target
        self._run, self._method, self._state = run, method, state
        self._max_bytes, self._metrics, self._max_age = max_bytes, metrics, max_age
        self._calls, self.encoder = state.calls, encoder or InstructionEncoder(None)
        self._lock = threading.Lock()
        self._last: dict[str, Instruction] = {}
        """The last message to each client, without payloads. Includes only messages with encoded
        weights, because a client may lack the base weights of such a message."""
        self._last_occasion = (0, True)
        """The round of the messages in `_last`, and whether they are training instructions."""
        self._sizes: dict[tuple[str, bool], tuple[int, int]] = {}
        """Round and size of each client's last message, by client name and message type (True for
        training)."""

    # Methods for instructions, which convert Knowledge to Flower's Parameters.

    def encode_all(
        self,
        round: int,
        instructions: Mapping[str, Knowledge],
        *,
        training: bool = True,
        differences: bool = True,
    ) -> dict[str, Parameters]:
        """Encode and keep the instructions of several clients, and count their bytes.

        Args:
            round: The current round.
            instructions: Content of each client's instruction. An object that several clients
                share is encoded once.
            training: Whether these are training instructions; otherwise, they are evaluation
                instructions.
            differences: Whether weights may be sent as differences from weights that clients have.

        Returns:
            The payload for each client.
        """
        envelope = Envelope(self._run, self._method.name, round, SERVER)
        sharing: dict[int, list[str]] = {}
        for name, knowledge in instructions.items():
            sharing.setdefault(id(knowledge), []).append(name)
        encoded: dict[str, Instruction] = {}
        for names in sharing.values():
            use, clients = "train" if training else "evaluate", names if differences else ()
            knowledge = instructions[names[0]]
            instruction = self.encoder.instruction(envelope, use, knowledge, clients)
            encoded |= dict.fromkeys(names, instruction)
        payloads: dict[str, Parameters] = {}
        for client in instructions:
            instruction = encoded[client]
            payloads[client] = self.encoder.payload(client, instruction)
            size = payload_bytes(payloads[client])
            self._sizes[client, training] = round, size
            self._state.count_sent(size, training=training)
            digest = instruction.version.digest
            if digest:
                with self._lock:
                    if self._last_occasion != (round, training):
                        self._last.clear()
                    self._last_occasion = round, training
                    self._last[client] = replace(instruction, payloads={})
            if training:
                self._calls.keep(client, round, instruction.knowledge, digest)
        self.encoder.drop_unused()
        return payloads

    def message_without_base(self, client: str) -> Parameters | None:
        """Encode the last message to a client again, with full weights, and count its bytes.

        Returns None if the message has no base weights.
        """
        with self._lock:
            instruction, (_, training) = self._last.get(client), self._last_occasion
        if instruction is None:
            return None
        payload = replace(instruction, payloads={}).payload_for()
        self._state.count_sent(payload_bytes(payload), training=training)
        return payload

    def cancel(self, round: int, clients: Iterable[str], *, training: bool = True) -> None:
        """Close the calls of a round that were not made, and subtract their bytes."""
        for name in clients:
            message_round, size = self._sizes.get((name, training), (round, 0))
            if message_round == round:
                self._state.count_sent(-size, training=training)
            if training:
                self._calls.close(name, round)

    def bytes_sent(self, client: str) -> int:
        """Return the size of the last instruction to train that was encoded for a client."""
        return self._sizes[client, True][1]

    # Methods for replies, which convert Flower's results to CallOutcome and then to Reply.

    def read(
        self, client: ClientInfo, kinds: Sequence[str], result: Result, round: int
    ) -> CallOutcome:
        """Decode a client's result when it arrives. Pools call this method from several threads.

        An invalid result, and an error that the client reports, are recorded in the outcome. The
        result of an evaluation before the training is decoded like a separate result.

        Args:
            client: The client.
            kinds: Kinds of models that the client evaluates.
            result: The client's reply or evaluation, in Flower's format.
            round: The round of the instruction.
        """
        if isinstance(result, FitRes) and any(n.startswith(EVALUATION) for n in result.metrics):
            parts: dict[bool, dict[str, Scalar]] = {True: {}, False: {}}
            for name, value in result.metrics.items():
                parts[name.startswith(EVALUATION)][name.removeprefix(EVALUATION)] = value
            evaluated = EvaluateRes(Status(Code.OK, ""), 0.0, 0, parts[True])
            evaluation = self.read(client, kinds, evaluated, round - 1)
            outcome = self.read(client, kinds, replace(result, metrics=parts[False]), round)
            return replace(outcome, evaluation=evaluation)
        name, metrics, knowledge = client.name, result.metrics, Knowledge()
        parameters = result.parameters if isinstance(result, FitRes) else NOTHING
        outcome = CallOutcome(name, round, bytes_received=payload_bytes(parameters))
        try:
            with from_outside(name):
                if result.status.code != Code.OK or "error" in metrics:
                    error = one_line(str(metrics.get("error", result.status.message))[:300])
                    # A client without a privacy budget is not at fault.
                    failure: Failure | None
                    failure = None if metrics.get(BUDGET_EXHAUSTED) is True else "error"
                    return replace(outcome, error=error or "failed", failure=failure)
                if isinstance(result, FitRes):
                    arrays = read_arrays(parameters, name, self._max_bytes)
                    bases = self._calls.bases_of(name)
                    envelope, knowledge = decode(arrays, name, bases, self._max_bytes)
                    run, method = self._run, self._method.name
                    expect(envelope, run=run, method=method, round=round, sender=name)
                metric_names = measured_names(self._metrics, client.classes // self._per_target)
                measured = read_measures(name, metrics, kinds, metric_names)
        except KnowledgeError as error:
            return replace(outcome, error=error.reason or "failed", failure="refused")
        work = float(metrics.get(WORK, 0.0))
        return replace(outcome, knowledge=knowledge, measured=measured, samples_processed=work)

    def replies(
        self, outcomes: Iterable[CallOutcome], members: Mapping[str, Member]
    ) -> Iterator[Reply]:
        """Yield the valid replies of the round, sorted by client.

        A client is dropped from the round if it sent no reply or if its reply cannot be decoded. A
        late reply is ignored, without consequences for the client, if the client has left, the
        method cannot use late replies, or the reply is too old.
        """
        outcome_of = {outcome.client: outcome for outcome in outcomes}
        for name in self._state.expected:
            age, why_unused = self._state.age_of(name), ""
            if age and name not in members:
                why_unused = "the client has left"
            elif age and self._method.spec.late == "refused":
                why_unused = f"{self._method.name} cannot use late replies"
            elif age > self._max_age:
                why_unused = f"it is {plural(age, 'round')} old ('pace.max-age' = {self._max_age})"
            round = self._state.record.round - age
            outcome = outcome_of.get(name)
            if outcome is None or outcome.failure == "silent":
                reason = outcome.error if outcome else "did not reply in time"
                self._state.drop_client(name, reason, "silent")
            else:
                self._state.count_received(outcome.bytes_received)
                if why_unused:
                    self._state.notice(
                        f"client {name}'s reply for round {round} was discarded: {why_unused}"
                    )
                elif outcome.error:
                    self._state.drop_client(name, outcome.error, outcome.failure)
                else:
                    sent, _ = self._calls.sent(name, round)
                    content = outcome.knowledge, outcome.measured, outcome.magnitudes
                    yield Reply(members[name].info, *content, age, sent)
            self._calls.close(name, round)
