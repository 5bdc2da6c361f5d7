"""FCCL against a literal transcription: the losses, the teachers, rounds, and messages."""

import copy
import json

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
    fitted,
    inside_of,
    instruction_of,
    learn,
    log_softmax,
    moved_outputs,
    opened,
    reply_of,
    same,
    state_of,
)

from fedhet.algorithms.distillation import cross_correlation_loss
from fedhet.base.errors import SettingsError
from fedhet.clients.fccl import DualObjective
from fedhet.clients.fedmd import Consensus
from fedhet.config.resolve import resolve
from fedhet.wire.knowledge import Knowledge

OFF, DUAL = 0.1, 0.5
OWN = {"fccl.off-diagonal": OFF, "fccl.dual-weight": DUAL}


def fccl(**changes):
    return small("fccl", **{"clients": 3, "models": "mlp", "max_samples": 240, **changes})


# The algorithm, written out slowly


def slow_correlation_loss(z, mean, off=OFF):
    """Return sum_u (1 - M_uu)^2 + lambda sum_(u != v) (1 + M_uv)^2, class by class."""
    total, mean = 0.0, torch.as_tensor(mean).double()
    for u in range(z.shape[1]):
        for v in range(z.shape[1]):
            a, b = z[:, u] - z[:, u].mean(), mean[:, v] - mean[:, v].mean()
            m = (a * b).sum() / (torch.sqrt((a**2).sum()) * torch.sqrt((b**2).sum()))
            total = total + ((1 - m) ** 2 if u == v else off * (1 + m) ** 2)
    return total


def divergence(teacher, student):
    """Return KL(teacher || student) of logits, averaged over samples."""
    p = torch.exp(log_softmax(teacher.detach()))
    return (p * (log_softmax(teacher.detach()) - log_softmax(student))).sum() / len(p)


def slow_client(client, start, consensus, teachers):
    """Update collaboratively for six steps, and then locally for three steps."""
    x, model = client.x.double(), start
    if consensus:
        images, mean = consensus
        model = descend(model, lambda m: slow_correlation_loss(m(images), mean), 6)

    def local(m):
        z = m(x)
        return cross_entropy(z, client.y) + DUAL * sum(divergence(t(x), z) for t in teachers)

    return descend(model, local)


def test_rounds_equal_the_algorithm(tmp_path):
    """Round 1 pretrains; then, the teachers are the pretrained and the previous model."""
    config = fccl(**PLAIN, **OWN, **{"fccl.digest-epochs": 6, "fccl.sample": 20}, rounds=3)
    server = Server(config, tmp_path)
    models = {name: c.setup()["private"] for name, c in clients(server).items()}
    pretrained, previous, sent, rows = {}, {}, {}, None
    for number in (1, 2, 3):
        instructions = server.instruct(number)
        replies, received = server.train(instructions), {}
        for (proxy, result), message in zip(replies, instructions, strict=True):
            client, instruction, name = client_of(proxy), instruction_of(message), proxy.name
            consensus, teachers = None, []
            if number > 1:
                mean = sum(z.astype(float) for z in sent.values()) / 3
                consensus = client.public.x.double()[rows], mean
                teachers = [pretrained[name], previous[name]]
            expected = slow_client(client, models[name], consensus, teachers)
            assert_close(client.network, expected, rtol=1e-3, atol=1e-5)
            # Continue from the client's weights, so that rounding does not accumulate.
            models[name] = copy.deepcopy(client.network)
            previous[name] = copy.deepcopy(client.network).double()
            pretrained.setdefault(name, previous[name])
            assert_close(client.models["pretrained"], pretrained[name], rtol=1e-6)
            assert_close(client.models["previous"], previous[name], rtol=1e-6)
            asked = instruction.tensors["asked"].astype(int)
            with torch.no_grad():
                z = expected(client.public.x.double()[asked])
            received[name] = reply_of(result).tensors["logits"]
            np.testing.assert_allclose(received[name], z, rtol=5e-3, atol=1e-4)
        server.aggregate(number, replies)
        rows, sent = asked, received


# Losses


def test_cross_correlation_loss_equals_its_definition():
    rng = np.random.default_rng(0)
    z = torch.tensor(rng.normal(size=(12, 4)), requires_grad=True)
    mean = torch.tensor(3 * rng.normal(size=(12, 4)) + 1, requires_grad=True)
    found, slow = cross_correlation_loss(z, mean, OFF), slow_correlation_loss(z, mean.detach())
    assert found.item() == pytest.approx(slow.item(), rel=1e-5)
    (gradient,) = torch.autograd.grad(found, z, retain_graph=True)
    (expected,) = torch.autograd.grad(slow, z)
    torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)
    found.backward()
    assert mean.grad is None


def test_cross_correlation_loss_ignores_the_scale_of_logits():
    rng = np.random.default_rng(1)
    z, mean = torch.tensor(rng.normal(size=(2, 9, 3))).float()
    moved = 5 * z + torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(
        cross_correlation_loss(moved, mean, OFF), cross_correlation_loss(z, mean, OFF)
    )
    # Two anticorrelated classes that agree with the mean have no loss.
    line = torch.stack([z[:, 0], -z[:, 0]], 1)
    assert cross_correlation_loss(line, line, 1.0).item() == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("samples", [1, 5])
def test_equal_logits_have_finite_gradients(samples):
    z = torch.ones(samples, 3, requires_grad=True)
    cross_correlation_loss(z, torch.zeros(samples, 3), OFF).backward()
    assert z.grad.isfinite().all()


# Gradients


def test_consensus_has_gradients_only_for_the_student(tmp_path):
    client = opened(fccl(), tmp_path)
    scores = torch.rand(8, 10, generator=torch.Generator().manual_seed(0)).requires_grad_()
    consensus = Consensus(client.public.x[:8], scores)
    client.consensus_loss(consensus, consensus.x, consensus.numbers()).backward()
    assert scores.grad is None
    assert all(p.grad.abs().sum() > 0 for p in client.network.parameters())
    for kind in ("pretrained", "previous"):
        assert all(p.grad is None for p in client.models[kind].parameters())


@pytest.mark.parametrize("kind", ["pretrained", "previous"])
def test_teachers_have_no_gradients_and_both_change_the_student(tmp_path, kind):
    server = Server(fccl(**OWN), tmp_path)
    learn(server, 1)
    client = clients(server)["client-0"]
    objective = client.own_loss()
    assert isinstance(objective, DualObjective)
    usual = objective(client.x, client.y)
    usual.backward()
    for teacher in ("pretrained", "previous"):
        assert all(p.grad is None for p in client.models[teacher].parameters())
        assert not client.models[teacher].training
    assert all(p.grad is not None for p in client.network.parameters())
    with torch.no_grad():
        for parameter in client.models[kind].parameters():
            parameter.mul_(0.5)
    assert objective(client.x, client.y) > usual + 1e-4


def test_label_space_of_its_own(tmp_path):
    """Labels and teachers give no gradient to outputs for other classes, unlike the consensus."""
    config = fccl(**{**SPACES, "clients": 4})
    server = Server(config, tmp_path)
    before = {n: state_of(c.setup()["private"]) for n, c in clients(server).items()}
    learn(server, 1)
    for name, client in clients(server).items():
        assert ((moved_outputs(client, before[name]) > 0) == inside_of(client)).all()
        client.network.zero_grad()
        client.own_loss()(client.x, client.y).backward()
        head = [*client.network.parameters()][-1].grad
        assert ((head != 0).numpy() == inside_of(client)).all()
        before[name] = state_of(client.network)
    learn(server, 2)
    for name, client in clients(server).items():
        assert (moved_outputs(client, before[name]) > 0).all()


# State and messages


def test_first_round_of_a_client_is_pretraining(tmp_path):
    """A client that starts in round 3 does not learn from the consensus first."""
    client, learned = opened(fccl(), tmp_path), []
    client.train_epochs = lambda *given, **options: learned.append(number)
    rows = np.arange(10, dtype=np.uint8)
    logits = np.random.default_rng(0).normal(size=(10, 10)).astype(np.float32)
    for number in (3, 4):
        fitted(client, number, Knowledge({"asked": rows, "rows": rows, "logits": logits}))
        teachers = [state_of(client.models[kind]) for kind in ("pretrained", "previous")]
        assert same(teachers[1], state_of(client.network))
        assert same(*teachers) == (number == 3)
    assert learned == [4]


def test_teachers_are_restored_from_disk(tmp_path):
    server = Server(fccl(), tmp_path)
    for number in (1, 2):
        server.play(number)
    client = clients(server)["client-1"]
    saved = {kind: state_of(model) for kind, model in client.models.items()}
    assert not same(saved["pretrained"], saved["previous"])
    for model in client.models.values():
        for parameter in model.parameters():
            parameter.data.zero_()
    client.state.begin_round()
    client.state.restore(json.loads((tmp_path / "run.json").read_text())["run"], before=3)
    for kind, state in saved.items():
        assert same(state_of(client.models[kind]), state)


def test_only_logits_of_public_samples_are_sent(tmp_path):
    server = Server(fccl(models=["mlp", "cnn2"]), tmp_path)
    for number in (1, 2):
        instruction = instruction_of(server.instruct(number)[0])
        agreed = {"logits", "rows"} if number > 1 else set()
        assert set(instruction.tensors) == {"asked"} | agreed
        assert not instruction.scalars
        for tensors in learn(server, number).values():
            assert set(tensors) == {"logits"}


def test_private_run_protects_the_loss_with_teachers(tmp_path):
    config = fccl(**{"privacy.epsilon": 8.0, "clients": 2, "rounds": 3})
    assert run(config, tmp_path)["rounds"] == 3


@pytest.mark.parametrize("task", ["regression", "multi-label"])
def test_other_tasks_raise(task):
    with pytest.raises(SettingsError, match="compare classes"):
        resolve({"method": "fccl", "data.task": task, "data.dataset": "diabetes"})
