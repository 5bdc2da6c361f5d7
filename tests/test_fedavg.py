"""FedAvg and the methods that share its round, against slow transcriptions."""

from __future__ import annotations

import copy
from functools import partial

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from rounds import PLAIN, instruction_of, reply_of, same
from safetensors.numpy import load_file
from torch.distributions import Normal, kl_divergence
from torch.nn import functional as F

from fedhet.algorithms import MlpWidth
from fedhet.algorithms.weights import interpolate
from fedhet.base.errors import FedhetError
from fedhet.client_runtime.local_training import FixMatch
from fedhet.data.store import RunData
from fedhet.learning.training import Optimization
from fedhet.models import build, part_arrays, part_names, shapes

METHODS = (
    "ditto", "fedavg", "fedprox", "fedbn", "fedper", "fedrep", "lg-fedavg", "moon", "pfedme",
    "pfedbayes",
)  # fmt: skip
WHOLE = ("ditto", "fedavg", "fedprox", "moon", "pfedme", "pfedbayes")
PARTS = {
    "fedbn": "all-but-norms",
    "fedper": "extractor",
    "fedrep": "extractor",
    "lg-fedavg": "head",
}
MODELS = ("mlp", "cnn2", "cnn2-dropout", "resnet18", "gems-resnet11")


def federation(method, **changes):
    return small(method, **{"clients": 3, **changes})


# Sent tensors


def expected(state, part):
    """Return the names of a part; a running batch count identifies a batch norm."""
    norms = {name.rpartition(".")[0] for name in state if name.endswith("num_batches_tracked")}
    return {
        "all": set(state),
        "all-but-norms": {n for n in state if n.rpartition(".")[0] not in norms},
        "extractor": {n for n in state if n.split(".")[0] == "extractor"},
        "head": {n for n in state if n.split(".")[0] == "classifier"},
    }[part]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("part", ["all", "all-but-norms", "extractor", "head"])
def test_part_selects_tensors(name, part):
    model = build(name, (3, 32, 32), 7, seed=0)
    state = model.state_dict()
    wanted = expected(state, part)
    assert part_names(model, part) == wanted
    assert len(wanted) > 0
    assert list(part_arrays(model, part)) == [n for n in state if n in wanted]
    found = shapes(name, (3, 32, 32), 7, part=part)
    assert {n: tuple(shape) for n, (shape, _) in found.items()} == {
        n: tuple(state[n].shape) for n in wanted
    }


@pytest.mark.parametrize("method", METHODS)
def test_only_the_part_is_sent(tmp_path, method):
    server = Server(federation(method, models="cnn2"), tmp_path)
    instructions = server.instruct(1)
    info = client_of(instructions[0][0]).info
    width = MlpWidth(256) if method == "moon" else 64
    state = build(info.model, info.shape, info.classes, seed=0, feature_dim=width).state_dict()
    wanted = expected(state, PARTS.get(method, "all"))
    groups = {"weights", "scale"} if method == "pfedbayes" else {"weights"}
    for knowledge in (instruction_of(instructions[0]), reply_of(server.train(instructions)[0][1])):
        assert set(knowledge.group("weights")) == wanted
        assert {name.split("/")[0] for name in knowledge.tensors} == groups
        assert not knowledge.scalars


# The server


@pytest.mark.parametrize("method", [*METHODS, "fml"])
def test_server_averages_by_samples(tmp_path, method):
    """McMahan et al., Algorithm 1: w <- sum over k of n_k / n w_k."""
    server = Server(federation(method, clients=4, fraction=0.75), tmp_path)
    replies = server.train(server.instruct(1))
    assert len(replies) == 3
    samples = {c.name: server.strategy.members[c.name].info.samples for c, _ in replies}
    assert len(set(samples.values())) > 1
    server.aggregate(1, replies)
    after = instruction_of(server.instruct(2)[0]).tensors
    for name, value in after.items():
        parts = [(reply_of(r).tensors[name].astype(float), samples[c.name]) for c, r in replies]
        mean = sum(part * count for part, count in parts) / sum(count for _, count in parts)
        mean = np.rint(mean) if "num_batches" in name else mean
        np.testing.assert_allclose(value, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.25, 2.0])
def test_pfedme_server_keeps_a_fraction_of_its_model(tmp_path, beta):
    """T. Dinh et al., Algorithm 1, line 12: w <- (1 - beta) w + beta sum of w_i / S."""
    server = Server(federation("pfedme", models="mlp", **{"pfedme.beta": beta}), tmp_path)
    instructions = server.instruct(1)
    before, replies = instruction_of(instructions[0]).tensors, server.train(instructions)
    samples = {c.name: server.strategy.members[c.name].info.samples for c, _ in replies}
    server.aggregate(1, replies)
    total = sum(samples.values())
    for name, value in instruction_of(server.instruct(2)[0]).tensors.items():
        mean = sum(reply_of(r).tensors[name] * (samples[c.name] / total) for c, r in replies)
        moved = (1 - beta) * before[name] + beta * mean
        np.testing.assert_allclose(value, moved, rtol=1e-4, atol=1e-6)


def test_pfedme_server_extrapolates_only_weights():
    """With beta = 2, the variance 2 * 0.4 - 1 would be negative."""
    old = {"a.weight": np.float32([1]), "a.running_mean": np.float32([3])}
    new = {"a.weight": np.float32([4]), "a.running_mean": np.float32([5])}
    old |= {"a.running_var": np.float32([1]), "a.num_batches_tracked": np.array(2)}
    new |= {"a.running_var": np.float32([0.4]), "a.num_batches_tracked": np.array(9)}
    moved = interpolate(old, new, 2.0)
    assert moved["a.weight"] == 2 * 4 - 1
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert moved[f"a.{name}"] == new[f"a.{name}"]


# The clients


class Slow:
    """A client's round in float64 with full batches, as in the papers' algorithms."""

    def __init__(self, client, start):
        self.model = copy.deepcopy(client.network).double()
        names = [name for name, _ in self.model.named_parameters()]
        self.w = {n: torch.tensor(start.get(n, self.own(n))).double() for n in names}
        self.x, self.y = client.x.double(), client.y
        self.lr, self.epochs = client.training.lr, client.training.local_epochs

    def own(self, name):
        return dict(self.model.named_parameters())[name].detach().numpy()

    def gradient(self, w):
        at = {n: v.clone().requires_grad_() for n, v in w.items()}
        logits = torch.func.functional_call(self.model, at, (self.x,))
        loss = F.cross_entropy(logits, self.y)
        return dict(zip(at, torch.autograd.grad(loss, at.values()), strict=True))

    def proximal(self, mu):
        """Li et al., Eq. 2: descend on F(w) + mu / 2 ||w - w^t||^2."""
        w, anchor = dict(self.w), dict(self.w)
        for _ in range(self.epochs):
            g = self.gradient(w)
            w = {n: w[n] - self.lr * (g[n] + mu * (w[n] - anchor[n])) for n in w}
        return w, w

    def alternating(self, head_epochs):
        """Collins et al., Algorithm 1: tau updates of the head, then the representation's."""
        w = dict(self.w)
        for part, epochs in (("classifier.", head_epochs), ("extractor.", self.epochs)):
            for _ in range(epochs):
                g = self.gradient(w)
                w = {n: v - self.lr * g[n] if n.startswith(part) else v for n, v in w.items()}
        return w, w

    def ditto(self, weight, epochs):
        """Li et al., Algorithm 1: w_k as in FedAvg, and s steps of v_k toward F_k and w^t."""
        v = {n: torch.tensor(self.own(n)) for n in self.w}
        for _ in range(epochs):
            g = self.gradient(v)
            v = {n: v[n] - self.lr * (g[n] + weight * (v[n] - self.w[n])) for n in v}
        return v, self.proximal(0.0)[1]

    def moreau(self, strength, rate, steps):
        """T. Dinh et al., Algorithm 1, lines 6 to 8: the personal model, then the local copy."""
        w, theta = dict(self.w), dict(self.w)
        for _ in range(self.epochs):
            for _ in range(steps):
                g = self.gradient(theta)
                theta = {n: theta[n] - self.lr * (g[n] + strength * (theta[n] - w[n])) for n in w}
            w = {n: w[n] - rate * strength * (w[n] - theta[n]) for n in w}
        return theta, w


ROUNDS = {
    "fedavg": ({}, lambda slow: slow.proximal(0.0)),
    "fedprox": ({"fedprox.mu": 0.7}, lambda slow: slow.proximal(0.7)),
    "fedbn": ({}, lambda slow: slow.proximal(0.0)),
    "fedper": ({}, lambda slow: slow.proximal(0.0)),
    "ditto": (
        {"ditto.lambda": 0.7, "ditto.personal-epochs": 5},
        lambda slow: slow.ditto(0.7, 5),
    ),
    "fedrep": ({"fedrep.head-epochs": 4}, lambda slow: slow.alternating(4)),
    "lg-fedavg": ({}, lambda slow: slow.proximal(0.0)),
    "pfedme": (
        {"pfedme.strength": 2.0, "pfedme.rate": 0.2, "pfedme.steps": 3},
        lambda slow: slow.moreau(2.0, 0.2, 3),
    ),
}


@pytest.mark.parametrize("method", ROUNDS)
def test_round_of_a_client_equals_the_algorithm(tmp_path, method):
    """The second round, in which the client's state differs from the server's instruction."""
    chosen, algorithm = ROUNDS[method]
    server = Server(federation(method, models="mlp", **PLAIN, **chosen), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    client = client_of(instructions[0][0])
    slow = Slow(client, instruction_of(instructions[0]).group("weights"))
    personal, sent = algorithm(slow)
    (_, result), *_ = server.train(instructions)
    reply = reply_of(result).group("weights")
    assert reply
    for name, value in reply.items():
        np.testing.assert_allclose(value, sent[name].numpy(), rtol=1e-4, atol=1e-6)
    for name, parameter in client.network.named_parameters():
        np.testing.assert_allclose(parameter.detach(), personal[name].numpy(), rtol=1e-4, atol=1e-6)


def slow_bayes(client, instruction, *, zeta, steps, noise, eps, loss=F.cross_entropy):
    """Zhang et al., Algorithm 1, with the draws in `noise`: steps on q, then Adam on w."""
    own = {name: p.detach().double() for name, p in client.network.named_parameters()}
    kept = {k.removeprefix("scale/"): v for k, v in client.state.tensors.items()}
    mean = {n: torch.tensor(v).double() for n, v in instruction.group("weights").items()}
    raw = {n: torch.tensor(v).double().expm1().log() for n, v in instruction.group("scale").items()}
    q = {(n, 0): own[n] for n in own} | {(n, 1): kept[n].double().expm1().log() for n in own}
    w = {(n, 0): mean[n] for n in own} | {(n, 1): raw[n] for n in own}
    moments = dict.fromkeys(w, (0.0, 0.0))
    x, y, n, lr = client.x.double(), client.y, len(client.y), client.training.lr
    model = copy.deepcopy(client.network).double()

    def divergence(q, w):
        normal = [{k: Normal(d[k, 0], torch.log1p(d[k, 1].exp())) for k in own} for d in (q, w)]
        return zeta / n * sum(kl_divergence(normal[0][k], normal[1][k]).sum() for k in own)

    def gradients(loss_of, at):
        at = {key: value.clone().requires_grad_() for key, value in at.items()}
        return dict(zip(at, torch.autograd.grad(loss_of(at), at.values()), strict=True))

    def personal(q):
        drawn = {k: q[k, 0] + noise * torch.log1p(q[k, 1].exp()) for k in own}
        logits = torch.func.functional_call(model, drawn, (x,))
        return loss(logits, y) + divergence(q, w)

    for epoch in range(1, client.training.local_epochs + 1):
        for _ in range(steps):
            g = gradients(personal, q)
            q = {key: q[key] - lr * g[key] for key in q}
        g = gradients(partial(divergence, q), w)
        for key, (m, v) in moments.items():
            m, v = 0.9 * m + 0.1 * g[key], 0.999 * v + 0.001 * g[key] ** 2
            moments[key] = m, v
            w[key] = w[key] - lr * (m / (1 - 0.9**epoch)) / ((v / (1 - 0.999**epoch)).sqrt() + eps)
    return q, w


@pytest.mark.parametrize("noise", [1.0, 0.25])
def test_pfedbayes_distributions_equal_the_algorithm(tmp_path, monkeypatch, steady_adam, noise):
    """In the second round, personal distributions are the client's, localized ones the server's."""
    monkeypatch.setattr(torch, "randn", lambda shape, **options: torch.ones(shape))
    bayes = {"pfedbayes.zeta": 3.0, "pfedbayes.steps": 2, "pfedbayes.noise": noise}
    chosen = {**PLAIN, "training.lr": 0.02, **bayes}
    server = Server(federation("pfedbayes", models="mlp", **chosen), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    client, instruction = client_of(instructions[0][0]), instruction_of(instructions[0])
    q, w = slow_bayes(client, instruction, zeta=3.0, steps=2, noise=noise, eps=steady_adam)
    (_, result), *_ = server.train(instructions)
    reply, near = reply_of(result), {"rtol": 1e-3, "atol": 2e-5}
    for name, parameter in client.network.named_parameters():
        np.testing.assert_allclose(parameter.detach(), q[name, 0], **near)
        np.testing.assert_allclose(
            client.state.tensors[f"scale/{name}"].detach(), torch.log1p(q[name, 1].exp()), **near
        )
        np.testing.assert_allclose(reply.group("weights")[name], w[name, 0], **near)
        np.testing.assert_allclose(
            reply.group("scale")[name], torch.log1p(w[name, 1].exp()), **near
        )
        assert not np.allclose(reply.group("weights")[name], parameter.detach(), atol=1e-3)


def test_pfedbayes_trains_on_draws_of_its_weights(tmp_path):
    """A step with scales of 0.5 differs from a step with the means, and depends on the seed."""
    chosen = {**PLAIN, "training.local-epochs": 1}
    drawn = federation("pfedbayes", models="mlp", **chosen, **{"pfedbayes.noise": 1.0})
    replies = []
    for number in range(2):
        server = Server(drawn, tmp_path / str(number))
        for values in server.strategy.averaged["scale"].values():
            values.fill(0.5)
        server.strategy._set_averages(server.strategy.averaged)
        replies.append(reply_of(server.train(server.instruct(1))[0][1]).tensors)
    assert same(*replies)
    server = Server(federation("fedavg", models="mlp", **chosen), tmp_path / "plain")
    plain = reply_of(server.train(server.instruct(1))[0][1]).tensors
    assert any(not np.allclose(plain[name], replies[0][name], atol=1e-4) for name in plain)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_each_phase_of_fedrep_changes_only_its_part(tmp_path, monkeypatch, momentum):
    """Gradients reach only the trained part; momentum and weight decay change no other part."""
    chosen = {**PLAIN, "training.momentum": momentum, "training.weight-decay": 0.1}
    server = Server(federation("fedrep", models="mlp", **chosen), tmp_path)
    instructions = server.instruct(1)
    client, seen = client_of(instructions[0][0]), []
    step = Optimization.step

    def watched(self, loss, penalty=0.0):
        before = {n: p.detach().clone() for n, p in client.network.named_parameters()}
        step(self, loss, penalty)
        parameters = dict(client.network.named_parameters())
        moved = {n.split(".")[0] for n, p in parameters.items() if not torch.equal(p, before[n])}
        reached = {n.split(".")[0] for n, p in parameters.items() if p.grad is not None}
        seen.append((moved, reached))
        client.network.zero_grad()

    monkeypatch.setattr(Optimization, "step", watched)
    server.train(instructions[:1])
    assert seen == [({"classifier"},) * 2] + 3 * [({"extractor"},) * 2]
    assert all(parameter.requires_grad for parameter in client.network.parameters())


def test_phases_of_fedrep_have_different_orders_of_the_samples(tmp_path, monkeypatch):
    orders, draw = [], Optimization.batches

    def watched(self, *arguments):
        parts = [*draw(self, *arguments)]
        orders.append(torch.cat(parts))
        return parts

    monkeypatch.setattr(Optimization, "batches", watched)
    server = Server(federation("fedrep", models="mlp", local_epochs=1), tmp_path)
    server.train(server.instruct(1)[:1])
    head, extractor = orders
    assert torch.equal(head.sort().values, extractor.sort().values)
    assert not torch.equal(head, extractor)


def test_models_of_ditto_have_separate_gradients(tmp_path, monkeypatch):
    """No gradient of the personal loss reaches the global model, and none the other way round."""
    fedavg = Server(federation("fedavg", models="mlp", **PLAIN), tmp_path / "fedavg")
    fedavg.play(1)
    (_, plain), *_ = fedavg.train(fedavg.instruct(2)[:1])
    server = Server(federation("ditto", models="mlp", **PLAIN), tmp_path / "ditto")
    server.play(1)
    instructions = server.instruct(2)
    client, step, seen = client_of(instructions[0][0]), Optimization.step, []
    start = {n: v.clone() for n, v in client.network.state_dict().items()}

    def watched(self, loss, penalty=0.0):
        private = {id(p) for p in client.network.parameters()}
        shared = {id(p) for p in self.parameters()} - private
        step(self, loss, penalty)
        graded = [p.grad is not None for p in client.network.parameters()]
        seen.append((bool(shared), any(graded), isinstance(penalty, torch.Tensor)))
        if shared:
            state = client.network.state_dict().items()
            assert all(torch.equal(value, start[name]) for name, value in state)

    monkeypatch.setattr(Optimization, "step", watched)
    (_, result), *_ = server.train(instructions[:1])
    assert seen == 3 * [(True, False, False)] + 3 * [(False, True, True)]
    assert same(reply_of(result).tensors, reply_of(plain).tensors)


def test_ditto_without_its_proximal_term_is_local_training(tmp_path):
    config = federation("ditto", models="mlp", **PLAIN, **{"ditto.lambda": 0.0})
    servers = [
        Server(config, tmp_path / "ditto"),
        Server(federation("local", models="mlp", **PLAIN), tmp_path / "local"),
    ]
    for server in servers:
        server.play(1)
        server.play(2)
    ours, alone = (client_of(server.instruct(3)[0][0]).network.state_dict() for server in servers)
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value)


def test_pseudo_labels_are_predicted_by_the_trained_model(tmp_path, monkeypatch):
    """Both models of Ditto learn from their own predictions, in evaluation mode."""
    predicting, original = [], FixMatch.loss

    def watched(self, predict):
        predicting.append(self._model)
        return original(self, predict)

    monkeypatch.setattr(FixMatch, "loss", watched)
    server = Server(federation("ditto", models="cnn2", semi="fixmatch", local_epochs=1), tmp_path)
    instructions = server.instruct(1)
    client = client_of(instructions[0][0])
    server.train(instructions[:1])
    first, *_, last = predicting
    assert last is client.network
    assert first is not client.network
    assert len({id(model) for model in predicting}) == 2


# What stays with a client


@pytest.mark.parametrize("method", PARTS)
def test_other_tensors_stay_on_the_client(tmp_path, method):
    """At the start of a round, exchanged tensors are the server's, and the others the client's."""
    server = Server(federation(method, models="cnn2"), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    sent = instruction_of(instructions[0]).group("weights")
    for proxy, _ in instructions:
        client = client_of(proxy)
        kept = {n: v.clone() for n, v in client.network.state_dict().items()}
        client._joined(client.network, sent)
        state = client.network.state_dict()
        own = set(state) - set(sent)
        assert own
        assert all(torch.equal(state[n], kept[n]) for n in own)
        assert all(np.array_equal(state[n].numpy(), sent[n]) for n in sent)
    first, second, *_ = (client_of(proxy).network.state_dict() for proxy, _ in instructions)
    name = next(n for n in first if n not in sent and first[n].is_floating_point())
    assert not torch.equal(first[name], second[name])


@pytest.mark.parametrize("method", METHODS)
def test_averages_are_evaluated_with_tensors_of_each_client(tmp_path, method):
    server = Server(federation(method, models="cnn2"), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    knowledge = instruction_of(instructions[0])
    sent, client = knowledge.group("weights"), client_of(instructions[0][0])
    own = {n: v.clone() for n, v in client.network.state_dict().items()}
    judged = client.eval_models(knowledge)
    assert set(judged) == {"private", "global"}
    for name, value in judged["global"].state_dict().items():
        np.testing.assert_array_equal(value, sent.get(name, own[name].numpy()))
    assert all(torch.equal(v, own[n]) for n, v in client.network.state_dict().items())


# Runs


@pytest.mark.parametrize("method", METHODS)
def test_run_evaluates_both_kinds(tmp_path, method):
    summary = run(federation(method), tmp_path / "run")
    assert set(summary["accuracy"]["personal"]) == {"private", "global"}
    assert len(records(tmp_path / "run")) == 2


def test_every_client_evaluates_the_current_average(tmp_path):
    """Clients that were not sampled also evaluate; the average is read from the checkpoint."""
    config = federation("fedavg", models="mlp", clients=4, fraction=0.25, rounds=3)
    run(config, tmp_path / "run")
    model, common = build("mlp", (1, 8, 8), 10, seed=0), RunData.for_run(config.run).common_test
    for record in records(tmp_path / "run")[-2:]:
        assert len(record["answered"]) == 1
        assert record["bytes_evaluation"] > 3 * record["bytes_down"]
        kept = tmp_path / "run" / "checkpoints" / f"round-{record['round']:06d}.safetensors"
        weights = {k.removeprefix("weights/"): torch.tensor(v) for k, v in load_file(kept).items()}
        model.load_state_dict({k: weights[k] for k in model.state_dict()})
        with torch.no_grad():
            right = (model(common.x).argmax(1) == common.y).double().mean().item()
        judged = record["accuracy"]["common"]["global"]["per_client"]
        assert judged == {f"client-{k}": pytest.approx(right) for k in range(4)}


@pytest.mark.parametrize("method", [m for m in METHODS if m != "lg-fedavg"])
def test_all_clients_must_have_one_model(tmp_path, method):
    with pytest.raises(FedhetError, match=method):
        Server(federation(method, models=["mlp", "cnn2"]), tmp_path)


def test_lg_fedavg_heads_agree_for_all_extractors(tmp_path):
    server = Server(federation("lg-fedavg", models=["mlp", "cnn2", "cnn3"]), tmp_path)
    replies = server.train(server.instruct(1))
    assert {reply_of(r).tensors["weights/classifier.weight"].shape for _, r in replies} == {
        (10, 64)
    }
