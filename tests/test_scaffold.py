"""SCAFFOLD against a transcription of Algorithm 1, and the states of its control variates."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import PLAIN, cross_entropy, instruction_of, reply_of, same
from torch import nn

from fedhet.algorithms.local_models import ControlledModel
from fedhet.base.errors import FedhetError, SettingsError
from fedhet.client_runtime.node import open_client, read_node
from fedhet.learning.training import Optimization

CHOSEN = {"clients": 4, "models": "mlp", **PLAIN}


def gradient(w, x, y):
    """Return g_i(w), the gradient of the mean cross-entropy of a network with one hidden layer."""
    w = {name: value.detach().requires_grad_() for name, value in w.items()}
    hidden = torch.relu(x.flatten(1) @ w["extractor.1.weight"].T + w["extractor.1.bias"])
    logits = hidden @ w["classifier.weight"].T + w["classifier.bias"]
    return dict(zip(w, torch.autograd.grad(cross_entropy(logits, y), w.values()), strict=True))


class Slow:
    """Karimireddy et al., Algorithm 1, option II, with full batches, in float64."""

    def __init__(self, x, clients, eta_l, eta_g, steps, decay=0.0):
        self.x = {n: torch.tensor(v).double() for n, v in x.items()}
        self.c = {n: torch.zeros_like(v) for n, v in self.x.items()}
        self.clients = clients
        self.own = {name: dict(self.c) for name in clients}
        self.eta_l, self.eta_g, self.steps, self.decay = eta_l, eta_g, steps, decay

    def round(self, sampled, weights):
        """Lines 3 to 18; the paper's equal weights are `weights` of 1."""
        dy, dc = {}, {}
        for i in sampled:
            y, c_i = dict(self.x), self.own[i]
            for _ in range(self.steps):
                g = gradient(y, *self.clients[i])
                y = {
                    n: y[n] - self.eta_l * (g[n] + self.decay * y[n] - c_i[n] + self.c[n])
                    for n in y
                }
            plus = {
                n: c_i[n] - self.c[n] + (self.x[n] - y[n]) / (self.steps * self.eta_l) for n in y
            }
            dy[i] = {n: y[n] - self.x[n] for n in y}
            dc[i] = {n: plus[n] - c_i[n] for n in y}
            self.own[i] = plus
        total = sum(weights[i] for i in sampled)
        for n in self.x:
            mean_y = sum(weights[i] / total * dy[i][n] for i in sampled)
            mean_c = sum(weights[i] / total * dc[i][n] for i in sampled)
            self.x[n] = self.x[n] + self.eta_g * mean_y
            self.c[n] = self.c[n] + len(sampled) / len(self.clients) * mean_c


@pytest.mark.parametrize(
    ("changes", "equal"),
    [
        ({"fraction": 0.5, "data.partition": "iid"}, True),
        ({"fraction": 0.75, "scaffold.global-lr": 0.7}, False),
        ({"training.schedule": "step", "training.milestones": [2], "rounds": 6}, False),
        ({"training.weight-decay": 0.05}, False),
    ],
)
def test_rounds_equal_the_algorithm(tmp_path, changes, equal):
    """Five rounds of x, c, and every c_i, with the paper's equal weights or by samples."""
    config = small("scaffold", **CHOSEN, **changes)
    server = Server(config, tmp_path)
    members = server.strategy.members
    weights = {name: member.info.samples for name, member in members.items()}
    assert (len({*weights.values()}) == 1) is equal
    slow, seen = None, set()
    for round in range(1, 6):
        instructions = server.instruct(round)
        opened = {proxy.name: client_of(proxy) for proxy, _ in instructions}
        if slow is None:
            start = instruction_of(instructions[0]).group("weights")
            every = [open_client(p._config, p._node) for p in server.manager.all().values()]
            data = {c.info.name: (c.x.double(), c.y) for c in every}
            decay = changes.get("training.weight-decay", 0.0)
            eta_g = changes.get("scaffold.global-lr", 1.0)
            slow = Slow(start, data, 0.1, eta_g, 3, decay)
        slow.eta_l = 0.01 if "training.milestones" in changes and round > 2 else 0.1
        seen |= {*opened}
        slow.round(sorted(opened), weights)
        replies = server.train(instructions)
        server.aggregate(round, replies)
        for name, client in opened.items():
            for key, value in slow.own[name].items():
                kept = client.state.tensors[f"control/{key}"]
                np.testing.assert_allclose(kept, value, rtol=1e-4, atol=2e-5)
        for group, expected in (("weights", slow.x), ("control", slow.c)):
            for name, value in server.strategy.averaged[group].items():
                np.testing.assert_allclose(value, expected[name], rtol=1e-4, atol=2e-5)
    assert len(seen) > 2


def scaffold(directory, **changes):
    return Server(small("scaffold", **CHOSEN | changes), directory)


def test_correction_is_a_gradient_of_the_trained_model_only(tmp_path):
    """The term is 0, and its gradient is c - c_i; control variates have no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    draw = {n: (torch.randn_like(p), torch.randn_like(p)) for n, p in model.named_parameters()}
    own, server = ({n: pair[k] for n, pair in draw.items()} for k in (0, 1))
    local = ControlledModel(model, model.state_dict(), own, server, lr=0.1)
    term = local.regularizer()
    assert term.item() == 0
    term.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, server[name] - own[name])
        assert own[name].grad is None
        assert server[name].grad is None


def test_control_variate_is_the_mean_gradient_of_minibatches(tmp_path, monkeypatch):
    """Option II with several batches per epoch: K counts the steps, not the epochs."""
    gradients, step = [], Optimization.step

    def watched(self, loss, penalty=0.0):
        parameters = self.parameters()
        own = torch.autograd.grad(loss, parameters, retain_graph=True)
        gradients.append([each.clone() for each in own])
        step(self, loss, penalty)

    monkeypatch.setattr(Optimization, "step", watched)
    server = scaffold(tmp_path, **{"training.batch-size": 16})
    for round in (1, 2):
        gradients.clear()
        instructions = server.instruct(round)
        client = client_of(instructions[0][0])
        replies = server.train(instructions[:1])
        assert len(gradients) == 3 * -(-len(client.y) // 16) > 6
        for number, (name, _) in enumerate(client.network.named_parameters()):
            mean = sum(each[number] for each in gradients) / len(gradients)
            kept = client.state.tensors[f"control/{name}"]
            torch.testing.assert_close(kept, mean, rtol=1e-3, atol=1e-5)
        server.aggregate(round, replies)


def test_first_round_equals_fedavg(tmp_path):
    """All control variates are 0."""
    fedavg = Server(small("fedavg", **CHOSEN), tmp_path / "fedavg")
    ours = scaffold(tmp_path / "scaffold")
    for server in (fedavg, ours):
        server.play(1)
    assert same(ours.strategy.averaged["weights"], fedavg.strategy.averaged["weights"])
    for server in (fedavg, ours):
        server.play(2)
    assert not same(ours.strategy.averaged["weights"], fedavg.strategy.averaged["weights"])


def test_control_variate_of_the_server_is_the_mean_of_the_clients(tmp_path):
    """If all clients have equal weights, also if only some are sampled in a round."""
    server = scaffold(tmp_path, fraction=0.5, **{"data.partition": "iid"})
    for round in range(1, 5):
        server.play(round)
    clients = [open_client(p._config, p._node) for p in server.manager.all().values()]
    assert len(clients) == 4
    for name, value in server.strategy.averaged["control"].items():
        own = [client.state.tensors.get(f"control/{name}") for client in clients]
        mean = sum(each for each in own if each is not None) / 4
        np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_control_variate_of_the_server_stays_the_mean_after_a_lost_reply(tmp_path, lost):
    """The client whose change was lost continues with its control variate before the change."""
    server = scaffold(tmp_path, **{"data.partition": "iid"})
    for round in range(1, 5):
        replies = server.train(server.instruct(round))
        server.aggregate(round, replies[1:] if round == lost else replies)
        if round == lost:
            state = server.strategy.state_dict()
            server.strategy.init()
            server.strategy.load_state_dict(state)
    clients = [open_client(p._config, p._node) for p in server.manager.all().values()]
    for name, value in server.strategy.averaged["control"].items():
        mean = sum(client.state.tensors[f"control/{name}"] for client in clients) / 4
        np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-6)


def test_client_that_never_replied_does_not_count(tmp_path):
    """It counts in N until it is excluded, and again with its first reply."""
    server = scaffold(tmp_path, **{"data.partition": "iid"})
    strategy = server.strategy
    replies = server.train(server.instruct(1))
    others, excluded = replies[1:], replies[0][0].name
    server.aggregate(1, others)
    control = {n: v.copy() for n, v in strategy.averaged["control"].items()}
    strategy.forget(excluded)
    strategy.forget(excluded)
    strategy.forget(others[0][0].name)  # Its share of c is unknown.
    for name, value in strategy.averaged["control"].items():
        mean = sum(reply_of(r).tensors[f"change/{name}"] for _, r in others) / 3
        np.testing.assert_allclose(control[name], mean * 3 / 4, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(value, mean, rtol=1e-4, atol=1e-7)
    before = {n: v.copy() for n, v in strategy.averaged["control"].items()}
    late = server.train(server.instruct(2)[:1])
    server.aggregate(2, late)
    for name, value in strategy.averaged["control"].items():
        change = reply_of(late[0][1]).tensors[f"change/{name}"]
        np.testing.assert_allclose(value, (3 * before[name] + change) / 4, rtol=1e-4, atol=1e-6)


def test_control_variates_survive_a_restart(tmp_path):
    sent = []
    for restarts in (False, True):
        server = scaffold(tmp_path / f"{restarts}")
        server.play(1)
        instructions = server.instruct(2)[:1]
        if restarts:
            client = client_of(instructions[0][0])
            assert client.state.tensors
            client.state.begin_round()
            client.state.tensors = {}
        sent.append(reply_of(server.train(instructions)[0][1]).tensors)
    assert same(*sent)
    state = server.strategy.state_dict()
    fresh = scaffold(tmp_path / "resumed")
    fresh.strategy.load_state_dict(state)
    assert same(fresh.strategy.state_dict(), state)
    assert any(value.any() for name, value in state.items() if name.startswith("control/"))


def test_evaluation_does_not_send_the_control_variate(tmp_path):
    server = scaffold(tmp_path)
    server.play(1)
    info = server.strategy.reference_client
    assert {n.split("/")[0] for n in server.strategy.instruct(2, info).tensors} == {
        "weights", "control",
    }  # fmt: skip
    evaluated = server.strategy.eval_instruction(1, info).tensors
    assert {name.split("/")[0] for name in evaluated} == {"weights"}


def test_late_change_counts_in_full(tmp_path):
    """The client uses its new control variate at once, so the weight of its change stays 1 / N."""
    server = scaffold(tmp_path, clients=2, **{"data.partition": "iid"})
    before = {n: v.copy() for n, v in server.strategy.averaged["control"].items()}
    instructions = server.instruct(1)
    (proxy, result), *_ = server.train(instructions[:1])
    sent = reply_of(result)
    member = server.strategy.members[proxy.name].info
    from fedhet.runs.measures import Measured
    from fedhet.strategies.base import Reply

    server.strategy.aggregate(3, [Reply(member, sent, Measured({}), age=2)])
    for name, value in server.strategy.averaged["control"].items():
        change = sent.tensors[f"change/{name}"]
        np.testing.assert_allclose(value, before[name] + change / 2, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("optimizer", "adam", "sgd"), ("momentum", 0.9, "0.0"), ("clip", 1.0, "0.0")],
)
def test_unsupported_training_is_refused(name, value, expected):
    match = rf"training\.{name}.*SCAFFOLD.*SGD.*expected {expected}, got"
    with pytest.raises(SettingsError, match=match):
        small("scaffold", **{f"training.{name}": value})


def test_default_training_is_plain_sgd():
    training = small("scaffold").run.training
    assert (training.optimizer, training.momentum, training.lr) == ("sgd", 0.0, 0.1)
    assert small("scaffold", **{"training.lr": 0.001}).run.training.lr == 0.001
    assert small("fedavg").run.training.optimizer == "adam"


def test_site_with_another_optimizer_is_refused(tmp_path):
    config = small("scaffold", clients=2, models="mlp")
    node = {"partition-id": 0, "num-partitions": 2, "optimizer": "adam"}
    with pytest.raises(FedhetError, match=r"node-config optimizer.*SCAFFOLD.*expected sgd"):
        config.method.client(config, read_node(node, config.run, str(tmp_path)))


@pytest.mark.parametrize(
    "changes",
    [
        {"privacy.epsilon": 8.0},
        {"privacy.secure-aggregation": True},
        {"wire.encoding": "int8"},
        {"wire.encoding": "top-k"},
        {"defense.average": "median"},
        {"pace.mode": "asynchronous"},
        {"semi": "fixmatch", "models": "cnn2"},
        {"models": "resnet10", "max_samples": 100},
    ],
)
def test_run_with(tmp_path, changes):
    model = changes.pop("models", "mlp")
    summary = run(small("scaffold", clients=3, models=model, **changes), tmp_path / "run")
    assert summary["accuracy"]["common"]["global"]["mean"] > 0


def test_private_correction_is_added_after_the_noise(tmp_path, monkeypatch):
    pytest.importorskip("opacus")
    from fedhet.privacy.sgd import PrivateOptimization

    seen, step = [], PrivateOptimization.step

    def watched(self, loss, penalty=0.0):
        seen.append(penalty)
        step(self, loss, penalty)

    monkeypatch.setattr(PrivateOptimization, "step", watched)
    server = Server(
        small("scaffold", clients=2, models="mlp", **{"privacy.epsilon": 8.0}), tmp_path
    )
    server.play(1)
    server.play(2)
    assert seen
    assert all(isinstance(each, torch.Tensor) and each.item() == 0 for each in seen)
