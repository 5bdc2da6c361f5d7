"""Helpers for tests of methods: references, rounds by hand, replies, and clients on disk.

The references share no code with fedhet. They are formulas in NumPy or PyTorch, and gradient
descent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from federation import Server, client_of
from flwr.common import ndarrays_to_parameters, parameters_to_ndarrays
from torch import Tensor, nn

from fedhet.base.arrays import Array, Arrays
from fedhet.client_runtime.node import read_node
from fedhet.clients.base import HetClient
from fedhet.config.resolve import Config
from fedhet.runs.measures import Measured
from fedhet.server.reply import Reply
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
    "data.samples-per-class": 10,
    "superclasses": [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7", "8", "9"]],
    "label-space": [2, 2],
}
"""Every client has two classes of four."""


# References


def softmax(logits) -> Array:
    """Return exp(z_i) / sum_j exp(z_j) over the last axis, in float64."""
    shifted = np.asarray(logits, np.float64)
    powers = np.exp(shifted - shifted.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def log_softmax(logits: Tensor) -> Tensor:
    """Return z_i - log sum_j exp(z_j) over the last axis; gradients flow through it."""
    return logits - torch.log(torch.exp(logits).sum(-1, keepdim=True))


def cross_entropy(logits: Tensor, labels) -> Tensor:
    """Return the mean over samples of -log softmax(z)_y, sample by sample."""
    logs = log_softmax(logits)
    return -sum(logs[n, y] for n, y in enumerate(labels.tolist())) / len(labels)


def step(parameters, gradients, lr: float) -> None:
    """Take a step of gradient descent; parameters without a gradient do not change."""
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter -= lr * gradient


def descend(
    model: nn.Module, loss: Callable[[nn.Module], Tensor], epochs: int = 3, lr: float = 0.1
) -> nn.Module:
    """Train a copy of a model in float64 by gradient descent on all data; return the copy."""
    model = copy.deepcopy(model).double().train()
    parameters = list(model.parameters())
    for _ in range(epochs):
        step(parameters, torch.autograd.grad(loss(model), parameters), lr)
    return model


def assert_close(model: nn.Module, expected: nn.Module, rtol=1e-4, atol=1e-6) -> None:
    """Compare every parameter and buffer of two models."""
    for name, value in expected.state_dict().items():
        found = model.state_dict()[name].numpy()
        np.testing.assert_allclose(found, value.numpy(), rtol=rtol, atol=atol)


# Rounds


def of_classes(classes, **rows) -> Knowledge:
    """Return knowledge with one row per class."""
    tensors = {name: np.asarray(values, np.float32) for name, values in rows.items()}
    return Knowledge({"classes": np.array(classes, np.int64), **tensors})


def normal(seed: int, *shape: int) -> Array:
    """Return draws from N(0, 1)."""
    return np.random.default_rng(seed).normal(size=shape)


def reply_from(server: Server, name: str, knowledge: Knowledge) -> Reply:
    """Return a client's reply in the form that a strategy aggregates."""
    return Reply(server.strategy.members[name].info, knowledge, Measured({}))


def features_from(server: Server, name: str, classes, value: float = 1.0) -> Reply:
    """Return a client's reply with random class means, scaled by `value`."""
    features = value * normal(0, len(classes), server.strategy.settings.feature_dim)
    return reply_from(server, name, of_classes(classes, features=features))


def assert_class_means(reply: Mapping[str, Array], features: Tensor, labels: Tensor) -> None:
    """Check that a reply contains the mean features of each class."""
    assert reply["classes"].tolist() == sorted(set(labels.tolist()))
    for row, c in enumerate(reply["classes"]):
        mean = features[labels == c].detach().mean(0)
        np.testing.assert_allclose(reply["features"][row], mean, rtol=1e-3, atol=1e-5)


def assert_only_rows_per_class(
    config: Config, directory: Path, field: str, width: int = 10, also: str = ""
) -> None:
    """Assert that both sides send only `classes` and a row of `field` for each of these classes.

    The first instruction is empty. A client replies with the classes that it has, and may send the
    field `also`.
    """
    server = Server(config, directory)
    instructions = server.instruct(1)
    assert not instruction_of(instructions[0]).tensors
    replies = server.train(instructions)
    for proxy, result in replies:
        reply = reply_of(result)
        assert set(reply.tensors) == {"classes", field, *filter(None, [also])}
        present = sorted(set(client_of(proxy).y.tolist()))
        assert reply.tensors["classes"].tolist() == present
        assert reply.tensors[field].shape == (len(present), width)
        assert not reply.scalars
    server.aggregate(1, replies)
    sent = instruction_of(server.instruct(2)[0])
    assert set(sent.tensors) == {"classes", field}
    assert not sent.scalars


def instruction_of(call) -> Knowledge:
    """Return the knowledge in a client's instruction; `call` is its proxy and its `FitIns`."""
    proxy, ins = call
    make = getattr(proxy, "make_payload", None)  # of a large message, which is made when sent
    return decode(parameters_to_ndarrays(make() if make else ins.parameters), "test")[1]


def reply_of(result) -> Knowledge:
    """Return the knowledge in a client's reply."""
    return decode(parameters_to_ndarrays(result.parameters), "test")[1]


def altered(result, change: Callable[[dict[str, Array]], None], **signed: object):
    """Return a reply after `change` has modified its tensors; `signed` is its envelope."""
    envelope, knowledge = decode(parameters_to_ndarrays(result.parameters), "test")
    tensors = {name: value.copy() for name, value in knowledge.tensors.items()}
    change(tensors)
    result = copy.copy(result)
    message = encode(replace(envelope, **signed), Knowledge(tensors, knowledge.scalars))
    result.parameters = ndarrays_to_parameters(message)
    return result


def learn(server: Server, number: int) -> dict[str, Arrays]:
    """Run a round; return the replies' tensors by client."""
    _, replies = server.play(number)
    return {proxy.name: reply_of(result).tensors for proxy, result in replies}


def clients(server: Server) -> dict[str, HetClient]:
    """Return the clients in their current state."""
    return {proxy.name: client_of(proxy) for proxy, _ in server.instruct(99)}


def same(one: Mapping[str, Array], other: Mapping[str, Array]) -> bool:
    """Return whether two messages or models are bit-for-bit equal."""
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def state_of(model) -> dict[str, Array]:
    """Return a copy of a model's tensors."""
    return {name: value.detach().numpy().copy() for name, value in model.state_dict().items()}


def inside_of(client: HetClient) -> Array:
    """Return a mask of classes [C] that is true for some, but not all classes."""
    inside = np.isin(np.arange(client.info.classes), client.space.numpy())
    assert 0 < inside.sum() < len(inside)
    return inside


def moved_outputs(client: HetClient, before: Mapping[str, Array]) -> Array:
    """Return the change in each class's output weights [C] since `before`."""
    now = state_of(client.network)["classifier.weight"]
    return np.abs(now - before["classifier.weight"]).sum(1)


def opened(
    config: Config, directory: Path, before: int = 1, partition: int = 1, **own: object
) -> HetClient:
    """Return a new client with the state on disk from before a round of the run `run`.

    `own` contains additional settings of its node.
    """
    node_config = {"partition-id": partition, "num-partitions": config.run.clients, **own}
    client = config.method.client(config, read_node(node_config, config.run, str(directory)))
    client.state.restore("run", before=before)
    return client


def replied(client: HetClient, number: int, knowledge: Knowledge) -> Knowledge:
    """Return a client's reply to an instruction in a round of the run `run`."""
    envelope = Envelope("run", client.run.method, number, "server")
    arrays, _, metrics = client.fit(encode(envelope, knowledge), {})
    assert "error" not in metrics, metrics
    return decode(arrays, "test")[1]


def fitted(client: HetClient, number: int, knowledge: Knowledge) -> Arrays:
    """Return the tensors of such a reply."""
    return replied(client, number, knowledge).tensors
