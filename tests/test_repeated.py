"""Calls that follow changes: at most so often, and for a small part of the time."""

import itertools
import threading
import time

from fedhet.runs.repeated import SHARE, Repeated


def test_calls_that_take_long_are_rare():
    """The processor's time counts, and not that of a machine which others use."""
    busy, calls = 0.01, []

    def work():
        until = time.thread_time() + busy
        while time.thread_time() < until:
            pass
        calls.append(time.monotonic())

    repeated = Repeated(work, 0.01)
    for _ in range(150):
        repeated.note()
        time.sleep(0.01)
    rests = [after - before for before, after in itertools.pairwise(calls)]
    repeated.end()
    assert rests
    assert min(rests) >= busy / SHARE


def test_a_change_is_followed_by_a_call_and_the_end_by_a_last_one():
    called = threading.Event()
    count = []

    def work():
        count.append(1)
        called.set()

    repeated = Repeated(work, 0.0)
    repeated.note()
    assert called.wait(10)
    repeated.end()
    before = len(count)
    repeated.note()
    time.sleep(0.05)
    assert len(count) == before
