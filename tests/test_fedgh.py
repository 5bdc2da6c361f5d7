"""FedGH: training of the head, the clients' start, and messages."""

import copy

import numpy as np
import pytest
import torch
from federation import Server, small
from rounds import (
    PLAIN,
    assert_class_means,
    assert_close,
    clients,
    cross_entropy,
    descend,
    features_from,
    fitted,
    instruction_of,
    learn,
    opened,
    reply_of,
    same,
    state_of,
)
from torch import nn

from fedhet.algorithms.feature_models import train_head
from fedhet.strategies import fedgh as server_half
from fedhet.wire.knowledge import Knowledge

MODELS = ["mlp", "cnn2", "cnn3"]


def fedgh(**changes):
    return small("fedgh", **{"clients": 3, **changes})


def head_of(instructions):
    """Return the head in an instruction."""
    sent = instruction_of(instructions).tensors
    assert set(sent) == {"weights/classifier.weight", "weights/classifier.bias"}
    return {name.rpartition(".")[2]: value for name, value in sent.items()}


# The server


def slow_training(head, means, labels, lr, epochs):
    """Gradient descent on a linear head with cross-entropy and a manual gradient."""
    weight, bias = (head[name].astype(np.float64).copy() for name in ("weight", "bias"))
    for _ in range(epochs):
        to_weight, to_bias = np.zeros_like(weight), np.zeros_like(bias)
        for mean, c in zip(means.astype(np.float64), labels, strict=True):
            scores = weight @ mean + bias
            powers = np.exp(scores - scores.max())
            wrong = powers / powers.sum() - np.eye(len(bias))[c]
            to_weight += np.outer(wrong, mean) / len(labels)
            to_bias += wrong / len(labels)
        weight, bias = weight - lr * to_weight, bias - lr * to_bias
    return weight, bias


def test_sent_head_is_the_trained_head(tmp_path):
    """In the authors' code, a client's optimizer makes the step, so the head does not change."""
    own = {"fedgh.server-epochs": 3, "fedgh.server-lr": 0.5, "fedgh.server-batch-size": 1000}
    server = Server(fedgh(models=MODELS, **own), tmp_path)
    for number in (1, 2):
        before = head_of(server.instruct(number)[0])
        replies = learn(server, number)
        means = np.concatenate([reply["features"] for reply in replies.values()])
        labels = np.concatenate([reply["classes"] for reply in replies.values()])
        measured = server.flower.state.record.method
        assert measured["classes_covered"] == len(set(labels.tolist()))
        assert measured["head_loss"] > 0
        weight, bias = slow_training(before, means, labels, 0.5, 3)
        after = head_of(server.instruct(number + 1)[0])
        np.testing.assert_allclose(after["weight"], weight, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(after["bias"], bias, rtol=1e-4, atol=1e-5)
        assert abs(after["weight"] - before["weight"]).max() > 1e-3


def test_loss_has_gradients_only_for_the_head():
    """Class means are constants, because the server has no extractors."""
    head = nn.Linear(4, 3)
    before = state_of(head)
    means, labels = torch.randn(6, 4, requires_grad=True), torch.tensor([0, 1, 2, 0, 1, 2])
    options = {"epochs": 1, "batch_size": 6, "lr": 0.1}
    generator = torch.Generator().manual_seed(0)
    train_head(head, means.detach(), labels, generator=generator, **options)
    assert means.grad is None
    for name, value in before.items():
        assert (state_of(head)[name] != value).all(), name


def test_round_trains_on_the_replies_of_the_round(tmp_path, monkeypatch):
    seen = []
    plain = server_half.train_head

    def watched(head, features, labels, **options):
        seen.append((features.numpy().copy(), labels.tolist(), options))
        return plain(head, features, labels, **options)

    monkeypatch.setattr(server_half, "train_head", watched)
    own = {"fedgh.server-epochs": 2, "fedgh.server-lr": 0.02, "fedgh.server-batch-size": 7}
    server = Server(fedgh(clients=4, fraction=0.5, alpha=0.3, models="mlp", **own), tmp_path)
    for number in (1, 2):
        replies = learn(server, number)
        features, labels, options = seen[-1]
        ordered = [replies[name] for name in sorted(replies)]
        np.testing.assert_array_equal(features, np.concatenate([r["features"] for r in ordered]))
        assert labels == [c for reply in ordered for c in reply["classes"]]
        assert (options["epochs"], options["lr"], options["batch_size"]) == (2, 0.02, 7)


@pytest.mark.parametrize("classes", [[], [3]])
def test_round_with_one_class_changes_nothing(tmp_path, classes):
    server = Server(fedgh(), tmp_path)
    before = server.strategy.state_dict()
    figures = server.strategy.aggregate(1, [features_from(server, "client-0", classes)])
    assert figures == {"classes_covered": float(len(classes))}
    assert same(server.strategy.state_dict(), before)


def test_training_that_diverges_leaves_the_head(tmp_path):
    """A client's values lead to weights that no message may contain, and no check rejects them."""
    server = Server(fedgh(), tmp_path)
    server.strategy.aggregate(1, [features_from(server, "client-0", [1, 2])])
    before = {name: value.copy() for name, value in server.strategy.state_dict().items()}
    with pytest.raises(Exception, match="diverged"):
        server.strategy.aggregate(2, [features_from(server, "client-1", [1, 2], 1e38)])
    assert same(server.strategy.state_dict(), before)


# The client


def test_client_starts_from_the_head_and_trains_the_full_model(tmp_path):
    """Train extractor and head with cross-entropy, then compute the extractor's class means."""
    client = opened(fedgh(models="mlp2", max_samples=150, **PLAIN), tmp_path)
    rng = np.random.default_rng(0)
    head = {
        "weights/classifier.weight": rng.normal(size=(10, 64)).astype(np.float32),
        "weights/classifier.bias": rng.normal(size=10).astype(np.float32),
    }
    model = copy.deepcopy(client.network).double()
    with torch.no_grad():
        for name, parameter in model.classifier.named_parameters():
            parameter.copy_(torch.tensor(head[f"weights/classifier.{name}"]))
    x = client.x.double()
    model = descend(model, lambda m: cross_entropy(m(x), client.y))
    reply = fitted(client, 1, Knowledge(head))
    assert_close(client.network, model)
    assert_class_means(reply, model.extractor(x), client.y)


def test_both_kinds_are_evaluated(tmp_path):
    """Evaluate the private model, and its extractor with the server's head."""
    server = Server(fedgh(models=MODELS), tmp_path)
    learn(server, 1)
    client_info = server.strategy.members["client-1"].info
    sent = server.strategy.eval_instruction(1, client_info)
    client = clients(server)["client-1"]
    assert list(client.eval_models(Knowledge())) == ["private"]
    judged = client.eval_models(sent)
    assert list(judged) == ["private", "global"]
    joined, own = state_of(judged["global"]), state_of(client.network)
    for name, value in joined.items():
        if name.startswith("classifier."):
            np.testing.assert_array_equal(value, sent.tensors[f"weights/{name}"])
            assert (value != own[name]).any()
        else:
            np.testing.assert_array_equal(value, own[name])


def test_all_clients_start_from_one_head(tmp_path):
    server = Server(fedgh(models=MODELS, **{"fedgh.feature-dim": 32}), tmp_path)
    instructions = server.instruct(1)
    head = head_of(instructions[0])
    assert head["weight"].shape == (10, 32)
    assert all(same(head_of(each), head) for each in instructions)


def test_no_weights_leave_a_client(tmp_path):
    server = Server(fedgh(models=MODELS), tmp_path)
    for _, result in server.train(server.instruct(1)):
        reply = reply_of(result)
        assert set(reply.tensors) == {"classes", "features"}
        assert reply.tensors["features"].shape == (len(reply.tensors["classes"]), 64)
        assert not reply.scalars
