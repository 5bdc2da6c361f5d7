"""`data.held-out-clients`: clients that never train, and the models that methods offer them."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch
from federation import records, run
from safetensors.numpy import load_file
from torch import nn

from fedhet.base.errors import SettingsError
from fedhet.client_runtime.node import open_client, read_node
from fedhet.config.resolve import check_deployable, resolve
from fedhet.data.store import RunData
from fedhet.inference.api import Result
from fedhet.methods.registry import all_methods, find_method
from fedhet.models import build, load_weights
from fedhet.report import compare, load_run
from fedhet.report.page import render_run
from fedhet.report.tables import legend, remarks
from fedhet.runs.log import Watcher
from fedhet.settings.run import draw_held_out
from fedhet.wire.knowledge import Knowledge

SMALL = {
    "clients": 5, "rounds": 2, "data.dataset": "breast-cancer", "data.partition": "iid",
    "data.held-out-clients": 0.4, "models.pool": ["mlp"], "training.local-epochs": 1,
    "engine.backend": "inline", "seed": 3,
}  # fmt: skip


def small(method="fedavg", **changes):
    return resolve({**SMALL, "method": method, **changes})


def held_back(directory):
    found = load_run(directory)
    return {n for record in found.records for n in found.clients if n not in record.asked}


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    directory = tmp_path_factory.mktemp("averaged") / "run"
    run(small(), directory)
    return directory


# Which clients


@pytest.mark.parametrize(
    ("share", "clients", "count"),
    [(0.2, 10, 2), (0.01, 10, 1), (0.99, 4, 3), (0.5, 2, 1), (0.25, 9, 2), (0.0, 10, 0)],
)
def test_held_out_clients_are_drawn_by_the_seed(share, clients, count):
    draws = [draw_held_out(share, clients, seed) for seed in range(40)]
    assert {len(found) for found in draws} == {count}
    assert all(found <= set(range(clients)) for found in draws)
    assert draws == [draw_held_out(share, clients, seed) for seed in range(40)]
    if count:
        assert set.union(*map(set, draws)) == set(range(clients)), "each may be drawn"


def test_held_out_clients_only_evaluate_after_the_last_round(averaged):
    names = held_back(averaged)
    assert len(names) == 2
    first, last = records(averaged)
    assert len(first["asked"]) == len(last["asked"]) == 3
    assert not names & {*first["asked"], *last["asked"]}
    assert set(first["accuracy"]["common"]) == {"private", "global"}
    for protocol in ("common", "personal"):
        found = last["accuracy"][protocol]
        assert set(found) == {"private", "global", "unseen", "unseen-epoch"}
        for kind, score in found.items():
            assert (set(score["per_client"]) == names) == kind.startswith("unseen"), kind
    assert not last.get("absent")
    summary = json.loads((averaged / "summary.json").read_text())
    assert summary["accuracy"]["common"]["unseen"]["clients"] == 2
    assert set(summary["models"]) == {f"client-{k}" for k in range(5)}


def test_samples_of_held_out_clients_are_unused(tmp_path):
    """The run equals a run of the other clients, whatever the held-out samples are."""
    unseen = draw_held_out(0.4, 5, 3)
    store = RunData.for_run(small().run)
    labeled, _ = RunData.for_run(small("central").run).pooled_parts()
    seen = [store.client(k).train for k in range(5) if k not in unseen]
    assert len(labeled) == sum(map(len, seen))
    assert torch.equal(labeled.x, torch.cat([split.x for split in seen]))


# Evaluation


def learned(model: nn.Module, split, epochs: int, batch: int, lr: float, order) -> None:
    """Train with Adam and cross-entropy on the samples in a given order."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    model.train()
    for _ in range(epochs):
        for rows in order.split(batch):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(split.x[rows]), split.y[rows]).backward()
            optimizer.step()


def accuracy(model: nn.Module, split) -> float:
    with torch.no_grad():
        return float((model.eval()(split.x).argmax(1) == split.y).float().mean())


def test_unadapted_model_is_the_average_of_the_server(averaged):
    """The average is read from the checkpoint, and evaluated here."""
    file = max((averaged / "checkpoints").rglob("*.safetensors"))
    saved = {k.removeprefix("weights/"): v for k, v in load_file(file).items()}
    store, last = RunData.for_run(small().run), records(averaged)[-1]["accuracy"]
    for name in held_back(averaged):
        data = store.client(int(name.rpartition("-")[2]))
        model = build("mlp", data.format.shape, len(data.format.classes), seed=3)
        load_weights(model, {k: v for k, v in saved.items() if k in model.state_dict()})
        for protocol, split in (("personal", data.test), ("common", data.common)):
            found = last[protocol]["unseen"]["per_client"][name]
            assert found == pytest.approx(accuracy(model, split), abs=1e-6)


def test_one_epoch_does_not_change_the_offered_model():
    """A newcomer's batch contains all its samples, so one step does not depend on their order."""
    config = small(**{"training.batch-size": 1000})
    node = read_node({"partition-id": 0, "num-partitions": 5}, config.run)
    client = open_client(config, node)
    model, twin = client.build_model(), client.build_model()
    before = [p.detach().clone() for p in model.parameters()]
    client.eval_models = lambda _: {client.config.method.spec.offered_kind: model}
    found = client._evaluate_held_out(2, Knowledge())
    assert all(map(torch.equal, before, model.parameters()))
    own = client.samples.own
    learned(twin, own, 1, 1000, config.run.training.lr, torch.arange(len(own.y)))
    for protocol, split in client.tests.items():
        assert found[protocol, "unseen"].accuracy == pytest.approx(accuracy(model, split))
        expected = accuracy(twin, split)
        assert found[protocol, "unseen-epoch"].accuracy == pytest.approx(expected, abs=1e-6)


def test_held_out_clients_do_not_change_training(averaged, tmp_path):
    """Held-out clients do not change the other clients' scores in the last round."""
    again = tmp_path / "run"
    run(small(**{"training.weight-decay": 0.0}), again)
    one, two = records(averaged)[-1]["accuracy"], records(again)[-1]["accuracy"]
    assert one == two


# What a method offers


def test_method_offers_its_common_model_or_none():
    offers = {name for name, each in all_methods()[0].items() if each.spec.offered_kind}
    assert {"fedavg", "felo", "fml"} <= offers
    assert not {"fedmd", "fedproto", "local", "um-pfssl"} & offers
    for name in offers:  # it is a model, and so its weights are sent
        assert find_method(name).spec.instructions.weights, name


def test_method_without_an_offered_model_is_noted(tmp_path):
    class Hears(Watcher):
        def notice(self, text):
            said.append(text)

    said: list[str] = []
    run(small("local"), tmp_path / "run", [Hears()])
    assert any("local trains no model for all clients" in text for text in said)
    found = load_run(tmp_path / "run")
    assert "local offers no model to held-out clients" in remarks(found)
    assert "offers no model to" in render_run(found)
    assert set(records(tmp_path / "run")[-1]["accuracy"]["common"]) == {"private"}


def test_untrained_architecture_gets_no_model(tmp_path):
    pool = ["mlp", "mlp2", "mlp3", "mlp-dropout"]
    config = small("felo", **{"models.pool": pool, "clients": 4, "data.held-out-clients": 0.25})
    run(config, tmp_path / "run")
    assert any("offers no model to" in line for line in remarks(load_run(tmp_path / "run")))


# Where it is shown


def test_held_out_accuracy_is_its_own_kind(averaged, tmp_path):
    found = load_run(averaged)
    assert not any("offers no model to" in line for line in remarks(found))
    assert "unseen-epoch: the same model after one local epoch" in legend(found)
    assert "common unseen-epoch" in render_run(found)
    run(small("local"), tmp_path / "local")
    both = compare([averaged, tmp_path / "local"], kind="unseen", protocol="common")
    assert both.headline == ("common", "unseen")
    scores = {group.method: group.score(("common", "unseen")) for group in both.groups}
    assert scores["local"].n == 0
    assert scores["fedavg"].mean == pytest.approx(found.last("common", "unseen").mean)
    frame = Result(found).clients
    assert any("unseen" in str(column) for column in frame.columns)


# Going on, and limits


def test_continued_run_evaluates_held_out_clients_again(tmp_path):
    directory = tmp_path / "run"
    run(small(), directory)
    run(small(rounds=4, out=str(directory), resume=True), directory)
    kinds = [set(record["accuracy"]["common"]) for record in records(directory)]
    plain = {"private", "global"}
    assert kinds == [plain, plain | {"unseen", "unseen-epoch"}, plain,
                     plain | {"unseen", "unseen-epoch"}]  # fmt: skip
    whole = tmp_path / "whole"
    run(small(rounds=4), whole)
    assert records(whole)[-1]["accuracy"] == records(directory)[-1]["accuracy"]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"data.held-out-clients": 1.0}, "data.held-out-clients"),
        ({"data.held-out-clients": -0.1}, "data.held-out-clients"),
        ({"privacy.noise-multiplier": 1.0}, "data.held-out-clients.*expected 0 with 'privacy"),
    ],
)
def test_invalid_held_out_settings_raise(changes, fault):
    with pytest.raises(SettingsError, match=fault):
        small(**changes)


def test_deployment_with_held_out_clients_raises():
    with pytest.raises(SettingsError, match=r"'data\.held-out-clients'"):
        check_deployable(small())
    check_deployable(small(**{"data.held-out-clients": 0.0}))


def test_central_training_excludes_held_out_clients(tmp_path):
    seed = next(s for s in range(100) if 0 in draw_held_out(0.4, 5, s))
    run(small("central", seed=seed), tmp_path / "run")
    last = records(tmp_path / "run")[-1]
    assert last["answered"]
    assert "client-0" in last["accuracy"]["common"]["unseen"]["per_client"]
    assert "client-0" not in last["accuracy"]["common"]["global"]["per_client"]


@pytest.mark.slow
def test_ray_gives_the_metrics_of_one_process(averaged, tmp_path):
    config = small()
    engine = config.run.engine.model_copy(update={"backend": "ray"})
    ray = dataclasses.replace(config, run=config.run.model_copy(update={"engine": engine}))
    run(ray, tmp_path / "run")
    one, two = records(averaged)[-1]["accuracy"], records(tmp_path / "run")[-1]["accuracy"]
    for kind in ("unseen", "unseen-epoch"):
        ours, theirs = (each["common"][kind]["per_client"] for each in (one, two))
        assert ours.keys() == theirs.keys()
        np.testing.assert_allclose([*ours.values()], [*theirs.values()])
