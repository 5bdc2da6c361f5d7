"""FedGKT against slow transcriptions of both sides, its messages, and rejected messages."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from interruption import Notices
from rounds import (
    PLAIN,
    SPACES,
    assert_close,
    clients,
    cross_entropy,
    descend,
    fitted,
    inside_of,
    moved_outputs,
    opened,
    same,
    state_of,
)

from fedhet.algorithms.distillation import distillation_loss
from fedhet.base.arrays import grouped
from fedhet.base.errors import KnowledgeError, SettingsError
from fedhet.models import build
from fedhet.runs.log import RunLog
from fedhet.server.reply import Reply
from fedhet.wire.knowledge import Knowledge

WIDTH = 12
FULL = {"fedgkt.temperature": 2.0, "fedgkt.alpha": 0.7, "fedgkt.server-epochs": 4}


def gkt(**changes):
    own = {"fedgkt.feature-dim": WIDTH, "fedgkt.server-model": "mlp2"}
    return small("fedgkt", **{"clients": 3, "models": "mlp", "max_samples": 240, **own, **changes})


def learn(server, number):
    """Run a round, and return the checked replies by client, read from disk only once."""
    found, aggregate = {}, server.strategy.aggregate

    def noted(round, replies):
        found.update({r.client.name: r.knowledge.tensors for r in replies})
        return aggregate(round, replies)

    server.strategy.aggregate = noted
    server.play(number)
    server.strategy.aggregate = aggregate
    assert server.flower.state.record.failed == {}
    return found


def instruction(server, name, number=2):
    return server.strategy.instruct(number, server.strategy.members[name].info)


# The algorithm, written out slowly


def divergence(teacher, student, temperature):
    """T^2 times the mean of sum_c p_c log(p_c / q_c), p and q the softmax of logits / T."""
    total = 0
    for a, b in zip(teacher, student, strict=True):
        p = torch.exp(a / temperature) / torch.exp(a / temperature).sum()
        q = torch.exp(b / temperature) / torch.exp(b / temperature).sum()
        total = total + sum(p[c] * torch.log(p[c] / q[c]) for c in range(len(p)))
    return temperature**2 * total / len(teacher)


def descended(model, x, y, teacher, *, epochs, lr=0.1, alpha=0.7, temperature=2.0):
    """Run gradient descent on all data with cross-entropy plus alpha times the divergence."""
    x, teacher = x.double(), None if teacher is None else torch.tensor(teacher).double()

    def loss(model):
        logits = model(x)
        both = 0 if teacher is None else alpha * divergence(teacher, logits, temperature)
        return cross_entropy(logits, y) + both

    return descend(model, loss, epochs, lr)


def test_round_of_a_client_equals_the_local_training(tmp_path):
    """The first round uses only labels, and the second also the server's logits."""
    server = Server(gkt(**PLAIN, **FULL), tmp_path)
    start = {name: c.setup()["private"] for name, c in clients(server).items()}
    assert not instruction(server, "client-1").tensors
    learn(server, 1)
    after = {name: copy.deepcopy(c.network) for name, c in clients(server).items()}
    given = {name: instruction(server, name).tensors["logits"] for name in after}
    replies = learn(server, 2)
    for name, client in clients(server).items():
        x, y = client.x, client.y
        assert_close(after[name], descended(start[name], x, y, None, epochs=3), rtol=2e-4)
        expected = descended(after[name], x, y, given[name], epochs=3)
        assert_close(client.network, expected, rtol=2e-4)
        features, logits = expected.eval().features_and_logits(x.double())
        sent = replies[name]
        np.testing.assert_allclose(sent["features"], features.detach(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(sent["logits"], logits.detach(), rtol=1e-3, atol=1e-5)
        np.testing.assert_array_equal(sent["labels"], y)


def test_server_trains_on_all_features_and_sends_logits_to_each_client(tmp_path):
    server = Server(gkt(**PLAIN, **FULL), tmp_path)
    start = copy.deepcopy(server.strategy.learner.model)
    replies = learn(server, 1)
    names = sorted(replies)
    assert len({len(replies[name]["labels"]) for name in names}) > 1
    x, edge, y = (
        torch.tensor(np.concatenate([replies[name][field] for name in names]).astype(float))
        for field in ("features", "logits", "labels")
    )
    expected = descended(start, x, y.long(), edge.numpy(), epochs=4)
    assert_close(server.strategy.learner.model, expected, rtol=2e-4)
    for name in names:
        with torch.no_grad():
            logits = expected(torch.tensor(replies[name]["features"]).double())
        found = instruction(server, name).tensors["logits"]
        np.testing.assert_allclose(found, logits, rtol=1e-3, atol=1e-5)
    right = np.concatenate([instruction(server, n).tensors["logits"] for n in names]).argmax(1)
    accuracy = server.flower.state.record.method["server_accuracy"]
    assert accuracy == pytest.approx((right == y.numpy()).mean())


@pytest.mark.parametrize(("schedule", "factor"), [("constant", 1.0), ("plateau", 0.5)])
def test_server_uses_the_learning_rate_schedule(tmp_path, schedule, factor):
    """If the loss stops decreasing, the server lowers its learning rate."""
    server = Server(gkt(**PLAIN, **FULL, schedule=schedule), tmp_path)
    learner = server.strategy.learner
    plateau = {"best": 0.1, "waited": 0, "factor": 0.5}
    known = {f"plateau/{name}": np.array(value) for name, value in plateau.items()}
    learner.load_state_dict(learner.state_dict() | known)
    start, replies = copy.deepcopy(learner.model), learn(server, 1)
    x, edge, y = (
        torch.tensor(np.concatenate([replies[n][field] for n in sorted(replies)]).astype(float))
        for field in ("features", "logits", "labels")
    )
    expected = descended(start, x, y.long(), edge.numpy(), epochs=4, lr=0.1 * factor)
    assert_close(learner.model, expected, rtol=2e-4)


def test_two_rounds_with_a_kept_optimizer_equal_one_of_twice_the_epochs(tmp_path):
    """Compare on the same replies with full batches.

    Without the optimizer's state, the results differ.
    """
    models = []
    for number, (epochs, keep) in enumerate(((2, True), (4, True), (2, False))):
        chosen = {**PLAIN, "training.momentum": 0.9, "keep_optimizer": keep}
        server = Server(gkt(**chosen, **{"fedgkt.server-epochs": epochs}), tmp_path / str(number))
        replies = learn(server, 1)
        members = server.strategy.members
        said = [Reply(members[n].info, Knowledge(t), None) for n, t in sorted(replies.items())]
        if epochs == 2:
            server.strategy.aggregate(2, said)
        models.append(state_of(server.strategy.learner.model))
    twice, once, anew = models
    assert all(np.allclose(twice[name], once[name], rtol=1e-4, atol=1e-6) for name in once)
    assert not all(np.allclose(anew[name], once[name], rtol=1e-4, atol=1e-6) for name in once)


def noting(batches):
    def note(module, given):
        if module.training:
            batches.append(given[0].clone())

    return note


def test_samples_keep_their_order_and_images_are_not_augmented(tmp_path):
    """With small batches in random order, the logits still belong to their samples."""
    server = Server(gkt(augment="crop-flip", models="cnn2"), tmp_path)
    learn(server, 1)
    seen = {}
    for name, client in clients(server).items():
        client.network.extractor.register_forward_pre_hook(noting(seen.setdefault(name, [])))
    replies = learn(server, 2)
    for name, client in clients(server).items():
        own = {image.numpy().tobytes() for image in client.x}
        assert len(seen[name]) > 1
        assert all(image.numpy().tobytes() in own for batch in seen[name] for image in batch)
        with torch.no_grad():
            features, logits = client.network.eval().features_and_logits(client.x)
        np.testing.assert_allclose(replies[name]["features"], features, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(replies[name]["logits"], logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_divergence_has_gradients_only_for_the_student(temperature):
    teacher, student = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0))
    teacher.requires_grad_()
    student.requires_grad_()
    loss = distillation_loss(teacher, student, temperature)
    loss.backward()
    assert teacher.grad is None
    assert student.grad.abs().sum() > 0
    expected = divergence(teacher.double(), student.double(), temperature)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_server_round_does_not_change_edge_models(tmp_path):
    server = Server(gkt(), tmp_path)
    instructions = server.instruct(1)
    replies = server.train(instructions)
    before = {proxy.name: state_of(client_of(proxy).network) for proxy, _ in instructions}
    model = state_of(server.strategy.learner.model)
    server.aggregate(1, replies)
    assert not same(model, state_of(server.strategy.learner.model))
    assert all(same(before[p.name], state_of(client_of(p).network)) for p, _ in instructions)


# Sent fields, and evaluation


def test_only_features_logits_and_labels_are_sent(tmp_path):
    server = Server(gkt(models=["mlp", "cnn2"]), tmp_path)
    for number in (1, 2):
        replies = learn(server, number)
        for name, client in clients(server).items():
            tensors = replies[name]
            assert set(tensors) == {"features", "logits", "labels"}
            assert tensors["features"].shape == (len(client.y), WIDTH)
            sent = instruction(server, name)
            assert set(sent.tensors) == {"logits"}
            assert sent.tensors["logits"].shape == (len(client.y), client.info.classes)
            assert not sent.scalars


def test_server_sends_its_current_model(tmp_path):
    server = Server(gkt(), tmp_path)
    info = next(iter(server.strategy.members.values())).info
    for round in (1, 2):
        learn(server, round)
        sent = server.strategy.eval_instruction(round, info)
        assert sent is server.strategy.eval_instruction(round, info)
        assert same(sent.group("server"), state_of(server.strategy.learner.model))


def test_kind_server_is_evaluated_in_each_round(tmp_path):
    summary = run(gkt(rounds=3, models=["mlp", "cnn2"]), tmp_path / "run")
    judged = [set(record["accuracy"]["personal"]) for record in records(tmp_path / "run")]
    assert judged == [{"private", "server"}] * 3
    for protocol in ("personal", "common"):
        assert set(summary["accuracy"][protocol]) == {"private", "server"}
        assert len(summary["accuracy"][protocol]["server"]["per_client"]) == 3


def test_kind_server_combines_edge_extractor_and_server_model(tmp_path):
    server = Server(gkt(), tmp_path)
    learn(server, 1)
    model = server.strategy.learner.model
    for client in clients(server).values():
        knowledge = Knowledge(grouped("server", state_of(model)))
        judged = client.eval_models(knowledge)
        assert list(judged) == ["private", "server"]
        with torch.no_grad():
            expected = model.eval()(client.network.eval().extractor(client.x))
            assert torch.equal(judged["server"].eval()(client.x), expected)
        assert list(client.eval_models(Knowledge())) == ["private"]


# What is refused


@pytest.mark.parametrize(
    ("rows", "fault"), [(rows, f"expected 2 to 30 samples, got {rows}") for rows in (0, 1, 31)]
)
def test_reply_of_too_few_or_too_many_rows_raises(tmp_path, rows, fault):
    strategy = Server(gkt(), tmp_path).strategy
    info = SimpleNamespace(name="client-1", samples=1)  # as after a robust aggregation rule
    strategy.members = {"client-1": SimpleNamespace(info=SimpleNamespace(samples=30))}
    with pytest.raises(KnowledgeError, match=rf"client-1.*labels.*{fault}"):
        strategy.accept(1, reply_of(info, rows))
    for kept in (2, 30):
        reply = reply_of(info, kept)
        assert strategy.accept(1, reply) is reply


def reply_of(info, rows):
    tensors = {
        "features": np.zeros((rows, WIDTH), np.float32),
        "logits": np.zeros((rows, 10), np.float32),
        "labels": np.zeros(rows, np.uint8),
    }
    return Reply(info, Knowledge(tensors), None)


def test_too_many_rows_drop_one_client(tmp_path):
    """The server learns from the other replies; the faulty client gets no logits."""
    server = Server(gkt(), tmp_path)
    instructions = server.instruct(1)
    replies = server.train(instructions)
    member = server.strategy.members["client-1"]
    claimed = SimpleNamespace(**{**vars(member.info), "samples": member.info.samples - 1})
    server.strategy.members["client-1"] = type(member)(claimed, member.proxy)
    server.aggregate(1, replies)
    assert "expected 2 to" in server.flower.state.record.failed["client-1"]
    assert set(server.strategy.logits) == {"client-0", "client-2"}


def test_logits_of_other_rows_raise_on_the_client(tmp_path):
    client = opened(gkt(), tmp_path)
    rows = len(client.y) - 1
    with pytest.raises(AssertionError, match=r"logits.*expected .*got shape"):
        fitted(client, 1, Knowledge({"logits": np.zeros((rows, 10), np.float32)}))


# State


KEEPING = {"keep_optimizer": True, "schedule": "plateau", "patience": 0}


def test_restored_server_continues_identically(tmp_path):
    """The checkpoint restores model, optimizer, learning rate, and every client's logits."""
    changes = {**KEEPING, "lr": 0.05, "fedgkt.server-epochs": 1}
    server = Server(gkt(**changes, rounds=5), tmp_path / "one")
    strategy = server.strategy
    for number in (1, 2):
        replies = learn(server, number)
    said = [Reply(strategy.members[n].info, Knowledge(t), None) for n, t in replies.items()]
    other = Server(gkt(**changes, rounds=5), tmp_path / "two").strategy
    other.load_state_dict(copy.deepcopy(strategy.state_dict()))
    assert same(other.state_dict(), strategy.state_dict())
    for number in (3, 4, 5):
        assert strategy.aggregate(number, said[1:]) == other.aggregate(number, said[1:])
        assert same(other.state_dict(), strategy.state_dict())
    for name in strategy.members:
        info = strategy.members[name].info
        assert same(other.instruct(6, info).tensors, strategy.instruct(6, info).tensors)


def test_client_that_left_has_no_logits(tmp_path):
    server = Server(gkt(), tmp_path)
    learn(server, 1)
    server.strategy.forget("client-1")
    assert not instruction(server, "client-1").tensors
    assert instruction(server, "client-2").tensors
    server.strategy.forget("unknown")


# Label spaces, and runs


def test_label_space_of_its_own(tmp_path):
    """Outputs for other classes get no gradient, and sent values are finite."""
    server = Server(gkt(clients=4, **SPACES), tmp_path)
    for number in (1, 2):
        before = {
            n: state_of(c.network if number > 1 else c.setup()["private"])
            for n, c in clients(server).items()
        }
        replies = learn(server, number)
        for name, client in clients(server).items():
            inside, moved = inside_of(client), moved_outputs(client, before[name])
            assert ((moved > 0) == inside).all()
            logits = replies[name]["logits"]
            assert np.isfinite(logits).all()
            assert (logits[:, inside].min(1) - logits[:, ~inside].max(1) > 29).all()
    judged = client.eval_models(
        Knowledge(grouped("server", state_of(server.strategy.learner.model)))
    )
    for model in judged.values():
        assert torch.isinf(model(client.x[:3])[:, torch.tensor(~inside)]).all()


def test_run_learns(tmp_path):
    chosen = {"rounds": 5, "local_epochs": 3, "max_samples": 500, "fedgkt.feature-dim": 64}
    summary = run(gkt(models=["mlp", "cnn2"], **chosen), tmp_path / "run")
    common = summary["accuracy"]["common"]
    assert common["server"]["mean"] > 0.5
    assert common["server"]["mean"] > common["private"]["mean"] > 0.4
    assert summary["accuracy"]["personal"]["private"]["mean"] > 0.75
    rounds = records(tmp_path / "run")
    assert rounds[-1]["method"]["server_accuracy"] > 0.85


def test_server_model_takes_feature_vectors():
    assert build("mlp2", (WIDTH,), 10, seed=0)(torch.zeros(2, WIDTH)).shape == (2, 10)


def test_server_model_of_images_raises_before_writing(tmp_path):
    config, refusal = (
        gkt(**{"fedgkt.server-model": "cnn2"}),
        "'fedgkt.server-model': expected a model for feature vectors, got 'cnn2'",
    )
    with pytest.raises(SettingsError, match=refusal):
        run(config, tmp_path / "simulated")
    assert not (tmp_path / "simulated").exists()
    with pytest.raises(SettingsError, match=refusal):
        Server(config, tmp_path / "deployed")


def test_run_notes_that_features_are_sent(tmp_path):
    notices = Notices()
    RunLog(small("fedgkt"), tmp_path, workers=1, watchers=[notices]).begin([])
    assert notices.texts == [
        "fedgkt sends the features and the label of every training sample to the server"
    ]
