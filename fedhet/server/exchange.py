"""Messages of the server: encodes instructions, and decodes what clients answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from flwr.common import Code, EvaluateRes, FitRes, Parameters, ndarrays_to_parameters
from flwr.server.client_proxy import ClientProxy

from fedhet.errors import KnowledgeError
from fedhet.methods.registry import Method
from fedhet.metrics import ACCURACY, measured_names
from fedhet.runs.measures import SPENT, Measured, read_measures
from fedhet.server.members import Member
from fedhet.server.proxy import Failures, name_of, reasons
from fedhet.server.reply import Reply, from_outside
from fedhet.server.reply_spool import SpooledReply, bytes_of
from fedhet.server.round import RoundState
from fedhet.server.sent import SentInstructions
from fedhet.wire.identity import SERVER, ClientInfo
from fedhet.wire.knowledge import (
    Envelope,
    Knowledge,
    decode,
    encode,
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
    ) -> None:
        """`max_bytes` limits a reply's size; `state` counts the bytes sent and received.

        `metrics` are those that clients measure. `remember` keeps what clients are sent to train
        on, for `sent_to`. `max_age` is 'pace.max-age'.
        """
        self._late, self._max_age = method.spec.late, max_age
        self._run, self._method, self._kinds = run, method.name, method.spec.kinds
        self._max_bytes, self._metrics = max_bytes, metrics
        self._state = state
        self._sent = SentInstructions() if remember else None

    def sent_to(self, client: str, round: int) -> Knowledge | None:
        """Return what a client was sent to train on in a round, as it decodes it.

        None: it was sent nothing, it is forgotten, or nothing is remembered.
        """
        return self._sent.get(client, round) if self._sent else None

    def forget_sent(self, client: str, round: int) -> None:
        """Forget what a client was sent to train on in a round."""
        if self._sent:
            self._sent.forget(client, round)

    def restore_sent(self, client: str, round: int, knowledge: Knowledge) -> None:
        """Remember again what a client was sent, which was kept elsewhere."""
        if self._sent:
            self._sent.keep(client, round, knowledge)

    def encode(self, round: int, client: str, knowledge: Knowledge) -> Parameters:
        """Return one client's instruction as a payload, and count its bytes."""
        payload = self._encoded(round, knowledge)
        if self._sent:
            self._sent.keep(client, round, knowledge)
        self._state.sent(payload_bytes(payload))
        return payload

    def encode_all(
        self, round: int, instructions: Mapping[str, Knowledge], *, training: bool = True
    ) -> dict[str, Parameters]:
        """Return each client's payload, and count their bytes as those of training or evaluation.

        An object shared by several clients is encoded once.
        """
        different = {id(knowledge): knowledge for knowledge in instructions.values()}
        encoded = {key: self._encoded(round, each) for key, each in different.items()}
        payloads = {name: encoded[id(each)] for name, each in instructions.items()}
        if self._sent and training:
            for name, each in instructions.items():
                self._sent.keep(name, round, each)
        self._state.sent(sum(map(payload_bytes, payloads.values())), training=training)
        return payloads

    def _encoded(self, round: int, knowledge: Knowledge) -> Parameters:
        envelope = Envelope(self._run, self._method, round, SERVER)
        return ndarrays_to_parameters(encode(envelope, knowledge))

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
            if why_not := self._too_late(name, members) if name in answers else "":
                self._state.too_late(name, why_not)
                self._state.received(bytes_of(answers[name].parameters))
                continue
            if name not in answers:
                self._state.absent(name, why.get(name, "did not answer in time"))
                continue
            with self._state.dropping(name):
                yield self.decode(members[name].info, answers[name])

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
                envelope, knowledge = decode(read_arrays(payload, name, self._max_bytes), name)
            age = self._state.age_of(name)
            number = self._state.record.round - age
            expect(envelope, run=self._run, method=self._method, round=number, sender=name)
            measured = self._measures(name, result.metrics, client.classes)
        sent = self.sent_to(name, number)
        self.forget_sent(name, number)
        return Reply(client, knowledge, measured, known, age, sent)

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

    def decode_evaluation(self, client: ClientInfo, result: EvaluateRes) -> Measured:
        """Return a client's measurements from an evaluation. Raises KnowledgeError."""
        with from_outside(client.name):
            if "error" in result.metrics:
                raise _error_of(client.name, result.metrics)
            return self._measures(client.name, result.metrics, client.classes)

    def _measures(self, name: str, metrics: Mapping[str, object], classes: int) -> Measured:
        return read_measures(name, metrics, self._kinds, measured_names(self._metrics, classes))


def _error_of(name: str, metrics: Mapping[str, object], message: str = "") -> KnowledgeError:
    """Return a client's own error; of the field SPENT if it has no privacy left to spend."""
    fault = str(metrics.get("error", message))[:300]
    return KnowledgeError(name, SPENT if metrics.get(SPENT) is True else "answer", fault)
