"""Centralized training: one model on all clients' data, equal to `local` for one client."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from federation import Server, client_of, records, run, small
from flwr.common import Context, RecordDict
from rounds import SPACES, cross_entropy, descend, instruction_of, reply_of

from fedhet.base.errors import DataError, SettingsError
from fedhet.client_runtime.node import open_client, read_node
from fedhet.data.partition import labeled_parts
from fedhet.data.store import RunData
from fedhet.deployment.control import submit
from fedhet.methods.central import trainer
from fedhet.models import build
from fedhet.runs.storage import load
from fedhet.server import app as server_app

PUBLIC = {"data.public-fraction": 0.3}


def federation(**changes):
    return small("central", **{"clients": 3, "models": "mlp", **changes})


def trainer_of(server):
    return next(client_of(proxy) for proxy, _ in server.instruct(1))


def clients_of(server):
    return {m.info.name: open_client(m.proxy._config, m.proxy._node) for m in members(server)}


def members(server):
    return server.strategy.members.values()


# With one client it is `local`

RECIPES = {
    "plain": {},
    "recipe": {
        "training.augment": "crop-flip",
        "training.schedule": "plateau",
        "training.patience": 0,
        "training.clip": 0.5,
        "training.keep-optimizer": True,
        "models": "cnn2-dropout",
    },
    "semi": {"training.semi": "fixmatch", "training.semi-threshold": 0.3, "models": "cnn2"},
    "space": {**SPACES, "max-samples": 0},
}


def last_model(directory):
    """Return the tensors of client-0's private model after the last round."""
    newest = sorted(directory.glob("state/*/client-0/round-*.safetensors"))[-1]
    tensors, _ = load(newest)
    return {k: v for k, v in tensors.items() if k.startswith("private/")}


@pytest.mark.parametrize("recipe", RECIPES)
def test_central_equals_local_with_one_client(tmp_path, recipe):
    chosen = {"clients": 1, "rounds": 3, "max-samples": 150, "models": "mlp", **RECIPES[recipe]}
    for method in ("local", "central"):
        run(small(method, **chosen), tmp_path / method)
    one, other = (last_model(tmp_path / method) for method in ("local", "central"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    pairs = zip(records(tmp_path / "local"), records(tmp_path / "central"), strict=True)
    for alone, central in pairs:
        assert alone["loss"] == central["loss"]
        for protocol, kinds in alone["accuracy"].items():
            assert kinds["private"] == central["accuracy"][protocol]["global"]


# What it trains on


def by_hand(config):
    """Return the samples of all clients, concatenated."""
    store, parts = RunData.for_run(config.run), []
    for k in range(config.run.clients):
        data = store.client(k)
        parts.append(labeled_parts(data, config.run.data, config.run.seed, data.name)[0])
    return torch.cat([p.x for p in parts]), torch.cat([p.y for p in parts])


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("data", ["clients", "clients+public", "public"])
def test_trainer_has_the_selected_data(tmp_path, data, alpha):
    changes = {"central.trains-on": data, "data.labeled-alpha": alpha, **PUBLIC}
    config = federation(**changes)
    client = trainer_of(Server(config, tmp_path))
    x, y = by_hand(config)
    public = RunData.for_run(config.run).public_set(client.info, labeled=True)
    if data != "clients":
        kept = [public] if data == "public" else [None, public]
        x = torch.cat([x if part is None else part.x for part in kept])
        y = torch.cat([y if part is None else part.y for part in kept])
    assert torch.equal(client.x, x)
    assert torch.equal(client.y, y)
    assert (len(client.unlabeled) > 0) == (alpha > 0 and data != "public")


def test_test_samples_are_not_trained_on(tmp_path):
    config = federation()
    server = Server(config, tmp_path)
    seen = {row.numpy().tobytes() for row in trainer_of(server).x}
    store = RunData.for_run(config.run)
    for k in range(3):
        test = store.client(k).test
        fresh = [row.numpy().tobytes() not in seen for row in test.x]
        assert len(test) > 0
        assert all(fresh)


def test_other_clients_keep_their_data_and_no_model(tmp_path):
    server = Server(federation(), tmp_path)
    server.train(server.instruct(1))
    for name, client in clients_of(server).items():
        if name != trainer(server.strategy.run):
            assert len(client.y) == client.info.samples
            assert client.models == {}


def test_public_data_belongs_to_no_client(tmp_path):
    fraction = {
        data: federation(**{"central.trains-on": data}).run.data.public_fraction
        for data in ("clients", "clients+public", "public")
    }
    assert fraction == {"clients": 0.0, "clients+public": 0.2, "public": 0.2}
    twice = {"central.trains-on": "clients+public", "data.public-dataset": "digits"}
    config = federation(**twice)
    node = read_node({"partition-id": 0, "num-partitions": 3}, config.run, str(tmp_path))
    with pytest.raises(DataError, match="client-0"):
        config.method.client(config, node)


# A round


def test_only_the_trainer_is_sampled_with_an_empty_instruction(tmp_path):
    server = Server(federation(fraction=0.34), tmp_path)
    for round in (1, 2):
        instructions = server.instruct(round)
        assert [proxy.name for proxy, _ in instructions] == ["client-0"]
        assert not instructions[0][1].config["evaluate"]
        assert not instruction_of(instructions[0]).tensors
        assert not instruction_of(instructions[0]).scalars
        server.aggregate(round, server.train(instructions))
        server.close(round)


def test_round_equals_gradient_descent_on_all_samples(tmp_path):
    """Train with full batches in float64, without code from fedhet."""
    plain = {
        "training.optimizer": "sgd", "training.momentum": 0.0, "training.lr": 0.05,
        "training.batch-size": 10_000, "training.local-epochs": 3,
    }  # fmt: skip
    config = federation(**plain)
    server = Server(config, tmp_path)
    (_, result), *_ = server.train(server.instruct(1))
    x, y = by_hand(config)
    model = build("mlp", tuple(x.shape[1:]), 10, seed=config.run.seed)
    model = descend(model, lambda m: cross_entropy(m(x.double()), y), lr=0.05)
    found = reply_of(result).group("weights")
    assert found.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6)


def test_model_of_the_trainer_is_evaluated(tmp_path):
    server = Server(federation(), tmp_path)
    _, replies = server.play(1)
    trained = reply_of(replies[0][1]).group("weights")
    instructions = server.flower.configure_evaluate(1)
    assert len(instructions) == 3
    assert all(
        np.array_equal(v, trained[n])
        for n, v in instruction_of(instructions[0]).group("weights").items()
    )
    own = server.strategy.eval_models()["server"].state_dict()
    assert all(np.array_equal(value, trained[name]) for name, value in own.items())
    for client in clients_of(server).values():
        (judged,) = client.eval_models(instruction_of(instructions[0])).values()
        assert all(np.array_equal(v, trained[n]) for n, v in judged.state_dict().items())


def test_label_space_of_its_own(tmp_path):
    """The trainer learns all classes; each client is evaluated on its own classes."""
    chosen = {**SPACES, "clients": 2, "max-samples": 0}
    server = Server(federation(**chosen), tmp_path)
    instructions = server.instruct(1)
    client = client_of(instructions[0][0])
    everyone = sorted({int(k) for c in clients_of(server).values() for k in c.client_samples.space})
    assert client.space.tolist() == everyone
    start = build("mlp", client.info.shape, 4, seed=0).state_dict()["classifier.weight"]
    ((_, result),) = server.train(instructions)
    moved = np.abs(reply_of(result).tensors["weights/classifier.weight"] - start.numpy()).sum(1)
    assert [k for k in range(4) if moved[k] > 0] == everyone
    server.aggregate(1, [(instructions[0][0], result)])
    instruction = server.strategy.eval_instruction(1, client.info)
    for other in clients_of(server).values():
        logits = other.eval_models(instruction)["global"](other.client_samples.own.x[:4])
        assert (
            logits.isfinite().any(0).nonzero().flatten().tolist()
            == other.client_samples.space.tolist()
        )


# The model, and runs


def test_model_is_that_of_the_first_client_or_the_setting(tmp_path):
    server = Server(federation(models=["cnn2", "mlp"]), tmp_path / "first")
    wide = reply_of(server.train(server.instruct(1))[0][1]).group("weights")
    assert wide["classifier.weight"].shape == (10, 64)
    server = Server(
        federation(models=["cnn2", "mlp"], **{"central.model": "mlp3"}), tmp_path / "named"
    )
    assert server.strategy.model.feature_dim == 64
    assert len(server.strategy.model.extractor) == 7
    with pytest.raises(SettingsError, match=r"'central\.model' = 'mlpp'"):
        federation(**{"central.model": "mlpp"})


def test_central_beats_local(tmp_path):
    chosen = {"clients": 3, "rounds": 4, "local_epochs": 2, "alpha": 0.3, "models": "mlp"}
    alone = run(small("local", **chosen), tmp_path / "local")["accuracy"]["common"]["private"]
    summary = run(small("central", **chosen), tmp_path / "central", report=True)
    assert set(summary["accuracy"]["personal"]) == {"global"}
    assert set(summary["accuracy"]["common"]) == {"global", "server"}
    together = summary["accuracy"]["common"]["global"]
    assert together["mean"] > alone["mean"] + 0.1
    assert together["mean"] == pytest.approx(summary["accuracy"]["common"]["server"]["mean"])
    assert (tmp_path / "central" / "report.html").exists()


def test_central_raises_in_a_deployment():
    config = federation()
    why = "setting 'method': the data of all sites would have to leave the sites.*got 'central'"
    context = Context(1, 1, {}, RecordDict(), config.flat())
    with pytest.raises(SettingsError, match=why):
        server_app.server_fn(context)
    with pytest.raises(SettingsError, match=why):
        submit(config, None, print)
