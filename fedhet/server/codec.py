"""The server's codec between `Knowledge` and Flower's records.

It encodes the instructions to clients, remembers what each was sent, and decodes their replies.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from flwr.common import Code, EvaluateRes, FitRes, Parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.base.arrays import Arrays
from fedhet.base.errors import ToldError
from fedhet.base.metrics import ACCURACY, measured_names
from fedhet.methods.registry import Method
from fedhet.runs.measures import SPENT, Measured, read_measures
from fedhet.server.calls import Failures, name_of, reasons
from fedhet.server.members import Member
from fedhet.server.published import Instruction, Publisher
from fedhet.server.reply import Reply, SpooledPayload, bytes_of, from_outside
from fedhet.server.round import RoundState
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import (
    Bases,
    Envelope,
    Knowledge,
    decode,
    expect,
    payload_bytes,
    read_arrays,
)


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
        publisher: Publisher | None = None,
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
            publisher: Encodes the instructions; None sends them unchanged.
        """
        self._late, self._max_age = method.spec.late, max_age
        self._run, self._method, self._kinds = run, method.name, method.spec.kinds
        self._max_bytes, self._metrics, self._state = max_bytes, metrics, state
        self._remember, self._publisher = remember, publisher or Publisher(None)
        self._lock = threading.Lock()
        self._sent: dict[str, dict[int, tuple[Knowledge, int]]] = {}
        """By client and round: its training instruction, and the digest of the weights in it."""
        self._sent_round = 0
        self._last: dict[str, Instruction] = {}
        """The last message of each client that may lack its base weights."""
        self._last_occasion = (0, True)
        """The round of these messages, and whether they are to train."""
        self._sizes: dict[tuple[str, bool], tuple[int, int]] = {}
        """The round and the bytes of each client's last message to train (True) or to evaluate."""

    # Instructions: from Knowledge to Flower's Parameters.

    def encode(self, round: int, client: str, knowledge: Knowledge) -> Parameters:
        """Return one client's training instruction as a payload, and count its bytes."""
        instruction = self._instruction(round, knowledge, (), training=True)
        return self._payloads(round, {client: instruction}, training=True)[client]

    def encode_all(
        self, round: int, instructions: Mapping[str, Knowledge], *, training: bool = True
    ) -> dict[str, Parameters]:
        """Return each client's payload, and count their bytes as those of training or evaluation.

        An object shared by several clients is encoded once.
        """
        sharing: dict[int, list[str]] = {}
        for name, knowledge in instructions.items():
            sharing.setdefault(id(knowledge), []).append(name)
        made: dict[str, Instruction] = {}
        for names in sharing.values():
            knowledge = instructions[names[0]]
            instruction = self._instruction(round, knowledge, names, training=training)
            made |= dict.fromkeys(names, instruction)
        return self._payloads(round, {name: made[name] for name in instructions}, training=training)

    def _instruction(
        self, round: int, knowledge: Knowledge, clients: Collection[str], *, training: bool
    ) -> Instruction:
        envelope = Envelope(self._run, self._method, round, SERVER)
        use = "train" if training else "evaluate"
        return self._publisher.instruction(envelope, use, knowledge, clients)

    def _payloads(
        self, round: int, instructions: Mapping[str, Instruction], *, training: bool
    ) -> dict[str, Parameters]:
        """Return each client's payload; count and remember what it is sent."""
        payloads: dict[str, Parameters] = {}
        for client, instruction in instructions.items():
            payloads[client] = self._publisher.payload(client, instruction)
            size = payload_bytes(payloads[client])
            self._sizes[client, training] = round, size
            self._state.sent(size, training=training)
            digest = instruction.version.digest
            if digest:
                with self._lock:
                    if self._last_occasion != (round, training):
                        self._last.clear()
                    self._last_occasion = round, training
                    self._last[client] = instruction.anew()
            if training and (self._remember or digest):
                self.keep_sent(client, round, instruction.knowledge, digest)
        self._publisher.tidy()
        return payloads

    def without_base(self, client: str) -> Parameters | None:
        """Return the last message to a client without base weights, and count its bytes.

        None if the message has no base weights.
        """
        with self._lock:
            instruction, (_, training) = self._last.get(client), self._last_occasion
        if instruction is None:
            return None
        payload = instruction.anew().whole
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
        answers = {name_of(proxy): result for proxy, result in results}
        why = reasons(failures)
        for name in self._state.expected:
            age, why_not = self._state.age_of(name), ""
            if age and name not in members:
                why_not = "it has left"
            elif age and self._late == "refused":
                why_not = f"what {self._method} sends belongs to its round"
            elif age > self._max_age:
                why_not = f"it is {age} rounds old ('pace.max-age' = {self._max_age})"
            if name not in answers:
                self._state.absent(name, why.get(name, "did not answer in time"))
            elif why_not:
                of = self._state.arrived[name]
                self._state.notice(f"client {name}'s answer to round {of} is not used: {why_not}")
                self._state.received(bytes_of(answers[name].parameters))
            else:
                with self._state.dropping(name):
                    yield self.decode(members[name].info, answers[name])
            self.forget_sent(name, self._state.record.round - age)

    def decode(self, client: ClientInfo, result: FitRes) -> Reply:
        """Return a client's reply to this round. Raises KnowledgeError."""
        payload, name, known = result.parameters, client.name, None
        with from_outside(name):
            spooled = payload if isinstance(payload, SpooledPayload) else None
            self._state.received(bytes_of(payload))
            if result.status.code != Code.OK or "error" in result.metrics:
                raise _error_of(name, result.metrics, result.status.message)
            if spooled:
                (envelope, knowledge), known = spooled.message(), spooled.magnitudes
            else:
                arrays = read_arrays(payload, name, self._max_bytes)
                envelope, knowledge = decode(arrays, name, self.bases_of(name), self._max_bytes)
            age = self._state.age_of(name)
            number = self._state.record.round - age
            expect(envelope, run=self._run, method=self._method, round=number, sender=name)
            measured = self._measures(name, result.metrics, client.classes, self._kinds)
        return Reply(client, knowledge, measured, known, age, self.sent(name, number)[0])

    def decode_evaluation(
        self, client: ClientInfo, result: EvaluateRes, kinds: Sequence[str]
    ) -> Measured:
        """Return a client's measurements of models of the `kinds`. Raises KnowledgeError."""
        with from_outside(client.name):
            if "error" in result.metrics:
                raise _error_of(client.name, result.metrics)
            return self._measures(client.name, result.metrics, client.classes, kinds)

    def _measures(
        self, name: str, metrics: Mapping[str, object], classes: int, kinds: Sequence[str]
    ) -> Measured:
        return read_measures(name, metrics, kinds, measured_names(self._metrics, classes))


def _error_of(name: str, metrics: Mapping[str, object], message: str = "") -> ToldError:
    """Return a client's own error."""
    fault = str(metrics.get("error", message))[:300]
    return ToldError(name, fault, spent=metrics.get(SPENT) is True)
