"""MOON against a transcription of its algorithm: the contrastive loss and the previous models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import PLAIN, cross_entropy, instruction_of, reply_of, same, state_of
from torch import nn

from fedhet.algorithms import MlpWidth
from fedhet.algorithms.local_models import ContrastiveModel, contrastive_loss
from fedhet.inference.client import open_models
from fedhet.models import build, shapes
from fedhet.privacy.sgd import PrivateOptimization

MU, TAU = 2.0, 0.7
CHOSEN = {"clients": 3, "models": "mlp", **PLAIN, "moon.mu": MU, "moon.temperature": TAU}


def network(w, x):
    """Return R_w(x), the features after the projection head, and F_w(x), the logits."""
    hidden = torch.relu(
        x.flatten(1) @ w["extractor.native.1.weight"].T + w["extractor.native.1.bias"]
    )
    first = torch.relu(hidden @ w["extractor.adapter.0.weight"].T + w["extractor.adapter.0.bias"])
    z = first @ w["extractor.adapter.2.weight"].T + w["extractor.adapter.2.bias"]
    return z, z @ w["classifier.weight"].T + w["classifier.bias"]


def contrast(z, near, far, tau=TAU):
    """Li et al., Eq. 3, sample by sample."""

    def sim(a, b):
        return (a * b).sum() / (a.square().sum().sqrt() * b.square().sum().sqrt())

    losses = []
    for row, glob, prev in zip(z, near, far, strict=True):
        positive, negative = torch.exp(sim(row, glob) / tau), torch.exp(sim(row, prev) / tau)
        losses.append(-torch.log(positive / (positive + negative)))
    return sum(losses) / len(losses)


def party_local_training(x, y, start, previous, lr, epochs):
    """Li et al., Algorithm 1, lines 11 to 23, with full batches."""
    w = {name: value.clone() for name, value in start.items()}
    for _ in range(epochs):
        w = {name: value.detach().requires_grad_() for name, value in w.items()}
        z, logits = network(w, x)
        loss = cross_entropy(logits, y)
        if previous is not None:
            loss = loss + MU * contrast(z, network(start, x)[0], network(previous, x)[0])
        gradients = torch.autograd.grad(loss, w.values())
        w = {n: v.detach() - lr * g for (n, v), g in zip(w.items(), gradients, strict=True)}
    return w


def test_rounds_equal_the_algorithm(tmp_path):
    """Two of three clients train in a round, so previous models have different ages."""
    server = Server(small("moon", **CHOSEN, fraction=0.67), tmp_path)
    previous, participants = {}, []
    for round in range(1, 6):
        instructions = server.instruct(round)
        names = [proxy.name for proxy, _ in instructions]
        participants.append(tuple(names))
        sent = instruction_of(instructions[0]).group("weights")
        start = {name: torch.tensor(value).double() for name, value in sent.items()}
        for proxy, _ in instructions:
            client = client_of(proxy)
            x, y = client.x.double(), client.y
            before = previous.get(proxy.name)
            previous[proxy.name] = party_local_training(x, y, start, before, lr=0.1, epochs=3)
        samples = {name: server.strategy.members[name].info.samples for name in names}
        replies = server.train(instructions)
        for proxy, result in replies:
            for name, value in reply_of(result).group("weights").items():
                np.testing.assert_allclose(value, previous[proxy.name][name], rtol=1e-4, atol=1e-5)
        server.aggregate(round, replies)
        average = server.strategy.averaged["weights"]
        for name, value in average.items():
            mean = sum(previous[k][name] * count for k, count in samples.items())
            mean /= sum(samples.values())
            np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-5)
    assert len(set(participants)) > 1


@pytest.mark.parametrize("tau", [0.1, 0.5, 3.0])
def test_contrastive_loss_equals_its_equation(tau):
    torch.manual_seed(0)
    z, near, far = torch.randn(3, 5, 7, dtype=torch.float64)
    expected = contrast(z, near, far, tau)
    torch.testing.assert_close(
        contrastive_loss(z, near, far, tau).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_contrastive_term_reaches_only_the_extractor():
    """No gradient reaches the classifier, the received model, or the previous model."""
    trained, previous = (
        build("mlp", (1, 8, 8), 10, seed=s, feature_dim=MlpWidth(16)) for s in (0, 1)
    )
    local = ContrastiveModel(trained, trained.state_dict(), previous, MU, TAU)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    local.logits_and_term(torch.randn(4, 1, 8, 8))[1].backward()
    reached = {name for name, p in trained.named_parameters() if p.grad is not None}
    assert reached == {name for name in trained.state_dict() if name.startswith("extractor.")}
    assert all(trained.get_parameter(name).grad.abs().sum() > 0 for name in reached)
    for extractor in local._references:
        assert not extractor.training
        assert all(not p.requires_grad and p.grad is None for p in extractor.parameters())


def test_references_do_not_change_in_training(tmp_path, monkeypatch):
    """Both references keep their weights and their batch statistics, in evaluation mode."""
    seen, original = [], ContrastiveModel.logits_and_term

    def watched(self, x):
        states = [state_of(each) for each in self._references]
        result = original(self, x)
        assert all(same(state_of(e), s) for e, s in zip(self._references, states, strict=True))
        seen.append(states)
        return result

    monkeypatch.setattr(ContrastiveModel, "logits_and_term", watched)
    changes = {"data.max-samples": 60, "training.local-epochs": 3}
    config = small("moon", clients=2, models="resnet10", **changes)
    server = Server(config, tmp_path)
    (instructions, _) = server.play(1)
    assert not seen
    client = client_of(instructions[0][0])
    last = {n.removeprefix("extractor."): v for n, v in state_of(client.network).items()}
    instructions = server.instruct(2)
    received = instruction_of(instructions[0]).group("weights")
    server.train(instructions[:1])
    assert len(seen) > 1
    for states in seen:
        for state, source in zip(states, (received, last), strict=True):
            for name, value in state.items():
                found = source.get(name, source.get(f"extractor.{name}"))
                np.testing.assert_array_equal(value, found)


@pytest.mark.parametrize(("changes", "rounds"), [({"moon.mu": 0.0}, 3), ({}, 1)])
def test_without_a_contrastive_term_moon_is_fedavg(tmp_path, changes, rounds):
    """It has none with mu = 0, and none in a client's first round."""
    weights = []
    for method in ("moon", "fedavg"):
        chosen = {"clients": 3, "models": "mlp", **PLAIN}
        own = {"moon.projection-dim": 0, **changes} if method == "moon" else {}
        server = Server(small(method, **chosen, **own), tmp_path / method)
        for round in range(1, rounds + 1):
            server.play(round)
        weights.append(server.strategy.averaged["weights"])
    assert same(*weights)


def test_contrastive_term_changes_the_second_round(tmp_path):
    replies = []
    for mu in (0.0, 1.0):
        server = Server(small("moon", **CHOSEN | {"moon.mu": mu}), tmp_path / f"{mu}")
        server.play(1)
        replies.append(reply_of(server.train(server.instruct(2)[:1])[0][1]).tensors)
    assert not same(*replies)


def test_previous_model_survives_a_restart(tmp_path):
    """A client that is opened again reads its previous model from its saved state."""
    sent = []
    for restarts in (False, True):
        server = Server(small("moon", **CHOSEN), tmp_path / f"{restarts}")
        server.play(1)
        instructions = server.instruct(2)[:1]
        if restarts:
            client = client_of(instructions[0][0])
            client.state.begin_round()
            with torch.no_grad():
                for parameter in client.network.parameters():
                    parameter.zero_()
        sent.append(reply_of(server.train(instructions)[0][1]).tensors)
    assert same(*sent)


@pytest.mark.parametrize("name", ["mlp", "cnn2", "resnet10"])
@pytest.mark.parametrize("width", [64, 128, 20])
def test_projection_head_is_an_mlp(name, width):
    """Even if the model's own features have the same width; unlike a linear adapter."""
    model = build(name, (1, 8, 8), 10, seed=0, feature_dim=MlpWidth(width))
    native = model.extractor.native(torch.zeros(2, 1, 8, 8)).shape[1]
    first, relu, second = model.extractor.adapter
    assert (first.in_features, first.out_features) == (native, native)
    assert isinstance(relu, nn.ReLU)
    assert (second.in_features, second.out_features) == (native, width)
    assert model.classifier.in_features == model.feature_dim == width
    state = {n: tuple(v.shape) for n, v in model.state_dict().items()}
    for dim in (width, MlpWidth(width)):  # Equal numbers must not share a cache entry.
        listed = {n: shape for n, (shape, _) in shapes(name, (1, 8, 8), 10, dim).items()}
        assert (listed == state) is isinstance(dim, MlpWidth)


def test_saved_global_model_has_the_projection_head(tmp_path):
    changes = {"moon.projection-dim": 16, "training.lr": 0.01, "training.local-epochs": 3}
    config = small("moon", clients=3, models="mlp", **changes)
    summary = run(config, tmp_path / "run")
    trained = open_models(tmp_path / "run", "server")
    assert trained.network("global").feature_dim == 16
    score = summary["accuracy"]["common"]["global"]["mean"]
    assert score > 0.3
    assert trained.accuracy("global") == {"common": pytest.approx(score)}


def test_private_contrastive_term_is_part_of_each_clipped_gradient(tmp_path, monkeypatch):
    """The term depends on the samples, so that DP-SGD must not add its gradient after the noise."""
    pytest.importorskip("opacus")
    losses, penalties, step = [], [], PrivateOptimization.step

    def watched(self, loss, penalty=0.0):
        penalties.append(penalty)
        step(self, loss, penalty)

    def counted(*arguments):
        losses.append(contrastive_loss(*arguments))
        return losses[-1]

    monkeypatch.setattr(PrivateOptimization, "step", watched)
    monkeypatch.setattr("fedhet.algorithms.local_models.contrastive_loss", counted)
    server = Server(small("moon", clients=2, models="mlp", **{"privacy.epsilon": 8.0}), tmp_path)
    server.play(1)
    assert not losses
    server.play(2)
    assert losses
    assert set(penalties) == {0.0}
