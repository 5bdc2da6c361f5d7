"""The round's record on the server, and its message counts."""

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from federation import small
from flwr.common import (
    Code,
    EvaluateRes,
    FitIns,
    FitRes,
    Parameters,
    Status,
    ndarrays_to_parameters,
)

from fedhet.base.errors import KnowledgeError, StateError
from fedhet.methods.registry import find_method
from fedhet.runs.measures import Measured
from fedhet.server import codec as exchanges
from fedhet.server import round as rounds
from fedhet.server.calls import CallOutcome, NamedProxy
from fedhet.server.codec import Codec
from fedhet.server.members import ClientHealth, Member
from fedhet.server.open_calls import OpenCalls
from fedhet.server.round import RoundState, Selection
from fedhet.server.steps import check_contract
from fedhet.wire.contract import Sizes
from fedhet.wire.identity import ClientInfo
from fedhet.wire.knowledge import Envelope, Knowledge, encode


@pytest.fixture
def notices():
    return []


@pytest.fixture
def state(notices):
    state = RoundState(2, notices.append)
    state.start(1)
    state.record_selection(Selection(("b", "a"), ("c",)))
    return state


def measured(train=0.0, evaluate=0.0, memory=0.0, loss=None, **accuracy):
    by_place = {("accuracy", "common", kind): value for kind, value in accuracy.items()}
    return Measured(by_place, loss, train, evaluate, memory)


def test_sampled_clients_are_sorted(state):
    assert state.record.asked == ["a", "b", "c"]


def test_counters_are_thread_safe(state):
    """Like the proxies' threads, 64 threads count a thousand messages of one byte each."""
    gate = threading.Barrier(64)

    def send(name):
        gate.wait()
        for _ in range(1000):
            state.count_sent(1)
            state.count_received(2)
        state.record_measured(name, measured(train=0.5, private=0.25))

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(send, [f"client-{k}" for k in range(64)]))
    record = state.finish(evaluated=True)
    assert (record.bytes_down, record.bytes_up) == (64_000, 128_000)
    assert record.seconds.train == 32
    assert len(record.accuracy["common"]["private"].per_client) == 64


def test_only_present_models_count(state):
    """A client that trained again without an evaluation is in no mean; its value is kept."""
    state.record_measured("a", measured(private=0.5, local=0.25))
    state.record_measured("b", measured(private=1.0, local=0.5))
    state.scores.mark_outdated(["b"])
    record = state.finish(evaluated=True)
    assert record.accuracy["common"]["private"].per_client == {"a": 0.5}
    assert record.relative["common"].per_client == {"a": 2.0}
    assert [state.scores.is_outdated(name) for name in "ab"] == [False, True]
    state.start(2)
    state.record_measured("b", measured(private=0.75))
    again = state.finish(evaluated=True).accuracy["common"]["private"]
    assert again.per_client == {"a": 0.5, "b": 0.75}


def test_round_that_is_not_evaluated_has_no_accuracy(state):
    state.record_measured("a", measured(private=0.5, loss=2.0))
    record = state.finish(evaluated=False)
    assert record.accuracy == {}
    assert record.loss.per_client == {"a": 2.0}
    state.start(2)
    assert state.finish(evaluated=False).loss is None


def test_fedhet_errors_drop_one_client_and_others_raise(state, notices):
    with state.drop_on_error("a"):
        raise KnowledgeError("a", "logits", "missing")
    with state.drop_on_error("b"):
        raise StateError("disk full")
    assert state.record.failed == {"a": "logits: missing", "b": "disk full"}
    assert notices[0] == "client a is dropped from round 1: logits: missing"
    with pytest.raises(ZeroDivisionError), state.drop_on_error("c"):
        1 / 0  # noqa: B018
    state.drop_client("c", "did not answer in time", "silent")
    assert state.reachable(["a", "b", "c"]) == ["a", "b"], "who answered badly is still there"


@pytest.mark.parametrize("error", [MemoryError(), OverflowError("too far"), RecursionError("deep")])
def test_reply_that_exhausts_memory_is_dropped(state, notices, error):
    with state.drop_on_error("a"):
        raise error
    assert state.record.failed == {
        "a": f"its reply cannot be used ({type(error).__name__}: {error})"
    }


@pytest.mark.parametrize(
    "error",
    [MemoryError(), OverflowError("too far"), RecursionError("deep"), OSError("gone"), KeyError(1)],
)
@pytest.mark.parametrize("step", ["decode", "read_arrays", "read_measures"])
def test_read_error_refuses_the_reply(exchange, monkeypatch, error, step):
    def fails(*_):
        raise error

    monkeypatch.setattr(exchanges, step, fails)
    results = [answer(means())]
    if step == "read_measures":
        results.append(EvaluateRes(Status(Code.OK, ""), 0.0, 1, {}))
    for result in results:
        outcome = exchange.read(CLIENT, ["private"], result, 1)
        assert (outcome.client, outcome.failure) == ("a", "refused")
        assert outcome.error.startswith(f"cannot be read ({type(error).__name__}")
        assert not outcome.knowledge.tensors


FORGED = "\x1b[2J\x1b]0;owned\x07\rround   9  accuracy (common) 1.0000\nnote: all well\u202e\x9b31m"


def test_reported_failure_is_one_printable_line(exchange, state, notices):
    for metrics, status in (({"error": FORGED}, Code.OK), ({}, Code.FIT_NOT_IMPLEMENTED)):
        result = FitRes(Status(status, FORGED), answer(means()).parameters, 1, metrics)
        outcome = exchange.read(CLIENT, ["private"], result, 1)
        assert (outcome.failure, outcome.is_reply) == ("error", False)
        assert not list(exchange.replies([outcome], {"a": Member(CLIENT, None)}))
        assert "owned" in state.record.failed["a"]
        assert state.record.failed["a"].isprintable()
    state.drop_client("b", FORGED, "silent")
    assert all(text.isprintable() for text in [*state.record.failed.values(), *notices])


def test_empty_error_is_an_error(exchange):
    for metrics in ({"error": ""}, {"error": "", "spent": True}):
        outcome = exchange.read(CLIENT, ["private"], answer(means(), metrics), 1)
        assert outcome.error == "failed"
        assert outcome.failure == (None if "spent" in metrics else "error")
        assert not outcome.is_reply


@pytest.mark.parametrize("fails", [False, True])
def test_shown_error_is_printable(exchange, fails):
    told, result = [], FitRes(Status(Code.OK, ""), Parameters([], ""), 0, {"error": FORGED})

    def fit(*_):
        if fails:
            raise OSError(FORGED)
        return result

    read = partial(exchange.read, CLIENT, ["private"])
    client = SimpleNamespace(cid="1", fit=fit)
    proxy = NamedProxy("a", client, read, on_reply=lambda *each: told.append(each))
    outcome = proxy.send(FitIns(Parameters([], ""), {}), None, 1)
    assert told == [("a", outcome.error)]
    assert "owned" in outcome.error
    assert outcome.error.isprintable()
    assert outcome.failure == ("silent" if fails else "error")


def test_metrics_are_json_serializable(state):
    state.add_metrics(
        {"half": np.float32(0.5), "seven": np.int64(7), "none": np.nan, "inf": np.inf}
    )
    assert state.record.method == {"half": 0.5, "seven": 7.0}
    assert {type(value) for value in state.record.method.values()} == {float}


def test_durations_add_up(monkeypatch, notices):
    """Three clients run two at a time; 6 s of work take 3 s of the 5 s wait."""
    now = iter([10.0, 11.0, 16.0, 18.0])
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(now))
    state = RoundState(2, notices.append)
    state.start(1)
    state.record_selection(Selection(("a", "b", "c")))
    state.clock.start_waiting()
    state.record_measured("a", measured(train=4.0, evaluate=2.0, memory=7.0))
    state.clock.stop_waiting()
    seconds = state.finish(evaluated=False).seconds
    assert (seconds.total, seconds.server, seconds.overhead) == (8.0, 3.0, 2.0)
    assert state.record.peak_memory_mb == 7.0


def test_client_statistics_survive_the_process(state, notices):
    state.record_measured("a", measured(private=0.5))
    state.scores.mark_outdated(["b"])
    other = RoundState(1, notices.append)
    other.load_json(state.to_json())
    other.start(2)
    assert other.scores.is_outdated("b")
    assert not other.scores.is_outdated("a")
    assert other.finish(evaluated=True).accuracy["common"]["private"].per_client == {"a": 0.5}
    odd = [{"common": {"private": {"a": value}}} for value in (math.nan, math.inf, 1e308, -1, "x")]
    texts = [json.dumps({"scores": {"accuracy": each}, "changed": []}) for each in (3, [], *odd)]
    texts.append(json.dumps({"scores": {}, "changed": 3}))
    for text in ("{}", "[]", "", json.dumps({"scores": {}}), *texts):
        with pytest.raises((ValueError, KeyError, TypeError)):
            other.load_json(text)


LIMIT = 10_000
CLIENT = ClientInfo("a", "mlp", 12, 3, "table", (4,))
SIZES = Sizes({"C": 3, "D": 2}, {"weights": {}})


@pytest.fixture
def exchange(state):
    return Codec("run-1", small("felo").method, LIMIT, state)


def failure_of(exchange, state, result):
    """Return the reason why a reply is dropped in the first two steps, or ""."""
    outcome = exchange.read(CLIENT, ["private", "local"], result, 1)
    state.record_selection(Selection(("a",)))
    spec = find_method("felo").spec
    replies = exchange.replies([outcome], {"a": Member(CLIENT, None)})
    list(check_contract(replies, contract=spec.replies, sizes=lambda _: SIZES, state=state))
    return state.record.failed.get("a", "")


def answer(knowledge, metrics=None, **changes):
    place = {"run": "run-1", "method": "felo", "round": 1, "sender": "a", **changes}
    payload = ndarrays_to_parameters(encode(Envelope(**place), knowledge))
    seconds = {"seconds.train": 1.0, "seconds.evaluate": 2.0, "memory": 3.0}
    return FitRes(Status(Code.OK, ""), payload, 1, {**seconds, **(metrics or {})})


def means(**changes):
    tensors = {
        "classes": np.array([0, 2]),
        "features": np.ones((2, 2), np.float32),
        "logits": np.ones((2, 3), np.float32),
        "counts": np.array([1, 5]),
    }
    return Knowledge({**tensors, **changes})


def test_shared_payload_is_encoded_once_and_counted_per_client(exchange, state):
    same, other = means(), means(counts=np.array([2, 2]))
    sent = exchange.encode_all(1, {"a": same, "b": same, "c": other})
    assert sent["a"] is sent["b"]
    assert sent["c"] is not sent["a"]
    assert state.record.bytes_down == sum(sum(map(len, p.tensors)) for p in sent.values())


def test_instruction_is_kept_until_its_call_is_closed():
    state = RoundState(2, print, calls=OpenCalls(keep_all=True))
    exchange, calls = Codec("run-1", small("felo").method, LIMIT, state), state.calls
    same, other = means(), means(counts=np.array([2, 2]))
    exchange.encode_all(1, {"a": same, "b": same})
    exchange.encode_all(1, {"a": other}, training=False)
    assert calls.sent("a", 1)[0] is calls.sent("b", 1)[0] is same
    exchange.encode_all(2, {"a": other}, differences=False)
    calls.close("a", 1)
    calls.close("c", 1)
    assert calls.sent("a", 2)[0] is other
    assert calls.sent("b", 1)[0] is same, "its reply may be late"
    for client, number in (("a", 1), ("b", 2), ("c", 1)):
        assert calls.sent(client, number) == (None, 0)
    calls.close("a", 2)
    assert calls.sent("a", 2) == (None, 0)


def test_no_instruction_is_kept_unless_a_reply_can_refer_to_it(exchange, state):
    exchange.encode_all(1, {"a": means()})
    assert state.calls.sent("a", 1) == (None, 0)
    state.calls.keep("a", 1, sent := means(), digest=3)
    assert state.calls.sent("a", 1) == (sent, 3)


def test_late_reply_is_stored_with_its_instruction(tmp_path):
    calls = OpenCalls(tmp_path, "run-1")
    for name, digest in (("a", 5), ("b", 6)):
        calls.keep(name, 1, means(), digest)
    calls.begin("ab", 1, 0.0)
    reply = Knowledge({"one": np.array(True), "half": np.ones((2, 3), np.float16).T}, {"x": 1})
    scores = {("accuracy", "common", "private"): 0.1, ("accuracy", "personal", "private"): 1 / 3}
    seen = Measured(scores, 0.2, 1.5, 2.5, 3.0, {"pseudo_error": 0.3}, 9.0, {"common": 0.4})
    stored = calls.store(CallOutcome("a", 1, reply, seen, bytes_received=70))
    assert not stored.knowledge.tensors
    assert stored.is_stored_late
    assert calls.sent("a", 1) == (None, 0), "the disk has it"
    calls["a"].outcome = stored
    assert calls.at_work == {"a", "b"}
    outcome = calls.collect("a", 3)
    assert (outcome.measured, outcome.bytes_received, outcome.error) == (seen, 70, "")
    assert list(outcome.knowledge.tensors) == ["one", "half"], "sums depend on the order"
    sent, _ = calls.sent("a", 1)
    for found, expected in ((outcome.knowledge, reply), (sent, means())):
        assert found.scalars == expected.scalars
        assert found.tensors.keys() == expected.tensors.keys()
        for name, value in expected.tensors.items():
            np.testing.assert_array_equal(found.tensors[name], value)
            assert found.tensors[name].dtype == value.dtype
    assert (calls.at_work, calls.late_rounds) == ({"b"}, {"a": 1})
    calls.close("a", 1)
    assert list((tmp_path / "late").iterdir()), "a run that is killed now resumes before this round"
    calls.remove_used()
    assert not list((tmp_path / "late").iterdir())
    assert calls.sent("b", 1)[1] == 6
    calls.start_round()
    assert not calls.late_rounds


def test_resumed_run_restores_replies_on_disk_and_repeats_other_calls(tmp_path):
    """A reply that arrives after the run was interrupted is stored with its instruction."""
    calls = OpenCalls(tmp_path, "run-1", keep_all=True)
    for name in ("a", "b", "c"):
        calls.keep(name, 1, means())
    calls.begin("abc", 1, 2.0)
    made = {name: CallOutcome(name, 1, Knowledge({"w": np.ones(2)})) for name in "ab"}
    calls["a"].outcome, calls["a"].due = calls.store(made["a"]), 5.0
    saved = json.loads(json.dumps(calls.to_dict()))
    assert saved == {"a": [1, 2.0, 5.0], "b": [1, 2.0, None], "c": [1, 2.0, None]}
    calls.end()
    assert not calls.at_work
    calls.store(made["b"])
    for is_simulated, times in ((False, (0.0, 0.0)), (True, (2.0, 5.0))):
        again = OpenCalls(tmp_path, "run-1", keep_all=True)
        known = {name: call for name, call in saved.items() if name != "b" or not is_simulated}
        again.load_dict(known, is_simulated=is_simulated)
        assert again.at_work == ({"a"} if is_simulated else {"a", "b"})
        assert (again["a"].began, again["a"].due) == times
        for name in again.at_work:
            assert again.collect(name, 3).knowledge.tensors["w"].tolist() == [1, 1]
            assert again.sent(name, 1)[0].tensors.keys() == means().tensors.keys()
    again.load_dict({}, is_simulated=True)
    assert not list((tmp_path / "late").iterdir()), "a new run has no replies of another"


def test_reply_is_read_and_counted(exchange, state):
    state.record_selection(Selection(("a",)))
    result = answer(means(), {"accuracy.common.private": 0.5})
    outcome = exchange.read(CLIENT, ["private"], result, 1)
    assert not state.record.bytes_up, "a reply counts in the round that uses it"
    (reply,) = exchange.replies([outcome], {"a": Member(CLIENT, None)})
    assert reply.samples == 12
    np.testing.assert_array_equal(reply.knowledge.tensors["counts"], [1, 5])
    assert state.record.bytes_up == sum(map(len, result.parameters.tensors))
    assert reply.measured.scores == {("accuracy", "common", "private"): 0.5}


def test_late_error_is_stored(tmp_path):
    calls = OpenCalls(tmp_path, "run-1")
    calls.begin("a", 1, 0.0)
    refused = CallOutcome("a", 1, bytes_received=9, error="round: odd", failure="refused")
    calls["a"].outcome = calls.store(refused)
    outcome = calls.collect("a", 2)
    assert (outcome.error, outcome.failure, outcome.bytes_received) == ("round: odd", "refused", 9)


@pytest.mark.parametrize(
    ("result", "field"),
    [
        (answer(means(), run="run-2"), "run"),
        (answer(means(), method="velo"), "method"),
        (answer(means(), round=2), "round"),
        (answer(means(), sender="b"), "sender"),
        (answer(means(features=np.ones((2, 3), np.float32))), "features"),
        (answer(means(), {"seconds.train": float("nan")}), "seconds.train"),
        (answer(means(), {"accuracy.common.server": 0.9}), "accuracy.common.server"),
        (answer(means(), {"accuracy.common.local": 5e-324}), "accuracy.common.local"),
        (answer(means(), {"accuracy.elsewhere.private": 0.9}), "accuracy.elsewhere.private"),
        (answer(means(), {"accuracy.common.private": 5e-324}), "accuracy.common.private"),
        (answer(means(), {"accuracy.common.private": 10**400}), "accuracy.common.private"),
        (answer(means(), {"memory": 10**5000}), "memory"),
        (answer(means(), {"more": 1.0}), "more"),
        (answer(means(), {"error": "disk full"}), "reply"),
        (answer(means(more=np.zeros(LIMIT, np.uint8))), "payload"),
    ],
)
def test_reply_of_another_round_or_contract_is_dropped(exchange, state, result, field):
    reason = failure_of(exchange, state, result)
    assert reason.startswith("disk full" if field == "reply" else f"{field}: ")
    assert state.record.bytes_up == sum(map(len, result.parameters.tensors)), "it did travel"


def test_client_that_backs_off_is_not_evaluated(notices):
    state = RoundState(2, notices.append, ClientHealth(1, 1, notices.append))
    for number, outcomes in enumerate([{"a": "refused", "b": "silent"}, {"c": None}], start=1):
        state.start(number)
        state.record_selection(Selection(tuple(outcomes)))
        state.health.update(number, outcomes, ["a", "b", "c"])
    assert state.reachable(["a", "b", "c"]) == ["c"]
    state.drop_client("c", "no answer", "silent")
    assert state.reachable(["a", "b", "c"]) == []
    state.record_selection(Selection(("b",)))
    assert state.reachable(["a", "b", "c"]) == ["b"], "it was asked, and has not been silent"


@pytest.mark.parametrize(
    ("unable", "replied", "back"),
    [(0, 5, False), (2, 3, False), (3, 2, True), (5, 0, True), (0, 0, False)],
)
def test_server_rolls_back_if_most_clients_fail(notices, unable, replied, back):
    state = RoundState(2, notices.append)
    state.start(1)
    assert state.finalize(["a", "b"]) is False
    assert (state.rollback.good, state.rollback.formed) == (0, 1)
    state.start(2)
    for number in range(unable):
        with state.drop_on_error(f"unable-{number}"):
            raise KnowledgeError("x", "reply", "training diverged")
    state.drop_client("silent-1", "no answer", "silent")
    state.drop_client("silent-2", "no answer", "silent")
    assert state.finalize([f"well-{n}" for n in range(replied)]) is back
    if replied and not back:
        assert (state.rollback.good, state.rollback.formed) == (1, 2)
    if back:
        state.record_rollback()
        assert (state.rollback.good, state.rollback.formed) == (2, 2)
        assert state.update_health(["unable-0"]) == []
        state.start(3)
        with state.drop_on_error("a"):
            raise KnowledgeError("x", "reply", "training diverged")
        assert state.finalize([]) is False, "there is nothing further back"


def test_no_rollback_before_the_first_success(notices):
    state = RoundState(2, notices.append)
    state.start(1)
    with state.drop_on_error("a"):
        raise KnowledgeError("x", "reply", "training diverged")
    assert state.finalize([]) is False
