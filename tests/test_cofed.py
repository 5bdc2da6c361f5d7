"""CoFED: messages, training data, state, and metrics."""

import re
from dataclasses import replace

import numpy as np
import pytest
import rounds
import torch
from federation import Server, records, run, small
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from rounds import instruction_of, reply_of
from torch.nn import functional as F

from fedhet import models
from fedhet.base.errors import KnowledgeError, SettingsError
from fedhet.config.resolve import resolve, resolve_flower
from fedhet.config.sources import (
    parse_pairs,
    preset_names,
    read_preset,
    read_toml,
    to_flower,
)
from fedhet.learning.training import batches
from fedhet.methods.registry import find_method
from fedhet.report import load_run
from fedhet.report.tables import relative_line
from fedhet.strategies.cofed import CofedStrategy
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Knowledge, decode, encode

TASKS = {
    "partition": "superclasses",
    "superclasses": [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"], ["8", "9"]],
    "label-space": [2, 3],
    "subclasses": 1,
    "samples-per-class": 15,
    "public-fraction": 0.4,
    "max-samples": 700,
    "models": ["mlp", "sk-tree"],
}


def cofed(**changes):
    return small("cofed", **{"rounds": 10, **TASKS, **changes})


def opened(config, directory):
    return rounds.opened(config, directory, partition=0)


def first_round(config, directory):
    server = Server(config, directory)
    _, replies = server.play(1)
    server.close(1)
    return server, replies


# --- sent fields ------------------------------------------------------------------------------


def test_upload_is_one_small_integer_per_sample_and_the_label_space(tmp_path):
    server, replies = first_round(cofed(), tmp_path / "run")
    public = len(server.strategy.public_set(labeled=False))
    assert public == 280
    for _, result in replies:
        knowledge = reply_of(result)
        assert set(knowledge.tensors) == {"predictions", "space"}
        assert not knowledge.scalars
        assert knowledge.tensors["predictions"].dtype == np.uint8
        assert knowledge.tensors["predictions"].shape == (public,)
        assert set(knowledge.tensors["predictions"]) <= set(knowledge.tensors["space"])
        assert len(knowledge.tensors["space"]) in (2, 3)
        size = sum(len(part) for part in result.parameters.tensors)
        assert size < public + 600  # three .npy headers and the manifest


def test_last_round_sends_no_labels(tmp_path):
    server, _ = first_round(cofed(), tmp_path / "run")
    instructions = server.instruct(2)
    assert all(instruction_of(each).scalars == {"predict": False} for each in instructions)
    for _, result in server.train(instructions):
        assert reply_of(result) == Knowledge()


def vote_by_hand(votes, alpha):
    """Apply Algorithm 1 and Eq. 19 to the messages that were sent."""
    instances = len(votes[0][0])
    sets = {c: set() for _, space in votes for c in space}
    for index in range(instances):
        for c in sets:
            total = sum(c in space for _, space in votes)
            if sum(said[index] == c for said, _ in votes) / total > alpha:
                sets[c].add(index)
    return sets


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6])
def test_clients_receive_only_their_classes(tmp_path, alpha):
    server, replies = first_round(cofed(**{"cofed.threshold": alpha}), tmp_path / "run")
    votes = {
        proxy.name: [reply_of(result).tensors[k].tolist() for k in ("predictions", "space")]
        for proxy, result in replies
    }
    sets = vote_by_hand(list(votes.values()), alpha)
    for proxy, ins in server.instruct(2):
        labels = instruction_of((proxy, ins)).tensors["labels"]
        assert labels.dtype == np.uint8
        for index, label in enumerate(labels.tolist()):
            mine = [c for c in votes[proxy.name][1] if index in sets[c]]
            assert label == (mine[0] if len(mine) == 1 else 5)
    figures = records(tmp_path / "run")[0]["method"]
    assert figures["pseudolabels"] == sum(map(len, sets.values()))


def reply(server, proxy, tensors):
    envelope, _ = decode(parameters_to_ndarrays(server.asked[proxy.name]), "test")
    arrays = encode(replace(envelope, sender=proxy.name), Knowledge(tensors))
    measures = {"seconds.train": 0.0, "seconds.evaluate": 0.0, "memory": 1.0}
    return FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 1, measures)


def uint8(*values):
    return np.array(values, np.uint8)


GOOD = np.zeros(280, np.uint8)


@pytest.mark.parametrize(
    ("tensors", "fault"),
    [
        ({}, "predictions: missing"),
        ({"predictions": GOOD}, "space: missing"),
        ({"predictions": GOOD, "space": uint8()}, "must be in the client's label space, got 0"),
        ({"predictions": GOOD, "space": uint8(1, 2)}, "must be in the client's label space, got 0"),
        ({"predictions": GOOD, "space": uint8(0, 0)}, "unique, got 0 more than once"),
        ({"predictions": GOOD, "space": uint8(0, 5)}, "must be from 0 to 4, got 5"),
        ({"predictions": GOOD + 7, "space": uint8(0)}, "must be from 0 to 4, got 7"),
        ({"predictions": GOOD[:9], "space": uint8(0)}, r"expected .* N = 280, got shape \[9\]"),
        ({"predictions": GOOD.astype(np.int64), "space": uint8(0)}, "dtype uint8, got int64"),
    ],
)
def test_invalid_vote_is_dropped(tmp_path, tensors, fault):
    server = Server(cofed(), tmp_path / "run")
    instructions = server.instruct(1)
    server.asked = {proxy.name: ins.parameters for proxy, ins in instructions}
    good = {"predictions": GOOD, "space": uint8(0, 1)}
    replies = [(instructions[0][0], reply(server, instructions[0][0], tensors))]
    replies += [(proxy, reply(server, proxy, good)) for proxy, _ in instructions[1:]]
    server.aggregate(1, replies)
    server.close(1)
    record = records(tmp_path / "run")[0]
    assert list(record["failed"]) == [instructions[0][0].name]
    assert re.search(fault, record["failed"][instructions[0][0].name])
    assert set(server.strategy.votes) == {proxy.name for proxy, _ in instructions[1:]}


def test_credibility_by_samples_weights_votes(tmp_path):
    equal, _ = first_round(cofed(), tmp_path / "equal")
    by_samples, _ = first_round(
        cofed(**{"cofed.credibility": "samples", "label-space": [1, 3]}), tmp_path / "samples"
    )
    assert {vote.weight for vote in equal.strategy.votes.values()} == {1.0}
    samples = {name: m.info.samples for name, m in by_samples.strategy.members.items()}
    assert {name: v.weight for name, v in by_samples.strategy.votes.items()} == samples
    assert len(set(samples.values())) > 1


def test_given_weights_decide_the_vote(tmp_path):
    weights = {"client-0": 7.0, "client-2": 0.25, "client-3": 0.0}
    server, replies = first_round(
        cofed(**{"cofed.credibility": weights, "cofed.threshold": 0.6}), tmp_path / "run"
    )
    said_by = {proxy.name: reply_of(result).tensors for proxy, result in replies}
    weight = {name: weights.get(name, 1.0) for name in said_by}
    assert weight["client-1"] == 1.0
    differs = False
    for c in range(5):
        total = sum(w for name, w in weight.items() if c in said_by[name]["space"])
        holders = sum(c in tensors["space"] for tensors in said_by.values())
        for index in range(280):
            yes = [name for name in said_by if said_by[name]["predictions"][index] == c]
            expected = total > 0 and sum(weight[name] for name in yes) / total > 0.6
            assert server.strategy.pseudolabeled[c, index] == expected
            differs |= expected != (holders > 0 and len(yes) / holders > 0.6)
    assert differs, "equal weights would have done as well"
    again = Server(server.log.config, tmp_path / "again")
    again.strategy.load_state_dict(server.strategy.state_dict())
    assert np.array_equal(again.strategy.pseudolabeled, server.strategy.pseudolabeled)


@pytest.mark.parametrize(
    "text",
    ["sample", "", "client-0", "client-0=", "client-0=x", "client-0=-1", "client-0=nan",
     "client-0=inf", "../x=1", "client-0=1,"],
)  # fmt: skip
def test_invalid_credibility_raises(text):
    given = parse_pairs([f"cofed.credibility={text}"])
    with pytest.raises(SettingsError, match=r"equal.*samples"):
        resolve({"method": "cofed", **given})


def test_weights_by_name_are_parsed(tmp_path):
    given = parse_pairs(["cofed.credibility= site-a = 2, site-b=0.5"])
    assert given == {"cofed.credibility": {"site-a": 2, "site-b": 0.5}}
    config = resolve({"method": "cofed", **given})
    assert config.method_settings.credibility == {"site-a": 2.0, "site-b": 0.5}
    (tmp_path / "mine.toml").write_text(config.to_toml())
    assert resolve(read_toml(tmp_path / "mine.toml")) == config
    assert hash(resolve(to_flower(config.flat()))) == hash(config)
    with pytest.raises(SettingsError, match="client-0"):
        parse_pairs(["cofed.credibility=client-0=1,client-0=2"])


def test_weight_of_an_unknown_client_raises(tmp_path):
    config = cofed(**{"cofed.credibility": {"client-1": 2, "clint-3": 5}})
    with pytest.raises(SettingsError, match=r"clint-3.*client-3"):
        Server(config, tmp_path / "run")


def test_weight_of_an_absent_client_is_noted(tmp_path, monkeypatch):
    server = Server(cofed(**{"cofed.credibility": {"client-3": 5}}), tmp_path / "run")
    notices = []
    monkeypatch.setattr(server.log, "notice", notices.append)
    del server.strategy.members["client-3"]
    server.strategy.init()
    assert notices == ["cofed.credibility: client 'client-3' has not joined yet"]
    assert server.strategy.weights == {"client-3": 5.0}


# --- abstentions ----------------------------------------------------------------------------


def two_best_by_hand(model, client):
    """Return the best class of each public instance, and its lead over the second-best class."""
    space = client.space.tolist()
    with torch.no_grad():
        logits = model.eval()(client.public)[:, space].double().numpy()
    shares = np.exp(logits - logits.max(1, keepdims=True))
    shares /= shares.sum(1, keepdims=True)
    ahead = [sorted(row)[-1] - sorted(row)[-2] for row in shares.tolist()]
    return [space[k] for k in shares.argmax(1)], np.array(ahead)


def test_network_abstains_if_its_two_best_classes_are_close(tmp_path):
    client = opened(cofed(models="mlp", **{"cofed.margin": 0.3, "local-epochs": 15}), tmp_path)
    sent = client.train(1, Knowledge(scalars={"predict": True})).tensors["predictions"]
    best, ahead = two_best_by_hand(client.models["private"], client)
    clear = np.abs(ahead - 0.3) > 1e-4
    expected = np.where(ahead > 0.3, best, 5)
    assert clear.sum() > 270
    assert sent[clear].tolist() == expected[clear].tolist()
    assert 20 < (sent == 5).sum() < 260, "all or none abstain"
    assert sent.dtype == np.uint8
    client.settings = client.settings.model_copy(update={"margin": 0.0})
    assert client._predictions().tensors["predictions"].tolist() == best


def test_tree_abstains_by_probabilities_and_svm_never(tmp_path):
    from sklearn.tree import DecisionTreeClassifier

    margin = {"cofed.margin": 0.9}
    client = opened(cofed(models="sk-svm", **margin), tmp_path)
    sent = client.train(1, Knowledge(scalars={"predict": True})).tensors["predictions"]
    assert 5 not in sent
    stump = DecisionTreeClassifier(max_depth=1, random_state=0)
    rows = client.public.flatten(1).numpy()
    noisy = client.y.numpy().copy()
    noisy[::2] = client.space[0]
    stump.fit(client.x.flatten(1).numpy(), noisy)
    client.models["private"]._fitted = stump
    ahead = [sorted(p)[-1] - sorted(p)[-2] for p in stump.predict_proba(rows)]
    sent = client._predictions().tensors["predictions"]
    best = stump.predict(rows)
    assert sent.tolist() == [b if a > 0.9 else 5 for a, b in zip(ahead, best, strict=True)]
    assert (sent == 5).any()


def test_federation_with_abstentions_equals_algorithm_1(tmp_path):
    config = cofed(**{"cofed.margin": 0.3, "cofed.threshold": 0.3, "models": "mlp"})
    server, replies = first_round(config, tmp_path / "run")
    votes = [
        [reply_of(result).tensors[k].tolist() for k in ("predictions", "space")]
        for _, result in replies
    ]
    assert any(5 in predictions for predictions, _ in votes)
    sets = vote_by_hand(votes, 0.3)
    for c in range(5):
        assert set(np.flatnonzero(server.strategy.pseudolabeled[c])) == sets.get(c, set())
    figures = records(tmp_path / "run")[0]["method"]
    share = np.mean([np.array(predictions) == 5 for predictions, _ in votes])
    assert figures["abstained"] == pytest.approx(share)


@pytest.mark.parametrize(
    ("margin", "said_", "fault"),
    [(0.0, 5, "must be from 0 to 4, got 5"), (0.3, 6, "must be from 0 to 5, got 6")],
)
def test_abstention_raises_unless_enabled(tmp_path, margin, said_, fault):
    server = Server(cofed(**{"cofed.margin": margin}), tmp_path / "run")
    instructions = server.instruct(1)
    server.asked = {proxy.name: ins.parameters for proxy, ins in instructions}
    vote = {"predictions": GOOD + np.uint8(said_), "space": uint8(0)}
    server.aggregate(1, [(instructions[0][0], reply(server, instructions[0][0], vote))])
    assert fault in server.flower.state.record.failed[instructions[0][0].name]


@pytest.mark.parametrize(
    ("classes", "margin", "dtype"), [(256, 0.0, "uint8"), (255, 0.3, "uint8"), (256, 0.3, "uint16")]
)
def test_abstention_widens_the_type_only_if_needed(classes, margin, dtype):
    strategy = CofedStrategy.__new__(CofedStrategy)
    strategy.settings = CofedStrategy.spec.settings(margin=margin)
    strategy.instances = 1
    method = find_method("cofed")
    sizes = strategy.sizes(ClientInfo("client-0", "mlp", 10, classes, "table", (3,)))
    wanted = {"predictions": np.array([3], dtype), "space": np.array([3], np.uint8)}
    method.spec.replies.check("client-0", wanted, {}, sizes)
    other = {**wanted, "predictions": np.array([3], "uint16" if dtype == "uint8" else "uint8")}
    with pytest.raises(KnowledgeError, match=f"dtype {dtype}"):
        method.spec.replies.check("client-0", other, {}, sizes)


# --- what a client does ---------------------------------------------------------------------


ASSIGNED = {
    "training.optimizer": ["adam", "sgd"],
    "training.lr": [0.002, 0.05],
    "training.batch-size": [16, 8],
    "training.local-epochs": [3, 2],
}
SITES = {
    # Clients 0 and 1 are assigned the first and the second values; the last names its own.
    "first": (0, {}, "adam", 0.002, 16, 3),
    "second": (1, {}, "sgd", 0.05, 8, 2),
    "own": (1, {"optimizer": "adamw", "lr": 0.01, "batch-size": 10, "local-epochs": 4},
            "adamw", 0.01, 10, 4),
}  # fmt: skip


@pytest.mark.parametrize("site", SITES)
def test_local_training_and_update_use_the_client_optimizer(tmp_path, site):
    """Sections 4.5 and 5.2: both trainings use its optimizer, rate, and epochs.

    The first training also uses its batch size.
    """
    index, own_settings, optimizer, lr, size, epochs = SITES[site]
    config = cofed(models="mlp", **ASSIGNED, **{"cofed.update-batch-size": 40})
    client = rounds.opened(config, tmp_path, partition=index, **own_settings)
    make = {
        "adam": lambda p: torch.optim.Adam(p, lr=lr),
        "adamw": lambda p: torch.optim.AdamW(p, lr=lr, weight_decay=0.0),
        "sgd": lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9),
    }[optimizer]
    expected, own = models.build("mlp", (1, 8, 8), 5, seed=0), client.space.tolist()

    def train(x, y, batch, order):
        steps = make(expected.parameters())
        for _ in range(epochs):
            for rows in batches(len(y), batch, order):
                target = torch.tensor([own.index(label) for label in y[rows].tolist()])
                steps.zero_grad()
                F.cross_entropy(expected(x[rows])[:, own], target).backward()
                steps.step()
        for name, tensor in expected.state_dict().items():
            ours = client.models["private"].state_dict()[name]
            torch.testing.assert_close(ours, tensor, rtol=1e-3, atol=1e-4)

    client.train(1, Knowledge(scalars={"predict": True}))
    train(client.x, client.y, size, client.generator(1, "batches"))
    client.state.metadata["participations"] = 1
    labels = np.full(len(client.public), 5, np.uint8)
    labels[:50] = np.resize(client.space.numpy(), 50)
    client.train(2, Knowledge({"labels": labels}, {"predict": False}))
    x = torch.cat([client.x, client.public[:50]])
    y = torch.cat([client.y, torch.from_numpy(labels[:50].astype(np.int64))])
    train(x, y, 40, client.generator(2, "update"))


def test_classical_model_is_fitted_on_local_and_public_data(tmp_path):
    client = opened(cofed(models="sk-tree"), tmp_path)
    client.train(1, Knowledge(scalars={"predict": True}))
    client.state.metadata["participations"] = 1
    labels = np.full(len(client.public), 5, np.uint8)
    labels[:40] = np.resize(client.space.numpy(), 40)
    client.train(2, Knowledge({"labels": labels}, {"predict": False}))
    again = models.build_any("sk-tree", (1, 8, 8), 5, seed=0)
    again.fit(
        torch.cat([client.x, client.public[:40]]),
        torch.cat([client.y, torch.from_numpy(labels[:40].astype(np.int64))]),
    )
    assert torch.equal(
        client.models["private"].predict(client.public), again.predict(client.public)
    )


def test_predictions_stay_in_the_label_space(tmp_path):
    client = opened(cofed(models="mlp"), tmp_path)
    foreign = next(c for c in range(5) if c not in client.space.tolist())
    with torch.no_grad():
        client.models["private"].classifier.bias[foreign] = 1e4
    assert set(client._predictions().tensors["predictions"].tolist()) <= set(client.space.tolist())


def test_public_labels_are_not_read(tmp_path, monkeypatch):
    seen = []
    client = opened(cofed(), tmp_path)
    before = client.public_set

    def watched(*, labeled):
        seen.append(labeled)
        return before(labeled=labeled)

    monkeypatch.setattr(client, "public_set", watched)
    assert len(client.public) == 280
    assert seen == [False]


def test_first_round_is_local_training(tmp_path):
    first = run(cofed(), tmp_path / "cofed")
    alone = run(small("local", **{**TASKS, "rounds": 1}), tmp_path / "local")
    before = first["accuracy"]["common"]["local"]["per_client"]
    assert before == alone["accuracy"]["common"]["private"]["per_client"]


def test_late_client_trains_locally_first(tmp_path):
    server = Server(cofed(), tmp_path / "run")
    instructions = server.instruct(1)
    server.aggregate(1, server.train(instructions[1:]))
    server.close(1)
    late = instructions[0][0].name
    told = {each[0].name: instruction_of(each) for each in server.instruct(2)}
    assert not told[late].tensors
    assert all(told[name].tensors for name in told if name != late)
    server.play(2)
    server.close(2)
    record = records(tmp_path / "run")[-1]
    scores = record["accuracy"]["common"]
    assert scores["private"]["per_client"][late] == scores["local"]["per_client"][late]
    assert record["relative"]["common"]["per_client"][late] == 1


def test_voters_receive_labels(tmp_path):
    run(cofed(fraction=0.5), tmp_path / "run")
    first, last = records(tmp_path / "run")
    assert len(first["asked"]) == 2
    assert first["asked"] == last["asked"]
    assert last["accuracy"]["common"]["private"]["per_client"].keys() == set(first["asked"])
    assert any(ratio != 1 for ratio in last["relative"]["common"]["per_client"].values())


# --- rounds, figures, state -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "rounds", "epochs"),
    [
        ({}, 2, 25),
        ({"cofed.iterations": 4}, 5, 10),
        ({"cofed.iterations": 99}, 100, 1),
        ({"training.local-epochs": 5}, 2, 5),
        ({"training.local-epochs": 7}, 2, 7),
    ],
)
def test_default_epochs_are_those_of_ten_rounds(given, rounds, epochs):
    config = resolve({"method": "cofed", **given})
    assert (config.run.rounds, config.run.training.local_epochs) == (rounds, epochs)
    for again in (resolve(config.flat()), resolve_flower(config.flat())):
        assert again.run.training.local_epochs == epochs


def test_rounds_equal_iterations_plus_one():
    for preset in (name for name in preset_names() if name.startswith("cofed-")):
        assert resolve({**read_preset(preset), "cofed.iterations": 2}).run.rounds == 3


def test_each_iteration_votes_again(tmp_path):
    summary = run(cofed(**{"cofed.iterations": 2}), tmp_path / "run")
    assert summary["rounds"] == 3
    figures = [record["method"] for record in records(tmp_path / "run")]
    assert set(figures[0]) == set(figures[1])
    assert figures[0] != figures[1]
    assert figures[2] == {}


def test_relative_accuracy_is_the_ratio_after_to_before(tmp_path):
    summary = run(cofed(), tmp_path / "run", report=True)
    first, last = records(tmp_path / "run")
    for protocol in ("common", "personal"):
        before = first["accuracy"][protocol]["private"]["per_client"]
        after = last["accuracy"][protocol]["private"]["per_client"]
        assert last["accuracy"][protocol]["local"]["per_client"] == before
        ratios = {name: after[name] / before[name] for name in before if before[name]}
        found = summary["relative"][protocol]
        assert found["per_client"] == pytest.approx(ratios)
        assert found["mean"] == pytest.approx(np.mean(list(ratios.values())))
        assert (found["best"], found["worst"]) == (max(ratios.values()), min(ratios.values()))
    assert set(first["relative"]["common"]["per_client"].values()) == {1.0}
    ratios = summary["relative"]["common"]["per_client"]
    best = max(ratios, key=ratios.get)
    line = relative_line(load_run(tmp_path / "run"))
    assert f"best {ratios[best]:.4f} ({best})" in line
    assert f"worst {min(ratios.values()):.4f} (" in line
    assert (tmp_path / "run" / "figures" / "relative.png").exists()
    assert len(set(summary["relative"]["common"]["per_client"].values())) > 1


@pytest.mark.parametrize("model", ["mlp", "sk-tree", "sk-mlp"])
@pytest.mark.parametrize("method", ["cofed", "local"])
def test_restored_client_is_identical(tmp_path, model, method):
    config = small(method, **{**TASKS, "rounds": 2, "models": model})
    server = Server(config, tmp_path / "run")
    for number in (1, 2):
        server.play(number)
        server.close(number)
    accuracy = records(tmp_path / "run")[-1]["accuracy"]["common"]
    client = opened(config, tmp_path / "run" / "state")
    client.state.restore(server.log.run_name, before=3)
    reached = client.evaluation(Knowledge())
    kinds = {"private", "local"} if method == "cofed" else {"private"}
    assert reached.keys() == {(p, kind) for p in ("common", "personal") for kind in kinds}
    for kind in kinds:
        expected = accuracy[kind]["per_client"][client.info.name]
        assert reached["common", kind].accuracy == expected
    files = list((tmp_path / "run" / "state").rglob("*"))
    suffixes = {path.suffix for path in files if path.is_file() and path.name != "client.json"}
    assert suffixes == {".safetensors", ".npy"}, "models, and counts of predictions"


def test_metrics_of_a_rejected_client_are_ignored(tmp_path):
    server = Server(cofed(), tmp_path / "run")
    replies = server.train(server.instruct(1))

    def without_vote(round, reply, accept=server.strategy.accept):
        odd = reply.client.name == "client-1"
        return accept(round, reply.with_knowledge(Knowledge()) if odd else reply)

    server.strategy.accept = without_vote
    server.aggregate(1, replies)
    state = server.flower.state
    assert state.record.failed == {"client-1": "predictions: missing"}
    assert state.scores.is_outdated("client-1")
    assert not state.scores.is_outdated("client-0")
    assert "client-1" not in state.finish(evaluated=True).loss.per_client
