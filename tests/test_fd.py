"""FD against a slow transcription of its Algorithm 1, its messages, and its state."""

import numpy as np
import pytest
import torch
from federation import Server, small
from hypothesis import given
from hypothesis import strategies as st
from rounds import (
    PLAIN,
    SPACES,
    altered,
    assert_close,
    assert_only_rows_per_class,
    clients,
    descend,
    fitted,
    inside_of,
    instruction_of,
    learn,
    log_softmax,
    moved_outputs,
    normal,
    of_classes,
    opened,
    reply_from,
    reply_of,
    softmax,
    state_of,
)

from fedhet.algorithms.classwise import (
    Teacher,
    class_cross_entropy,
    means_of_others,
    nearest_distributions,
    sum_by_class,
)
from fedhet.wire.knowledge import Knowledge


def fd(**changes):
    return small("fd", **{"clients": 3, **changes})


# The server: "Global ensembling phase"


def global_ensembling(replies, client):
    """Compute lines 10 to 15 for one device, label by label and device by device."""
    found = {}
    for label in sorted({int(c) for reply in replies.values() for c in reply["classes"]}):
        total, devices = 0.0, 0
        for name, reply in replies.items():
            rows = dict(zip(reply["classes"].tolist(), reply["probabilities"], strict=True))
            if name != client and label in rows:
                total = total + rows[label].astype(np.float64)
                devices += 1
        if devices:
            found[label] = total / devices
    return found


def test_clients_receive_the_mean_of_other_clients(tmp_path):
    """Use the latest reply of each client.

    Two of four clients reply in a round, and clients lack classes.
    """
    server = Server(fd(clients=4, fraction=0.5, alpha=0.3, models="mlp"), tmp_path)
    latest = {}
    for number in (1, 2, 3):
        replies = learn(server, number)
        latest |= replies
        taught = [len(global_ensembling(latest, name)) for name in replies]
        assert server.flower.state.record.method == {
            "classes_covered": len({c for r in latest.values() for c in r["classes"].tolist()}),
            "classes_taught": np.mean(taught),
        }
    assert len(latest) > 2
    for name, member in server.strategy.members.items():
        sent = server.strategy.instruct(4, member.info).tensors
        expected = global_ensembling(latest, name)
        assert sent["classes"].tolist() == list(expected)
        np.testing.assert_allclose(
            sent["probabilities"], np.array(list(expected.values())), rtol=1e-5, atol=1e-7
        )


def test_two_clients_receive_each_other(tmp_path):
    server = Server(fd(clients=2, models="mlp"), tmp_path)
    replies = learn(server, 1)
    for instructions in server.instruct(2):
        (other,) = [reply for name, reply in replies.items() if name != instructions[0].name]
        sent = instruction_of(instructions).tensors
        assert sent["classes"].tolist() == other["classes"].tolist()
        np.testing.assert_allclose(sent["probabilities"], other["probabilities"], atol=1e-7)


def one_hot(*classes):
    return np.eye(10)[list(classes)]


def test_class_of_one_client_is_not_sent_back(tmp_path):
    server = Server(fd(), tmp_path)
    replies = [
        reply_from(server, "client-0", of_classes([1, 2], probabilities=one_hot(1, 2))),
        reply_from(server, "client-1", of_classes([1, 4], probabilities=one_hot(3, 4))),
    ]
    figures = server.strategy.aggregate(1, replies)
    assert figures == {"classes_covered": 3.0, "classes_taught": 2.0}
    sent = {
        instructions[0].name: instruction_of(instructions).tensors
        for instructions in server.instruct(2)
    }
    assert {name: found["classes"].tolist() for name, found in sent.items()} == {
        "client-0": [1, 4], "client-1": [1, 2], "client-2": [1, 2, 4],
    }  # fmt: skip
    assert (sent["client-0"]["probabilities"] == one_hot(3, 4)).all()
    assert (sent["client-1"]["probabilities"] == one_hot(1, 2)).all()
    half = (one_hot(1) + one_hot(3)) / 2
    assert (sent["client-2"]["probabilities"] == np.vstack([half, one_hot(2, 4)])).all()


def test_departed_client_is_forgotten(tmp_path):
    server = Server(fd(models="mlp"), tmp_path)
    replies = learn(server, 1)
    server.strategy.forget("client-1")
    server.strategy.forget("nobody")
    left = {name: reply for name, reply in replies.items() if name != "client-1"}
    for instructions in server.instruct(2):
        expected = global_ensembling(left, instructions[0].name)
        sent = instruction_of(instructions).tensors
        assert sent["classes"].tolist() == list(expected)
    for name in replies:
        server.strategy.forget(name)
    assert not instruction_of(server.instruct(3)[0]).tensors
    assert not server.strategy.state_dict()


PARTS = st.lists(
    st.dictionaries(st.integers(0, 5), st.integers(0, 2**31), min_size=0, max_size=6),
    min_size=1,
    max_size=6,
)


@given(PARTS)
def test_mean_excludes_the_departed_client(clients):
    """The result holds for any assignment of classes, and each vector is again a distribution."""
    parts = [
        (
            np.array(sorted(own), np.int64),
            np.array(
                [np.random.default_rng(own[c]).dirichlet(np.full(4, 0.1)) for c in sorted(own)]
            ).reshape(-1, 4).astype(np.float32),
        )
        for own in clients
    ]  # fmt: skip
    totals = sum_by_class(parts, 4)
    for k, part in enumerate(parts):
        classes, means = means_of_others(totals, *part)
        others = [other for j, other in enumerate(parts) if j != k]
        assert classes.tolist() == sorted({int(c) for own, _ in others for c in own})
        assert (means >= 0).all()
        np.testing.assert_allclose(means.sum(1), 1, rtol=1e-6)
        for row, c in enumerate(classes):
            has = [vectors[own.tolist().index(c)] for own, vectors in others if c in own]
            np.testing.assert_allclose(means[row], np.mean(has, axis=0), atol=1e-6)


def projected(vector):
    """Return the shift with which the positive parts sum to 1, by bisection."""
    low, high = min(vector) - 1, max(vector)
    for _ in range(200):
        middle = (low + high) / 2
        if sum(max(value - middle, 0) for value in vector) > 1:
            low = middle
        else:
            high = middle
    return [max(value - low, 0) for value in vector]


@given(st.integers(0, 2**31), st.integers(1, 6), st.sampled_from([1e-6, 0.3, 50.0]))
def test_invalid_distribution_is_projected(seed, width, size):
    vectors = size * np.random.default_rng(seed).normal(size=(5, width))
    found = nearest_distributions(vectors)
    assert (found >= 0).all()
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-5)
    for row, vector in zip(found, vectors, strict=True):
        np.testing.assert_allclose(row, projected(vector), atol=1e-5)


def test_valid_distribution_is_unchanged():
    rows = np.array([[0.2, 0.8, 0.0], [0.0, 0.99999, 0.0]])
    assert (nearest_distributions(rows) == rows.astype(np.float32)).all()
    assert nearest_distributions(np.zeros((1, 4))).tolist() == [[0.25] * 4]
    assert nearest_distributions(np.zeros((0, 3))).shape == (0, 3)


# The client: "Local training phase"


def local_training(client, knowledge, gamma):
    """Lines 3 to 8 with all data as one batch: gradient descent, and the mean of F by label."""
    x, y = client.x.double(), client.y.tolist()
    taught = dict(zip(*knowledge.tensors.values(), strict=True))
    total, count = {}, {}

    def mean_loss(model):
        outputs = torch.exp(log_softmax(model(x)))
        loss = 0.0
        for n, label in enumerate(y):
            loss = loss - torch.log(outputs[n, label])
            if label in taught:
                teacher = torch.tensor(taught[label]).double()
                loss = loss - gamma * (teacher * torch.log(outputs[n])).sum()
            total[label] = total.get(label, 0.0) + outputs[n].detach().numpy()
            count[label] = count.get(label, 0) + 1
        return loss / len(y)

    model = descend(client.network, mean_loss)
    return model, {label: total[label] / count[label] for label in sorted(total)}


def test_round_of_a_client_equals_the_local_training_phase(tmp_path):
    """Train for three epochs.

    Samples of a class without a teacher contribute only cross-entropy.
    """
    chosen = {"fd.gamma": 0.7, "models": "mlp2", "max_samples": 150}
    client = opened(fd(**chosen, **PLAIN), tmp_path)
    knowledge = of_classes([0, 1, 2, 4], probabilities=softmax(2 * normal(0, 4, 10)))
    assert len(set(client.y.tolist()) - {0, 1, 2, 4}) > 0
    model, means = local_training(client, knowledge, 0.7)
    reply = fitted(client, 1, knowledge)
    assert_close(client.network, model)
    assert reply["classes"].tolist() == list(means)
    np.testing.assert_allclose(
        reply["probabilities"], np.array(list(means.values())), rtol=1e-4, atol=1e-6
    )


def test_regularizer_has_gradients_only_for_the_student():
    """Its gradient is F minus the teacher's F, and 0 for a class without a teacher."""
    rng = np.random.default_rng(1)
    logits = torch.tensor(rng.normal(size=(6, 4)), dtype=torch.float32, requires_grad=True)
    probabilities = softmax(rng.normal(size=(2, 4))).astype(np.float32)
    teacher = Teacher.from_tensors(
        np.array([0, 2]), np.log(probabilities), np.log(probabilities), 4, torch.device("cpu")
    )
    labels = torch.tensor([0, 1, 2, 2, 3, 0])
    loss = class_cross_entropy(logits, labels, teacher)
    own = softmax(logits.detach().double().numpy())
    for n, label in enumerate(labels.tolist()):
        row = {0: 0, 2: 1}.get(label)
        expected = 0.0 if row is None else -(probabilities[row] * np.log(own[n])).sum()
        assert loss[n].item() == pytest.approx(expected, rel=1e-5)
    loss.sum().backward()
    for n, label in enumerate(labels.tolist()):
        row = {0: 0, 2: 1}.get(label)
        expected = np.zeros(4) if row is None else own[n] - probabilities[row]
        np.testing.assert_allclose(logits.grad[n], expected, atol=1e-6)
    assert not teacher.log_probabilities.requires_grad


def test_zero_probability_has_a_finite_loss(tmp_path):
    """Its logarithm must not be minus infinity, because the product with 0 would be NaN."""
    client = opened(fd(models="mlp"), tmp_path)
    sure = Knowledge({"classes": np.array([3]), "probabilities": one_hot(3).astype(np.float32)})
    reply = fitted(client, 1, sure)
    assert np.isfinite(reply["probabilities"]).all()
    assert np.isfinite(client.loss)


def test_label_space_of_its_own(tmp_path):
    """Outputs for other classes get no gradient from the regularizer either, and are sent as 0."""
    server = Server(fd(models="mlp", **SPACES, **{"fd.gamma": 3.0}), tmp_path)
    learn(server, 1)
    start = {name: state_of(client.network) for name, client in clients(server).items()}
    instructions = {each[0].name: instruction_of(each) for each in server.instruct(2)}
    replies = learn(server, 2)
    for name, client in clients(server).items():
        inside, moved = inside_of(client), moved_outputs(client, start[name])
        assert ((moved > 0) == inside).all()
        assert (replies[name]["probabilities"][:, ~inside] == 0).all()
        np.testing.assert_allclose(replies[name]["probabilities"].sum(1), 1, rtol=1e-5)
        teacher = client.read_teacher(instructions[name])
        rows = dict(zip(*instructions[name].tensors.values(), strict=True))
        for row, j in enumerate(client.space.tolist()):
            assert bool(teacher.known[row]) == (j in rows)
            if j in rows:
                expected = rows[j][inside] / rows[j][inside].sum()
                found = teacher.log_probabilities[row].exp()
                np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-9)


def test_only_class_probabilities_are_sent(tmp_path):
    assert_only_rows_per_class(fd(models=["mlp", "cnn2", "cnn3"]), tmp_path, "probabilities")


@pytest.mark.parametrize("average", ["median", "filter"])
def test_robust_average_returns_distributions(tmp_path, average):
    """One of five clients permutes its classes; the other clients' averages hardly change."""
    config = fd(clients=5, models="mlp", alpha=100.0, **{"defense.average": average})
    server = Server(config, tmp_path)
    instructions = server.instruct(1)
    replies = server.train(instructions)

    def turn(tensors):
        tensors["probabilities"] = np.roll(one_hot(*tensors["classes"]), 1, 1).astype(np.float32)

    malicious = [(p, altered(r, turn) if p.name == "client-1" else r) for p, r in replies]
    server.aggregate(1, malicious)
    honest = {p.name: reply_of(r).tensors for p, r in replies if p.name != "client-1"}
    sent = server.strategy.instruct(2, server.strategy.members["client-0"].info).tensors
    np.testing.assert_allclose(sent["probabilities"].sum(1), 1, rtol=1e-5)
    for c, row in zip(sent["classes"].tolist(), sent["probabilities"], strict=True):
        has = [r["probabilities"][r["classes"].tolist().index(c)] for r in honest.values()]
        assert abs(row - np.mean(has, axis=0)).max() < 0.2
