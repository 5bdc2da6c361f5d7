"""Replies on disk: reading, memory use, and deletion."""

import mmap
import resource
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from federation import Server, small
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters, parameters_to_ndarrays
from torch import nn

from fedhet.algorithms import weights as averaging
from fedhet.algorithms.weights import RunningAverage, average_weights
from fedhet.base.arrays import OnDemand
from fedhet.base.errors import KnowledgeError, StateError
from fedhet.engines.simulate import InlineProxy
from fedhet.methods.registry import find_method
from fedhet.server.calls import CallOutcome, RoundResults
from fedhet.server.codec import Codec
from fedhet.server.reply import ReplySpool
from fedhet.server.round import RoundState
from fedhet.wire.contract import Contract, TensorField, WeightsField
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge, decode, encode, read_arrays

SENT = Contract(
    (WeightsField("weights", "w"), TensorField("counts", "int64", ("C",), "samples of a class"))
)
LIMIT = 10**8


def payload(tensors, sender="a"):
    """Return a message in the form in which it arrives."""
    return ndarrays_to_parameters(encode(Envelope("run", "m", 1, sender), Knowledge(tensors)))


def models(count, seed=0):
    """Return models with an odd number of elements, a scalar, an empty and a transposed tensor."""
    rng = np.random.default_rng(seed)
    for _ in range(count):
        weights = {
            "w": rng.normal(size=(37, 5)).astype(np.float32),
            "turned": rng.normal(size=(4, 9)).astype(np.float32).T,
            "steps": np.asarray(rng.integers(0, 99), np.int64),
            "none": np.zeros((0, 3), np.float32),
            "half": rng.normal(size=11).astype(np.float16),
        }
        yield weights, int(rng.integers(1, 999))


def literal_mean(parts, total):
    """Return the weighted mean of full tensors."""
    mean = np.zeros(parts[0][0].shape, dtype=np.float64)
    for value, weight in parts:
        mean += value.astype(np.float64) * (weight / total)
    dtype = parts[0][0].dtype
    return np.asarray(np.rint(mean) if np.issubdtype(dtype, np.integer) else mean, dtype=dtype)


def outcome(tensors, client="a"):
    """Return the outcome of a call, with a reply that has been decoded from a message."""
    arrays = read_arrays(payload(tensors, client), client, LIMIT)
    return CallOutcome(client, 1, decode(arrays, client)[1])


def on_disk(spool, weights, name):
    tensors = {f"weights/{k}": v for k, v in weights.items()}
    return spool.put(outcome(tensors, name)).knowledge.group("weights")


@pytest.mark.parametrize("part", [1, 7, 185, 10**6])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_average_from_disk_equals_the_average_in_memory(tmp_path, monkeypatch, part, count):
    monkeypatch.setattr(averaging, "PART", part)
    spool, given = ReplySpool(tmp_path, SENT), list(models(count))
    stored_models = [(on_disk(spool, w, f"c{k}"), n) for k, (w, n) in enumerate(given)]
    found = average_weights(stored_models)
    total = sum(n for _, n in given)
    assert list(found) == list(given[0][0])
    for name, value in found.items():
        expected = literal_mean([(w[name], n) for w, n in given], total)
        assert value.dtype == expected.dtype
        assert value.shape == expected.shape
        assert value.tobytes() == expected.tobytes()
    running = RunningAverage()
    for weights, n in stored_models:
        running.add(weights, n)
    for name, value in running.mean().items():
        sums = sum(w[name].astype(np.float64) * n for w, n in given) / total
        sums = np.rint(sums) if name == "steps" else sums
        assert value.tobytes() == np.asarray(sums, value.dtype).tobytes()


def test_sum_of_negative_zeros_keeps_its_sign():
    running = RunningAverage()
    running.add({"w": np.array([-0.0], np.float32)}, 2)
    assert np.signbit(running.mean()["w"]).all()


def test_only_weights_stay_on_disk(tmp_path):
    spool = ReplySpool(tmp_path, SENT)
    with spool.open_replies():
        tensors = {"weights/w": np.arange(6.0), "counts": np.array([1, 2])}
        knowledge = spool.put(outcome(tensors)).knowledge
        assert list(knowledge.tensors) == ["weights/w", "counts"]
        kept = knowledge.tensors["weights/w"]
        changed = knowledge.replacing({"counts": np.array([3, 4])})
        assert isinstance(changed.tensors, OnDemand)
        assert list(changed.tensors) == ["weights/w", "counts"]
    assert knowledge.tensors["counts"].tolist() == [1, 2]
    assert changed.tensors["counts"].tolist() == [3, 4]
    assert kept.tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(StateError, match="reply of a"):
        knowledge.group("weights")["w"]


def test_reply_that_is_too_large_is_not_written(tmp_path):
    codec = Codec("run", find_method("fedavg"), 2000, RoundState(1, print))
    result = FitRes(Status(Code.OK, ""), payload({"weights/w": np.zeros(1000)}), 1, {})
    refused = codec.read(ClientInfo("a", "mlp", 12, 3, "table", (4,)), (), result, 1)
    assert refused.error.startswith("payload: must be at most 0.0 MB")
    assert ReplySpool(tmp_path, SENT).put(refused) is refused
    assert not list(tmp_path.iterdir())


def test_truncated_file_raises(tmp_path):
    spooled = ReplySpool(tmp_path, SENT).put(outcome({"weights/w": np.zeros(1000)}))
    with (tmp_path / "a").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(KnowledgeError, match=r"^a: payload: .*8000 bytes"):
        spooled.knowledge.tensors["weights/w"]


def test_reply_with_a_truncated_file_is_dropped(tmp_path):
    server = Server(small("fedavg", clients=3, models=["mlp"]), tmp_path / "run")
    outcomes = [proxy.send(ins, None, 1) for proxy, ins in server.instruct(1)]
    with (tmp_path / "run" / "inbox" / "client-1").open("r+b") as file:
        file.truncate(5000)
    server.flower.aggregate_fit(1, RoundResults(outcomes))
    assert server.flower.state.record.answered == ["client-0", "client-2"]
    assert "payload: its file has changed" in server.flower.state.record.failed["client-1"]


def test_full_disk_leaves_no_file(tmp_path):
    """A limit on file sizes simulates a full disk, so the write fails halfway."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            ReplySpool(tmp_path, SENT).put(outcome({"weights/w": np.zeros(10_000)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())


def test_leftovers_of_a_killed_server_are_removed(tmp_path):
    left = tmp_path / "run" / "inbox" / "client-9"
    server = Server(small("fedavg", clients=2), tmp_path / "run")
    left.parent.mkdir()
    left.write_bytes(b"half a reply")
    server.flower.begin(server.manager)
    assert not left.exists()
    outcomes = [proxy.send(ins, None, 1) for proxy, ins in server.instruct(1)]
    assert {path.name for path in left.parent.iterdir()} == {"client-0", "client-1"}
    server.strategy.aggregate = lambda round, replies: 1 / 0
    with pytest.raises(ZeroDivisionError):
        server.flower.aggregate_fit(1, RoundResults(outcomes))
    assert not list(left.parent.iterdir())


# The server's memory


class Counted(mmap.mmap):
    """A mapping that counts its living instances."""

    alive = most = 0

    def __init__(self, *_, **__):
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)

    def __del__(self):
        Counted.alive -= 1


def wide(shape, classes):
    """Return a model of one megabyte, mostly in two tensors."""
    layers = [nn.Linear(shape[1] * shape[2], 2000), nn.ReLU(), nn.Linear(2000, 64)]
    return nn.Sequential(nn.Flatten(), *layers), nn.Linear(64, classes)


def memory_of_a_round(method, clients, directory):
    """Return the server's peak allocation in a round over the payload, and its mappings.

    All clients send the reply of the first client.
    """
    own = {"fedtype.proxy": "test_reply_spool:wide"} if method == "fedtype" else {}
    few = {"max_samples": 1000, "min_samples": 1, "max_test_samples": 20}
    config = small(method, clients=clients, models="test_reply_spool:wide", **few, **own)
    server = Server(config, directory)
    instructions = server.instruct(1)
    given = instructions[0][0]._proxy.fit(instructions[0][1], None, 0)
    envelope, knowledge = decode(parameters_to_ndarrays(given.parameters), "x")

    def repeated(self, ins, timeout, group_id):
        signed = encode(replace(envelope, sender=self.cid), knowledge)
        return FitRes(given.status, ndarrays_to_parameters(signed), 1, dict(given.metrics))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InlineProxy, "fit", repeated)
        patch.setattr(mmap, "mmap", Counted)
        patch.setattr(averaging, "PART", 1000)
        Counted.alive = Counted.most = 0
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        outcomes = [proxy.send(ins, None, 1) for proxy, ins in instructions]
        server.flower.aggregate_fit(1, RoundResults(outcomes))
        peak = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    assert len(server.flower.state.record.answered) == clients
    return peak / sum(map(len, given.parameters.tensors)), Counted.most


@pytest.mark.parametrize("method", ["fedavg", "felo", "fedtype"])
def test_servers_memory_does_not_grow_with_the_clients(tmp_path, method):
    few, mapped = memory_of_a_round(method, 3, tmp_path / "few")
    many, mapped_of_many = memory_of_a_round(method, 12, tmp_path / "many")
    assert many < few + 0.3, (few, many)
    assert many < 2, many  # beside what is sent: an answer as it arrives, or the new average
    assert mapped == mapped_of_many <= 3
