"""A round of a method by hand: what is told and said, and clients opened from their disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from federation import Server, client_of
from flwr.common import parameters_to_ndarrays

from fedhet.arrays import Array, Arrays
from fedhet.client_runtime.node import read_node
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config
from fedhet.wire.knowledge import Envelope, Knowledge, decode, encode

PLAIN = {
    "training.optimizer": "sgd",
    "training.momentum": 0.0,
    "training.lr": 0.1,
    "training.batch-size": 1000,
    "training.local-epochs": 3,
    "engine.precision": "float32",
}
"""Gradient descent on all data: what a round computes does not depend on any draw."""
SPACES = {
    "partition": "superclasses",
    "samples-per-class": 10,
    "superclasses": "0+1,2+3,4+5,6+7+8+9",
    "label-space": "2-2",
}
"""Every client has two classes of four."""


def told(asked) -> Knowledge:
    """Return the knowledge of a round's first instruction."""
    return decode(parameters_to_ndarrays(asked[0][1].parameters), "test")[1]


def said(result) -> Knowledge:
    """Return the knowledge of a client's answer."""
    return decode(parameters_to_ndarrays(result.parameters), "test")[1]


def learn(server: Server, number: int) -> dict[str, Arrays]:
    """Run a round; return the replies' tensors by client."""
    answers = server.answers(server.ask(number))
    server.strategy.aggregate_fit(number, answers, [])
    return {proxy.name: said(result).tensors for proxy, result in answers}


def clients(server: Server) -> dict[str, HetClient]:
    """Return the clients as they are now."""
    return {proxy.name: client_of(proxy) for proxy, _ in server.ask(99)}


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Tell whether two messages or models are equal, bit for bit."""
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def state_of(model) -> dict[str, Array]:
    """Return a copy of a model's tensors."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def opened(config: Config, directory: Path, before: int = 1, partition: int = 1) -> HetClient:
    """Return a new client, with the state on disk as it was before a round of the run `run`."""
    node_config = {"partition-id": partition, "num-partitions": config.run.clients}
    client = config.method.client(config, read_node(node_config, config.run, str(directory)))
    client.state.restore("run", before=before)
    return client


def fitted(client: HetClient, number: int, knowledge: Knowledge) -> Arrays:
    """Return the tensors of a client's answer in a round of the run `run`."""
    envelope = Envelope("run", client.run.method, number, "server")
    arrays, _, metrics = client.fit(encode(envelope, knowledge), {})
    assert "error" not in metrics, metrics
    return decode(arrays, "test")[1].tensors


def restored_server_says_the_same(config: Config, directory: Path) -> None:
    """Check that a new server with the state of another one says the same, and forgets alike."""
    server, other = (Server(config, directory / name) for name in ("one", "two"))
    learn(server, 1)
    other.strategy.load_state_dict(server.strategy.state_dict())
    assert same(told(other.ask(2)).tensors, told(server.ask(2)).tensors)
    for each in (server, other):
        each.strategy.forget("client-1")
    assert same(told(other.ask(3)).tensors, told(server.ask(3)).tensors)


def reopened_client_goes_on(config: Config, directory: Path, *told_it: Knowledge) -> None:
    """Check that a client opened again before its last round ends that round as it did before."""
    client = opened(config, directory)
    for number, knowledge in enumerate(told_it, 1):
        learned = fitted(client, number, knowledge)
    again = opened(config, directory, before=len(told_it))
    assert same(fitted(again, len(told_it), told_it[-1]), learned)
    assert same(state_of(again.network), state_of(client.network))
