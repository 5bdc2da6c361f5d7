"""RHFL against a literal transcription: losses, confidence, rounds, state, and messages."""

import copy

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import (
    PLAIN,
    SPACES,
    assert_close,
    clients,
    cross_entropy,
    descend,
    inside_of,
    instruction_of,
    learn,
    log_softmax,
    moved_outputs,
    opened,
    reply_from,
    reply_of,
    same,
    state_of,
)

from fedhet.algorithms.noisy_labels import confidence_weights, symmetric_loss
from fedhet.base.errors import SettingsError
from fedhet.clients.fedmd import Consensus
from fedhet.config.resolve import resolve
from fedhet.wire.knowledge import Knowledge

CE, RCE, ETA = 0.3, 0.7, 2.0
OWN = {"rhfl.ce-weight": CE, "rhfl.rce-weight": RCE, "rhfl.eta": ETA}
NAMES = ["client-0", "client-1", "client-2"]


def rhfl(**changes):
    return small("rhfl", **{"clients": 3, "models": "mlp", "max_samples": 240, **changes})


# The algorithm, written out slowly


def slow_sl(logits, labels, ce=CE, rce=RCE):
    """Return lambda CE + gamma RCE, with log 0 = log 0.0001 in the one-hot labels."""
    total = 0.0
    for z, y in zip(logits, labels.tolist(), strict=True):
        p = torch.exp(log_softmax(z))
        for k in range(len(z)):
            one_hot = 1.0 if k == y else 0.0001
            total = total - rce * p[k] * np.log(one_hot)
        total = total - ce * torch.log(p[y])
    return total / len(labels)


def slow_weights(previous, losses, eta=ETA):
    """Return softmax(1 / (K - 1) + eta F_k / sum F), where F = (drop of the loss) / loss."""
    k = len(losses)
    if not previous:
        return dict.fromkeys(losses, 1 / (k - 1))
    f = {}
    for name, loss in losses.items():
        drop = previous[name] - loss if name in previous else 0.0
        f[name] = max(drop, 0.0) / loss
    total = sum(f.values()) or 1.0
    power = {name: np.exp(1 / (k - 1) + eta * f[name] / total) for name in losses}
    return {name: value / sum(power.values()) for name, value in power.items()}


def slow_client(client, start, images, others):
    """Descend six times on sum_k W_k KL(p_k || p), and three times on the symmetric loss."""
    x, model = client.x.double(), start
    if others:

        def toward(m):
            log_p = log_softmax(m(images))
            return sum(w * (p * (torch.log(p) - log_p)).sum() / len(p) for w, p in others)

        model = descend(model, toward, 6)
    return descend(model, lambda m: slow_sl(m(x), client.y))


def test_rounds_equal_the_algorithm(tmp_path):
    config = rhfl(**PLAIN, **OWN, **{"rhfl.digest-epochs": 6, "rhfl.sample": 20}, rounds=4)
    server = Server(config, tmp_path)
    models = {name: c.setup()["private"] for name, c in clients(server).items()}
    losses, weights, sent = {}, {}, {}
    rows = None
    for number in (1, 2, 3, 4):
        instructions, previous = server.instruct(number), losses
        losses, received = {}, {}
        replies = server.train(instructions)
        for (proxy, result), message in zip(replies, instructions, strict=True):
            client, instruction, name = client_of(proxy), instruction_of(message), proxy.name
            others = [(weights[k], torch.tensor(sent[k]).double()) for k in sent if k != name]
            images = client.public.x.double()[rows] if others else None
            expected = slow_client(client, models[name], images, others)
            assert_close(client.network, expected, rtol=1e-3, atol=5e-6)
            models[name] = copy.deepcopy(client.network)
            asked = instruction.tensors["asked"].astype(int)
            reply = reply_of(result)
            with torch.no_grad():
                p = torch.exp(log_softmax(expected(client.public.x.double()[asked])))
                losses[name] = float(slow_sl(expected(client.x.double()), client.y))
            np.testing.assert_allclose(reply.tensors["probabilities"], p, rtol=5e-3, atol=1e-5)
            assert reply.scalars["loss"] == pytest.approx(losses[name], rel=1e-3)
            received[name], losses[name] = reply.tensors["probabilities"], reply.scalars["loss"]
        server.aggregate(number, replies)
        rows, sent = asked, received
        weights = slow_weights(previous, losses)
        assert server.strategy.weights == pytest.approx(weights, rel=1e-5)
    assert max(weights.values()) - min(weights.values()) > 0.05


# Losses and weights


def test_symmetric_loss_equals_its_definition():
    logits = torch.tensor(np.random.default_rng(0).normal(size=(6, 4)), requires_grad=True)
    labels = torch.tensor([0, 1, 2, 3, 0, 1])
    found, slow = symmetric_loss(logits, labels, CE, RCE), slow_sl(logits, labels)
    assert found.item() == pytest.approx(slow.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found, logits)
    (expected,) = torch.autograd.grad(slow, logits)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    alone = symmetric_loss(logits, labels, 1.0, 0.0)
    torch.testing.assert_close(alone.double(), cross_entropy(logits, labels), rtol=1e-5, atol=0)


def test_wrong_label_has_a_bounded_gradient():
    """The gradient of RCE disappears if the model is sure of another class, unlike that of CE."""
    logits = torch.tensor([[20.0, 0.0]], requires_grad=True)
    wrong = torch.tensor([1])
    (reverse,) = torch.autograd.grad(symmetric_loss(logits, wrong, 0.0, 1.0), logits)
    (usual,) = torch.autograd.grad(symmetric_loss(logits, wrong, 1.0, 0.0), logits)
    assert reverse.abs().max() < 1e-6
    assert usual.abs().max() > 0.99


def test_client_whose_loss_drops_has_the_largest_weight():
    previous, losses = np.array([2.0, 2.0, 2.0, np.nan]), np.array([1.0, 1.9, 2.5, 0.1])
    found = confidence_weights(previous, losses, 1.0)
    slow = slow_weights({0: 2.0, 1: 2.0, 2: 2.0}, dict(enumerate(losses)), 1.0)
    np.testing.assert_allclose(found, [slow[k] for k in range(4)])
    assert found[0] > found[1] > found[2] == found[3]
    np.testing.assert_allclose(confidence_weights(previous, losses, 0.0), np.full(4, 0.25))


def test_weights_stay_finite():
    """Losses of zero, losses that do not change, and a single client."""
    zero, nan = np.zeros(2), np.full(2, np.nan)
    for previous, losses in ((zero, zero), (nan, zero), (np.ones(2), zero), (np.ones(1), zero[:1])):
        assert np.isfinite(confidence_weights(previous, losses, 0.5)).all()
    np.testing.assert_allclose(confidence_weights(np.ones(3), np.ones(3), 0.5), np.full(3, 1 / 3))


# Strategy


def answer(server, losses, seed=0):
    rng, rows = np.random.default_rng(seed), len(server.strategy.requested)
    return [
        reply_from(
            server,
            name,
            Knowledge(
                {"probabilities": rng.dirichlet(np.ones(10), rows).astype("float32")},
                {} if loss is None else {"loss": loss},
            ),
        )
        for name, loss in losses.items()
    ]


def test_absent_client_learns_from_all_others(tmp_path):
    server = Server(rhfl(**OWN), tmp_path)
    strategy = server.strategy
    server.instruct(1)
    strategy.aggregate(1, answer(server, dict.fromkeys(NAMES, 2.0)))
    strategy.aggregate(2, answer(server, {"client-0": 1.0, "client-2": 1.5}))
    weights = slow_weights(dict.fromkeys(NAMES, 2.0), {"client-0": 1.0, "client-2": 1.5})
    assert strategy.weights == pytest.approx(weights)
    p = strategy.scores
    for name, expected in {
        "client-1": weights["client-0"] * p["client-0"] + weights["client-2"] * p["client-2"],
        "client-0": weights["client-2"] * p["client-2"],
    }.items():
        found = strategy.consensus_fields(strategy.members[name].info)["probabilities"]
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    strategy.forget("client-2")
    strategy.forget("unknown")
    assert set(strategy.weights) == set(strategy.scores) == {"client-0"}
    info = strategy.members["client-0"].info
    assert not strategy.consensus_fields(info)["probabilities"].any()


def test_restored_server_continues_identically(tmp_path):
    server = Server(rhfl(**OWN), tmp_path / "one")
    other = Server(rhfl(**OWN), tmp_path / "two").strategy
    for number in (1, 2):
        learn(server, number)
    strategy = server.strategy
    other.load_state_dict(copy.deepcopy(strategy.state_dict()))
    for name in NAMES:
        info = strategy.members[name].info
        assert same(other.consensus_fields(info), strategy.consensus_fields(info))
    strategy.requested = other.requested = strategy.consensus_rows
    replies = answer(server, dict(zip(NAMES, (0.5, 0.7, 0.1), strict=True)))
    for each in (strategy, other):
        each.aggregate(3, replies)
    assert same(other.state_dict(), strategy.state_dict())


# Clients and messages


def test_target_has_no_gradient(tmp_path):
    client = opened(rhfl(**OWN), tmp_path)
    scores = (torch.rand(8, 10, generator=torch.Generator().manual_seed(0)) / 10).requires_grad_()
    consensus = Consensus(client.public.x[:8], scores)
    client.consensus_loss(consensus, consensus.x, consensus.numbers()).backward()
    assert scores.grad is None
    assert all(p.grad.abs().sum() > 0 for p in client.network.parameters())


def test_label_space_of_its_own(tmp_path):
    """The symmetric loss gives no gradient to outputs for other classes."""
    server = Server(rhfl(**{**SPACES, "clients": 4}), tmp_path)
    before = {n: state_of(c.setup()["private"]) for n, c in clients(server).items()}
    replies = server.play(1)[1]
    for (_, result), (name, client) in zip(replies, clients(server).items(), strict=True):
        assert ((moved_outputs(client, before[name]) > 0) == inside_of(client)).all()
        assert np.isfinite(reply_of(result).scalars["loss"])


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_loss_is_sent_only_if_it_is_used(tmp_path, eta):
    server = Server(rhfl(models=["mlp", "cnn2"], **{"rhfl.eta": eta}), tmp_path)
    for number in (1, 2):
        instructions, replies = server.play(number)
        received = [instruction_of(each) for each in instructions]
        agreed = {"probabilities", "rows"} if number > 1 else set()
        assert all(set(each.tensors) == {"asked"} | agreed for each in received)
        for _, result in replies:
            assert set(reply_of(result).tensors) == {"probabilities"}
            assert set(reply_of(result).scalars) == ({"loss"} if eta else set())


def test_privacy_requires_equal_weights(tmp_path):
    private = {"privacy.epsilon": 8.0, "clients": 2}
    with pytest.raises(SettingsError, match=r"rhfl\.eta.*privacy\.epsilon.*0\.5"):
        rhfl(**private)
    summary = run(rhfl(**private, **{"rhfl.eta": 0.0}), tmp_path)
    assert summary["rounds"] == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.task": "regression", "data.dataset": "diabetes"}, "noisy labels"),
        ({"privacy.secure-aggregation": True}, "by their losses"),
        ({"defense.average": "median"}, "krum"),
    ],
)
def test_unsupported_settings_raise(changes, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve({"method": "rhfl", "clients": 4, **changes})
