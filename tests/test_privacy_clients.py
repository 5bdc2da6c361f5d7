"""Messages, budget, refusals, and repeated replies of a private client."""

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from federation import (
    SMALL,
    Server,
    client_of,
    fast,
    permitted,
    records,
    run,
    settings,
    without_times,
)
from flwr.common import Context, RecordDict
from interruption import Notices
from opacus.grad_sample import GradSampleHooks
from rounds import opened, replied
from torch import nn

from fedhet import report
from fedhet.algorithms.classwise import ClassSums
from fedhet.base.errors import PrivacyError, SettingsError, StateError
from fedhet.client_runtime import privacy as mechanisms
from fedhet.client_runtime.app import client_fn, within_limits
from fedhet.client_runtime.node import Budget, NodeSettings, read_node
from fedhet.client_runtime.privacy import REDACTED
from fedhet.config.resolve import check_trainable, resolve
from fedhet.data.dataset import Split
from fedhet.methods.registry import find_method, shipped_names
from fedhet.methods.spec import Passes
from fedhet.privacy import noise as secret_noise
from fedhet.privacy import sgd
from fedhet.privacy.accounting import Noise, Plan, Release, calibrate_noise, epsilon_of
from fedhet.privacy.ledger import Ledger, digest_of, read_ledger
from fedhet.report.comparison_report import comparison_cells, drawings
from fedhet.settings.schema import build, kebab
from fedhet.wire.knowledge import Envelope, Knowledge, decode, encode

CHEAP = {"privacy.noise-multiplier": 1.0, "privacy.class-noise": 4.0, "privacy.count-noise": 4.0,
         "training.batch-size": 4096}  # fmt: skip
"""A run whose epsilon is computed at once: its batches have all samples."""
PLANNED = {"privacy.epsilon": 8.0}
"""A run whose noise is calibrated, which takes seconds for each number of samples."""
SUPPORTED = sorted(n for n in shipped_names() if not find_method(n).spec.privacy.unsupported)
MEASURED = {
    "epsilon": "follows from the settings and the number of rows",
    "spent": "the budget is spent, which the ledger's entries determine",
    "error": "the type of an error alone",
    "seconds.train": "always 0",
    "seconds.evaluate": "always 0",
    "memory": "always 0",
}
"""Why a private client may report what it does, besides scores on the shared test set: these are a
function of models that are private."""
DESCRIBED = {
    "name": "given by its owner",
    "model": "given by its owner, or assigned",
    "samples": "always 2",
    "classes": "the task's",
    "kind": "the task's",
    "shape": "the task's",
    "order": "a digest of the task's class names",
    "training": "settings",
    "own_data": "whether it is a site with a folder",
    "base": "a digest of the pretrained model",
    "task": "settings",
    "stored": "constant",
    "public": "a digest of the public set",
}
SENT = {
    "weights": "trained by DP-SGD",
    "change": "a function of weights that DP-SGD has trained",
    "proxy": "trained by DP-SGD, jointly with the private model",
    "update": "what DP-SGD, jointly with the private model, has changed of what the server sent",
    "scores": "a private model's, on public data",
    "logits": "a private model's, on public data; or noised sums over noised counts",
    "probabilities": "a private model's, on public data; or noised sums over noised counts",
    "predictions": "a private model's, on public data",
    "space": "the task's label space, or all classes",
    "features": "noised sums over noised counts",
    "representation": "random mixture of noised class means",
    "labels": "random weights of the classes with a noised mean",
    "classes": "those whose noised count is large",
    "counts": "noised",
}
"""Why each tensor, by the first part of its name, may be sent."""


def weights_for(client):
    """Return FedAvg's instruction in the first round."""
    state = client.build_model().state_dict()
    return Knowledge({f"weights/{name}": value.numpy() for name, value in state.items()})


def private(method, **changes):
    """Return a small private federation, by default `CHEAP`."""
    spec = find_method(method).spec
    one = spec.one_model or spec.submodels or method == "fedlora"
    pool = ["cnn2-gn"] if one else ["mlp", "cnn2-gn"]
    found = find_method(method)
    own = {
        f"{found.table}.{kebab(name)}": allowed[0]
        for name, allowed in found.spec.privacy.needs.items()
    }
    if method == "cofed":
        own["cofed.update-batch-size"] = 32
    large = {k: v for k, v in fast(method).items() if v == "mlp3"}
    changes = {"models": pool, **large, **own, **changes}
    named = {**SMALL, **settings(method, **changes)}
    if not any(name.startswith("privacy.") for name in named):
        named |= CHEAP
    return resolve(named)


def entries(directory: Path, client="client-1"):
    return Ledger(directory, client).entries()


# Nothing but noised steps depends on the samples.


def drawn_alike(monkeypatch):
    """Make all secret draws equal in each run of a test."""
    keys = (number.to_bytes(32, "big") for number in range(10**6))
    alike = SimpleNamespace(token_bytes=lambda size: next(keys))
    monkeypatch.setattr(secret_noise, "secrets", alike)


def other_samples(split: Split, seed: int) -> Split:
    """Return as many samples of the same classes, but otherwise different."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randint(0, 256, split.x.shape, generator=rng).to(split.x.dtype)
    return Split(x, split.y[torch.randperm(len(split.y), generator=rng)])


def replies(config, directory, seed, monkeypatch):
    """Return the replies of two rounds if all clients have other samples."""
    drawn_alike(monkeypatch)
    server, found = Server(config, directory), []
    for number in (1, 2):
        instructions = server.instruct(number)
        for proxy, _ in instructions:
            client = client_of(proxy)
            if number == 1:
                client.samples.own = other_samples(client.samples.own, seed)
        results = server.train(instructions)
        for proxy, result in results:
            assert "error" not in result.metrics, (proxy.name, result.metrics)
            arrays = [np.load(io.BytesIO(t)) for t in result.parameters.tensors]
            found.append((decode(arrays, "test")[1], dict(result.metrics)))
        server.aggregate(number, results)
    return found


def multiplied(tensors):
    """Return tensors in which the product replaces two factors, because any rank may be sent."""
    rights = {n.removesuffix("/left"): n for n in tensors if n.endswith("/left")}
    products = {
        name: (tensors[left] @ tensors[f"{name}/right"]).ravel() for name, left in rights.items()
    }
    whole = {n: v.ravel() for n, v in tensors.items() if not n.endswith(("/left", "/right"))}
    return {**whole, **products}


def distance(one, other):
    """Return the largest difference between the messages of two runs."""
    worst = 0.0
    for (first, said), (second, told) in zip(one, other, strict=True):
        here, there = multiplied(first.tensors), multiplied(second.tensors)
        assert here.keys() == there.keys()
        assert said.keys() == told.keys()
        for name, value in here.items():
            if value.shape != there[name].shape:
                return np.inf
            difference = np.abs(value.astype(float) - there[name].astype(float))
            worst = max(worst, float(difference.max(initial=0.0)))
        for name in said.keys() & {"accuracy.common.private", "epsilon"}:
            worst = max(worst, abs(said[name] - told[name]))
    return worst


@pytest.mark.parametrize("method", SUPPORTED)
def test_replies_without_gradients_do_not_depend_on_samples(method, tmp_path, monkeypatch):
    """If every gradient and feature is scaled to nothing, replies depend on no sample.

    Only values without a bound could still depend on the samples. With an ordinary bound, the
    replies differ.
    """

    def sent(norm, seed):
        config = private(
            method,
            optimizer="sgd",
            momentum=0.0,
            **{"training.lr": 0.05, "privacy.noise-multiplier": 1.0, "privacy.max-grad-norm": norm,
               "privacy.class-clip": norm, "privacy.class-noise": 1.0,
               "privacy.count-noise": 1.0},
        )  # fmt: skip
        return replies(config, tmp_path / f"{norm}-{seed}", seed, monkeypatch)

    assert distance(sent(1e-9, 1), sent(1e-9, 2)) < 1e-5
    if find_method(method).spec.replies.fields:
        assert distance(sent(1.0, 1), sent(1.0, 2)) > 1e-3


def test_only_a_simulated_clock_receives_the_number_of_rows(tmp_path):
    """Adjacent datasets have equal numbers; a site ignores settings of a simulated clock."""
    devices = tmp_path / "devices.csv"
    devices.write_text("client,sample-ms,mbit\nclient-0,1,100\nclient-1,1,100\n")
    for clock in ({}, {"pace.clock": str(devices)}):
        config = private("felo", clients=2, **CHEAP, **clock)
        client = opened(config, tmp_path / str(len(clock)))
        message = encode(Envelope("run", "felo", 1, "server"), Knowledge())
        _, count, said = client.fit(message, {})
        assert count == 2
        assert said.get("work") == (len(client.y) if clock else None)
    node = {"partition-id": 0, "name": "a"}
    assert "pace.clock" not in permitted(node, {"pace.clock": str(devices), "method": "felo"})


@pytest.mark.parametrize("method", SUPPORTED)
def test_every_field_that_is_sent_has_a_reason(method, tmp_path):
    server = Server(private(method), tmp_path)
    contract = find_method(method).spec.replies
    assert find_method(method).spec.privacy.mechanism
    for proxy, result in server.play(1)[1]:
        client = client_of(proxy)
        assert result.num_examples == 2
        assert client.get_properties({}).keys() == DESCRIBED.keys()
        assert client.get_properties({})["samples"] == 2
        assert {n for n in result.metrics if "common" not in n.split(".")} <= MEASURED.keys()
        assert result.metrics["seconds.train"] == result.metrics["memory"] == 0.0
        arrays = [np.load(io.BytesIO(t)) for t in result.parameters.tensors]
        knowledge = decode(arrays, "test")[1]
        assert not knowledge.scalars
        assert {name.partition("/")[0] for name in knowledge.tensors} <= SENT.keys()
        contract.check(client.info.name, knowledge.tensors, {}, client.sizes())


def test_classes_of_a_site_are_all_classes(tmp_path):
    """With its own directory, a site would otherwise reply for the classes of its samples."""
    folder = tmp_path / "own"
    folder.mkdir()
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (80, 8, 8), dtype=np.uint8), rng.integers(2, 5, 80)
    np.savez(folder / "train.npz", x=x, y=y)
    (folder / "site.toml").write_text("num-classes = 10\nshape = [1, 8, 8]\n")
    config = private("felo", **{"models.num-classes": 10})
    client = opened(config, tmp_path / "state", partition=-1, data=f"npz:{folder}", name="site-a")
    assert client.space.tolist() == list(range(10))


def test_error_reveals_no_samples(tmp_path, monkeypatch, caplog):
    client = opened(private("felo"), tmp_path)
    for raised in (StateError("loss 3.25 of 17 samples"), ValueError("17 samples")):

        def fails(*_, raised=raised):
            raise raised

        monkeypatch.setattr(client, "train", fails)
        message = encode(Envelope("run", "felo", 1, "server"), Knowledge())
        _, count, said = client.fit(message, {})
        assert count == 0
        assert said == {"error": REDACTED.format("StateError")} or (
            said == {"error": said["error"]} and "17" not in said["error"]
        )


def test_personal_scores_and_losses_are_in_the_clients_own_log(tmp_path, caplog):
    with caplog.at_level("INFO", "fedhet"):
        replied(opened(private("felo"), tmp_path), 1, Knowledge())
    text = caplog.text
    assert "training loss" in text
    assert "accuracy of the private model, personal test split" in text


# One sample changes a sum by at most the clipping norm, whatever the batch size.


class Features(nn.Module):
    """A network whose features are its inputs."""

    def features_and_logits(self, x):
        return x, torch.zeros(len(x), 10)


def crafted(size, power, pairs):
    """Return features [N, 1] of norm at most 1, the first of which is a null sample.

    In batches of `size`, a float32 sum just below 2^`power` is followed by `pairs` of small numbers
    that cancel out. Above 2^`power`, the first number of each pair is rounded up to one unit in the
    last place, and the second number is rounded to zero, so the sum grows with each pair.
    """
    unit = 2.0 ** (power - 24)  # the last place of numbers below 2^power
    start = torch.tensor([0.0, 0.5, *[1.0] * (2**power - 1)])
    start = torch.cat([start, torch.zeros(-len(start) % size)])
    pair = torch.zeros(2, size)
    pair[:, 0] = unit * torch.tensor([1.0625, -0.9375])
    return torch.cat([start, pair.repeat(pairs, 1).flatten()]).unsqueeze(1)


@pytest.mark.parametrize(("size", "power", "pairs"), [(32, 15, 800), (1, 12, 2500)])
def test_one_sample_changes_a_class_sum_by_at_most_the_clipping_norm(
    size, power, pairs, tmp_path, monkeypatch
):
    """The server chooses the batch size, and all other samples are crafted."""
    monkeypatch.setattr(
        secret_noise.SecretNoise,
        "_gaussians",
        lambda self, count, device: torch.zeros(count, dtype=torch.float64),
    )
    config = private(
        "felo",
        models=["mlp"],
        **{"privacy.class-clip": 1.0, "engine.eval-batch-size": size, **CHEAP},
    )
    without = crafted(size, power, pairs)
    present = without.clone()
    present[0] = 1.0
    sums = []
    for name, x in (("without", without), ("present", present)):
        client = opened(config, tmp_path / name)
        client.samples.own = Split(x, torch.zeros(len(x), dtype=torch.long))
        client.privacy.begin("run", 1)
        empty = ClassSums(10, 1, torch.device("cpu"))
        means = client.privacy.class_means(empty, Features())
        assert means.classes.tolist() == [0]
        assert means.counts.tolist() == [len(x)]
        sums.append(float(means.features[0, 0]) * len(x))
    assert 0.9 < sums[1] - sums[0] < 1.01
    assert sums[1] == pytest.approx(2**power + 0.5, rel=1e-3)


# What it costs


def test_run_consumes_the_planned_budget(tmp_path):
    config = private("felo", clients=2, rounds=3, fraction=1.0, **PLANNED)
    notices = Notices()
    summary = run(config, tmp_path, [notices], report=True)
    assert notices.texts[0] == "3 rounds consume at most ε = 8 at δ = 1e-05 per client"
    spent = summary["privacy"]
    assert set(spent) == {"client-0", "client-1"}
    for name, each_ in spent.items():
        found = [e.release for e in Ledger(tmp_path / "state", name).entries()]
        assert each_ == {"epsilon": pytest.approx(epsilon_of(found, 1e-5)), "delta": 1e-5}
        assert 7.8 < each_["epsilon"] <= 8.0
    rounds = [max(r["epsilon"].values()) for r in records(tmp_path)]
    assert rounds == sorted(rounds)
    assert "personal" not in summary["accuracy"]
    page = (tmp_path / "report.html").read_text()
    assert "accuracy by epsilon, up to 7.9" in page or "epsilon, up to 8" in page
    assert ">epsilon<" in page


def test_comparison_shows_epsilon(tmp_path):
    config = private("fedavg", models=["mlp"], clients=2, rounds=1, **CHEAP)
    spent = run(config, tmp_path / "private")["privacy"]["client-1"]["epsilon"]
    comparison = report.compare([tmp_path / "private"])
    (cell,) = comparison_cells(comparison).columns["epsilon"]
    assert cell.value == pytest.approx(spent, rel=0.05)
    assert "accuracy by epsilon" in [each.alt for each in drawings(comparison)]


@pytest.mark.parametrize("method", ["fedavg", "cofed", "fedmd", "cronus", "fedtype", "fml"])
def test_planned_noise_lasts_for_all_rounds(method, tmp_path):
    summary = run(private(method, clients=2, **PLANNED), tmp_path)
    assert set(summary["privacy"]) == {"client-0", "client-1"}
    assert all(each_["epsilon"] <= 8.0 for each_ in summary["privacy"].values())
    assert all(not r["failed"] for r in records(tmp_path))


def test_gradients_of_a_private_client_are_those_of_its_samples(tmp_path):
    """Private training uses the memory format channels_last by default, like other training."""
    client = opened(private("fedavg", models=["cnn2-gn"]), tmp_path)
    model, x = client.network.train(), client.compute.to_inputs(client.samples.own.x[:5])
    y = client.samples.own.y[:5]
    hooks = GradSampleHooks(model, strict=False)
    nn.functional.cross_entropy(model(x), y).backward()
    found = [p.grad_sample.clone() for p in model.parameters()]
    hooks.cleanup()
    for row in range(5):
        loss = nn.functional.cross_entropy(model(x[row : row + 1]), y[row : row + 1])
        expected = torch.autograd.grad(loss, list(model.parameters()))
        for grads, grad in zip(found, expected, strict=True):
            assert torch.allclose(grads[row], grad, atol=1e-5)


def test_budget_is_recorded_before_each_pass_and_release(tmp_path, monkeypatch):
    client, seen = opened(private("felo", **PLANNED), tmp_path), []

    def step(self, *args):
        seen.append(len(entries(tmp_path)))
        return original(self, *args)

    original = sgd.PrivateOptimization.step
    monkeypatch.setattr(sgd.PrivateOptimization, "step", step)
    replied(client, 1, Knowledge())
    assert set(seen) == {1}
    one, two = entries(tmp_path)
    rows = len(client.y)
    assert one.release == Release(one.noise, 32 / rows, -(-rows // 32))
    assert two.release == Release(two.noise)
    assert (one.run, one.round, one.method, one.client) == ("run", 1, "felo", "client-1")


def test_both_phases_of_fedrep_consume_the_planned_budget(tmp_path):
    own = {"fedrep.head-epochs": 3, "training.local-epochs": 2, "rounds": 1}
    client = opened(private("fedrep", **own, **PLANNED), tmp_path)
    weights = weights_for(client).tensors.items()
    replied(client, 1, Knowledge({n: v for n, v in weights if n.startswith("weights/extractor.")}))
    releases = [each.release for each in entries(tmp_path)]
    steps = -(-len(client.y) // 32)
    assert [each.count for each in releases] == [3 * steps, 2 * steps]
    assert epsilon_of(releases, client.run.privacy.delta) == pytest.approx(8.0, rel=0.02)


def test_both_models_of_ditto_consume_the_planned_budget(tmp_path):
    own = {"ditto.personal-epochs": 3, "training.local-epochs": 2, "rounds": 1}
    client = opened(private("ditto", **own, **PLANNED), tmp_path)
    replied(client, 1, weights_for(client))
    releases = [each.release for each in entries(tmp_path)]
    steps = -(-len(client.y) // 32)
    assert [each.count for each in releases] == [2 * steps, 3 * steps]
    assert epsilon_of(releases, client.run.privacy.delta) == pytest.approx(8.0, rel=0.02)


def test_exhausted_run_releases_nothing(tmp_path):
    config = private("felo", clients=2, rounds=1, **PLANNED)
    client = opened(config, tmp_path)
    replied(client, 1, Knowledge())
    before = len(entries(tmp_path))
    message = encode(Envelope("run", "felo", 2, "server"), Knowledge())
    arrays, _, said = client.fit(message, {})
    assert arrays == []
    assert said["spent"] is True
    assert "exhausted: the limit of the run's 'privacy.epsilon' is epsilon = 8" in said["error"]
    assert len(entries(tmp_path)) == before
    server = Server(private("felo", clients=2, rounds=1, **PLANNED), tmp_path / "other")
    server.play(1)
    server.close(1)
    for number in (2, 3, 4, 5):
        server.play(number)
        assert set(server.flower.state.record.failed) == {"client-0", "client-1"}
    assert server.flower.state.health.eligible(6, ["client-0", "client-1"]) == [
        "client-0", "client-1",
    ]  # fmt: skip
    assert server.flower.state.health.to_dict()["silent"] == {}


def test_sites_budget_lasts_for_all_runs(tmp_path):
    own = {"privacy": "epsilon=10 delta=1e-5"}
    first = opened(private("felo"), tmp_path, **own)
    for number in (1, 2):
        replied(first, number, Knowledge())
    second = opened(private("felo"), tmp_path, **own)
    second.privacy.begin("other", 1)
    noise = second.privacy.noise
    assert noise.gradients > first.privacy.noise.gradients
    past = [e.release for e in entries(tmp_path)]
    plan = second.privacy.plan
    total = [*past, *plan.steps(noise.gradients), *plan.sums(noise.sums, noise.counts)]
    assert 9.5 < epsilon_of(total, 1e-5) <= 10.0
    spent = opened(private("felo"), tmp_path, privacy="epsilon=6 delta=1e-5")
    message = encode(Envelope("third", "felo", 1, "server"), Knowledge())
    _, _, said = spent.fit(message, {})
    assert "error" in said


@pytest.mark.parametrize("method", ["felo", "fedavg"])
def test_exhausted_budget_of_a_site_raises(method, tmp_path):
    """The reply mentions the budget, so the server does not treat it as a failure."""
    config = private(method)
    earlier = opened(config, tmp_path)
    earlier.privacy.begin("earlier", 1)
    steps = [Release(1.0, 1.0, 20)]
    about = {"run": "earlier", "round": 1, "method": method, "client": earlier.info.name}
    earlier.privacy._ledger.charge(steps, lambda past: None, data="d", **about)
    client = opened(config, tmp_path, privacy="epsilon=8 delta=1e-5")
    told = weights_for(client) if method == "fedavg" else Knowledge()
    _, _, said = client.fit(encode(Envelope("run", method, 1, "server"), told), {})
    assert said["spent"] is True
    assert "this site's limit is epsilon = 8" in said["error"]


def test_remaining_budget_covers_class_sums(tmp_path):
    """Most of the budget is consumed; class sums get a fraction of the remainder."""
    settings, plan = private("felo", **PLANNED).run.privacy, Plan(100, (Passes(1, 20, 1),), 1, 2)
    spent = (Release(2.0, 1.0, 5),)
    budget = epsilon_of(spent, settings.delta) + 0.3
    noise = calibrate_noise(settings, plan, budget, spent)
    total = [*spent, *plan.steps(noise.gradients), *plan.sums(noise.sums, noise.counts)]
    assert epsilon_of(total, settings.delta) <= budget


def test_private_site_reveals_nothing_about_unreadable_data(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("FEDHET_STATE_DIR", str(tmp_path))
    lines = ["text,label", *(f"some words,{k % 2}" for k in range(60)), "a letter,John Smith"]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    (tmp_path / "classes.txt").write_text("0\n1\n")
    (tmp_path / "site.toml").write_text("num-classes = 2\n")
    node = {"data": f"text:{tmp_path}", "name": "site-a", "privacy": "epsilon=8 delta=1e-5"}
    run = {"method": "fedavg", "privacy.epsilon": 8.0, "models.pool": "text-cnn"}
    run["models.num-classes"] = 2
    context = Context(0, 0, node, RecordDict(), run)
    with pytest.raises(StateError) as told:
        client_fn(context)
    assert str(told.value) == REDACTED.format("DataError")
    assert "John Smith" in caplog.text


def test_private_client_does_not_train_for_held_out_scores(tmp_path):
    client = opened(private("fedavg"), tmp_path)
    message = encode(Envelope("run", "fedavg", 1, "server"), weights_for(client))
    _, _, said = client.evaluate(message, {"unseen": True})
    assert not any("unseen" in name for name in said)


def test_nonfinite_loss_does_not_reveal_a_sample(tmp_path):
    client = opened(private("fedavg"), tmp_path)
    client.samples.own.x[0] = 3e38
    reply = replied(client, 1, weights_for(client))
    assert all(np.isfinite(value).all() for value in reply.tensors.values())


def test_private_site_rejects_a_run_without_privacy():
    own = {"privacy": "epsilon=8", "data": "npz:/srv/data", "name": "site-a"}
    site = build(NodeSettings, own, prefix="node-config ")
    assert site.budget() == Budget(8.0, 1e-5)
    with pytest.raises(SettingsError, match="privacy"):
        within_limits(resolve({**SMALL, "method": "felo"}), site)
    within_limits(private("felo"), site)


@pytest.mark.parametrize(
    "text", ["8", "epsilon=x", "epsilon=8 beta=1", "delta=1e-5", "epsilon=0", "epsilon=8 delta=1"]
)
def test_invalid_budget_raises(text):
    with pytest.raises(SettingsError, match="epsilon=8 delta=1e-5"):
        Budget.from_text(text)


def test_too_large_delta_raises(tmp_path):
    with pytest.raises(PrivacyError, match=r"'privacy\.delta'"):
        opened(private("felo", **{"privacy.delta": 0.05, "privacy.epsilon": 8.0}), tmp_path)


# Again: resumed runs, second tries, killed clients


def test_no_key_of_the_noise_is_stored_or_sent(tmp_path, monkeypatch):
    keys = []
    fresh = SimpleNamespace(token_bytes=lambda size: keys.append(os.urandom(size)) or keys[-1])
    monkeypatch.setattr(secret_noise, "secrets", fresh)
    client = opened(private("felo", **CHEAP), tmp_path)
    arrays, _, said = client.fit(encode(Envelope("run", "felo", 1, "server"), Knowledge()), {})
    assert "error" not in said
    stored = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert len(stored) >= 3, "a state, an answer, and a ledger"
    assert len(keys) == 2, "one for training, one for class sums"
    for content in (*stored, *(each.tobytes() for each in arrays)):
        assert not any(key in content or key.hex().encode() in content for key in keys)


def test_repeated_reply_is_identical(tmp_path):
    client = opened(private("felo"), tmp_path)
    first = replied(client, 1, Knowledge())
    paid = entries(tmp_path)
    for again in (client, opened(private("felo"), tmp_path)):
        second = replied(again, 1, Knowledge())
        assert all(np.array_equal(second.tensors[k], v) for k, v in first.tensors.items())
    assert entries(tmp_path) == paid


def test_repeated_reply_is_identical_after_a_rollback(tmp_path):
    client = opened(private("felo", rounds=10), tmp_path)
    for number in range(1, 8):
        replied(client, number, Knowledge())
    first = replied(client, 2, Knowledge())
    paid = entries(tmp_path)
    second = replied(client, 2, Knowledge())
    assert all(np.array_equal(second.tensors[k], v) for k, v in first.tensors.items())
    assert entries(tmp_path) == paid


def test_resumed_run_records_each_round_once(tmp_path):
    config = private("felo", clients=2, rounds=3)
    run(private("felo", clients=2, rounds=3), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    (tmp_path / "checkpoints" / "round-000003.safetensors").unlink()
    paid = len(Ledger(tmp_path / "state", "client-0").entries())
    again = run(config.replacing(resume=True, out=str(tmp_path)), tmp_path)
    assert len(Ledger(tmp_path / "state", "client-0").entries()) == paid
    assert without_times(again)["rounds"] == 3


KILLED = """
    import os, signal, sys
    from pathlib import Path
    sys.path.insert(0, {tests!r})
    from test_privacy_clients import private, opened, replied
    from fedhet.wire.knowledge import Knowledge
    import fedhet.client_runtime.privacy as mechanisms
    import fedhet.client_runtime.state as states
    from fedhet.privacy import sgd

    class At:
        def __init__(self, owner, name, before):
            original = getattr(owner, name)
            def killed(*args, **kwargs):
                result = None if before else original(*args, **kwargs)
                os.kill(os.getpid(), signal.SIGKILL)
                return result
            setattr(owner, name, killed)

    At(*{place})
    replied(opened(private("felo"), Path({state!r})), 1, Knowledge())
"""
PLACES = {
    "before it has paid": "(os, 'write', True)",
    "after it has paid": "(os, 'fsync', False)",
    "before a step": "(sgd.PrivateOptimization, 'step', True)",
    "after a step": "(sgd.PrivateOptimization, 'step', False)",
    "before its class means": "(mechanisms.ClippedClassSums, 'noised_means', True)",
    "before its state is saved": "(states.ClientState, 'save', True)",
    "after its state is saved": "(states.ClientState, 'save', False)",
    "before its answer is kept": "(mechanisms.DifferentialPrivacy, 'store_reply', True)",
    "after its answer is kept": "(mechanisms.DifferentialPrivacy, 'store_reply', False)",
}


@pytest.mark.slow
@pytest.mark.parametrize("when", PLACES)
def test_killed_client_has_recorded_all_started_releases(when, tmp_path):
    """The client is killed, called again, and replies; both attempts consume budget."""
    script = KILLED.format(
        tests=str(Path(__file__).parent), place=PLACES[when], state=str(tmp_path)
    )
    code = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(code, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == -signal.SIGKILL
    paid = entries(tmp_path) if Ledger(tmp_path, "client-1").path.exists() else []
    trained = when not in ("before it has paid",)
    assert len(paid) >= trained
    replied(opened(private("felo"), tmp_path), 1, Knowledge())
    now = entries(tmp_path)
    assert now[: len(paid)] == paid
    sent_before = when == "after its answer is kept"
    assert len(now) == len(paid) + (0 if sent_before else 2)


# The ledger


def entry(**changes):
    return {"run": "r", "round": 1, "method": "felo", "client": "a", "data": "d", **changes}


def test_incomplete_line_is_removed(tmp_path):
    ledger = Ledger(tmp_path, "a")
    ledger.charge([Release(1.0)], lambda past: None, **entry())
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + whole[:-9])
    assert len(ledger.entries()) == 1
    ledger.charge([Release(2.0, 0.5, 3)], lambda past: None, **entry(round=2))
    assert [e.release for e in ledger.entries()] == [Release(1.0), Release(2.0, 0.5, 3)]


def test_line_is_not_started_on_a_full_disk(tmp_path):
    ledger = Ledger(tmp_path, "a")
    ledger.charge([Release(1.0)], lambda past: None, **entry())
    whole = ledger.path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 50, before[1]))
    try:
        with pytest.raises(StateError, match=r"a\.jsonl: .*disk is full"):
            ledger.charge([Release(2.0)], lambda past: None, **entry(round=2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert ledger.path.read_bytes() == whole


def test_oversized_ledger_releases_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("fedhet.privacy.ledger.MAX_BYTES", 1000)
    ledger = Ledger(tmp_path, "a")
    while not ledger.path.exists() or ledger.path.stat().st_size <= 1000:
        ledger.charge([Release(1.0)], lambda past: None, **entry())
    with pytest.raises(StateError, match=r"1,?000 bytes"):
        ledger.charge([Release(1.0)], lambda past: None, **entry())
    with pytest.raises(StateError, match=r"1,?000 bytes"):
        ledger.entries()


@pytest.mark.parametrize("line", ["", "nothing", '{"at": "x"}', '{"noise": -1}'])
def test_damaged_ledger_releases_nothing(tmp_path, line):
    ledger = Ledger(tmp_path, "a")
    ledger.charge([Release(1.0)], lambda past: None, **entry())
    text = ledger.path.read_text()
    ledger.path.write_text(f"{line}\n{text}")
    with pytest.raises(StateError, match="line 1"):
        ledger.charge([Release(1.0)], lambda past: None, **entry())
    assert ledger.path.read_text() == f"{line}\n{text}"


@pytest.mark.parametrize(
    ("old", "new"),
    [('"noise":4.0', f'"noise":{value}') for value in
     ("-1", "1e-154", "0.1", "NaN", "Infinity", "1e308", "1e999")]
    + [('"sampling":1.0', f'"sampling":{value}') for value in ("0", "-1", "NaN", "1.5", "Infinity")]
    + [('"count":1', f'"count":{value}') for value in ("0", "-3", "9" * 400)]
    + [('"source":"AES-256-CTR"', '"source":""'), (',"source":"AES-256-CTR"', "")],
)  # fmt: skip
def test_invalid_entry_has_infinite_epsilon(tmp_path, call, old, new):
    """Such an entry must not hide any consumption, alone or among other entries."""
    ledger = Ledger(tmp_path, "a")
    ledger.charge([Release(4.0)], lambda past: None, **entry())
    ledger.charge([Release(4.0)], lambda past: None, **entry(run="other"))
    first, second = ledger.path.read_text().splitlines()
    assert old in first
    ledger.path.write_text(f"{first.replace(old, new)}\n{second}\n")
    assert epsilon_of([each.release for each in ledger.entries()], 1e-5) == np.inf
    status, out, _ = call("privacy", str(tmp_path), "--json")
    rows = {r["run"]: (r["epsilon"], r["infinite"]) for r in json.loads(out)}
    assert status == 0
    assert rows == {
        "r": (None, 1), "other": (pytest.approx(epsilon_of([Release(4.0)], 1e-5)), 0),
        "all": (None, 1),
    }  # fmt: skip
    status, out, _ = call("privacy", str(tmp_path))
    assert "a: 1 entry has infinite epsilon" in " ".join(out.split())


@pytest.mark.parametrize("limit", [{}, {"privacy": "epsilon=8 delta=1e-5"}])
def test_run_of_an_earlier_version_releases_nothing(tmp_path, limit):
    client = opened(private("felo", **{"privacy.noise-multiplier": 1.0}), tmp_path, **limit)
    replied(opened(private("felo", **{"privacy.noise-multiplier": 1.0}), tmp_path), 1, Knowledge())
    path = Ledger(tmp_path, "client-1").path
    path.write_text(path.read_text().replace(',"source":"AES-256-CTR"', ""))
    before = path.read_text()
    arrays, _, said = client.fit(encode(Envelope("run", "felo", 2, "server"), Knowledge()), {})
    assert arrays == []
    assert said["spent"] is True
    assert "No further data was released" in said["error"]
    assert path.read_text() == before


def test_rejected_entries_are_not_written(tmp_path):
    ledger = Ledger(tmp_path, "a")

    def refuse(past):
        raise PrivacyError("no")

    with pytest.raises(PrivacyError):
        ledger.charge([Release(1.0)], refuse, **entry())
    assert ledger.entries() == []


def test_ledger_is_private_and_no_symlink(tmp_path):
    ledger = Ledger(tmp_path, "a")
    ledger.charge([Release(1.0)], lambda past: None, **entry())
    assert ledger.path.stat().st_mode & 0o077 == 0
    Ledger(tmp_path, "b").path.symlink_to(ledger.path)
    with pytest.raises(StateError, match="link"):
        Ledger(tmp_path, "b").charge([Release(1.0)], lambda past: None, **entry())


def test_digest_does_not_depend_on_the_order_of_samples():
    x, y = torch.randn(9, 1, 4, 4), torch.arange(9) % 3
    order = torch.randperm(9)
    assert digest_of(x, y) == digest_of(x[order], y[order])
    assert digest_of(x, y) != digest_of(x, (y + 1) % 3)
    assert digest_of(x, y) != digest_of(x[:8], y[:8])


def test_command_shows_consumption_by_run(tmp_path, call):
    for name, number in (("one", 1), ("one", 2), ("two", 1)):
        about = entry(run=name, round=number)
        Ledger(tmp_path, "a").charge([Release(4.0)], lambda past: None, **about)
    status, out, _ = call("privacy", str(tmp_path), "--json")
    assert status == 0
    rows = json.loads(out)
    assert [(r["run"], r["rounds"]) for r in rows] == [("one", 2), ("two", 1), ("all", 3)]
    assert rows[0]["epsilon"] == pytest.approx(epsilon_of([Release(4.0, count=2)], 1e-5))
    assert read_ledger(Ledger(tmp_path, "a").path)


# Runs without privacy at a site, and copies of a ledger


def at_site(config, directory, **own):
    """Return a client whose private state outlives the run, as in a deployment."""
    about = {"partition-id": 1, "num-partitions": config.run.clients, "state-dir": str(directory)}
    return config.method.client(config, read_node({**about, **own}, config.run))


def open_config(**changes):
    return resolve({**SMALL, **settings("felo", models=["mlp"], clients=2, **changes)})


def test_site_records_its_runs_without_privacy_before_they_train(tmp_path, monkeypatch):
    client, seen = at_site(open_config(), tmp_path), []
    train = type(client).train
    monkeypatch.setattr(
        type(client),
        "train",
        lambda self, *args: (seen.append(entries(tmp_path)), train(self, *args))[1],
    )
    for number in (1, 2):
        client.state.restore("run", before=number)
        replied(client, number, Knowledge())
    message = encode(Envelope("run", "felo", 2, "server"), Knowledge())
    assert "error" not in client.evaluate(message, {})[2]
    again = at_site(open_config(), tmp_path)  # each message of a deployment has its own process
    assert "error" not in again.evaluate(message, {})[2]
    found = entries(tmp_path)
    assert [(e.run, e.round, e.is_private) for e in found] == [("run", 1, False), ("run", 2, False)]
    assert {e.data for e in found} == {digest_of(client.x, client.y)}
    assert seen == [found[:1], found]


def test_simulated_client_records_no_run_without_privacy(tmp_path):
    client = opened(open_config(), tmp_path)
    replied(client, 1, Knowledge())
    assert entries(tmp_path) == []


def test_private_run_notes_earlier_runs_without_privacy(tmp_path, caplog, call):
    replied(at_site(open_config(), tmp_path), 1, Knowledge())
    for number in (1, 2):
        client = at_site(private("felo", clients=2, **CHEAP), tmp_path)
        client.state.restore("second", before=number)
        envelope = Envelope("second", "felo", number, "server")
        assert client.fit(encode(envelope, Knowledge()), {})[2]["epsilon"] < np.inf
    said = [each for each in caplog.messages if "no privacy guarantee" in each]
    assert len(said) == 1
    assert "client-1: run second has no privacy guarantee" in said[0]
    assert "used this site's data: run." in said[0]
    rows = json.loads(call("privacy", str(tmp_path), "--json")[1])
    found = [(r["run"], r["epsilon"] is None, r["guarantee"]) for r in rows]
    assert found == [("run", True, False), ("second", False, False), ("all", True, False)]
    status, out, _ = call("privacy", str(tmp_path))
    assert status == 0
    assert "no privacy" in out
    assert "client-1: no privacy guarantee, because the ledger contains runs without privacy" in out


def test_sites_budget_is_that_of_its_private_runs(tmp_path, monkeypatch):
    """A run without privacy voids the guarantee, but does not end private runs."""
    replied(at_site(open_config(), tmp_path), 1, Knowledge())
    given = []
    monkeypatch.setattr(
        mechanisms, "calibrate_noise", lambda *args: given.append(args) or Noise(9.0, 9, 9)
    )
    client = at_site(private("felo", clients=2), tmp_path, privacy="epsilon=8 delta=1e-5")
    client.privacy.begin("second", 1)
    assert client.privacy.noise == Noise(9.0, 9, 9)
    assert [words[3:] for words in given] == [(), ((),)]
    client.privacy._check(entries(tmp_path), Release(50.0))


def test_run_without_privacy_voids_the_guarantee_whatever_the_digest(tmp_path, call):
    """Another seed, image size, or sample changes the digest; most samples are equal."""
    ledger = Ledger(tmp_path, "a")
    ledger.record_unprotected("open", 1, "felo", "a", "first digest")
    ledger.charge([Release(4.0)], lambda past: None, **entry(run="private", data="other digest"))
    rows = json.loads(call("privacy", str(ledger.path), "--json")[1])
    assert {r["run"]: r["guarantee"] for r in rows} == {
        "open": False,
        "private": False,
        "all": False,
    }


@pytest.mark.parametrize(("method", "charged"), [("felo", {1, 2}), ("fedmd", {1, 2, 3})])
def test_scores_are_logged_with_the_round_of_the_server(method, charged, tmp_path, caplog):
    """Some methods train again after the last round, which consumes more budget."""
    with caplog.at_level("INFO", "fedhet"):
        run(private(method, clients=2, rounds=2, **CHEAP), tmp_path)
    rounds = re.findall(r"client-1: round (\d+): accuracy", caplog.text)
    assert set(rounds) == {"1", "2"}
    assert {each.round for each in entries(tmp_path / "state")} == charged


def test_copies_of_a_ledger_are_merged_without_losing_or_doubling_an_entry(tmp_path, call):
    """A backup replaces a ledger that has grown, and both copies grow."""
    ledger, copy = Ledger(tmp_path / "state", "a"), Ledger(tmp_path / "copy", "a")
    twice = [Release(4.0), Release(4.0)]  # alike in all, and both count
    for each in (ledger, copy):
        each.charge(twice, lambda past: None, **entry(run="before"))
    if ledger.entries() != copy.entries():  # the clock's second has changed
        copy.path.write_bytes(ledger.path.read_bytes())
    ledger.charge([Release(5.0)], lambda past: None, **entry(run="restored"))
    copy.charge([Release(6.0)], lambda past: None, **entry(run="lost"))
    copy.charge([Release(7.0)], lambda past: None, **entry(run="lost", round=2))
    for added in (2, 0):
        status, _, err = call("privacy", str(ledger.path), "--merge", str(copy.path))
        assert status == 0
        assert f"{added} of 4 entries" in " ".join(err.split())
    assert sorted(e.noise for e in ledger.entries()) == [4, 4, 5, 6, 7]
    ledger.path.unlink()  # the disk is new
    assert call("privacy", str(ledger.path), "--merge", str(copy.path))[0] == 0
    assert ledger.entries() == copy.entries()
    assert ledger.path.stat().st_mode & 0o077 == 0


def test_foreign_ledger_is_not_merged(tmp_path, call):
    ledger, other = Ledger(tmp_path, "a"), Ledger(tmp_path, "b")
    ledger.charge([Release(4.0)], lambda past: None, **entry())
    other.charge([Release(4.0)], lambda past: None, **entry(client="b"))
    before = ledger.path.read_bytes()
    (tmp_path / "damaged.jsonl").write_text("{}\n")
    for into, copy, fault in (
        (ledger.path, other.path, "expected the ledger of 'a', got 'b'"),
        (ledger.path, tmp_path / "damaged.jsonl", "line 1 is damaged"),
        (ledger.path, tmp_path / "nothing.jsonl", "cannot read"),
        (tmp_path / "loose.jsonl", ledger.path, "to merge into"),
    ):
        status, _, err = call("privacy", str(into), "--merge", str(copy))
        assert status != 0
        assert fault in " ".join(err.split())
    assert ledger.path.read_bytes() == before


# What cannot be private


@pytest.mark.parametrize("method", sorted(set(shipped_names()) - set(SUPPORTED)))
def test_unsupported_method_raises_with_the_reason(method):
    reason = find_method(method).spec.privacy.unsupported
    with pytest.raises(SettingsError, match=rf"{method} \({reason[:20]}"):
        resolve({"method": method, "privacy.epsilon": 8.0})


@pytest.mark.parametrize(
    ("method", "changes", "said"),
    [
        ("felo", {"models": ["cnn2"]}, "batch norm layers of cnn2 mix.*expected cnn2-gn with"),
        ("fedtype", {"proxy": "cnn2"}, "'fedtype.proxy': .* expected cnn2-gn .* got 'cnn2'"),
        ("fedtype", {"proxy": "cnn3"}, "'fedtype.proxy': .* expected cnn3-gn .* got 'cnn3'"),
        ("fedtype", {"backward": "conformal"}, "expected symmetric or topk or none"),
        ("felo", {"clip": 1.0}, "'training.clip': expected 0 with .* got 1.0"),
        ("felo", {"semi": "fixmatch"}, "'training.semi': expected none"),
        ("felo", {"pace.select": "power-of-choice"}, "expected random"),
        ("felo", {"schedule": "plateau"}, "expected constant or cosine or step"),
        ("felo", {"engine.precision": "bfloat16"}, "expected float32"),
        ("felo", {"pace.select": "oort"}, "'pace.select': expected random .* got 'oort'"),
        ("fedmd", {"models": ["sk-tree"]}, "a neural network"),
    ],
)
def test_unsupported_setting_raises_with_an_alternative(method, changes, said):
    with pytest.raises(SettingsError, match=said):
        private(method, **changes)


def test_private_default_models_are_supported():
    config = resolve({"method": "felo", "privacy.epsilon": 8.0})
    assert config.run.models.pool[:3] == ("cnn2-gn", "cnn3-gn", "mlp")
    assert config.run.engine.precision == "float32"
    assert resolve({"method": "fml", "privacy.epsilon": 8.0}).method_settings.meme == "cnn2-gn"
    assert (
        "text-gru"
        not in resolve(
            {"method": "felo", "privacy.epsilon": 8.0, "data.dataset": "text:x"}
        ).run.models.pool
    )


def test_custom_model_with_an_unsupported_layer_raises():
    class Attentive(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 1)

    with pytest.raises(Exception, match="DP-SGD"):
        sgd.check_supports_dp(Attentive())


@pytest.mark.parametrize(
    ("name", "kind", "shape"),
    [
        ("text-gru", "text", (0, 12, 50)),
        ("text-transformer", "text", (0, 12, 50)),
        ("ft-transformer", "table", (8,)),
        ("mixing_model:made", "image", (1, 8, 8)),
    ],
)
def test_unsupported_model_raises_before_a_run(name, kind, shape, tmp_path, monkeypatch):
    (tmp_path / "mixing_model.py").write_text(
        "from torch import nn\n\n\nclass Mixing(nn.Flatten):\n    def forward(self, x):\n"
        "        return super().forward(x) - x.flatten(1).mean(0)\n\n\n"
        "def made(shape, classes):\n    return Mixing(), nn.Linear(64, classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = private("fedavg", models=[name])
    message = (
        f"'models.pool': model '{name}' cannot be trained with DP-SGD.*expected another model, got"
    )
    dataset = SimpleNamespace(kind=kind, shape=shape, classes="abc", outputs=3)
    with pytest.raises(SettingsError, match=message):
        check_trainable(config, dataset)


def test_run_prints_its_epsilon_before_it_starts():
    assert private("felo", rounds=20, **PLANNED).run.privacy.describe_budget(20) == (
        "20 rounds consume at most ε = 8 at δ = 1e-05 per client"
    )
