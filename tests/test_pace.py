"""Closing of rounds, weights of late replies, and simulated durations."""

from __future__ import annotations

import math
import threading
import weakref
from time import monotonic, sleep
from types import SimpleNamespace

import numpy as np
import pytest
from federation import settings
from flwr.common import Code, FitIns, FitRes, Parameters, Status
from hypothesis import given
from hypothesis import strategies as st

from fedhet.algorithms.rounds import (
    Closing,
    clients_per_round,
    clients_to_sample,
    median_duration,
    rebase,
    staleness_weight,
)
from fedhet.base.errors import SettingsError, StateError
from fedhet.config.resolve import resolve
from fedhet.server.calls import Call, CallOutcome, CallPool, NamedProxy
from fedhet.server.pace import SimulatedClock, closing, read_devices
from fedhet.settings.engine import PaceSettings
from fedhet.wire.knowledge import payload_bytes

TIMES = st.lists(st.integers(0, 60), min_size=1, max_size=8)


@given(times=TIMES, enough=st.integers(1, 9), grace=st.integers(0, 20), timeout=st.integers(1, 50))
def test_round_closes_like_a_simulation_by_the_second(times, enough, grace, timeout):
    """Check at each second whether the round closes, literally.

    It closes if all clients have replied, if enough replies are old enough, or at the timeout. Both
    clocks must close at that second: the simulated clock and the real clock.
    """
    second, since = 0, None
    while True:
        there = sum(time <= second for time in times)
        if since is None and there >= enough:
            since = second
        if (
            there == len(times)
            or second >= timeout
            or (since is not None and second >= since + grace)
        ):
            break
        second += 1
    rule = Closing(enough, float(grace), float(timeout))
    assert rule.closing_time([100.0 + t for t in times], 100.0) == 100.0 + second
    seen: list[float] = []
    now = 0.0
    for time in sorted(times):
        if time > now + rule.remaining_wait(now, seen, len(times) - len(seen)):
            break
        now = float(time)
        seen.append(now)
    assert now + rule.remaining_wait(now, seen, len(times) - len(seen)) == second


@pytest.mark.parametrize(
    ("given_", "needed", "awaited", "expected"),
    [
        ({}, 10, 10, 10),
        ({"over_selection": 0.3}, 10, 13, 10),
        ({"min_replies": 0.75}, 10, 10, 8),
        ({"min_replies": 0.7}, 10, 10, 7),
        ({"min_replies": 3.0}, 10, 10, 3),
        ({"min_replies": 30.0}, 10, 10, 10),
        ({"min_replies": 0.01}, 10, 10, 1),
        ({"over_selection": 0.5}, 10, 4, 4),
    ],
)
def test_sufficient_replies_are_a_fraction_or_a_number(given_, needed, awaited, expected):
    assert closing(PaceSettings(**given_), needed, awaited).min_replies == expected


def test_number_of_sampled_clients():
    assert [clients_per_round(20, share) for share in (0.5, 1.0, 0.01, 0.125)] == [10, 20, 1, 3]
    assert [clients_to_sample(10, share) for share in (0.0, 0.3, 0.01)] == [10, 13, 11]


def test_timeout_is_a_multiple_of_the_usual_round():
    pace = PaceSettings(timeout="3x")
    assert closing(pace, 1, 1).timeout == math.inf
    assert closing(pace, 1, 1, [1.0, 9.0, 2.0]).timeout == 6.0
    assert median_duration([100.0, *[4.0] * 20]) == 4.0
    assert closing(PaceSettings(timeout="90"), 1, 1, [1.0]).timeout == 90.0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"timeout": "soon"}, "expected seconds such as 600, or a multiple of a round"),
        ({"timeout": "0x"}, "expected seconds"),
        ({"min_replies": 1.5}, "a fraction > 0 and <= 1, or an integer >= 2"),
        ({"server_lr": 0.5}, "expected 1 unless 'pace.mode' is asynchronous"),
        ({"candidates": 3}, "expected 0 unless 'pace.select' is power-of-choice"),
    ],
)
def test_invalid_pace_raises(changes, words):
    with pytest.raises(SettingsError, match=words):
        resolve(settings("fedavg", **changes))


def test_synchronous_method_raises_with_asynchronous_pace():
    with pytest.raises(SettingsError, match=r"fedmd.*synchronous"):
        resolve({**settings("fedmd"), "pace.mode": "asynchronous"})


def test_weight_of_a_late_reply():
    assert staleness_weight(0) == 1
    assert staleness_weight(3) == 0.5
    assert staleness_weight(8) == pytest.approx(1 / 3)


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.floats(0.1, 2))
def test_average_of_rebased_weights_is_a_fedbuff_step(seed, clients, server_lr):
    """FedBuff, Algorithm 1: w + eta / K sum_k s(tau_k) Delta_k, weighted by samples."""
    rng = np.random.default_rng(seed)
    now = rng.standard_normal(5)
    starts, trained = rng.standard_normal((2, clients, 5))
    ages, samples = rng.integers(0, 9, clients), rng.integers(1, 50, clients)
    step = np.zeros(5)
    for k in range(clients):
        step += samples[k] / samples.sum() / math.sqrt(1 + ages[k]) * (trained[k] - starts[k])
    rates = [server_lr * staleness_weight(age) for age in ages.tolist()]
    moved = [rebase(now, trained[k], starts[k], rates[k], None) for k in range(clients)]
    average = np.average(moved, axis=0, weights=samples)
    np.testing.assert_allclose(average, now + server_lr * step, rtol=1e-9, atol=1e-9)


def test_rebased_weights_keep_type_and_range():
    counter = rebase(np.array(3), np.array(9), np.array(5), 0.5, None)
    assert counter == 9
    one = np.float32([1.0])
    variance = rebase(one, np.float32([0.5]), np.float32([9.0]), 1.0, 0.0)
    assert variance == 0
    assert variance.dtype == np.float32


def test_client_duration_is_work_over_speed_plus_bytes_over_bandwidth(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("client,sample-ms,mbit\nb,2,8\na,10,80\n")
    clock = SimulatedClock(PaceSettings(clock=str(file), stragglers=1.0, slowdown=4.0), 0)
    assert clock.seconds("b", 1, 500, 3_000_000) == 4 * (1.0 + 3.0)
    assert clock.seconds("a", 1, 500, 0) == 4 * 5.0
    with pytest.raises(SettingsError, match="client 'c'"):
        clock.seconds("c", 1, 1, 1)


def test_devices_are_drawn_by_seed_with_the_given_spread():
    pace = PaceSettings(clock="log-normal", spread=0.5, sample_ms=3.0, mbit=40.0)
    drawn = [SimulatedClock(pace, 7).device(f"client-{k}") for k in range(2000)]
    for found, middle in (("sample_ms", 3.0), ("mbit", 40.0)):
        logs = np.log([getattr(each, found) for each in drawn])
        assert logs.mean() == pytest.approx(math.log(middle), abs=0.05)
        assert logs.std() == pytest.approx(0.5, abs=0.05)
    assert SimulatedClock(pace, 7).device("client-3") == drawn[3]
    assert SimulatedClock(pace, 8).device("client-3") != drawn[3]


def test_measured_devices_without_names_are_drawn(tmp_path):
    file = tmp_path / "devices.csv"
    file.write_text("mbit,sample-ms\n10,1\n20,2\n30,3\n")
    clock = SimulatedClock(PaceSettings(clock=str(file)), 0)
    drawn = [clock.device(f"client-{k}").mbit for k in range(60)]
    assert set(drawn) == {10, 20, 30}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "unsupported columns, expected sample-ms, mbit and optionally client, got no header"),
        ("sample-ms,speed\n1,2\n", "unsupported columns, expected .*, got sample-ms, speed"),
        ("sample-ms,mbit\n", "file must have at least one row"),
        ("sample-ms,mbit\n1,2\n1,fast\n", r"line 3: mbit must be a number > 0, got 'fast'"),
        ("sample-ms,mbit\n1\n", "line 2: mbit must be a number > 0, got None"),
        ("sample-ms,mbit\n-1,2\n", "sample-ms must be a number > 0, got '-1'"),
        (b"\xff\xfe\x00", r"devices\.csv: not valid UTF-16.*Save the file in UTF-8"),
    ],
)
def test_invalid_device_file_raises_with_the_location(tmp_path, text, words):
    file = tmp_path / "devices.csv"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SettingsError, match=words):
        read_devices(file)


def test_missing_device_file_raises(tmp_path):
    with pytest.raises(SettingsError, match="log-normal"):
        read_devices(tmp_path / "lognormal")


# Calls.


def message():
    return FitIns(Parameters([], ""), {})


def reply():
    return FitRes(Status(Code.OK, ""), Parameters([b"payload"], ""), 1, {})


def call_of(name, fit):
    """Return a call to a client whose method `fit` is given. The reply is not decoded."""

    def read(result, round):
        return CallOutcome(name, round, bytes_received=payload_bytes(result.parameters))

    return Call(NamedProxy(name, SimpleNamespace(cid="1", fit=fit), read), 1, message())


def test_first_event_decides_if_a_reply_is_late():
    """One of two calls finishes before its round closes, and the other afterwards."""
    gate, stored = threading.Event(), []

    def store(outcome):
        stored.append((outcome.client, outcome.bytes_received))
        return outcome

    def slowly(*_):
        gate.wait(60)
        return reply()

    pool = CallPool(2, store)
    early, late = call_of("a", lambda *_: reply()), call_of("b", slowly)
    pool.submit([early, late])
    ends = monotonic() + 60
    while pool._finished.empty():
        assert monotonic() < ends
        sleep(0.01)
    assert pool.close_round([early, late]) == [early]
    gate.set()
    outcomes = [pool.next_outcome(60.0) for _ in range(2)]
    assert [(o.client, o.is_late, o.is_stored_late, o.is_reply) for o in outcomes] == [
        ("a", False, False, True),
        ("b", True, True, True),
    ]
    assert stored == [("b", 7)]
    pool.shutdown()


def test_failed_storage_of_a_late_reply_is_a_failure():
    def full(outcome):
        raise StateError("disk full")

    gate = threading.Event()
    pool, call = CallPool(2, full), call_of("a", lambda *_: gate.wait(60) and reply())
    pool.submit([call])
    assert pool.close_round([call]) == []
    gate.set()
    outcome = pool.next_outcome(60.0)
    assert (outcome.error, outcome.failure) == ("disk full", "silent")
    assert not outcome.is_reply
    assert not outcome.is_stored_late
    pool.shutdown()


def test_idle_thread_keeps_no_reply_in_memory():
    pool, call = CallPool(1, lambda outcome: outcome), call_of("a", lambda *_: reply())
    pool.submit([call])
    outcome = pool.next_outcome(60.0)
    assert outcome.bytes_received == 7
    assert outcome.is_reply
    assert not outcome.is_late
    released, ends = [weakref.ref(outcome), weakref.ref(call)], monotonic() + 60
    del outcome, call
    while any(each() is not None for each in released):
        assert monotonic() < ends
        sleep(0.01)
    pool.shutdown()
