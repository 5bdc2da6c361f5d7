"""Throttled calls after changes: a maximum rate, and a small fraction of the time."""

import itertools
import threading
import time

from fedhet.runs import progress


def test_slow_calls_are_throttled(monkeypatch):
    """CPU time counts, not the wall-clock time of a shared machine."""
    share, busy, calls = 0.25, 1.1 * progress.SLOW_CALL, []
    monkeypatch.setattr(progress, "MAX_LOAD", share)

    def work():
        until = time.thread_time() + busy
        while time.thread_time() < until:
            pass
        calls.append(time.monotonic())

    calling = progress.Throttled(work, 0.01)
    for _ in range(150):
        calling.trigger()
        time.sleep(0.01)
    _, *rests = [after - before for before, after in itertools.pairwise(calls)]
    calling.end()
    assert rests
    assert min(rests) >= busy / share


def test_every_change_and_the_end_trigger_a_call():
    called = threading.Event()
    count = []

    def work():
        count.append(1)
        called.set()

    calling = progress.Throttled(work, 0.0)
    calling.trigger()
    assert called.wait(10)
    calling.end()
    before = len(count)
    calling.trigger()
    time.sleep(0.05)
    assert len(count) == before
