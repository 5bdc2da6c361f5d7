"""Felo against Algorithm 1, line by line, transcribed here in plain torch and numpy."""

import numpy as np
import pytest
import torch
from federation import Server, records, run, small
from flwr.common import parameters_to_ndarrays

from fedhet import models
from fedhet.arrays import grouped
from fedhet.client.node import read_node
from fedhet.runs.records import Measured
from fedhet.training import batches
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge, decode
from strategies.base import Reply
from strategies.felo import FeloStrategy


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def opened(tmp_path, **changes):
    config = small(local_epochs=2, models="mlp", **changes)
    node = read_node({"partition-id": 0, "num-partitions": 4}, config.run, str(tmp_path))
    client = config.method.client(config, node)
    client.state.restore("run", before=1)
    return client


def weights(seed):
    state = models.build("mlp", (1, 8, 8), 10, seed=seed, feature_dim=64).state_dict()
    return {name: tensor.numpy() for name, tensor in state.items()}


def class_knowledge(classes=(0, 2, 3, 4, 5, 6, 7, 9)):
    rng = np.random.default_rng(0)
    return {
        "classes": np.array(classes, np.int64),
        "features": rng.normal(size=(len(classes), 64)).astype(np.float32),
        "logits": (2 * rng.normal(size=(len(classes), 10))).astype(np.float32),
    }


def transcription(client, round, start, taught, alpha):
    """Lines 9 to 15: returns the trained weights, and means over the last epoch by class."""
    model = models.build("mlp", (1, 8, 8), 10, seed=client.run.seed, feature_dim=64)
    model.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
    model.train()
    adam = torch.optim.Adam(model.parameters(), lr=client.run.training.lr)
    order = client.generator(round, "batches")
    for _ in range(client.run.training.local_epochs):
        seen = {}
        for index in batches(len(client.y), client.run.training.batch_size, order):
            features, logits = model.features_and_logits(client.x[index])
            losses = []
            for s, p, y in zip(features, logits, client.y[index].tolist(), strict=True):
                loss = -torch.log(torch.softmax(p, 0)[y])
                if taught is not None and y in taught["classes"]:
                    row = taught["classes"].tolist().index(y)
                    mse = torch.mean((s - torch.tensor(taught["features"][row])) ** 2)
                    target = torch.softmax(torch.tensor(taught["logits"][row]), 0)
                    kl = torch.sum(target * (torch.log(target) - torch.log_softmax(p, 0)))
                    loss = loss + alpha * (mse + kl)
                losses.append(loss)
                seen.setdefault(y, []).append((s.detach().numpy(), p.detach().numpy()))
            adam.zero_grad()
            (sum(losses) / len(losses)).backward()
            adam.step()
    means = {
        y: [np.mean(part, axis=0) for part in zip(*rows, strict=True)] for y, rows in seen.items()
    }
    counts = {y: len(rows) for y, rows in seen.items()}
    return model.state_dict(), means, counts


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("averaged", [True, False])
def test_a_client_follows_algorithm_1(tmp_path, alpha, first, averaged):
    client = opened(tmp_path, **{"felo.alpha": alpha})
    own = {n: t.numpy().copy() for n, t in client.models["private"].state_dict().items()}
    if not first:
        client.state.facts["participations"] = 1
    told = class_knowledge()
    start = weights(9) if averaged else own
    message = Knowledge({**told, **(grouped("weights", start) if averaged else {})})
    answer = client.train(3, message)
    trained, means, counts = transcription(client, 3, start, None if first else told, alpha)
    for name, tensor in trained.items():
        ours = client.models["private"].state_dict()[name]
        np.testing.assert_allclose(ours, tensor, rtol=1e-3, atol=2e-4)
        np.testing.assert_array_equal(answer.group("weights")[name], ours)
    assert answer.tensors["classes"].tolist() == sorted(means)
    for row, y in enumerate(answer.tensors["classes"].tolist()):
        np.testing.assert_allclose(
            answer.tensors["features"][row], means[y][0], rtol=1e-2, atol=1e-3
        )
        np.testing.assert_allclose(answer.tensors["logits"][row], means[y][1], rtol=1e-2, atol=1e-3)
        assert answer.tensors["counts"][row] == counts[y]


def said(result):
    return decode(parameters_to_ndarrays(result.parameters), "test")[1].tensors


def expected_average(clients, by_samples):
    """Line 4, over what each client said last."""
    rows = {}
    for part in clients:
        for row, y in enumerate(part["classes"].tolist()):
            rows.setdefault(y, []).append(
                (
                    part["counts"][row] if by_samples else 1,
                    part["features"][row],
                    part["logits"][row],
                )
            )
    return {
        y: [sum(w * part[k] for w, *part in held) / sum(w for w, *_ in held) for k in (0, 1)]
        for y, held in rows.items()
    }


@pytest.mark.parametrize("weighting", ["clients", "samples"])
def test_the_server_averages_what_each_client_said_last(tmp_path, weighting):
    config = small(fraction=0.5, rounds=4, **{"felo.weighting": weighting})
    server = Server(config, tmp_path / "run")
    last = {}
    for number in (1, 2, 3):
        answers = server.answers(server.ask(number))
        assert len(answers) == 2
        last |= {proxy.name: said(result) for proxy, result in answers}
        server.strategy.aggregate_fit(number, answers, [])
    assert len(last) > 2
    _, told = decode(parameters_to_ndarrays(server.ask(4)[0][1].parameters), "test")
    expected = expected_average([last[name] for name in sorted(last)], weighting == "samples")
    assert told.tensors["classes"].tolist() == sorted(expected)
    for row, y in enumerate(told.tensors["classes"].tolist()):
        np.testing.assert_allclose(
            told.tensors["features"][row], expected[y][0], rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            told.tensors["logits"][row], expected[y][1], rtol=1e-4, atol=1e-5
        )


def test_the_first_round_teaches_nothing(tmp_path):
    server = Server(small(), tmp_path / "run")
    for _, ins in server.ask(1):
        _, told = decode(parameters_to_ndarrays(ins.parameters), "test")
        assert not told.tensors


def test_the_run_starts_from_initial_training(tmp_path):
    """In round 1 Felo and local are the same, but for Felo's linear adapter."""
    changes = {"rounds": 1, "models": "cnn2"}  # 64 features by nature: no adapter
    felo = run(small("felo", **changes), tmp_path / "felo")
    local = run(small("local", **changes), tmp_path / "local")
    assert felo["accuracy"] == local["accuracy"]


def test_without_its_terms_and_weights_felo_is_local(tmp_path):
    changes = {"rounds": 3, "models": "cnn2"}
    off = {"felo.alpha": 0.0, "felo.share-weights": False}
    felo = run(small("felo", **changes, **off), tmp_path / "felo")
    local = run(small("local", **changes), tmp_path / "local")
    assert felo["accuracy"] == local["accuracy"]
    assert records(tmp_path / "felo")[-1]["loss"] == records(tmp_path / "local")[-1]["loss"]


@pytest.mark.parametrize(
    ("counts", "samples", "expected"),
    [
        ([3, 9], 12, [3, 9]),
        ([3, 5], 12, [3, 5]),
        ([300, 900], 12, [3, 9]),
        ([1, 10**12], 12, [1, 11]),
        ([10**12, 10**12], 10**6, [500_000, 500_000]),
    ],
)
def test_counts_weigh_no_more_than_the_clients_samples(counts, samples, expected):
    client = ClientInfo("a", "mlp", samples, 3, (4,))
    tensors = {"classes": np.array([0, 2]), "counts": np.array(counts)}
    reply = Reply(client, Knowledge(tensors), Measured({}, None, 0.0, 0.0, 0.0))
    found = FeloStrategy.accept(None, 1, reply).knowledge.tensors
    assert found["counts"].tolist() == expected
    assert found["counts"].dtype == np.int64
    assert found["classes"].tolist() == [0, 2]
