"""The workers of a run on Ray: which are idle, and how lost ones are replaced.

Flower's own pool of Ray's actors puts a dead actor back, on which every later task fails, and its
simulation looks through all messages for each client, ten times a second. Here a lost worker is
left out and, if its machine is still there, started again; its client is asked again by another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fedhet.base.errors import FedhetError
from fedhet.engines.gpu_memory import ASKED_ALONE
from fedhet.engines.ray.machines import Machine

LOG = logging.getLogger("flwr")
LOOK_EVERY = 0.5
"""Seconds between two looks whether a worker has started."""
ROOM_WITHIN = 30.0
"""Seconds that idle workers have to give back a GPU's memory."""
TRIES = 2
"""How many workers a client is asked by if they are lost, before it fails."""


class LostError(Exception):
    """A worker that is lost, with its process or its machine."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A worker and its machine."""

    machine: Machine
    actor: Any


Task = Callable[[Any], Any]
"""Starts a task on an actor, and returns Ray's reference to its result."""
Taken = Callable[[float | None], contextlib.AbstractContextManager[Placed]]
"""Takes a worker, until a point in time, for as long as its block runs."""


class WorkerPool:
    """The workers of a run, of which each does one task at a time."""

    def __init__(
        self,
        places: Sequence[Machine],
        start: Callable[[Machine], Any],
        notice: Callable[[str], None],
    ) -> None:
        """Start a worker at each of `places`. `start` returns an actor that has `is_ready`."""
        self.places = tuple(places)
        self._start, self.notice = start, notice
        self._changed = threading.Condition()
        self._idle: deque[Placed] = deque()
        self._busy: set[Placed] = set()
        self._starting: dict[Any, Placed] = {}
        self._one_alone = threading.Lock()
        self._is_reserved = False
        """Whether a task runs alone, or waits until the others have ended."""
        for machine in places:
            self._begin(machine)

    def wait(self, patience: float) -> None:
        """Wait until a worker has started. Raises FedhetError if none has in `patience` seconds."""
        try:
            placed = self._take(time.monotonic() + patience)
        except TimeoutError:
            raise FedhetError(
                f"no worker has started on the Ray cluster within {patience:g} s: perhaps another "
                "program holds its processors, as `ray status` shows"
            ) from None
        self._give_back(placed)

    @property
    def is_lost(self) -> bool:
        """Whether all workers are lost, and none is starting."""
        with self._changed:
            self._admit()
            return not (self._idle or self._busy or self._starting)

    def run(self, who: str, task: Task, timeout: float | None) -> Any:
        """Return the result of a task on any worker; on another one if that is lost.

        Raises LostError if that one is lost too, or none is left, and TimeoutError after `timeout`
        seconds, with the time to wait for a worker.
        """
        return self._run(who, task, timeout, self._worker)

    def run_alone(self, who: str, task: Task, timeout: float | None) -> Any:
        """Return the result of a task as `run` does, while no other one runs on any worker.

        The other workers give back the memory of their GPUs before.
        """
        self.notice(f"{who} {ASKED_ALONE}")
        return self._run(who, task, timeout, self._worker_alone)

    def _run(self, who: str, task: Task, timeout: float | None, worker: Taken) -> Any:
        end = None if timeout is None else time.monotonic() + timeout
        for tried in range(1, TRIES + 1):
            with worker(end) as placed:
                try:
                    return _result(task(placed.actor), end)
                except LostError as error:
                    again = tried < TRIES
                    outcome = "it is asked again on another" if again else "it fails in this round"
                    self.notice(
                        f"the worker of {who} on {placed.machine.address} is lost ({error}): "
                        f"{outcome}"
                    )
                    self._replace(placed)
                    if not again:
                        raise
                except TimeoutError:
                    self._replace(placed)  # it is still at work, and might never end
                    raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        """End all workers."""
        with self._changed:
            for placed in (*self._idle, *self._busy, *self._starting.values()):
                _end(placed)
            self._idle.clear()
            self._busy.clear()
            self._starting.clear()

    @contextlib.contextmanager
    def _worker(self, end: float | None) -> Iterator[Placed]:
        placed = self._take(end)
        try:
            yield placed
        finally:
            self._give_back(placed)

    @contextlib.contextmanager
    def _worker_alone(self, end: float | None) -> Iterator[Placed]:
        with self._one_alone:
            self._is_reserved = True
            try:
                placed = self._take(end, alone=True)
                try:
                    self._make_room()
                    yield placed
                finally:
                    self._give_back(placed)
            finally:
                with self._changed:
                    self._is_reserved = False
                    self._changed.notify_all()

    def _make_room(self) -> None:
        """Let idle workers give back their memory; one that is lost has none."""
        import ray

        refs = [placed.actor.make_room.remote() for placed in self._idle]
        if refs:
            ray.wait(refs, num_returns=len(refs), timeout=ROOM_WITHIN)

    def _take(self, end: float | None, *, alone: bool = False) -> Placed:
        with self._changed:
            while True:
                self._admit()
                is_free = not self._busy if alone else not self._is_reserved
                if self._idle and is_free:
                    placed = self._idle.popleft()
                    self._busy.add(placed)
                    return placed
                if not (self._idle or self._busy or self._starting):
                    raise LostError("no worker is left on Ray")
                left = _left(end)
                if left == 0:
                    raise TimeoutError("no worker was free in time")
                self._changed.wait(LOOK_EVERY if left is None else min(LOOK_EVERY, left))

    def _give_back(self, placed: Placed) -> None:
        """Make a worker idle, unless it has been replaced."""
        with self._changed:
            if placed in self._busy:
                self._busy.remove(placed)
                self._idle.append(placed)
            self._changed.notify()

    def _replace(self, placed: Placed) -> None:
        """End a worker, and start another on its machine; it never starts if that is gone."""
        with self._changed:
            self._busy.discard(placed)
            _end(placed)
            self._begin(placed.machine)

    def _begin(self, machine: Machine) -> None:
        placed = Placed(machine, self._start(machine))
        self._starting[placed.actor.is_ready.remote()] = placed

    def _admit(self) -> None:
        """Make idle those that have started; leave out those whose machine is gone."""
        import ray

        if not self._starting:
            return
        refs = list(self._starting)
        started, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in started:
            placed = self._starting.pop(ref)
            try:
                ray.get(ref)
                self._idle.append(placed)
            except Exception as error:
                LOG.warning("%s", error)
                self.notice(
                    f"no worker starts on {placed.machine.address} ({type(error).__name__}): the "
                    "run continues without it"
                )


def _result(ref: Any, end: float | None) -> Any:
    """Wait for a task's result. Raises LostError if its worker is lost, and TimeoutError."""
    import ray

    try:
        return ray.get(ref, timeout=_left(end))
    except ray.exceptions.GetTimeoutError:
        raise TimeoutError("did not answer in time") from None
    except ray.exceptions.RayError as error:
        LOG.warning("%s", error)
        raise LostError(type(error).__name__) from error


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _end(placed: Placed) -> None:
    import ray

    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(placed.actor, no_restart=True)
