"""FedHe against slow transcriptions of its losses, its messages, and its state."""

import numpy as np
import pytest
import torch
from federation import Server, small
from rounds import (
    PLAIN,
    SPACES,
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
    same,
    softmax,
    state_of,
)


def fedhe(**changes):
    return small("fedhe", **{"clients": 3, **changes})


# The distance


# The client


def slow_round(client, knowledge, weight, loss):
    """Run gradient descent on CE + weight * distance; return the last epoch's logits."""
    x, y = client.x.double(), client.y.tolist()
    entries = dict(zip(*knowledge.tensors.values(), strict=True))
    seen = []

    def mean_loss(model):
        logits = model(x)
        logs, total = log_softmax(logits), 0.0
        seen.append(logits.detach().numpy())
        for n, label in enumerate(y):
            total = total - logs[n, label]
            if label in entries:
                server = torch.tensor(entries[label]).double()
                if loss == "mse":
                    total = total + weight * ((logits[n] - server) ** 2).mean()
                else:
                    wanted = torch.exp(server) / torch.exp(server).sum()
                    total = total + weight * (wanted * (torch.log(wanted) - logs[n])).sum()
        return total / len(y)

    return descend(client.network, mean_loss), seen[-1]


@pytest.mark.parametrize("loss", ["mse", "kl"])
def test_round_of_a_client_equals_the_algorithm(tmp_path, loss):
    """Samples of a class without an entry contribute only cross-entropy."""
    chosen = {"fedhe.loss": loss, "fedhe.alpha": 0.7, "models": "mlp2", "max_samples": 150}
    client = opened(fedhe(**chosen, **PLAIN), tmp_path)
    knowledge = of_classes([0, 1, 2, 4], logits=2 * normal(0, 4, 10))
    labels = client.y.numpy()
    assert len(set(labels.tolist()) - {0, 1, 2, 4}) > 0
    model, logits = slow_round(client, knowledge, 0.7, loss)
    reply = fitted(client, 1, knowledge)
    for name, value in model.state_dict().items():
        found = client.network.state_dict()[name]
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-6)
    assert reply["classes"].tolist() == sorted(set(labels.tolist()))
    for row, j in enumerate(reply["classes"]):
        mean = logits[labels == j].mean(0)
        np.testing.assert_allclose(reply["logits"][row], mean, rtol=1e-3, atol=1e-5)


def test_fedhe_equals_felo_without_features_and_weights(tmp_path):
    """The logit term is the same, and cnn2 has Felo's feature width. Bit-for-bit equal."""
    changes = {"models": "cnn2", "local_epochs": 2, "clients": 3}
    felo = {"felo.feature-weight": 0.0, "felo.share-weights": False, "felo.alpha": 0.6}
    whole = Server(small("felo", **changes, **felo), tmp_path / "felo")
    ours = {"fedhe.loss": "kl", "fedhe.alpha": 0.6, "fedhe.replies": "latest"}
    logits = Server(fedhe(**changes, **ours), tmp_path / "fedhe")
    for number in (1, 2, 3):
        one, other = learn(logits, number), learn(whole, number)
        for name, reply in one.items():
            assert same(reply, {field: other[name][field] for field in ("classes", "logits")})
    others = clients(whole)
    for name, client in clients(logits).items():
        assert same(state_of(client.network), state_of(others[name].network))


@pytest.mark.parametrize("loss", ["mse", "kl"])
def test_label_space_of_its_own(tmp_path, loss):
    """Outputs for other classes get no gradient, not even from the distance."""
    config = fedhe(models="mlp", **SPACES, **{"fedhe.loss": loss, "fedhe.alpha": 3.0})
    server = Server(config, tmp_path)
    learn(server, 1)
    start = {name: state_of(client.network) for name, client in clients(server).items()}
    knowledge = instruction_of(server.instruct(2)[0])
    learn(server, 2)
    for name, client in clients(server).items():
        inside, moved = inside_of(client), moved_outputs(client, start[name])
        assert ((moved > 0) == inside).all()
        teacher = client.read_teacher(knowledge)
        rows = dict(zip(*knowledge.tensors.values(), strict=True))
        assert teacher.known.all()
        for row, j in enumerate(client.space.tolist()):
            np.testing.assert_array_equal(teacher.features[row], rows[j][inside])
            expected = np.log(softmax(rows[j][inside].astype(float)))
            np.testing.assert_allclose(teacher.log_probabilities[row], expected, rtol=1e-4)


# The server


def reference_average(replies):
    """Average class by class over the clients that have the class, with equal weights."""
    found = {}
    for j in sorted({int(c) for reply in replies for c in reply["classes"]}):
        has = [r["logits"][r["classes"].tolist().index(j)] for r in replies if j in r["classes"]]
        found[j] = sum(row.astype(np.float64) for row in has) / len(has)
    return found


@pytest.mark.parametrize("kept", ["all", "latest"])
def test_server_averages_the_clients_logits(tmp_path, kept):
    """Two of four clients reply in a round.

    The earlier logits of the other clients remain in the mean.
    """
    changes = {"clients": 4, "fraction": 0.5, "data.alpha": 0.3, "models": "mlp"}
    changes["fedhe.replies"] = kept
    server = Server(fedhe(**changes), tmp_path)
    latest, every = {}, {}
    for number in (1, 2, 3):
        replies = learn(server, number)
        assert len(replies) == 2
        latest |= replies
        for name, reply in replies.items():
            every.setdefault(name, []).append(reply)
        assert server.flower.state.record.method == {
            "classes_covered": len({c for r in latest.values() for c in r["classes"].tolist()})
        }
    assert len(latest) > 2
    assert len({tuple(reply["classes"]) for reply in latest.values()}) > 1
    assert max(map(len, every.values())) > 1
    if kept == "all":  # a client's part is the plain mean over its replies
        latest = {
            name: {
                "classes": replies[0]["classes"],
                "logits": np.mean([reply["logits"].astype(float) for reply in replies], axis=0),
            }
            for name, replies in every.items()
        }
    expected, sent = (
        reference_average(list(latest.values())),
        instruction_of(server.instruct(4)[0]).tensors,
    )
    assert sent["classes"].tolist() == list(expected)
    for row, j in enumerate(expected):
        np.testing.assert_allclose(sent["logits"][row], expected[j], rtol=1e-4, atol=1e-6)


def test_departed_client_is_forgotten(tmp_path):
    server = Server(fedhe(models="mlp"), tmp_path)
    replies = learn(server, 1)
    server.strategy.forget("client-1")
    server.strategy.forget("nobody")
    expected = reference_average([replies["client-0"], replies["client-2"]])
    sent = instruction_of(server.instruct(2)[0]).tensors
    assert sent["classes"].tolist() == list(expected)
    for row, j in enumerate(expected):
        np.testing.assert_allclose(sent["logits"][row], expected[j], rtol=1e-4, atol=1e-6)
    for name in replies:
        server.strategy.forget(name)
    assert not instruction_of(server.instruct(3)[0]).tensors
    assert not server.strategy.state_dict()


def test_only_class_logits_are_sent(tmp_path):
    assert_only_rows_per_class(fedhe(models=["mlp", "cnn2", "cnn3"]), tmp_path, "logits")
