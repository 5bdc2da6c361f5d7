"""Steps of a message on a client, from the decoded instruction to training, and back.

An instruction passes the steps in the order of the list, and the reply to it passes them in the
opposite order. `fedhet.server.steps` contains the steps of a reply on the server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from flwr.common import NDArrays, Scalar

from fedhet.client_runtime.masking import Masking
from fedhet.client_runtime.privacy import NoPrivacy
from fedhet.client_runtime.state import ClientCodec, ClientState
from fedhet.wire.knowledge import Envelope, Knowledge


@dataclass
class Exchange:
    """Instruction of a round, and the client's reply to it."""

    envelope: Envelope
    instruction: Knowledge
    config: Mapping[str, Scalar]
    """Flower's config of the message."""
    reply: Knowledge = field(default_factory=Knowledge)
    """Reply of the method, as changed by the steps."""
    arrays: NDArrays = field(default_factory=list)
    """Encoded reply, empty before it is encoded. If the request is repeated, a step of the
    instruction finds the stored reply, and the client does not train."""


def _unchanged(exchange: Exchange) -> None:
    pass


@dataclass(frozen=True)
class Step:
    """Effects of a step on an instruction and on the reply to it."""

    receive: Callable[[Exchange], None] = _unchanged
    send: Callable[[Exchange], None] = _unchanged


def steps_of(
    privacy: NoPrivacy,
    masking: Masking | None,
    model: str,
    codec: ClientCodec,
    state: ClientState,
    save: Callable[[Exchange], None],
) -> list[Step]:
    """Return the steps between the decoding of an instruction and the method's `train`, in order.

    A reply is stored after the client's state is saved, so that the state contains what is sent.

    Args:
        privacy: Privacy mechanism of the client.
        masking: Masking of replies, or None without secure aggregation.
        model: Name of the client's architecture.
        codec: Codec that encodes the reply.
        state: State of the client.
        save: Function that saves the state after the round.
    """

    def begin_round(exchange: Exchange) -> None:
        privacy.begin(exchange.envelope.run, exchange.envelope.round)

    def store_reply(exchange: Exchange) -> None:
        privacy.store_reply(exchange.arrays)

    def find_stored(exchange: Exchange) -> None:
        exchange.arrays = exchange.arrays or privacy.stored_reply() or []

    def restore_state(exchange: Exchange) -> None:
        is_repeated = bool(exchange.arrays)
        state.restore(exchange.envelope.run, before=exchange.envelope.round + is_repeated)

    def encode_reply(exchange: Exchange) -> None:
        exchange.arrays = codec.encode_reply(
            exchange.envelope, exchange.instruction, exchange.reply
        )

    def filter_reply(exchange: Exchange) -> None:
        exchange.reply = privacy.filter_reply(exchange.reply)

    request, mask = masking_steps(masking, model) if masking else (Step(), Step())
    return [
        Step(receive=begin_round, send=store_reply),
        request,
        Step(receive=find_stored),
        Step(receive=restore_state, send=save),
        Step(send=encode_reply),
        mask,
        Step(send=filter_reply),
    ]


def masking_steps(masking: Masking, model: str) -> tuple[Step, Step]:
    """Return the steps that check a request and store the encoded reply, and that mask a reply."""

    def check_request(exchange: Exchange) -> None:
        found = masking.begin(exchange.envelope, exchange.instruction, exchange.config)
        exchange.arrays = found or []

    def store_reply(exchange: Exchange) -> None:
        exchange.arrays = masking.store(exchange.envelope, exchange.arrays)

    def mask_reply(exchange: Exchange) -> None:
        exchange.reply = masking.masked(exchange.envelope, exchange.reply, model)

    return Step(receive=check_request, send=store_reply), Step(send=mask_reply)
