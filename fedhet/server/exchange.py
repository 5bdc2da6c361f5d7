"""Messages of the server: encodes instructions, and decodes replies and checks their contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flwr.common import Code, EvaluateRes, FitRes, Parameters, ndarrays_to_parameters

from fedhet.algorithms.classwise import capped
from fedhet.errors import FedhetError, KnowledgeError, words_of
from fedhet.methods.registry import Method
from fedhet.runs.measures import Measured, read_measures
from fedhet.server.outliers import Sizes as FieldSizes
from fedhet.server.outliers import out_of_proportion, sizes_of
from fedhet.server.reply_spool import StoredReply
from fedhet.server.round import RoundState
from fedhet.settings.metrics import measured_names
from fedhet.wire.contract import Contract, Sizes
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


@dataclass(frozen=True)
class Reply:
    """A client's reply, checked against the contract."""

    client: ClientInfo
    knowledge: Knowledge
    measured: Measured

    @property
    def samples(self) -> int:
        """Return the client's number of training samples, as reported when it joined."""
        return self.client.samples

    def saying(self, knowledge: Knowledge) -> Reply:
        """Return this reply with its knowledge replaced."""
        return replace(self, knowledge=knowledge)

    def with_counts_capped(self) -> Reply:
        """Return this reply with `counts` that sum to no more samples than its client has."""
        counts = capped(self.knowledge.tensors["counts"], self.samples)
        return self.saying(self.knowledge.replacing({"counts": counts}))


class Exchange:
    """The messages between a method's server half and its clients in one run."""

    def __init__(
        self,
        run: str,
        method: Method,
        max_bytes: int,
        state: RoundState,
        metrics: Sequence[str] = (),
    ) -> None:
        """`max_bytes` limits a reply's size; `state` counts the bytes sent and received.

        `metrics` are measured beside accuracy.
        """
        self._run, self._method, self._kinds = run, method.name, method.spec.kinds
        self._receives: Contract = method.spec.replies
        self._max_bytes, self._metrics = max_bytes, metrics
        self._state = state

    def encode(self, round: int, knowledge: Knowledge) -> Parameters:
        """Return one client's instruction as a payload, and count its bytes."""
        payload = self._encoded(round, knowledge)
        self._state.sent(payload_bytes(payload))
        return payload

    def encode_all(
        self, round: int, instructions: Mapping[str, Knowledge]
    ) -> dict[str, Parameters]:
        """Return each client's payload; an object shared by several clients is encoded once."""
        different = {id(knowledge): knowledge for knowledge in instructions.values()}
        encoded = {key: self._encoded(round, each) for key, each in different.items()}
        payloads = {name: encoded[id(each)] for name, each in instructions.items()}
        self._state.sent(sum(map(payload_bytes, payloads.values())))
        return payloads

    def _encoded(self, round: int, knowledge: Knowledge) -> Parameters:
        envelope = Envelope(self._run, self._method, round, SERVER)
        return ndarrays_to_parameters(encode(envelope, knowledge))

    def read(self, round: int, client: ClientInfo, result: FitRes, sizes: Sizes) -> Reply:
        """Return a client's reply. Raises KnowledgeError if it violates the contract."""
        with _from_outside(client.name):
            return self._read(round, client, result, sizes)

    def _read(self, round: int, client: ClientInfo, result: FitRes, sizes: Sizes) -> Reply:
        payload, name = result.parameters, client.name
        stored = payload if isinstance(payload, StoredReply) else None
        self._state.received(stored.size if stored else payload_bytes(payload))
        if result.status.code != Code.OK or "error" in result.metrics:
            fault = str(result.metrics.get("error", result.status.message))[:300]
            raise KnowledgeError(name, "answer", fault)
        if stored:
            envelope, knowledge = stored.read(name, self._receives)
        else:
            envelope, knowledge = decode(read_arrays(payload, name, self._max_bytes), name)
        expect(envelope, run=self._run, method=self._method, round=round, sender=name)
        reply = Reply(client, knowledge, self._measures(name, result.metrics, client.classes))
        self.check(reply, sizes)
        return reply

    def read_evaluation(self, client: ClientInfo, result: EvaluateRes) -> Measured:
        """Return a client's measurements from an evaluation. Raises KnowledgeError."""
        name = client.name
        with _from_outside(name):
            if "error" in result.metrics:
                raise KnowledgeError(name, "answer", str(result.metrics["error"])[:300])
            return self._measures(name, result.metrics, client.classes)

    def _measures(self, name: str, metrics: Mapping[str, object], classes: int) -> Measured:
        return read_measures(name, metrics, self._kinds, measured_names(self._metrics, classes))

    def check(self, reply: Reply, sizes: Sizes) -> None:
        """Raise KnowledgeError unless a reply satisfies the contract."""
        said = reply.knowledge
        self._receives.check(reply.client.name, said.tensors, said.scalars, sizes)


@contextlib.contextmanager
def _from_outside(sender: str) -> Iterator[None]:
    """Raise KnowledgeError for whatever goes wrong in the block, which reads what `sender` sent.

    No list of exceptions is complete: memory, recursion, a library's own. One reply must not cost
    the others, and the reason is in the notice.
    """
    try:
        yield
    except FedhetError:
        raise
    except Exception as error:
        fault = f"cannot be read ({type(error).__name__}: {words_of(error)})"
        raise KnowledgeError(sender, "answer", fault) from error


def in_proportion(
    replies: Iterable[Reply], stored: Mapping[str, FieldSizes], state: RoundState, factor: float
) -> Iterator[Reply]:
    """Yield the replies of a round that are in proportion to its others; drop the rest by name.

    `stored`: the sizes of replies that lie on disk, which need not be read for them again.
    `factor` is 'engine.outlier-factor'; 0 lets everything pass.
    """
    if not factor:
        yield from replies
        return
    known = {} if isinstance(replies, list) else stored  # a list: the attack has changed them
    replies = list(replies)
    sizes = {r.client.name: known.get(r.client.name) or sizes_of(r.knowledge) for r in replies}
    state.compared(sizes)
    odd = out_of_proportion(sizes, state.usual, factor)
    for reply in replies:
        with state.dropping(reply.client.name):
            if reply.client.name in odd:
                raise odd[reply.client.name]
            yield reply
