"""FedDF against a transcription of Lin et al.'s Algorithm 1, with several architectures."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from federation import Server, client_of, run, small
from rounds import altered, instruction_of, reply_of, same

from fedhet.algorithms.distillation import distillation_loss
from fedhet.algorithms.weights import RunningAverage
from fedhet.base.errors import DivergedError
from fedhet.data.store import RunData
from fedhet.learning.devices import CPU
from fedhet.models import build
from fedhet.strategies import feddf


def federation(**changes):
    few = {"clients": 4, "models": ["mlp", "cnn2"], "max_samples": 200, "feddf.epochs": 2}
    return small("feddf", **{**few, **changes})


class Slow:
    """A round on the server, computed from the clients' weights in float64."""

    def __init__(self, server, replies):
        self.run, members = server.strategy.run, server.strategy.members
        info = server.strategy.reference_client
        self.task = info.shape, info.classes
        self.x = RunData.for_run(self.run).public_set(info, labeled=False).x.double()
        self.clients = [
            (members[name].info.model, members[name].info.samples, weights)
            for name, weights in replies
        ]

    def model(self, name, weights):
        model = build(name, *self.task, seed=0).double()
        model.load_state_dict({k: torch.tensor(np.asarray(v)) for k, v in weights.items()})
        return model

    def averages(self):
        found = {}
        for model in {model for model, _, _ in self.clients}:
            group = [(n, w) for other, n, w in self.clients if other == model]
            total = sum(n for n, _ in group)
            mean = {k: sum(n / total * w[k].astype(float) for n, w in group) for k in group[0][1]}
            found[model] = {k: np.rint(v) if "tracked" in k else v for k, v in mean.items()}
        return found

    def teacher(self):
        with torch.no_grad():
            logits = [self.model(name, w).eval()(self.x) for name, _, w in self.clients]
        return sum(logits) / len(logits)

    def divergence(self, student):
        """Return the mean of KL(teacher, student) over the public samples."""
        target = self.teacher().softmax(1)
        own = copy.deepcopy(student).eval()(self.x).detach().softmax(1)
        return float((target * (target / own).log()).sum(1).mean())

    def students(self, name, average, epochs, lr, eps):
        """Return the average and the student after each epoch of Adam with cosine annealing."""
        student, teacher = self.model(name, average).train(), self.teacher()
        moments = {n: [torch.zeros_like(p)] * 2 for n, p in student.named_parameters()}
        found = [copy.deepcopy(student)]
        for step in range(epochs):
            own = student(self.x)
            target = teacher.softmax(1)
            loss = (target * (target.log() - own.log_softmax(1))).sum(1).mean()
            gradients = torch.autograd.grad(loss, list(student.parameters()))
            rate = lr * (1 + math.cos(math.pi * step / epochs)) / 2
            for (n, p), g in zip(student.named_parameters(), gradients, strict=True):
                first, second = moments[n]
                first, second = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g * g
                moments[n] = [first, second]
                m, v = first / (1 - 0.9 ** (step + 1)), second / (1 - 0.999 ** (step + 1))
                p.data -= rate * m / (v.sqrt() + eps)
            found.append(copy.deepcopy(student))
        return found


def one_round(server):
    """Let all clients reply in the first round, and return their weights as plain arrays."""
    replies = server.train(server.instruct(1))
    return replies, [(proxy.name, reply_of(result).group("weights")) for proxy, result in replies]


# The mathematics


def test_average_of_no_model_raises():
    with pytest.raises(ValueError, match="positive total weight"):
        RunningAverage().mean()


# The server


def test_without_distillation_each_architecture_has_its_average(tmp_path):
    server = Server(federation(**{"feddf.epochs": 0}), tmp_path)
    results, replies = one_round(server)
    slow = Slow(server, replies)
    assert len({samples for _, samples, _ in slow.clients}) > 1
    server.aggregate(1, results)
    assert server.strategy.models.keys() == {"mlp", "cnn2"}
    for name, average in slow.averages().items():
        for key, value in server.strategy.models[name].items():
            np.testing.assert_allclose(value, average[key], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("lr", "closest"),
    [(3e-3, {"mlp": 3, "cnn2": 3}), (8e-3, {"mlp": 0, "cnn2": 3}), (0.02, {"mlp": 0, "cnn2": 0})],
)
def test_students_learn_the_mean_of_all_clients_logits(tmp_path, steady_adam, lr, closest):
    """The result is the closest model to the teacher among the average and each epoch's student."""
    chosen = {"feddf.epochs": 3, "feddf.batch-size": 10_000, "feddf.lr": lr}
    server = Server(federation(clients=3, **chosen), tmp_path)
    results, replies = one_round(server)
    server.aggregate(1, results)
    slow = Slow(server, replies)
    for name, average in slow.averages().items():
        students = slow.students(name, average, 3, lr, steady_adam)
        epochs = min(range(4), key=lambda after: slow.divergence(students[after]))
        assert epochs == closest[name]
        wanted = students[epochs].state_dict()
        for key, value in server.strategy.models[name].items():
            moved = np.abs(wanted[key].numpy() - average[key]).max()
            np.testing.assert_allclose(value, wanted[key], atol=1e-3 * moved + 1e-6)
    figures = server.flower.state.record.method
    assert 0 < figures["distillation_loss"] < 10


def test_best_student_is_kept_in_evaluation_mode():
    """The weights are the teacher's plus noise, scaled by 3, 1, 2, and 1."""
    student, x = build("cnn2-dropout", (1, 8, 8), 10, seed=0).train(), torch.rand(20, 1, 8, 8)
    start = copy.deepcopy(student.state_dict())
    with torch.no_grad():
        teacher = copy.deepcopy(student).eval()(x)
    closest = feddf._Closest(student, x, teacher, CPU, distillation_loss)
    for epochs, noise in enumerate((3, 1, 2, 1)):
        noisy = {name: value + 0.02 * noise for name, value in start.items() if value.ndim}
        student.load_state_dict(start | noisy)
        closest.compare(epochs)
    student.load_state_dict(start)
    for name, value in start.items():
        np.testing.assert_allclose(closest.weights[name], value + 0.02 * (value.ndim > 0))


def test_replies_are_not_kept_and_models_not_shared(tmp_path):
    """The server keeps only sums, and the replies of the next round do not change its models."""
    server = Server(federation(), tmp_path)
    results, _ = one_round(server)
    kept, accept = [], server.strategy.accept
    server.strategy.accept = lambda *a: kept.append(accept(*a)) or kept[-1]
    server.aggregate(1, results)
    assert len(kept) == 4
    assert not any(reply.knowledge.tensors for reply in kept)
    models = copy.deepcopy(server.strategy.models)
    instructions = server.instruct(2)
    for name, _ in instructions:
        assert same(instruction_of((name, _)).group("weights"), models[name._proxy._node.model])
    results = server.train(instructions)
    server.strategy.aggregate = lambda round, replies: {}
    server.aggregate(2, results)
    assert all(same(models[name], server.strategy.models[name]) for name in models)


def test_only_weights_are_sent_and_none_at_first(tmp_path):
    server = Server(federation(), tmp_path)
    instructions = server.instruct(1)
    assert not any(instruction_of(each).tensors for each in instructions)
    for proxy, result in server.train(instructions):
        knowledge = reply_of(result)
        state = client_of(proxy).network.state_dict()
        assert knowledge.tensors.keys() == {f"weights/{name}" for name in state}
        assert not knowledge.scalars


def test_model_with_invalid_logits_is_dropped(tmp_path):
    def spoil(tensors):
        for name, value in tensors.items():  # pixels are negative, for the most part
            value[...] = -1e11 if "extractor" in name else 1e11

    found = []
    for name in ("without", "with"):
        server = Server(
            federation(**{"engine.outlier-factor": 0.0, "defense.clip-factor": 0.0}),
            tmp_path / name,
        )
        replies, _ = one_round(server)
        if name == "with":
            (proxy, result), *others = replies
            replies = [(proxy, altered(result, spoil)), *others]
        else:
            replies = replies[1:]
        server.aggregate(1, replies)
        found.append(server.strategy.models)
        failed = server.flower.state.record.failed
        assert list(failed) == ["client-0"]
    assert "logits on the public data" in failed["client-0"]
    assert all(same(found[0][name], found[1][name]) for name in found[0])


def test_architecture_without_a_reply_keeps_its_model(tmp_path):
    server = Server(federation(), tmp_path)
    server.play(1)
    before = copy.deepcopy(server.strategy.models)
    replies = [a for a in server.train(server.instruct(2)) if a[0]._proxy._node.model == "mlp"]
    server.aggregate(2, replies)
    assert same(server.strategy.models["cnn2"], before["cnn2"])
    assert not same(server.strategy.models["mlp"], before["mlp"])


def test_diverging_distillation_keeps_the_averages(tmp_path):
    server = Server(federation(), tmp_path)
    server.play(1)
    before = copy.deepcopy(server.strategy.models)
    server.strategy.settings = server.strategy.settings.model_copy(update={"lr": 1e30})
    aggregate, caught = server.strategy.aggregate, []

    def watched(round, replies):
        try:
            return aggregate(round, replies)
        except DivergedError as error:
            caught.append(error)
            raise

    server.strategy.aggregate = watched
    server.play(2)
    assert caught
    assert all(same(server.strategy.models[name], before[name]) for name in before)


# The clients, and runs


def test_client_starts_from_the_fused_model(tmp_path):
    """A step with a tiny learning rate leaves the model as it was sent."""
    server = Server(federation(models="mlp", **{"training.lr": 1e-12}), tmp_path)
    server.play(1)
    instructions = server.instruct(2)
    sent = instruction_of(instructions[0]).group("weights")
    (_, result), *_ = server.train(instructions)
    for name, value in reply_of(result).group("weights").items():
        np.testing.assert_allclose(value, sent[name], atol=1e-8)


def test_run_learns(tmp_path):
    config = federation(rounds=4, clients=3, fraction=0.67, alpha=1.0, models="mlp", local_epochs=3)
    summary = run(config, tmp_path / "run")
    common = summary["accuracy"]["common"]
    assert set(common) == {"private", "global"}
    assert common["global"]["mean"] > 0.4
