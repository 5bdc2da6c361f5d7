"""FedProto against slow transcriptions of its equations, its messages, and its state."""

import numpy as np
import pytest
import torch
from federation import Server, small
from rounds import (
    PLAIN,
    assert_only_rows_per_class,
    descend,
    fitted,
    instruction_of,
    learn,
    normal,
    of_classes,
    opened,
)
from torch import nn

from fedhet.algorithms.feature_models import NearestPrototype
from fedhet.runs.measures import Measured
from fedhet.server.reply import Reply
from fedhet.wire.knowledge import Knowledge


def fedproto(**changes):
    return small("fedproto", **{"clients": 3, **changes})


# The server (Eq. 6)


def reference_prototypes(replies, by_samples):
    """Average class by class and client by client."""
    found = {}
    for j in sorted({int(c) for reply in replies for c in reply["classes"]}):
        total, weight = 0.0, 0
        for reply in replies:
            for row, c in enumerate(reply["classes"]):
                if c == j:
                    share = int(reply["counts"][row]) if by_samples else 1
                    total = total + share * reply["features"][row].astype(np.float64)
                    weight += share
        found[j] = total / weight
    return found


@pytest.mark.parametrize("weighting", ["samples", "clients"])
def test_prototypes_are_averaged_over_clients_with_the_class(tmp_path, weighting):
    """Use Dirichlet splits with missing classes, and the latest reply of each client."""
    changes = {"clients": 4, "fraction": 0.5, "alpha": 0.3, "models": "mlp"}
    changes |= {"engine.samples-cap": 10.0}
    server = Server(fedproto(**changes, **{"fedproto.weighting": weighting}), tmp_path)
    latest = {}
    for number in (1, 2, 3):
        latest |= learn(server, number)
    assert len(latest) > 2
    assert len({tuple(reply["classes"]) for reply in latest.values()}) > 1
    expected = reference_prototypes(list(latest.values()), weighting == "samples")
    sent = instruction_of(server.instruct(4)[0]).tensors
    assert sent["classes"].tolist() == list(expected)
    for row, j in enumerate(expected):
        np.testing.assert_allclose(sent["features"][row], expected[j], rtol=1e-4, atol=1e-6)
    plain = reference_prototypes(list(latest.values()), weighting != "samples")
    assert any(not np.allclose(plain[j], expected[j], rtol=1e-3) for j in expected)


def answer(client, classes, counts, value=1.0):
    features = np.full((len(classes), 64), value, np.float32)
    tensors = {"classes": np.array(classes, np.int64), "features": features}
    return client, Knowledge({**tensors, "counts": np.array(counts, np.int64)})


def accepted(server, name, knowledge):
    info = server.strategy.members[name].info
    reply = Reply(info, knowledge, Measured({}))
    return server.strategy.accept(1, reply)


def test_class_counts_are_limited_by_samples(tmp_path):
    server = Server(fedproto(), tmp_path)
    samples = server.strategy.members["client-0"].info.samples
    one = accepted(server, *answer("client-0", [1, 2], [10**9, 10**9], 5.0))
    counts = one.knowledge.tensors["counts"]
    assert counts[0] == counts[1]
    assert 0.9 * samples < counts.sum() <= samples
    other = accepted(server, *answer("client-1", [1], [counts[0]], 1.0))
    assert other.knowledge.tensors["counts"].tolist() == [counts[0]]
    server.strategy.aggregate(1, [one, other])
    np.testing.assert_allclose(
        instruction_of(server.instruct(2)[0]).tensors["features"][:, 0], [3.0, 5.0]
    )


def test_client_without_labels_has_no_prototypes(tmp_path):
    """This can happen with `training.semi`; the other prototypes are averaged without it."""
    server = Server(fedproto(), tmp_path)
    none = accepted(server, *answer("client-0", [], []))
    assert server.strategy.aggregate(1, [none]) == {"classes_covered": 0.0}
    assert instruction_of(server.instruct(2)[0]).tensors["features"].shape == (0, 64)
    some = accepted(server, *answer("client-1", [4], [2]))
    assert server.strategy.aggregate(2, [some]) == {"classes_covered": 1.0}
    assert instruction_of(server.instruct(3)[0]).tensors["classes"].tolist() == [4]


def test_departed_client_is_forgotten(tmp_path):
    server = Server(fedproto(), tmp_path)
    replies = [
        accepted(server, *answer("client-0", [1, 2], [3, 3], 5.0)),
        accepted(server, *answer("client-1", [1], [3], 1.0)),
    ]
    assert server.strategy.aggregate(1, replies) == {"classes_covered": 2.0}
    server.strategy.forget("client-0")
    sent = instruction_of(server.instruct(2)[0]).tensors
    assert sent["classes"].tolist() == [1]
    assert (sent["features"] == 1).all()
    server.strategy.forget("client-1")
    server.strategy.forget("client-2")
    assert not instruction_of(server.instruct(3)[0]).tensors


# The client (Eqs. 3 and 7)


def slow_round(client, teacher, weight):
    """Run gradient descent on CE + weight * mean of (f - prototype)^2."""
    x, y = client.x.double(), client.y.tolist()
    known = dict(zip(teacher["classes"].tolist(), teacher["features"].astype(float), strict=True))

    def mean_loss(model):
        features = model.extractor(x)
        logits = model.classifier(features)
        loss = 0.0
        for n, label in enumerate(y):
            loss = loss + torch.logsumexp(logits[n], 0) - logits[n, label]
            if label in known:
                gap = features[n] - torch.tensor(known[label])
                loss = loss + weight * (gap**2).sum() / len(gap)
        return loss / len(y)

    return descend(client.network, mean_loss)


def test_round_of_a_client_equals_the_local_update(tmp_path):
    """Samples of a class without a prototype contribute only cross-entropy."""
    chosen = {"models": "mlp2", "fedproto.lambda": 0.7, "max_samples": 150, **PLAIN}
    client = opened(fedproto(**chosen), tmp_path)
    knowledge = of_classes([0, 1, 2, 4], features=normal(0, 4, 64))
    assert len(set(client.y.tolist()) - {0, 1, 2, 4}) > 0
    model = slow_round(client, knowledge.tensors, 0.7)
    reply = fitted(client, 1, knowledge)
    for name, value in model.state_dict().items():
        found = client.network.state_dict()[name]
        np.testing.assert_allclose(found, value.numpy(), rtol=1e-4, atol=1e-6)
    features = model.extractor(client.x.double()).detach().numpy()
    labels = client.y.numpy()
    assert reply["classes"].tolist() == sorted(set(labels.tolist()))
    for row, j in enumerate(reply["classes"]):
        np.testing.assert_allclose(
            reply["features"][row], features[labels == j].mean(0), rtol=1e-3, atol=1e-5
        )
        assert reply["counts"][row] == (labels == j).sum()


def test_prototypes_use_evaluation_mode(tmp_path):
    """Prototypes use the weights after training, without dropout."""
    client = opened(fedproto(models="cnn2-dropout"), tmp_path)
    reply = fitted(client, 1, Knowledge())
    features = client.network.eval().extractor(client.x).detach().numpy()
    for row, j in enumerate(reply["classes"]):
        mean = features[client.y.numpy() == j].mean(0)
        np.testing.assert_allclose(reply["features"][row], mean, rtol=1e-4, atol=1e-5)


# The nearest prototype (Eq. 4)


@pytest.mark.parametrize("known", [(0, 1, 2, 3, 4), (1, 3)])
def test_prediction_is_the_nearest_prototype(known):
    rng = np.random.default_rng(0)
    features, prototypes = rng.normal(size=(30, 7)), rng.normal(size=(5, 7))
    mask = torch.tensor([c in known for c in range(5)])
    model = NearestPrototype(nn.Identity(), torch.tensor(prototypes).float(), mask)
    logits = model(torch.tensor(features).float()).numpy()
    for n in range(30):
        squares = {c: sum((features[n] - prototypes[c]) ** 2) for c in known}
        assert logits[n].argmax() == min(squares, key=squares.get)
        for c in range(5):
            if c in known:
                assert logits[n, c] == pytest.approx(-squares[c], rel=1e-4)
            else:
                assert logits[n, c] == -np.inf


def test_distances_are_precise_far_from_zero():
    """Thirty features near 1000 differ only in their last digits."""
    far = torch.full((30, 7), 1000.0)
    far[:, 0] += torch.arange(30) / 100
    model = NearestPrototype(nn.Identity(), far, torch.ones(30, dtype=torch.bool))
    assert model(far).argmax(1).tolist() == list(range(30))
    assert model(far).diagonal().tolist() == [0.0] * 30


def test_both_kinds_are_evaluated(tmp_path):
    client = opened(fedproto(), tmp_path)
    assert list(client.eval_models(Knowledge())) == ["private"]
    knowledge = of_classes([0, 1, 2, 4], features=normal(0, 4, 64))
    judged = client.eval_models(knowledge)
    assert list(judged) == ["private", "prototype"]
    logits = judged["prototype"](client.x[:5])
    features = client.network.extractor(client.x[:5])
    for row, c in enumerate(knowledge.tensors["classes"]):
        gap = features - torch.tensor(knowledge.tensors["features"][row])
        torch.testing.assert_close(logits[:, c], -gap.square().sum(1), rtol=1e-4, atol=1e-3)
    assert torch.isinf(logits[:, [3, 5, 6, 7, 8, 9]]).all()


def test_round_is_evaluated_with_its_prototypes(tmp_path):
    server = Server(fedproto(rounds=2), tmp_path)
    client = server.strategy.members["client-0"].info
    assert server.strategy.eval_instruction(1, client) is None
    learn(server, 1)
    assert server.strategy.eval_instruction(1, client) is server.strategy.instruct(2, client)


# Sent and local tensors


def test_only_prototypes_are_sent(tmp_path):
    config = fedproto(models=["mlp", "cnn2", "cnn3"], **{"fedproto.feature-dim": 32})
    assert_only_rows_per_class(config, tmp_path, "features", width=32, also="counts")
