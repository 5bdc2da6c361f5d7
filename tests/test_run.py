"""Complete runs: files, reproducibility, and robustness against a faulty client."""

import json
import math

import numpy as np
import pytest
from federation import Server, records, run, small, without_times
from rounds import altered, instruction_of, reply_of

from fedhet.base.errors import DataError, SettingsError, StateError
from fedhet.client_runtime.node import open_client, read_node
from fedhet.config.resolve import resolve
from fedhet.config.sources import read_toml
from fedhet.engines import simulate as simulation
from fedhet.engines.simulate import InlineProxy
from fedhet.server.app import components
from fedhet.wire.knowledge import Envelope, Knowledge, encode


@pytest.fixture(scope="module")
def felo(tmp_path_factory):
    directory = tmp_path_factory.mktemp("felo") / "first"
    return directory, run(small(), directory, report=True)


def states(directory):
    """Return the clients' states, and the name under which the run is stored."""
    return sorted((directory / "state").glob("*/*/round-*.safetensors"))


def test_run_directory_contains_the_documented_files(felo):
    directory, summary = felo
    for name in ("config.toml", "partition.json", "metrics.jsonl", "summary.json", "report.html"):
        assert (directory / name).stat().st_size > 0
    assert any((directory / "tensorboard").iterdir())
    assert {p.parent.name for p in states(directory)} == set(summary["models"])
    assert summary["models"] == {f"client-{k}": ("mlp", "cnn2")[k % 2] for k in range(4)}
    assert summary["headline"] == "common"
    assert [h["round"] for h in summary["history"]] == [1, 2]
    for protocol in ("personal", "common"):
        values = summary["accuracy"][protocol]["private"]
        each = list(values["per_client"].values())
        assert len(each) == 4
        assert values["mean"] == pytest.approx(np.mean(each))
        assert values["std"] == pytest.approx(np.std(each))
        assert values["worst"] == min(each)


def test_summary_and_partition_count_every_sample(felo):
    directory, summary = felo
    content = json.loads((directory / "partition.json").read_text())
    counts = content["counts"].values()
    assert sum(map(sum, counts)) == 400
    assert content["classes"] == [str(digit) for digit in range(10)]
    clients = [json.loads(path.read_text()) for path in directory.glob("state/*/*/client.json")]
    assert len(clients) == 4
    personal = sum(map(sum, counts)) - sum(client["samples"] for client in clients)
    assert 0 < personal < 400
    assert summary["test_samples"] == {"personal": personal, "common": 100}


def test_last_round_is_the_headline(felo):
    directory, summary = felo
    for protocol, kinds in records(directory)[-1]["accuracy"].items():
        for kind, last in kinds.items():
            # Of two rounds the last fifth is the last one.
            assert summary["accuracy"][protocol][kind] == {
                **last,
                "tail": last["mean"],
                "clients": len(last["per_client"]),
            }


def test_recorded_bytes_equal_the_payloads(tmp_path):
    server = Server(small(), tmp_path / "run")
    instructions, replies = server.play(1)
    server.close(1)
    record = records(tmp_path / "run")[0]
    assert record["bytes_down"] == sum(
        len(t) for _, i in instructions for t in i.parameters.tensors
    )
    assert record["bytes_up"] == sum(len(t) for _, a in replies for t in a.parameters.tensors)


def test_same_seed_same_summary(felo, tmp_path):
    _, first = felo
    assert without_times(run(small(), tmp_path / "again")) == without_times(first)


def test_other_seed_changes_the_run(felo, tmp_path):
    _, first = felo
    other = run(small(seed=1), tmp_path / "other")
    assert other["accuracy"] != first["accuracy"]


def test_ray_gives_the_metrics_of_inline(felo, tmp_path):
    _, inline = felo
    on_ray = run(small(backend="ray"), tmp_path / "ray")
    assert without_times(on_ray) == without_times(inline)


def test_replies_in_another_order_give_the_same_aggregate(tmp_path):
    told = []
    for order in (1, -1):
        server = Server(small(), tmp_path / f"order{order}" / "run")
        server.aggregate(1, server.train(server.instruct(1))[::order])
        told.append([(p.name, i.parameters.tensors[1:]) for p, i in server.instruct(2)])
    assert told[0] == told[1]


@pytest.mark.parametrize(("workers", "expected"), [(1, 2), (2, 4), (100, 100)])
def test_number_of_concurrent_calls_is_limited(tmp_path, workers, expected):
    config = small(clients=100)
    server = components(config, tmp_path / "run", workers=workers, watchers=[]).server
    assert server.max_workers == expected


def test_sampling_goes_by_name_and_seed(tmp_path):
    server = Server(small(fraction=0.5), tmp_path / "run")
    members = [member.info for member in server.strategy.members.values()]
    selections = [server.strategy.select(t, members) for t in range(1, 30)]
    sampled = [list(selection.training) for selection in selections]
    assert all(len(names) == 2 and names == sorted(names) for names in sampled)
    assert {name for names in sampled for name in names} == {f"client-{k}" for k in range(4)}
    mixed = [members[index] for index in (3, 1, 0, 2)]
    assert selections == [server.strategy.select(t, mixed) for t in range(1, 30)]
    assert not any(selection.assisting for selection in selections)
    other = Server(small(fraction=0.5, seed=1), tmp_path / "other").strategy
    assert selections != [other.select(t, members) for t in range(1, 30)]


def test_all_clients_are_evaluated_if_few_are_sampled(tmp_path):
    directory = tmp_path / "few"
    summary = run(small(rounds=3, fraction=0.25, evaluate_every=2), directory)
    rounds = records(directory)
    assert rounds[0]["accuracy"] == {}
    for record in rounds[1:]:
        assert len(record["asked"]) == 1
        assert len(record["accuracy"]["common"]["private"]["per_client"]) == 4
    assert len(summary["accuracy"]["personal"]["private"]["per_client"]) == 4


def test_restarted_client_restores_its_model(felo):
    directory, summary = felo
    config = small()
    node = read_node({"partition-id": 1, "num-partitions": 4}, config.run, str(directory / "state"))
    fresh = config.method.client(config, node)
    message = encode(Envelope(states(directory)[0].parts[-3], "felo", 2, "server"), Knowledge())
    _, _, metrics = fresh.evaluate(message, {})
    expected = summary["accuracy"]["common"]["private"]["per_client"]["client-1"]
    assert metrics["accuracy.common.private"] == expected
    assert fresh.state.participations == 2


def test_state_of_another_model_raises(felo):
    directory, _ = felo
    config = small(models=["cnn2", "mlp"])
    node = read_node({"partition-id": 1, "num-partitions": 4}, config.run, str(directory / "state"))
    other = config.method.client(config, node)
    before = states(directory)[1].read_bytes()
    message = encode(Envelope(states(directory)[0].parts[-3], "felo", 2, "server"), Knowledge())
    _, _, metrics = other.fit(message, {})
    assert "model is 'cnn2', expected this client's 'mlp'" in metrics["error"]
    assert states(directory)[1].read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "signed", "fault"),
    [
        ({"features": lambda x: x * np.nan}, {}, "features: contains NaN or infinity"),
        ({"classes": lambda x: x * 0 + 10}, {}, "classes: must be from 0 to 9, got 10"),
        ({"classes": lambda x: x * 0 + 3}, {}, "classes: values must be unique"),
        ({"features": lambda x: x[:, :-1]}, {}, "features: expected float32 [P, D]"),
        ({"logits": lambda x: x.astype(float)}, {}, "logits: expected dtype float32, got float64"),
        ({"counts": None}, {}, "counts: missing"),
        ({"labels": lambda _: np.zeros(3)}, {}, "labels: unknown field"),
        ({"weights/classifier.weight": lambda x: x[:, :3]}, {},
         "weights/classifier.weight: expected float32 [10, 64], got float32 [10, 3]"),
        ({"weights/classifier.weight": None}, {}, "weights/classifier.weight: missing"),
        ({}, {"sender": "client-0"}, "sender: expected 'client-2', got 'client-0'"),
        ({}, {"round": 7}, "round: expected 1, got 7"),
    ],
)  # fmt: skip
def test_invalid_reply_is_dropped_with_name_and_field(tmp_path, changes, signed, fault):
    def edit(tensors):
        for name, change in changes.items():
            value = tensors.pop(name, None)
            tensors |= {} if change is None else {name: change(value)}

    server = Server(small(), tmp_path / "run")
    replies = [
        (proxy, altered(result, edit, **signed) if proxy.name == "client-2" else result)
        for proxy, result in server.train(server.instruct(1))
    ]
    server.aggregate(1, replies)
    server.close(1)
    record = records(tmp_path / "run")[0]
    assert record["failed"].keys() == {"client-2"}
    assert record["failed"]["client-2"].startswith(fault)
    assert record["answered"] == ["client-0", "client-1", "client-3"]
    assert len(server.instruct(2)) == 4


def _garbage(result):
    result.parameters.tensors[1] = b"\x80\x04garbage"


DAMAGE = {
    "client-0": _garbage,
    "client-1": lambda result: result.parameters.tensors.append(bytes(1_000_000)),
    "client-2": lambda result: result.metrics.update({"accuracy.common.private": math.nan}),
    "client-3": lambda result: result.parameters.tensors.clear(),
}


class Damaging(InlineProxy):
    """A client whose reply is damaged in transit in a different way each time."""

    def fit(self, ins, timeout, group_id):
        result = super().fit(ins, timeout, group_id)
        DAMAGE[self.cid](result)
        return result


def test_undecodable_reply_is_dropped(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Damaging)
    server = Server(small(max_payload_mb=0.5), tmp_path / "run")
    replies = server.train(server.instruct(1))
    server.aggregate(1, replies)
    failed = server.flower.state.record.failed
    assert failed["client-0"].startswith("array 1: not a valid .npy array")
    assert failed["client-1"].startswith("payload: must be at most 0.5 MB, got 1.")
    assert failed["client-2"].startswith(
        "accuracy.common.private: must be a finite number, got nan"
    )
    assert failed["client-3"].startswith("manifest")


class Unwell(InlineProxy):
    """A client that fails in round 1 and works again in round 2."""

    def fit(self, ins, timeout, group_id):
        if self.cid == "client-3" and group_id == 1:
            raise RuntimeError("the power went out")
        return super().fit(ins, timeout, group_id)


def test_dying_client_does_not_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(simulation, "InlineProxy", Unwell)
    run(small(), tmp_path / "run")
    first, second = records(tmp_path / "run")
    assert first["failed"] == {"client-3": "the power went out"}
    assert second["failed"] == {}
    assert len(second["accuracy"]["common"]["private"]["per_client"]) == 4


def test_malformed_instruction_gets_an_error_reply(tmp_path):
    config = small()
    node = read_node({"partition-id": 0, "num-partitions": 4}, config.run, str(tmp_path))
    client = open_client(config, node)
    bad = {"classes": np.array([1, 1]), "features": np.zeros((2, 64), np.float32)}
    _, _, metrics = client.fit(encode(Envelope("r", "felo", 1, "server"), Knowledge(bad)), {})
    assert metrics["error"] == "server: classes: values must be unique, got 1 more than once"
    _, _, metrics = client.fit(encode(Envelope("../r", "felo", 1, "server"), Knowledge()), {})
    assert metrics["error"].startswith("server: run: expected a valid name, got '../r'")
    assert not list(tmp_path.iterdir())


def test_existing_run_is_not_overwritten(felo):
    directory, _ = felo
    before = (directory / "metrics.jsonl").read_bytes()
    with pytest.raises(StateError):
        simulation.simulate(small(), directory)
    assert (directory / "metrics.jsonl").read_bytes() == before


def test_missing_data_raises_before_training(tmp_path):
    config = small(dataset="cifar10", data_dir=str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="nowhere"):
        simulation.simulate(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_missing_device_raises(tmp_path):
    with pytest.raises(SettingsError, match=r"'cuda:99'.*engine\.device"):
        simulation.simulate(small(device="cuda:99"), tmp_path / "run")


def test_unshared_weights_are_not_sent(tmp_path):
    server = Server(small(**{"felo.share-weights": False}), tmp_path / "run")
    _, result = server.train(server.instruct(1))[0]
    assert set(reply_of(result).tensors) == {"classes", "features", "logits", "counts"}


def test_felo_never_mixes_architectures(tmp_path):
    server = Server(small(), tmp_path / "run")
    _, replies = server.play(1)
    sent = {proxy.name: reply_of(result).group("weights") for proxy, result in replies}
    samples = {name: m.info.samples for name, m in server.strategy.members.items()}
    for proxy, ins in server.instruct(2):
        number = int(proxy.name[-1])
        group = [f"client-{k}" for k in (number % 2, number % 2 + 2)]
        for name, tensor in instruction_of((proxy, ins)).group("weights").items():
            total = sum(samples[g] for g in group)
            expected = sum(samples[g] * sent[g][name].astype(np.float64) for g in group) / total
            np.testing.assert_allclose(
                tensor, expected, rtol=1e-5, atol=1e-6 if tensor.dtype.kind == "f" else 0.5
            )


def test_config_left_by_a_run_runs_again(felo, tmp_path):
    directory, summary = felo
    config = resolve({**read_toml(directory / "config.toml"), "out": ""})
    assert without_times(run(config, tmp_path / "again")) == without_times(summary)
