"""KT-pFL against a literal transcription: targets, coefficients, training, state, and messages."""

import copy

import numpy as np
import pytest
import torch
from federation import Server, client_of, small
from rounds import (
    PLAIN,
    assert_close,
    clients,
    cross_entropy,
    descend,
    instruction_of,
    learn,
    log_softmax,
    opened,
    reply_from,
    reply_of,
    same,
)

from fedhet.algorithms.consensus import updated_coefficients
from fedhet.base.errors import SettingsError
from fedhet.clients.fedmd import Consensus
from fedhet.config.resolve import resolve
from fedhet.wire.knowledge import Knowledge

T, RHO, RATE = 2.0, 0.3, 0.5
OWN = {"kt-pfl.temperature": T, "kt-pfl.rho": RHO, "kt-pfl.coefficient-lr": RATE}
NAMES = ["client-0", "client-1", "client-2"]


def kt(**changes):
    return small("kt-pfl", **{"clients": 3, "models": "mlp", "max_samples": 240, **changes})


def soft(*shape, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(shape[-1]), shape[:-1]).astype("float32")


# The algorithm, written out slowly


def projected(row, mass=1.0):
    """Return the nearest point of the simplex: max(row - t, 0), with t found by bisection."""
    low, high = row.min() - mass, row.max()
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(row - middle, 0).sum() > mass else (low, middle)
    return np.maximum(row - low, 0)


def slow_coefficients(c, s, rate=RATE, rho=RHO):
    """Descend once on sum_n KL(sum_m c_nm s_m || s_n) + rho ||c - 1/N||^2, by autograd."""
    c, s = torch.tensor(c, requires_grad=True), torch.tensor(s).double()
    loss = rho * ((c - 1 / len(c)) ** 2).sum()
    for n in range(len(c)):
        mixed = sum(c[n, m] * s[m] for m in range(len(c)))
        loss = loss + (mixed * torch.log(mixed / s[n])).sum() / s.shape[1]
    loss.backward()
    moved = (c - rate * c.grad).detach().numpy()
    return np.array([projected(row) for row in moved])


def slow_client(client, start, instruction):
    """Take six steps on KL(target || softmax(z / T)), and three steps on the client's data."""
    x, tensors = client.x.double(), instruction.tensors
    target = tensors.get("probabilities")
    model = start
    if target is not None:
        images = client.public.x.double()[tensors["rows"].astype(int)]
        target = torch.tensor(target).double()
        model = descend(
            model,
            lambda m: (
                (target * (torch.log(target) - log_softmax(m(images) / T))).sum() / len(images)
            ),
            6,
        )
    return descend(model, lambda m: cross_entropy(m(x), client.y))


def test_rounds_equal_the_algorithm(tmp_path):
    config = kt(**PLAIN, **OWN, **{"kt-pfl.digest-epochs": 6, "kt-pfl.sample": 20}, rounds=3)
    server = Server(config, tmp_path)
    models = {name: c.setup()["private"] for name, c in clients(server).items()}
    c, targets = np.full((3, 3), 1 / 3), {}
    for number in (1, 2, 3):
        instructions = server.instruct(number)
        for n, (proxy, message) in enumerate(sorted(instructions, key=lambda i: i[0].name)):
            found = instruction_of((proxy, message)).tensors.get("probabilities")
            assert (found is None) == (number == 1)
            if found is not None:
                np.testing.assert_allclose(found, targets[n], rtol=1e-4, atol=1e-6)
        replies, soft_predictions = server.train(instructions), {}
        for (proxy, result), message in zip(replies, instructions, strict=True):
            client, instruction = client_of(proxy), instruction_of(message)
            expected = slow_client(client, models[proxy.name], instruction)
            assert_close(client.network, expected, rtol=5e-4, atol=2e-6)
            models[proxy.name] = copy.deepcopy(client.network)
            with torch.no_grad():
                x = client.public.x.double()[instruction.tensors["asked"].astype(int)]
                sent = torch.exp(log_softmax(expected(x) / T)).numpy()
            found = reply_of(result).tensors["probabilities"]
            np.testing.assert_allclose(found, sent, rtol=2e-3, atol=1e-5)
            soft_predictions[proxy.name] = found
        server.aggregate(number, replies)
        s = np.stack([soft_predictions[name] for name in NAMES])
        c = slow_coefficients(c, s)
        np.testing.assert_allclose(server.strategy.coefficients / 3, c, rtol=1e-4, atol=1e-6)
        targets = [sum(c[n, m] * s[m] for m in range(3)) for n in range(3)]
    assert np.abs(c - 1 / 3).max() > 0.01
    last = server.strategy.eval_instruction(3, server.strategy.members["client-1"].info)
    np.testing.assert_allclose(last.tensors["probabilities"], targets[1], rtol=1e-4, atol=1e-6)


# Coefficients


@pytest.mark.parametrize("rate", [0.05, 0.5, 5.0])
@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_update_of_the_coefficients_is_a_projected_gradient_step(rate, rho):
    s = soft(5, 7, 4)
    c = np.random.default_rng(1).dirichlet(np.ones(5), 5)
    found = updated_coefficients(c, s, rate, rho)
    np.testing.assert_allclose(found, slow_coefficients(c, s, rate, rho), atol=1e-6)
    np.testing.assert_allclose(found.sum(1), 1, atol=1e-6)


def test_clients_with_similar_predictions_learn_from_each_other():
    """Clients 0 and 1 agree; without the penalty, they give client 2 no weight."""
    first, second = soft(6, 4), soft(6, 4, seed=1)
    s = np.stack([first, first, second])
    c = np.full((3, 3), 1 / 3)
    for _ in range(300):
        c = updated_coefficients(c, s, 0.5, 0.0)
    np.testing.assert_allclose(c, [[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]], atol=0.05)
    for _ in range(300):
        c = updated_coefficients(c, s, 0.005, 100.0)
    np.testing.assert_allclose(c, np.full((3, 3), 1 / 3), atol=0.01)


def test_predictions_of_zero_stay_finite():
    s = np.eye(3, dtype=np.float32)[:, None].repeat(2, 1)
    c = updated_coefficients(np.full((3, 3), 1 / 3), s, 0.1, 0.7)
    assert np.isfinite(c).all()
    assert (c.diagonal() > 1 / 3).all()


def answered(server, names, seed=0):
    rows = len(server.strategy.requested)
    values = {n: soft(rows, 10, seed=seed + int(n[-1])) for n in names}
    replies = [reply_from(server, n, Knowledge({"probabilities": v})) for n, v in values.items()]
    return replies, np.stack([*values.values()])


def test_coefficients_of_absent_clients_are_unchanged(tmp_path):
    server = Server(kt(**OWN), tmp_path)
    strategy = server.strategy
    server.instruct(1)
    replies, first = answered(server, NAMES)
    strategy.aggregate(1, replies)
    before = strategy.coefficients / 3
    np.testing.assert_allclose(before, slow_coefficients(np.full((3, 3), 1 / 3), first), atol=1e-6)
    replies, s = answered(server, ["client-0", "client-2"], 5)
    strategy.aggregate(2, replies)
    after, both = strategy.coefficients / 3, np.ix_([0, 2], [0, 2])
    np.testing.assert_allclose(after[1], before[1])
    np.testing.assert_allclose(after[:, 1], before[:, 1])
    mass = before[both].sum(1, keepdims=True)
    np.testing.assert_allclose(
        after[both], slow_coefficients(before[both] / mass, s) * mass, atol=1e-6
    )
    # The absent client learns from the two others, with its unchanged coefficients.
    weights = before[1, [0, 2]] / before[1, [0, 2]].sum()
    found = strategy.consensus_fields(strategy.members["client-1"].info)["probabilities"]
    np.testing.assert_allclose(found, np.tensordot(weights, s, 1), rtol=1e-5, atol=1e-7)


def test_new_and_departed_clients(tmp_path):
    """A new client has mean coefficients; a departed client leaves no trace."""
    server = Server(kt(**{**OWN, "kt-pfl.coefficient-lr": 0.0}), tmp_path)
    strategy = server.strategy
    server.instruct(1)
    strategy.aggregate(1, answered(server, ["client-0", "client-2"])[0])
    info = strategy.members["client-1"].info
    s = np.stack([strategy.scores[name] for name in ("client-0", "client-2")])
    np.testing.assert_allclose(
        strategy.consensus_fields(info)["probabilities"], s.mean(0), rtol=1e-5, atol=1e-7
    )
    strategy.coefficients[:] = [[1.5, 0.5], [0.4, 1.6]]
    strategy.aggregate(2, answered(server, NAMES)[0])
    assert strategy.names == NAMES
    expected = [[1.5, 1.0, 0.5], [1.0, 1.0, 1.0], [0.4, 1.0, 1.6]]
    np.testing.assert_allclose(strategy.coefficients, expected, atol=1e-6)
    strategy.forget("client-1")
    strategy.forget("unknown")
    np.testing.assert_allclose(strategy.coefficients, [[1.5, 0.5], [0.4, 1.6]], atol=1e-6)
    assert set(strategy.scores) == {"client-0", "client-2"}


def test_restored_server_continues_identically(tmp_path):
    server = Server(kt(**OWN), tmp_path / "one")
    other = Server(kt(**OWN), tmp_path / "two").strategy
    for number in (1, 2):
        learn(server, number)
    strategy = server.strategy
    other.load_state_dict(copy.deepcopy(strategy.state_dict()))
    for name in NAMES:
        info = strategy.members[name].info
        assert same(other.consensus_fields(info), strategy.consensus_fields(info))
    replies, _ = answered(server, NAMES)
    strategy.requested = other.requested = strategy.consensus_rows
    for each in (strategy, other):
        each.aggregate(3, replies)
    assert same(other.state_dict(), strategy.state_dict())


# Clients and messages


def test_target_has_no_gradient(tmp_path):
    client = opened(kt(**OWN), tmp_path)
    scores = torch.tensor(soft(8, 10)).requires_grad_()
    consensus = Consensus(client.public.x[:8], scores)
    client.consensus_loss(consensus, consensus.x, consensus.numbers()).backward()
    assert scores.grad is None
    assert all(p.grad.abs().sum() > 0 for p in client.network.parameters())


def test_only_soft_predictions_of_public_samples_are_sent(tmp_path):
    server = Server(kt(models=["mlp", "cnn2"]), tmp_path)
    for number in (1, 2):
        received = [instruction_of(each) for each in server.instruct(number)]
        agreed = {"probabilities", "rows"} if number > 1 else set()
        assert all(set(each.tensors) == {"asked"} | agreed for each in received)
        assert not any(each.scalars for each in received)
        for tensors in learn(server, number).values():
            assert set(tensors) == {"probabilities"}
    values = [each.tensors["probabilities"] for each in received]
    assert not np.array_equal(values[0], values[1])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data.task": "regression", "data.dataset": "diabetes"}, "class probabilities"),
        ({"privacy.secure-aggregation": True}, "for each client"),
        ({"defense.average": "median"}, "krum"),
    ],
)
def test_unsupported_settings_raise(changes, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve({"method": "kt-pfl", "clients": 4, **changes})
