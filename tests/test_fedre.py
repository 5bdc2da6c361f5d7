"""FedRE against slow transcriptions of the mixture, the server's loss, and the rounds."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from federation import Server, client_of, small
from rounds import (
    PLAIN,
    SPACES,
    assert_close,
    clients,
    cross_entropy,
    descend,
    fitted,
    instruction_of,
    learn,
    log_softmax,
    normal,
    opened,
    reply_from,
    reply_of,
    same,
    softmax,
    state_of,
)
from torch import nn

from fedhet.algorithms.classwise import ClassMeans
from fedhet.algorithms.entanglement import entangle, entangled_loss, train_entangled
from fedhet.base.errors import DivergedError
from fedhet.base.seeding import torch_generator
from fedhet.clients.fedgh import FedGhClient
from fedhet.methods.registry import find_method
from fedhet.wire.knowledge import Knowledge

D, C, N = 6, 4, 7


def fedre(**changes):
    return small("fedre", **{"clients": 3, "models": ["mlp", "cnn2"], **PLAIN, **changes})


def encodings(seed=1, count=N, classes=C):
    """Return rows that sum to 1, each with a class of weight 0, in float32."""
    rows = np.random.default_rng(seed).random((count, classes)) + 0.1
    rows[np.arange(count), np.arange(count) % classes] = 0
    return (rows / rows.sum(1, keepdims=True)).astype(np.float32)


# The mixture


def test_representation_and_labels_have_the_same_normalized_weights():
    classes, means, draws = [1, 2, 5], normal(0, 3, D).astype(np.float32), [0.2, 0.9, 0.4]
    representation, labels = entangle(
        means, np.array(classes), np.array(draws, dtype=np.float32), size=7
    )
    mixed, encoding = [0.0] * D, [0.0] * 7
    for row, c in enumerate(classes):
        weight = draws[row] / (0.2 + 0.9 + 0.4)
        one_hot = [1.0 if k == c else 0.0 for k in range(7)]
        mixed = [m + weight * x for m, x in zip(mixed, means[row], strict=True)]
        encoding = [e + weight * x for e, x in zip(encoding, one_hot, strict=True)]
    np.testing.assert_allclose(representation, mixed, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(labels, encoding, rtol=1e-6)
    assert representation.dtype == labels.dtype == np.float32


def test_one_class_is_sent_unchanged():
    mean = normal(0, 1, D).astype(np.float32)
    representation, labels = entangle(mean, np.array([2]), np.array([1e-7]), C)
    np.testing.assert_array_equal(representation, mean[0])
    assert labels.tolist() == [0, 0, 1, 0]


# The server's loss


def test_loss_is_the_weighted_cross_entropy_of_every_class():
    """Sum over representations and classes, as in the authors' double loop."""
    logits, labels = 3 * normal(2, N, C), encodings()
    total = 0.0
    for n in range(N):
        for c in range(C):
            total -= labels[n, c] * np.log(softmax(logits[n])[c])
    loss = entangled_loss(torch.tensor(logits), torch.tensor(labels).double())
    assert loss.item() == pytest.approx(total, rel=1e-6)


def test_loss_of_the_server_reaches_only_the_head():
    head = nn.Linear(D, C)
    x, labels = torch.tensor(normal(0, N, D)).float(), torch.tensor(encodings())
    entangled_loss(head(x), labels).backward()
    wrong = softmax((x @ head.weight.T + head.bias).detach()) - labels.numpy()
    np.testing.assert_allclose(head.weight.grad, wrong.T @ x.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias.grad, wrong.sum(0), rtol=1e-4, atol=1e-5)
    assert not x.requires_grad
    assert not labels.requires_grad


def slow_training(head, representations, labels, lr, orders):
    """Gradient descent on a linear head with a manual gradient; `orders` are the batches' rows."""
    weight, bias = (head[name].astype(np.float64).copy() for name in ("weight", "bias"))
    total = 0.0
    for epoch in orders:
        total = 0.0
        for rows in epoch:
            to_weight, to_bias = np.zeros_like(weight), np.zeros_like(bias)
            for n in rows:
                z = representations[n].astype(np.float64)
                predicted = softmax(weight @ z + bias)
                for c in range(len(bias)):
                    total -= labels[n, c] * np.log(predicted[c])
                    error = labels[n, c] * (predicted - np.eye(len(bias))[c])
                    to_weight += np.outer(error, z)
                    to_bias += error
            weight, bias = weight - lr * to_weight, bias - lr * to_bias
    return weight, bias, total / len(labels)


def orders_of(count, batch_size, epochs, generator):
    """Return the rows of each batch of each epoch, given the generator's draws."""
    orders = []
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator).tolist()
        orders.append([order[k : k + batch_size] for k in range(0, count, batch_size)])
    return orders


@pytest.mark.parametrize(("batch_size", "epochs"), [(32, 1), (3, 2), (1, 1)])
def test_training_is_gradient_descent_on_shuffled_batches(batch_size, epochs):
    """A batch may contain a single representation, because a head has no batch normalization."""
    torch.manual_seed(0)
    head = nn.Linear(D, C)
    x, labels, before = normal(0, N, D).astype(np.float32), encodings(), state_of(head)
    options = {"epochs": epochs, "batch_size": batch_size, "lr": 0.2}
    loss = train_entangled(
        head, torch.tensor(x), torch.tensor(labels), generator=torch_generator(3), **options
    )
    orders = orders_of(N, batch_size, epochs, torch_generator(3))
    weight, bias, expected = slow_training(before, x, labels, 0.2, orders)
    np.testing.assert_allclose(head.weight.detach(), weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(head.bias.detach(), bias, rtol=1e-4, atol=1e-5)
    assert loss == pytest.approx(expected, rel=1e-4)


# Rounds


def test_rounds_equal_the_algorithm(tmp_path):
    """Three rounds with half of the clients: models, replies, and the head that the server sends.

    The weights of the mixtures are given, from the replies.
    """
    config = fedre(
        clients=4, fraction=0.5, max_samples=120, rounds=3, alpha=1.0,
        **{
            "fedre.feature-dim": 8, "fedre.server-epochs": 2, "fedre.server-lr": 0.3,
            "fedre.server-batch-size": 1000,
        },
    )  # fmt: skip
    server, head, models = Server(config, tmp_path), None, {}
    for round in range(1, 4):
        instructions = server.instruct(round)
        sent = instruction_of(instructions[0]).group("weights")
        head = head or {k: torch.tensor(v).double() for k, v in sent.items()}
        expected = {}
        for proxy, _ in instructions:
            client = client_of(proxy)
            model = copy.deepcopy(models.get(proxy.name) or client.build_model(8)).double()
            with torch.no_grad():
                for name, value in head.items():
                    model.get_parameter(name).copy_(value)
            x, y = client.x.double(), client.y
            model = descend(model, lambda m, x=x, y=y: cross_entropy(m(x), y)).eval()
            models[proxy.name] = model
            features = model.extractor(x).detach()
            expected[proxy.name] = {
                c: sum(features[n] for n in range(len(y)) if y[n] == c) / int((y == c).sum())
                for c in sorted(set(y.tolist()))
            }
        replies = server.train(instructions)
        mixtures, labels = [], []
        for proxy, result in replies:
            assert_close(client_of(proxy).network, models[proxy.name], rtol=2e-3, atol=2e-5)
            tensors, means = reply_of(result).tensors, expected[proxy.name]
            assert set(tensors) == {"representation", "labels"}
            assert np.flatnonzero(tensors["labels"]).tolist() == sorted(means)
            mixture = sum(float(tensors["labels"][c]) * mean for c, mean in means.items())
            np.testing.assert_allclose(tensors["representation"], mixture, rtol=2e-3, atol=2e-5)
            mixtures.append(mixture)
            labels.append(torch.tensor(tensors["labels"]).double())
        server.aggregate(round, replies)
        weight, bias = head["classifier.weight"], head["classifier.bias"]
        for _ in range(2):
            weight, bias = (value.clone().requires_grad_() for value in (weight, bias))
            loss = -sum(
                row @ log_softmax(weight @ z + bias)
                for z, row in zip(mixtures, labels, strict=True)
            )
            steps = torch.autograd.grad(loss, [weight, bias])
            weight, bias = (
                v.detach() - 0.3 * s for v, s in zip((weight, bias), steps, strict=True)
            )
        head = {"classifier.weight": weight, "classifier.bias": bias}
        after = instruction_of(server.instruct(round + 1)[0]).group("weights")
        for name, value in head.items():
            np.testing.assert_allclose(after[name], value, rtol=2e-3, atol=2e-5)
            assert abs(after[name] - sent[name]).max() > 1e-3
    assert len(models) > 2


def test_weights_are_drawn_from_seed_client_and_round(tmp_path):
    """They are normalized draws of the client's generator, in the order of the classes."""
    drawn = {}
    for seed in (0, 1):
        server = Server(fedre(seed=seed, partition="iid"), tmp_path / str(seed))
        for round in (1, 2):
            for name, tensors in learn(server, round).items():
                generator = torch_generator(seed, name, round, "entanglement")
                draws = 1 - torch.rand(10, generator=generator).double().numpy()
                np.testing.assert_allclose(tensors["labels"], draws / draws.sum(), rtol=1e-5)
                drawn[seed, name, round] = tuple(tensors["labels"].tolist())
    assert len(set(drawn.values())) == len(drawn) == 12


def test_weights_are_normalized_uniform_draws(tmp_path, monkeypatch):
    """For two classes, P(w <= 1/4) = 1/6 and P(w <= 1/2) = 1/2."""
    client = opened(fedre(), tmp_path)
    means = Knowledge({"classes": np.array([0, 3]), "features": np.eye(2, 64, dtype=np.float32)})
    monkeypatch.setattr(FedGhClient, "train", lambda *_: means)
    weights = np.array([client.train(n, Knowledge()).tensors["labels"][0] for n in range(3000)])
    assert (weights <= 1 / 4).mean() == pytest.approx(1 / 6, abs=0.025)
    assert (weights <= 1 / 2).mean() == pytest.approx(1 / 2, abs=0.035)


def test_both_kinds_are_evaluated(tmp_path):
    """Evaluate the private model, and its extractor with the server's head."""
    server = Server(fedre(), tmp_path)
    server.play(1)
    sent = server.strategy.eval_instruction(1, server.strategy.members["client-1"].info)
    client = clients(server)["client-1"]
    models = client.eval_models(sent)
    assert list(models) == ["private", "global"]
    joined, own = state_of(models["global"]), state_of(client.network)
    for name, value in joined.items():
        shared = name.startswith("classifier.")
        np.testing.assert_array_equal(
            value, sent.tensors[f"weights/{name}"] if shared else own[name]
        )
        assert not shared or (value != own[name]).any()


def test_only_classes_of_the_label_space_have_a_weight(tmp_path):
    server = Server(small("fedre", **SPACES, models="mlp", **PLAIN), tmp_path)
    _, replies = server.play(1)
    for proxy, result in replies:
        present = np.flatnonzero(reply_of(result).tensors["labels"])
        assert 0 < len(present) < 10
        assert np.isin(present, client_of(proxy).space.numpy()).all()


def class_means(classes):
    rows = normal(0, len(classes), 64).astype(np.float32)
    counts = np.ones(len(classes), np.int64)
    return ClassMeans(np.array(classes, np.int64), rows, normal(1, len(classes), 10), counts)


def test_mixture_uses_only_the_means_that_the_privacy_mechanism_releases(tmp_path, monkeypatch):
    """The reply is thus post-processing of the noised class means."""
    config = fedre()
    client = opened(config, tmp_path / "client")
    sent = instruction_of(Server(config, tmp_path / "server").instruct(1)[0])
    released = class_means([2, 7])
    monkeypatch.setattr(client.privacy, "class_means", lambda sums, model: released)
    reply = fitted(client, 1, sent)
    assert np.flatnonzero(reply["labels"]).tolist() == [2, 7]
    expected = reply["labels"][[2, 7]] @ released.features
    np.testing.assert_allclose(reply["representation"], expected, rtol=1e-5, atol=1e-6)


def test_client_without_releasable_classes_sends_an_empty_reply(tmp_path, monkeypatch):
    config = fedre()
    client = opened(config, tmp_path / "client")
    sent = instruction_of(Server(config, tmp_path / "server").instruct(1)[0])
    monkeypatch.setattr(client.privacy, "class_means", lambda sums, model: class_means([]))
    assert fitted(client, 1, sent) == {}


# The server


@pytest.fixture
def server(tmp_path):
    own = {"fedre.server-epochs": 2, "fedre.server-batch-size": 2, "fedre.server-lr": 0.05}
    return Server(fedre(clients=4, **own), tmp_path)


def mixture(server, name, seed, scale=1.0):
    tensors = {
        "representation": (scale * normal(seed, 64)).astype(np.float32),
        "labels": np.roll(encodings(seed, 1, 10)[0], seed),
    }
    return reply_from(server, name, Knowledge(tensors))


@pytest.mark.parametrize("count", [1, 3])
def test_round_trains_on_the_replies_of_the_round(server, count):
    before = {k.rpartition(".")[2]: v.copy() for k, v in server.strategy.state_dict().items()}
    names = sorted(server.strategy.members)[:count]
    replies = [mixture(server, name, seed) for seed, name in enumerate(names)]
    metrics = server.strategy.aggregate(5, replies)
    x, labels = (
        np.stack([reply.knowledge.tensors[field] for reply in replies])
        for field in ("representation", "labels")
    )
    orders = orders_of(count, 2, 2, torch_generator(0, "server", 5, "head"))
    weight, bias, loss = slow_training(before, x, labels, 0.05, orders)
    after = {k.rpartition(".")[2]: v for k, v in server.strategy.state_dict().items()}
    np.testing.assert_allclose(after["weight"], weight, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after["bias"], bias, rtol=1e-4, atol=1e-5)
    assert metrics["head_loss"] == pytest.approx(loss, rel=1e-4)
    assert metrics["classes_covered"] == (labels.sum(0) > 0).sum()


def test_empty_replies_change_nothing(server):
    before = server.strategy.state_dict()
    empty = reply_from(server, "client-0", Knowledge())
    assert server.strategy.aggregate(1, [empty]) == {"classes_covered": 0.0}
    assert same(server.strategy.state_dict(), before)
    full = mixture(server, "client-1", 1)
    assert server.strategy.aggregate(1, [empty, full])["classes_covered"] == 9


def test_training_that_diverges_leaves_the_head(server):
    server.strategy.aggregate(1, [mixture(server, "client-0", 0)])
    before = {name: value.copy() for name, value in server.strategy.state_dict().items()}
    with pytest.raises(DivergedError):
        server.strategy.aggregate(2, [mixture(server, "client-1", 1, scale=1e38)])
    assert same(server.strategy.state_dict(), before)


def test_declaration_covers_privacy_sums_and_late_replies():
    spec = find_method("fedre").spec
    assert spec.privacy.vectors == 1
    assert "individual clients" in spec.sums.unsupported
    assert spec.late == "kept"
    assert spec.tasks == find_method("fedgh").spec.tasks
    assert set(spec.defenses) == {"krum", "filter"}
