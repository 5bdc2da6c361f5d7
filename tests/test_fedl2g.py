"""FedL2G against slow transcriptions of its losses, its gradient, and its rounds."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from federation import Server, client_info, client_of, small
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
    of_classes,
    opened,
    reply_from,
    reply_of,
    same,
    softmax,
    state_of,
)
from torch import nn

from fedhet.algorithms.guiding import GuidedObjective, guiding_gradient, lacks_second_derivatives
from fedhet.base.errors import SettingsError
from fedhet.base.seeding import numpy_rng
from fedhet.learning.training import LabelSpace
from fedhet.methods.fedl2g import SPEC, FedL2gSettings
from fedhet.models import HetModel, build
from fedhet.wire.knowledge import Knowledge

GUIDES = ["logits", "features"]
N, INPUTS, WIDTH, CLASSES = 7, 5, 6, 4


def network(norm: bool = False) -> HetModel:
    """Return a network with one hidden layer, in float64."""
    torch.manual_seed(1)
    layers = [nn.Linear(INPUTS, WIDTH), *([nn.BatchNorm1d(WIDTH)] if norm else []), nn.Tanh()]
    return HetModel(nn.Sequential(*layers), nn.Linear(WIDTH, CLASSES), WIDTH).double()


def batches(labels=range(CLASSES)):
    """Return a study batch and a quiz batch with the given labels."""
    rng = np.random.default_rng(3)
    labels = np.array(labels)
    return [
        (torch.tensor(rng.normal(size=(N, INPUTS))), torch.tensor(rng.choice(labels, N)))
        for _ in range(2)
    ]


def vectors_for(guide):
    width = CLASSES if guide == "logits" else WIDTH
    return torch.tensor(np.random.default_rng(4).normal(size=(CLASSES, width)))


def objective_of(model, vectors, guide, space=range(CLASSES)):
    return GuidedObjective(model, LabelSpace(torch.tensor(list(space))), vectors, guide)


# The local loss


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("space", [range(CLASSES), [1, 3]])
def test_loss_is_cross_entropy_plus_the_mean_squared_distance(guide, space):
    """Both cover only the logits of the client's label space."""
    model, vectors = network(), vectors_for(guide)
    (x, y), _ = batches(list(space))
    features, logits = (each.detach().numpy() for each in model.features_and_logits(x))
    total = 0.0
    for n, c in enumerate(y.tolist()):
        total -= np.log(softmax(logits[n][list(space)])[list(space).index(c)])
        output, columns = (logits[n], space) if guide == "logits" else (features[n], range(WIDTH))
        total += np.mean([(output[k] - vectors[c, k].item()) ** 2 for k in columns])
    loss = objective_of(model, vectors, guide, space)(x, y)
    assert loss.item() == pytest.approx(total / N, rel=1e-6)


def test_guiding_loss_reaches_only_the_guided_layers():
    """Guided features train the extractor only, and no vector has a gradient in local training."""
    for guide, reached in (("features", {"extractor"}), ("logits", {"extractor", "classifier"})):
        model, vectors = network(), vectors_for(guide)
        objective, ((x, y), _) = objective_of(model, vectors, guide), batches()
        (objective(x, y) - objective(x, y, guided=False)).backward()
        moved = {
            name.split(".")[0]
            for name, value in model.named_parameters()
            if value.grad is not None and value.grad.abs().max() > 1e-12
        }
        assert moved == reached
        assert not objective.vectors.requires_grad
        assert vectors.grad is None


# The gradient of the guiding vectors


def quiz_loss(weights, vectors, study, quiz, lr, guide, space):
    """Return the quiz loss after one step, with the derivatives of the study loss by hand."""
    w1, b1, w2, b2 = (w.copy() for w in weights)
    (x, y), (z, t) = ((a.numpy(), b.numpy()) for a, b in (study, quiz))
    columns = [list(space).index(c) for c in y]
    hidden = np.tanh(x @ w1.T + b1)
    logits = hidden @ w2.T + b2
    d_logits, d_hidden = np.zeros_like(logits), np.zeros_like(hidden)
    probabilities = softmax(logits[:, list(space)])
    for n in range(len(y)):
        probabilities[n, columns[n]] -= 1
    d_logits[:, list(space)] = probabilities / len(y)
    if guide == "logits":
        gaps = (logits - vectors[y])[:, list(space)]
        d_logits[:, list(space)] += 2 * gaps / gaps.size
    else:
        d_hidden += 2 * (hidden - vectors[y]) / hidden.size
    d_hidden += d_logits @ w2
    d_sum = d_hidden * (1 - hidden**2)
    steps = d_sum.T @ x, d_sum.sum(0), d_logits.T @ hidden, d_logits.sum(0)
    w1, b1, w2, b2 = (w - lr * d for w, d in zip((w1, b1, w2, b2), steps, strict=True))
    predicted = softmax((np.tanh(z @ w1.T + b1) @ w2.T + b2)[:, list(space)])
    return -np.mean([np.log(predicted[n, list(space).index(c)]) for n, c in enumerate(t)])


@pytest.mark.parametrize("guide", GUIDES)
@pytest.mark.parametrize("space", [range(CLASSES), [1, 3]])
def test_gradient_equals_differences_of_the_quiz_loss(guide, space):
    model, vectors = network(), vectors_for(guide)
    study, quiz = batches(list(space))
    weights = [value.detach().numpy() for value in model.parameters()]
    gradient = guiding_gradient(objective_of(model, vectors, guide, space), study, quiz, 0.3)
    for c in range(CLASSES):
        for k in range(vectors.shape[1]):
            losses = []
            for shift in (1e-5, -1e-5):
                moved = vectors.numpy().copy()
                moved[c, k] += shift
                losses.append(quiz_loss(weights, moved, study, quiz, 0.3, guide, space))
            expected = (losses[0] - losses[1]) / 2e-5
            assert gradient[c, k].item() == pytest.approx(expected, rel=1e-5, abs=1e-9)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("guide", GUIDES)
def test_gradient_needs_only_the_jacobian_of_the_outputs(guide):
    """Without second derivatives: 2 lr / (N W) times the sum of J_i g over a class's samples."""
    model, vectors = network(), vectors_for(guide)
    study, quiz = batches()
    objective = objective_of(model, vectors, guide)
    stepped = copy.deepcopy(model)
    objective(*study).backward()
    with torch.no_grad():
        for new, old in zip(stepped.parameters(), model.parameters(), strict=True):
            new -= 0.3 * old.grad
    g = torch.autograd.grad(cross_entropy(stepped(quiz[0]), quiz[1]), list(stepped.parameters()))
    tangents = dict(zip(dict(model.named_parameters()), g, strict=True))

    def outputs(weights):
        part = model if guide == "logits" else model.extractor
        prefix = "" if guide == "logits" else "extractor."
        own = {n[len(prefix) :]: w for n, w in weights.items() if n.startswith(prefix)}
        return torch.func.functional_call(part, own, (study[0],))

    current = {n: w.detach() for n, w in model.named_parameters()}
    _, moved = torch.func.jvp(outputs, (current,), (tangents,))
    expected = torch.zeros_like(vectors)
    for n, c in enumerate(study[1].tolist()):
        expected[c] += 2 * 0.3 / moved.numel() * moved[n]
    actual = guiding_gradient(objective, study, quiz, 0.3)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-10)


def test_only_classes_of_the_study_batch_have_a_gradient():
    model, vectors = network(), vectors_for("logits")
    (x, _), quiz = batches()
    study = x, torch.tensor([0, 2, 2, 0, 0, 2, 2])
    gradient = guiding_gradient(objective_of(model, vectors, "logits"), study, quiz, 0.1)
    assert {*quiz[1].tolist()} - {0, 2}
    assert (gradient.abs().sum(1) > 0).tolist() == [True, False, True, False]


def test_gradient_leaves_the_model_and_the_vectors_unchanged():
    """Batch normalization uses the batch, and its running statistics do not change."""
    model, vectors = network(norm=True).train(), vectors_for("features")
    before, kept = state_of(model), vectors.clone()
    study, quiz = batches()
    guiding_gradient(objective_of(model, vectors, "features"), study, quiz, 0.1)
    assert same(state_of(model), before)
    assert torch.equal(vectors, kept)
    assert not vectors.requires_grad
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_frozen_weights_do_not_step():
    """The gradient equals the gradient of a model with the frozen layer as a constant."""
    model, vectors = network(), vectors_for("logits")
    study, quiz = batches()
    model.extractor.requires_grad_(False)
    partly = guiding_gradient(objective_of(model, vectors, "logits"), study, quiz, 0.3)
    head = HetModel(nn.Identity(), copy.deepcopy(model.classifier), WIDTH)
    fixed = [(model.extractor(x), y) for x, y in (study, quiz)]
    alone = guiding_gradient(objective_of(head, vectors, "logits"), *fixed, 0.3)
    torch.testing.assert_close(partly, alone)


def test_models_without_second_derivatives_are_rejected():
    x = torch.zeros(2, 3, 32, 32)
    assert lacks_second_derivatives(build("mobilenet-v3-small", (3, 32, 32), 10, seed=0), x)
    assert not lacks_second_derivatives(build("cnn2", (3, 32, 32), 10, seed=0), x)
    client = replace(client_info("image", (3, 32, 32)), model="mobilenet-v3-small")
    with pytest.raises(SettingsError, match=r"models\.pool.*second deriv.*'mobilenet-v3-small'"):
        SPEC.check_model(FedL2gSettings(), client)
    SPEC.check_model(FedL2gSettings(), replace(client, model="cnn2"))


# Rounds


def fedl2g(**changes):
    return small("fedl2g", **{"clients": 3, "models": ["mlp", "cnn2"], **PLAIN, **changes})


def inputs_of(client):
    """Return the study set and the quiz set of a client, in float64."""
    return [(client.compute.to_inputs(s.x).double(), s.y) for s in (client._study, client._quiz)]


def literal_loss(model, x, y, vectors, guide):
    features = model.extractor(x)
    logits = model.classifier(features)
    outputs = logits if guide == "logits" else features
    return cross_entropy(logits, y) + ((outputs - vectors[y]) ** 2).mean()


def literal_gradient(model, study, quiz, vectors, guide, lr):
    """Return the gradient by a step whose guiding loss is differentiated with respect to v.

    The step's gradient is written as a sum over samples, so that no second derivative of the
    network is needed: each component of the output has one gradient for the weights.
    """
    model = copy.deepcopy(model)  # The running statistics of the client do not change.
    weights = list(model.parameters())
    study_loss = literal_loss(model, *study, vectors, guide)
    slopes = torch.autograd.grad(study_loss, weights)
    stepped = copy.deepcopy(model)
    with torch.no_grad():
        for weight, slope in zip(stepped.parameters(), slopes, strict=True):
            weight -= lr * slope
    g = torch.autograd.grad(cross_entropy(stepped(quiz[0]), quiz[1]), list(stepped.parameters()))
    features = model.extractor(study[0])
    outputs = model.classifier(features) if guide == "logits" else features
    result = torch.zeros_like(vectors)
    for n, c in enumerate(study[1].tolist()):
        for k in range(outputs.shape[1]):
            row = torch.autograd.grad(outputs[n, k], weights, retain_graph=True, allow_unused=True)
            along = sum((r * s).sum() for r, s in zip(row, g, strict=True) if r is not None)
            result[c, k] += 2 * lr / outputs.numel() * along
    return result


@pytest.mark.parametrize("guide", GUIDES)
def test_rounds_equal_the_algorithm(tmp_path, guide):
    """Three rounds with half of the clients: models, replies, and guiding vectors."""
    rate = {"logits": 0.1, "features": 100.0}[guide]
    config = fedl2g(
        clients=4, fraction=0.5, max_samples=120, rounds=3, alpha=1.0,
        **{
            "fedl2g.guide": guide, "fedl2g.feature-dim": 8, "fedl2g.study-samples": 1000,
            "fedl2g.study-lr": 0.3,
        },
    )  # fmt: skip
    server, vectors, models = Server(config, tmp_path), None, {}
    for round in range(1, 4):
        instructions = server.instruct(round)
        sent = instruction_of(instructions[0]).tensors["vectors"]
        if vectors is None:
            vectors = torch.tensor(sent).double()
        np.testing.assert_allclose(sent, vectors, rtol=1e-4, atol=1e-5)
        expected = {}
        for proxy, _ in instructions:
            client = client_of(proxy)
            study, quiz = inputs_of(client)
            start = models.get(proxy.name) or client.build_model(client.settings.width)
            model = descend(start, lambda m, s=study, v=vectors: literal_loss(m, *s, v, guide))
            models[proxy.name] = model
            gradient = literal_gradient(model, study, quiz, vectors, guide, 0.3)
            expected[proxy.name] = model, gradient, sorted({*study[1].tolist()})
        replies = server.train(instructions)
        for proxy, result in replies:
            model, gradient, classes = expected[proxy.name]
            assert_close(client_of(proxy).network, model, rtol=2e-3, atol=2e-5)
            tensors = reply_of(result).tensors
            assert tensors["classes"].tolist() == classes
            scale = gradient.abs().max().item()
            np.testing.assert_allclose(
                tensors["gradients"], gradient[classes], rtol=5e-3, atol=1e-3 * scale
            )
        server.aggregate(round, replies)
        vectors = vectors.clone()
        for c in range(len(vectors)):
            own = [gradient[c] for _, gradient, classes in expected.values() if c in classes]
            if own:
                vectors[c] -= rate * sum(own) / len(own)
    assert len(models) > 2


def test_quiz_set_is_excluded_from_training(tmp_path):
    """Every sample is in one set, and the quiz labels affect the reply but not the model."""
    config = fedl2g(**{"fedl2g.study-samples": 1000})
    sent = instruction_of(Server(config, tmp_path / "server").instruct(1)[0])
    replies, models = [], []
    for change in (0, 1):
        client = opened(config, tmp_path / str(change))
        count = len(client.y)
        assert len(client._quiz) == min(10, count // 5) > 2
        rows = [x.numpy().tobytes() for s in (client._quiz, client._study) for x in s.x]
        assert sorted(rows) == sorted(x.numpy().tobytes() for x in client.x)
        again = opened(config, tmp_path / "again")
        assert torch.equal(again._quiz.y, client._quiz.y)
        client._quiz = replace(client._quiz, y=(client._quiz.y + change) % 10)
        replies.append(fitted(client, 1, sent))
        models.append(state_of(client.network))
    assert same(*models)
    assert not same(*replies)


@pytest.mark.parametrize(("count", "quiz"), [(3, 3), (4, 2), (9, 2), (15, 3), (80, 10)])
def test_size_of_the_quiz_set(tmp_path, count, quiz):
    client = opened(fedl2g(), tmp_path)
    own = client.samples.own
    client.samples.own = replace(own, x=own.x[:1].repeat(count, 1, 1, 1), y=own.y[:1].repeat(count))
    client.prepare()
    assert len(client._quiz) == quiz
    assert len(client._study) == (count - quiz if count > 3 else count)


def test_study_batch_is_drawn_in_each_round(tmp_path):
    """The classes of a client's reply are the classes of five samples, which differ by round."""
    server = Server(fedl2g(partition="iid", **{"fedl2g.study-samples": 5}), tmp_path)
    sent = [learn(server, round) for round in (1, 2)]
    for name in sent[0]:
        first, second = (each[name]["classes"].tolist() for each in sent)
        assert len(first) <= 5
        assert first != second


def test_models_do_not_change_during_the_warm_up(tmp_path):
    server = Server(fedl2g(**{"fedl2g.warm-up-rounds": 2}), tmp_path)
    first = server.strategy.vectors.copy()
    for round in (1, 2, 3):
        server.play(round)
        for client in clients(server).values():
            start = state_of(client.build_model())
            assert same(state_of(client.network), start) is (round < 3)
    assert not np.array_equal(server.strategy.vectors, first)


def test_clients_of_two_label_spaces_learn(tmp_path):
    """A client sends gradients only for classes of its label space."""
    server = Server(small("fedl2g", **SPACES, models="mlp", **PLAIN), tmp_path)
    _, replies = server.play(1)
    for proxy, result in replies:
        sent, space = reply_of(result).tensors["classes"], client_of(proxy).space.numpy()
        assert 0 < len(sent) <= len(space) < 10
        assert np.isin(sent, space).all()


# The server


@pytest.fixture
def server(tmp_path):
    return Server(fedl2g(), tmp_path)


def reply(server, name, classes, gradients, age=0):
    knowledge = of_classes(classes, gradients=gradients)
    return replace(reply_from(server, name, knowledge), age=age)


def test_vectors_start_with_draws_from_a_standard_normal(tmp_path):
    for guide, width in (("logits", 10), ("features", 64)):
        server = Server(fedl2g(**{"fedl2g.guide": guide}), tmp_path / guide)
        vectors = server.strategy.vectors
        assert vectors.shape == (10, width)
        assert abs(vectors.mean()) < 0.35
        assert 0.8 < vectors.std() < 1.2
        other = Server(fedl2g(seed=1, **{"fedl2g.guide": guide}), tmp_path / f"{guide}-1")
        assert not np.array_equal(other.strategy.vectors, vectors)


def test_step_uses_the_mean_over_clients_with_the_class(server):
    before = server.strategy.vectors.copy()
    names = sorted(server.strategy.members)
    one, two = numpy_rng(0, "a").normal(size=(2, 10)), numpy_rng(0, "b").normal(size=(1, 10))
    metrics = server.strategy.aggregate(
        1, [reply(server, names[0], [1, 4], one), reply(server, names[1], [4], two)]
    )
    expected = before.astype(np.float64)
    mean = (one[1] + two[0]) / 2
    expected[1] -= 0.1 * one[0]
    expected[4] -= 0.1 * mean
    np.testing.assert_allclose(server.strategy.vectors, expected, rtol=1e-5, atol=1e-6)
    assert metrics["classes_covered"] == 2
    assert metrics["gradient_norm"] == pytest.approx(np.sqrt((one[0] ** 2 + mean**2).sum()))
    assert np.array_equal(
        server.strategy.instruct(2, server.strategy.reference_client).tensors["vectors"],
        server.strategy.vectors,
    )


def test_large_gradient_is_clipped_to_the_norm_of_100(server):
    before = server.strategy.vectors.copy()
    name = next(iter(server.strategy.members))
    server.strategy.aggregate(1, [reply(server, name, [3], np.full((1, 10), 5e3))])
    moved = before - server.strategy.vectors
    assert np.linalg.norm(moved) == pytest.approx(0.1 * 100, rel=1e-4)
    assert not moved[[0, 1, 2, 4, 5, 6, 7, 8, 9]].any()


def test_late_reply_has_a_reduced_weight(server):
    before = server.strategy.vectors.copy()
    names = sorted(server.strategy.members)
    late = reply(server, names[0], [2], np.ones((1, 10)), age=2)
    assert 0 < late.freshness < 1
    server.strategy.aggregate(3, [late, reply(server, names[1], [2], -np.ones((1, 10)))])
    mean = (late.freshness - 1) / (late.freshness + 1)
    np.testing.assert_allclose(server.strategy.vectors[2], before[2] - 0.1 * mean, rtol=1e-4)


def test_state_restores_the_vectors(server, tmp_path):
    server.play(1)
    other = Server(fedl2g(), tmp_path / "other")
    other.strategy.load_state_dict(server.strategy.state_dict())
    sent = other.strategy.instruct(2, other.strategy.reference_client)
    assert isinstance(sent, Knowledge)
    assert np.array_equal(sent.tensors["vectors"], server.strategy.vectors)


@pytest.mark.parametrize("name", ["privacy.epsilon", "privacy.secure-aggregation"])
def test_privacy_and_secure_aggregation_are_rejected(name):
    value = 8.0 if name == "privacy.epsilon" else True
    with pytest.raises(SettingsError, match="fedl2g"):
        fedl2g(**{name: value})
