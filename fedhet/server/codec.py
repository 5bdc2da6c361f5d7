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
from fedhet.server.published import Instruction, LastMessages, Publisher
from fedhet.server.reply import Reply, SpooledReply, bytes_of, from_outside
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


class Exchange:
    """The messages between a method's server half and its clients in one run."""

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
        """`max_bytes` limits a reply's size; `state` counts the bytes sent and received.

        `metrics` are those that clients measure. `remember` keeps what clients are sent to train
        on, for `sent_to`. `max_age` is 'pace.max-age'. `publisher` encodes the instructions, None:
        they travel as they are.
        """
        self._late, self._max_age = method.spec.late, max_age
        self._run, self._method, self._kinds = run, method.name, method.spec.kinds
        self._max_bytes, self._metrics = max_bytes, metrics
        self._state = state
        self._remember, self._publisher = remember, publisher or Publisher(None)
        self._sent = SentInstructions(last_alone=not remember)
        self._last = LastMessages()
        self._sizes: dict[tuple[str, bool], tuple[int, int]] = {}
        """The round and the bytes of each client's last message to train (True) or to evaluate."""

    def sent_to(self, client: str, round: int) -> Knowledge | None:
        """Return what a client was sent to train on in a round, as it decodes it.

        None: it was sent nothing, it is forgotten, or nothing is remembered.
        """
        found = self._sent.get(client, round)
        return found[0] if found else None

    def forget_sent(self, client: str, round: int) -> None:
        """Forget what a client was sent to train on in a round."""
        self._sent.forget(client, round)

    def digest_of_sent(self, client: str, round: int) -> int:
        """Return the digest of the weights that a client was sent in a round; 0: there is none."""
        found = self._sent.get(client, round)
        return found[1] if found else 0

    def restore_sent(self, client: str, round: int, knowledge: Knowledge, digest: int) -> None:
        """Remember again what a client was sent, which was kept elsewhere."""
        self._sent.keep(client, round, knowledge, digest)

    def encode(self, round: int, client: str, knowledge: Knowledge) -> Parameters:
        """Return one client's instruction as a payload, and count its bytes."""
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

    def again(self, client: str) -> Parameters | None:
        """Return the last message to a client without what it lacks, and count its bytes.

        None: the message built on nothing.
        """
        found = self._last.get(client)
        if found is None:
            return None
        instruction, training = found
        payload = instruction.anew().whole
        self._state.sent(payload_bytes(payload), training=training)
        return payload

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
        found: dict[str, Parameters] = {}
        for client, instruction in instructions.items():
            found[client] = self._publisher.payload(client, instruction)
            size = payload_bytes(found[client])
            self._sizes[client, training] = round, size
            self._state.sent(size, training=training)
            digest = instruction.version.digest
            if digest:
                self._last.keep(client, round, instruction.anew(), training=training)
            if training and (self._remember or digest):
                self._sent.keep(client, round, instruction.knowledge, digest)
        self._publisher.tidy()
        return found

    def withdraw(self, round: int, clients: Iterable[str], *, training: bool = True) -> None:
        """Neither count nor remember messages of a round which were not sent after all."""
        for name in clients:
            of, size = self._sizes.get((name, training), (round, 0))
            if of == round:
                self._state.sent(-size, training=training)
            if training:
                self.forget_sent(name, round)

    def bases_of(self, client: str) -> Bases:
        """Return what finds the weights that a client was sent, on which its reply builds."""

        def weights(envelope: Envelope, digest: int) -> Arrays | None:
            sent, known = self._sent.get(client, envelope.round) or (None, 0)
            return sent.tensors if sent and known == digest else None

        return weights

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
            if name not in answers:
                self._state.absent(name, why.get(name, "did not answer in time"))
            elif why_not := self._too_late(name, members):
                self._state.too_late(name, why_not)
                self._state.received(bytes_of(answers[name].parameters))
            else:
                with self._state.dropping(name):
                    yield self.decode(members[name].info, answers[name])
            self.forget_sent(name, self._state.record.round - self._state.age_of(name))

    def decode(self, client: ClientInfo, result: FitRes) -> Reply:
        """Return a client's reply to this round. Raises KnowledgeError."""
        payload, name, known = result.parameters, client.name, None
        with from_outside(name):
            spooled = payload if isinstance(payload, SpooledReply) else None
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
        return Reply(client, knowledge, measured, known, age, self.sent_to(name, number))

    def _too_late(self, name: str, members: Collection[str]) -> str:
        """Return why a late reply is not used, or ""; one that is not late is."""
        age = self._state.age_of(name)
        if not age:
            return ""
        if name not in members:
            return "it has left"
        if self._late == "refused":
            return f"what {self._method} sends belongs to its round"
        if age > self._max_age:
            return f"it is {age} rounds old ('pace.max-age' = {self._max_age})"
        return ""

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


class SentInstructions:
    """What each client was sent to train on in a round, until it is forgotten; from any thread.

    An object that several clients share is kept once.
    """

    def __init__(self, *, last_alone: bool = False) -> None:
        """`last_alone`: all instructions are forgotten when those of another round are kept."""
        self._lock, self._last_alone, self._round = threading.Lock(), last_alone, 0
        self._by_client: dict[str, dict[int, tuple[Knowledge, int]]] = {}

    def keep(self, client: str, round: int, knowledge: Knowledge, digest: int = 0) -> None:
        """Keep the instruction of a round; one that is sent again replaces the earlier.

        `digest` is that of its weights, 0: no reply can build on them.
        """
        with self._lock:
            if self._last_alone and round != self._round:
                self._by_client.clear()
            self._round = round
            self._by_client.setdefault(client, {})[round] = knowledge, digest

    def get(self, client: str, round: int) -> tuple[Knowledge, int] | None:
        """Return the instruction of a round, and the digest of its weights.

        None: there was none, or it is forgotten.
        """
        with self._lock:
            return self._by_client.get(client, {}).get(round)

    def forget(self, client: str, round: int) -> None:
        """Forget the instruction of a round, if it is kept."""
        with self._lock:
            rounds = self._by_client.get(client, {})
            rounds.pop(round, None)
            if not rounds:
                self._by_client.pop(client, None)
