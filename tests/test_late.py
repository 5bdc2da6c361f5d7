"""Rounds that do not wait for all clients: late replies, their use, and resuming."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from federation import Server, records, run, small, without_times
from flwr.common import Code, FitRes, Parameters, Status
from interruption import CutError, CutOff, resumed, same_but_for_the_name
from typer.testing import CliRunner

from fedhet.base.arrays import grouped
from fedhet.cli import app
from fedhet.clients.fedavg import FedAvgClient
from fedhet.methods.registry import find_method, shipped_names
from fedhet.report import load_run
from fedhet.runs.measures import Measured
from fedhet.runs.storage import Checkpoints, ClientStore
from fedhet.server.open_calls import OpenCalls
from fedhet.server.reply import Reply
from fedhet.server.steps import steps_of
from fedhet.wire.knowledge import Knowledge

DEVICES = "client,sample-ms,mbit\n" + "".join(
    f"client-{k},{ms},{mbit}\n"
    for k, (ms, mbit) in enumerate([(1, 100), (2, 50), (3, 80), (8, 20)])
)
"""Three clients alike, and one that is slow."""


@pytest.fixture
def devices(tmp_path):
    """Write the file of these devices."""
    (tmp_path / "devices.csv").write_text(DEVICES)
    return str(tmp_path / "devices.csv")


def by_hand(config, directory, enough, *, asynchronous):
    """Simulate the rounds of a method with messages of one size, event by event.

    Yields for each round the sampled clients, the replies, the ages of late replies, the late
    clients, and the clock.
    """
    found = records(directory)
    down = found[0]["bytes_down"] / len(found[0]["asked"])
    up = found[0]["bytes_up"] / len(found[0]["answered"])
    samples = {
        n: m.info.samples
        for n, m in Server(config, directory.parent / "by-hand").strategy.members.items()
    }
    takes = {}
    for line in DEVICES.splitlines()[1:]:
        name, ms, mbit = line.split(",")
        work = samples[name] * config.run.training.local_epochs
        takes[name] = work * float(ms) / 1000 + (up + down) * 8 / (float(mbit) * 1e6)
    now, at_work = 0.0, {}
    for number in range(1, config.run.rounds + 1):
        sampled = sorted(samples.keys() - at_work.keys())
        at_work |= {name: (number, now + takes[name]) for name in sampled}
        counted = at_work if asynchronous or not sampled else sampled
        dues = sorted(at_work[name][1] for name in counted)
        now = dues[min(enough if sampled else 1, len(dues)) - 1]
        there = sorted(name for name, (_, due) in at_work.items() if due <= now)
        ages = {name: number - at_work[name][0] for name in there if at_work[name][0] < number}
        for name in there:
            del at_work[name]
        yield sampled, there, ages, sorted(at_work), now


@pytest.mark.parametrize(("mode", "enough"), [("synchronous", 3), ("asynchronous", 2)])
def test_rounds_close_like_an_event_simulation(tmp_path, devices, mode, enough):
    config = small(
        "fedavg",
        clock=devices,
        **{"pace.mode": mode},
        min_replies=float(enough),
        rounds=9,
        models=["mlp"],
    )
    summary = run(config, tmp_path / "run")
    expected = by_hand(config, tmp_path / "run", enough, asynchronous=mode == "asynchronous")
    for found, (sampled, there, ages, late, now) in zip(
        records(tmp_path / "run"), expected, strict=True
    ):
        assert found["asked"] == sampled
        assert sorted(found["answered"]) == there
        assert found.get("ages", {}) == ages
        assert found.get("late", []) == late
        assert found["clock"] == pytest.approx(now)
        assert not found["failed"]
    assert [past["clock"] for past in summary["history"]] == [
        pytest.approx(each["clock"]) for each in records(tmp_path / "run")
    ]


def late_run(method, devices, **changes):
    return small(method, clock=devices, min_replies=3.0, rounds=6, **changes)


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("fedhe", "fedtype", "heterofl")]


@pytest.mark.parametrize("method", ["felo", "fedmd", "um-pfssl", *SLOW])
def test_run_with_late_clients_resumes_identically(tmp_path, devices, method):
    resumes_as_if_it_had_not_been_cut(late_run(method, devices), tmp_path)


def test_preference_follows_the_simulated_clock_after_resuming(tmp_path, devices):
    choice = {"pace.select": "oort", "fraction": 0.75}
    config = small("fedavg", clock=devices, min_replies=2.0, rounds=8, models=["mlp"], **choice)
    resumes_as_if_it_had_not_been_cut(config, tmp_path)
    whole, cut = (known_of_clients(tmp_path / name) for name in ("whole", "after"))
    assert whole == cut
    assert whole["client-3"]["seconds"] > 0.3  # it trains for 8 ms a sample


def known_of_clients(directory):
    """Return the checkpoint's record of each client's last reply."""
    identity = {"run": load_run(directory).origin.run, "method": "fedavg"}
    facts = Checkpoints(directory, identity).read_checkpoint(8).metadata
    return json.loads(facts["pace"])["selection"]["clients"]


def resumes_as_if_it_had_not_been_cut(config, tmp_path):
    run(config, tmp_path / "whole")
    assert any("late" in each for each in records(tmp_path / "whole"))
    for moment, number in (("before", 3), ("after", 4)):
        place = tmp_path / moment
        with pytest.raises(CutError):
            run(config, place, [CutOff(number, moment)])
        run(resumed(config, place), place)
        same_but_for_the_name(tmp_path / "whole", place)


@pytest.mark.slow
def test_ray_gives_the_metrics_of_inline(tmp_path, devices):
    config = late_run("fedavg", devices, models=["mlp"])
    other = late_run("fedavg", devices, models=["mlp"], backend="ray")
    one, two = run(config, tmp_path / "inline"), run(other, tmp_path / "ray")
    assert without_times(one) == without_times(two)


def test_late_reply_of_a_synchronous_method_is_dropped(tmp_path, devices):
    config = late_run("fedmd", devices, max_silences=1, max_refusals=1)
    run(config, tmp_path / "run")
    found = records(tmp_path / "run")
    assert not any(each["failed"] for each in found)
    assert not any("ages" in each for each in found)
    instructions = [each["round"] for each in found if "client-3" in each["asked"]]
    assert 1 < len(instructions) < 4  # when it was no longer at work
    assert all("client-3" not in each["answered"] for each in found)


@pytest.mark.parametrize("most", [0, 1])
def test_outdated_reply_is_not_used(tmp_path, devices, most):
    ages: dict[int, set[int]] = {}
    (tmp_path / "devices.csv").write_text(DEVICES.replace(",8,20", ",20,20"))
    for limit in (most, 100):
        config = late_run("fedavg", devices, models=["mlp"], **{"pace.max-age": limit})
        run(config, tmp_path / str(limit))
        found = records(tmp_path / str(limit))
        ages[limit] = {age for each in found for age in each.get("ages", {}).values()}
        assert not any(each["failed"] for each in found)
    assert max(ages[100]) > 1
    assert ages[most] == {age for age in ages[100] if age <= most}


def test_every_method_declares_its_use_of_late_replies():
    """Replies about the public samples of one round are useless in later rounds."""
    specs = {name: find_method(name).spec for name in shipped_names()}
    assert {spec.late for spec in specs.values()} == {"averaged", "kept", "refused"}
    for name, spec in specs.items():
        rows = {getattr(field, "axes", ())[:1] for field in spec.replies.fields}
        if rows & {("Q",), ("N",)}:
            assert spec.late == "refused", name


def test_late_change_is_added_to_current_weights_with_less_weight(tmp_path, devices):
    """Compare with numpy: a fresh reply is a model, and a late reply changes an older model."""
    config = late_run("fedavg", devices, models=["mlp"])
    server = Server(config, tmp_path / "run")
    strategy, sent = server.strategy, {}
    samples = {n: m.info.samples for n, m in strategy.members.items()}
    checked = 0
    for number in range(1, 6):
        before = {k: v.copy() for k, v in strategy.averaged["weights"].items()}
        instructions = server.instruct(number)
        for proxy, _ in instructions:
            sent[proxy.name] = number, before
        found = server.flower.collector.fit(number, instructions, server.flower.state.needed, None)
        models = {}
        original = strategy.aggregate

        def seen(number, replies, models=models, original=original):
            models |= {r.client.name: (r.age, dict(r.knowledge.group("weights"))) for r in replies}
            return original(number, replies)

        strategy.aggregate = seen
        server.flower.aggregate_fit(number, found)
        strategy.aggregate = original
        server.close(number)
        total = sum(samples[n] / math.sqrt(1 + age) for n, (age, _) in models.items())
        for key in before:
            if not np.issubdtype(before[key].dtype, np.floating):
                continue
            mean = np.zeros(before[key].shape)
            for name, (age, model) in models.items():
                mean += samples[name] / math.sqrt(1 + age) / total * model[key].astype(np.float64)
            after = strategy.averaged["weights"][key]
            np.testing.assert_allclose(after, mean, rtol=1e-5, atol=1e-6)
        late = [name for name, (age, _) in models.items() if age]
        for name in late:
            asked_in, start = sent[name]
            trained = raw_reply(server, name, asked_in)
            for key in before:
                if np.issubdtype(before[key].dtype, np.floating):
                    expected = before[key] + (trained[key] - start[key].astype(np.float64))
                    np.testing.assert_allclose(models[name][1][key], expected, rtol=1e-5, atol=1e-5)
            checked += 1
    assert checked
    server.flower.collector.close()


@pytest.mark.parametrize("encoding", ["float32", "int8"])
def test_late_reply_counts_with_the_bytes_that_were_sent(tmp_path, devices, encoding):
    """All clients send one model, so sizes differ only by the length of numbers in the header."""
    config = late_run("fedavg", devices, models=["mlp"], **{"wire.encoding": encoding})
    run(config, tmp_path / "run")
    replied = [each for each in records(tmp_path / "run") if each["answered"]]
    assert any(each.get("ages") for each in replied)
    sizes = [each["bytes_up"] / len(each["answered"]) for each in replied]
    assert max(sizes) - min(sizes) < 20, sizes


@pytest.mark.parametrize("method", ["fedavg", "felo", "fedkd", "heterofl"])
def test_asynchronous_round_equals_a_fedbuff_step(tmp_path, method):
    """Each element moves by eta sum_k n_k s(tau_k) Delta_k / sum_k n_k, over the clients k that
    train the element: the clients of an architecture (felo), or of a width (heterofl, n_k = 1)."""
    changes = {"pace.mode": "asynchronous", "pace.server-lr": 0.5, "min_replies": 2.0}
    changes |= {"fedkd": {"energy-start": 1.0, "energy-end": 1.0}}.get(method, {})
    changes |= {"felo": {"models": ["mlp", "cnn2"]}}.get(method, {})
    changes |= {"heterofl": {"masked": False}}.get(method, {})
    server = Server(small(method, **changes), tmp_path / "run")
    strategy, rng = server.strategy, np.random.default_rng(7)
    field = "update" if method == "fedkd" else "weights"
    server.flower.state.start(9)
    if method == "felo":
        for client in (member.info for member in strategy.members.values()):
            shapes = strategy.sizes(client).models["weights"]
            strategy.weights[client.model] = random_weights(rng, shapes)
    instructions = {n: strategy.instruct(9, m.info) for n, m in strategy.members.items()}
    global_model = {"fedkd": instructions["client-0"].group("weights")}.get(method)
    if method == "heterofl":
        global_model = dict(strategy.weights)
    ages = dict(zip(sorted(strategy.members), (0, 8, 3, 1), strict=True))
    replies, updates = [], {}
    for name, age in ages.items():
        client = replace(strategy.members[name].info, samples=10 + 7 * age)
        shapes = strategy.sizes(client).models[field]
        start, delta = random_weights(rng, shapes), random_weights(rng, shapes, 0.1)
        sent = {k: start[k] + delta[k] for k in start} if field == "weights" else delta
        extra = {}
        if method == "felo":
            sizes = strategy.sizes(client).axes
            extra = {
                "classes": np.arange(2),
                "features": np.ones((2, sizes["D"]), np.float32),
                "logits": np.ones((2, sizes["C"]), np.float32),
                "counts": np.array([1, 1], np.int64),
            }
        instruction = Knowledge(grouped("weights", start))
        reply = Knowledge({**grouped(field, sent), **extra})
        replies.append(Reply(client, reply, Measured({}), age=age, sent=instruction))
        updates[name] = client, delta
    members = strategy.members
    instruct = partial(strategy.instruct, 9)
    state = server.flower.state
    steps = steps_of(strategy.run, strategy.spec, strategy.sizes, state, members, instruct)
    accepted = replies
    for step in (*steps, server.flower._accept):
        accepted = step(accepted)
    accepted = list(accepted)
    assert len(accepted) == 4, server.flower.state.record.failed
    strategy.aggregate(9, accepted)
    for name, (client, _) in updates.items():
        before = global_model or instructions[name].group("weights")
        after = {
            "felo": lambda model=client.model: strategy.weights[model],
            "heterofl": lambda: strategy.weights,
        }.get(method, lambda: strategy.averaged["weights"])()
        for key, value in before.items():
            if not np.issubdtype(value.dtype, np.floating):
                continue
            step, total = np.zeros(value.shape), np.zeros(value.shape)
            for other, (peer, delta) in updates.items():
                if method == "felo" and peer.model != client.model:
                    continue
                count = 1 if method == "heterofl" else peer.samples
                region = tuple(map(slice, delta[key].shape))
                step[region] += count / math.sqrt(1 + ages[other]) * delta[key]
                total[region] += count
            expected = value + 0.5 * np.divide(step, total, out=step * 0, where=total > 0)
            if key.endswith("running_var"):
                expected = expected.clip(min=0)
            np.testing.assert_allclose(after[key], expected, rtol=1e-4, atol=1e-5, err_msg=key)


def random_weights(rng, shapes, scale=1.0):
    """Return random tensors of the given shapes; integers and variances are not negative."""
    tensors = {}
    for name, (shape, dtype) in shapes.items():
        value = scale * rng.normal(size=shape)
        positive = name.endswith("running_var") or not np.issubdtype(dtype, np.floating)
        tensors[name] = np.asarray(np.abs(value) + 1 if positive else value, dtype)
    return tensors


def raw_reply(server, name, number):
    """Return a client's weights at the end of a round, from its disk."""
    store = ClientStore(server.log.directory / "state", server.log.run_name, name)
    tensors, _ = store.load(number)
    return {
        k.removeprefix("private/"): v.numpy()
        for k, v in tensors.items()
        if k.startswith("private/")
    }


# By this machine's clock.


@pytest.fixture
def held(monkeypatch):
    """Delays a client's training until it is released."""
    gate = threading.Event()
    train = FedAvgClient.train

    def slowly(self, round, knowledge):
        if self.info.name == "client-2" and round == 1:
            gate.wait(60)
        return train(self, round, knowledge)

    monkeypatch.setattr(FedAvgClient, "train", slowly)
    monkeypatch.setattr("fedhet.engines.simulate.InlineProxy._one_at_a_time", threading.RLock())
    return gate


class Unlocked:
    """A lock without effect, so that clients of this test train in parallel."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def test_hanging_client_replies_late_and_is_used(tmp_path, held, monkeypatch):
    monkeypatch.setattr("fedhet.engines.simulate.InlineProxy._one_at_a_time", Unlocked())
    config = small("fedavg", clients=3, rounds=4, models=["mlp"], min_replies=2.0, max_silences=1)
    server = Server(config, tmp_path / "run")
    server.flower.collector.open(3)
    for number in (1, 2, 3, 4):
        instructions = server.instruct(number)
        names = [proxy.name for proxy, _ in instructions]
        assert ("client-2" in names) == (number in (1, 4)), number
        found = server.flower.collector.fit(number, instructions, server.flower.state.needed, None)
        server.flower.aggregate_fit(number, found)
        assert not server.flower.state.record.failed
        if number == 2:
            assert server.flower.state.record.late == ["client-2"]
            held.set()
            until(lambda: (tmp_path / "run" / "late" / "client-2.safetensors").exists())
        if number == 3:
            assert server.flower.state.record.ages == {"client-2": 2}
        server.close(number)
        if number == 3:
            assert not (tmp_path / "run" / "late" / "client-2.safetensors").exists()
    server.flower.collector.close()


def until(what, seconds=120):
    ends = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_pending_clients_are_canceled(tmp_path, monkeypatch):
    """In one process, clients train in turn; after enough replies, the others need not train."""
    train = FedAvgClient.train

    def slowly(self, round, knowledge):
        time.sleep(1)  # more than the server needs to see that there are enough
        return train(self, round, knowledge)

    monkeypatch.setattr(FedAvgClient, "train", slowly)
    config = small("fedavg", clients=4, rounds=2, models=["mlp"], min_replies=2.0)
    run(config, tmp_path / "run")
    run(small("fedavg", clients=4, rounds=1, models=["mlp"]), tmp_path / "all" / "run")
    (whole,) = records(tmp_path / "all" / "run")
    for each in records(tmp_path / "run"):
        assert each["bytes_down"] / len(each["asked"]) == whole["bytes_down"] / 4
        assert 2 <= len(each["answered"]) <= 3
        assert each["asked"] == each["answered"]
        assert "late" not in each
        assert not each["failed"]


def test_canceled_instructions_are_not_kept(tmp_path):
    config = small("fedavg", clients=4, models=["mlp"], min_replies=2.0)
    server = Server(config, tmp_path / "run")
    calls = server.flower.state.calls
    server.instruct(1)
    server.flower._codec.cancel(1, {"client-1", "client-3"})
    there = [name for name in sorted(server.strategy.members) if calls.sent(name, 1)[0]]
    assert there == ["client-0", "client-2"]


def test_canceled_evaluations_are_not_counted(tmp_path):
    server = Server(small("fedavg", clients=4, models=["mlp"]), tmp_path / "run")
    exchange = server.flower._codec
    server.instruct(1)
    sent = server.strategy.instruct(1, server.strategy.members["client-0"].info)
    exchange.encode_all(1, dict.fromkeys(server.strategy.members, sent), training=False)
    record = server.flower.state.record
    whole, down = record.bytes_evaluation, record.bytes_down
    exchange.cancel(1, {"client-3"}, training=False)
    assert record.bytes_evaluation == pytest.approx(whole * 3 / 4)
    assert record.bytes_down == down


def test_round_without_replies_does_not_change_the_usual_duration(tmp_path, devices):
    """Otherwise, the timeout, three times the usual duration, would become zero."""
    pace = {"pace.timeout": "3x", "pace.drop-outs": 0.5}
    config = small("fedavg", clock=devices, rounds=4, models=["mlp"], fraction=0.25, seed=3, **pace)
    run(config, tmp_path / "run")
    first, *others = records(tmp_path / "run")
    assert first["asked"]
    assert not first["answered"]
    assert any(each["answered"] for each in others)
    assert others[-1]["clock"] > 0


def test_late_reply_survives_on_disk_and_one_of_another_run_does_not(tmp_path, devices):
    config = late_run("felo", devices)
    with pytest.raises(CutError):
        run(config, tmp_path / "run", [CutOff(3, "after")])
    assert [path.stem for path in (tmp_path / "run" / "late").iterdir()] == ["client-3"]
    run_name = load_run(tmp_path / "run").origin.run
    sampled = [each["round"] for each in records(tmp_path / "run") if "client-3" in each["asked"]]

    def restored(directory, run_name, number=sampled[-1]):
        calls = OpenCalls(directory, run_name)
        calls.load_dict({"client-3": [number, 0.0, 1.0]}, is_simulated=True)
        return calls.at_work

    for folder in ("other", "earlier"):
        shutil.copytree(tmp_path / "run" / "late", tmp_path / folder / "late")
    assert restored(tmp_path / "run", run_name) == {"client-3"}
    assert restored(tmp_path / "other", "felo-other") == set()
    assert restored(tmp_path / "earlier", run_name, sampled[-1] - 1) == set()
    assert not [*(tmp_path / "other" / "late").iterdir(), *(tmp_path / "earlier/late").iterdir()]
    (tmp_path / "run" / "late" / "client-3.safetensors").write_bytes(b"damaged")
    assert restored(tmp_path / "run", run_name) == set()


def test_oversized_late_reply_is_not_written_to_disk(tmp_path):
    """A malicious client could otherwise fill the disk by replying after the round."""
    config = small("fedavg", models=["mlp"], min_replies=2.0, max_payload_mb=0.1)
    server = Server(config, tmp_path / "run")
    flower, info = server.flower, server.strategy.members["client-1"].info
    large = Parameters([bytes(5_000_000)], "numpy.ndarray")
    result = FitRes(Status(Code.OK, ""), large, 0, {})
    calls = flower.state.calls
    calls.begin(["client-1"], 1, 0.0)
    calls["client-1"].outcome = calls.store(flower._codec.read(info, (), result, 1))
    (path,) = (tmp_path / "run" / "late").iterdir()
    assert path.stat().st_size < 100_000
    outcome = calls.collect("client-1", 1)
    assert outcome.bytes_received == 5_000_000
    assert re.search(r"0\.1 MB.*5\.0 MB", outcome.error)


def test_report_shows_accuracy_by_simulated_hours(tmp_path, devices):
    run(late_run("fedavg", devices, models=["mlp"]), tmp_path / "run", report=True)
    assert (tmp_path / "run" / "figures" / "clock.svg").exists()
    assert "simulated hours" in (tmp_path / "run" / "report.html").read_text()
    out = tmp_path / "compared"
    result = CliRunner().invoke(app, ["compare", str(tmp_path / "run"), "--out", str(out)])
    assert result.exit_code == 0, result.output
    (group,) = json.loads((out / "compare.json").read_text())["groups"]
    ended = records(tmp_path / "run")[-1]["clock"]
    assert group["clock"]["mean"] == pytest.approx(ended)
    assert 0 < group["clock_to_target"]["mean"] <= ended
    assert "simulated time" in (out / "compare.md").read_text()
