"""The workers of a run on Ray: the actor that trains clients, and the pool of all actors.

Flower's own pool of Ray's actors puts a dead actor back, on which every later task fails, and its
simulation looks through all messages for each client, ten times a second. Here a lost worker is
left out and, if its machine is still there, started again; its client is asked again by another.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedhet.base.errors import FedhetError
from fedhet.client_runtime.node import open_client, read_node
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import ASKED_ALONE, make_room, too_small
from fedhet.learning.devices import find_device
from fedhet.server.calls import UserCodeFault, is_user_code_error
from fedhet.settings.engine import EngineSettings

LOG = logging.getLogger("flwr")
LOOK_EVERY = 0.5
"""Seconds between two looks whether a worker has started."""
ROOM_WITHIN = 30.0
"""Seconds that idle workers have to give back a GPU's memory."""
TRIES = 2
"""How many workers a client is asked by if they are lost, before it fails."""


@dataclass(frozen=True)
class Failed:
    """A client's error. It travels in words: not every exception can be unpickled again."""

    reason: str
    trace: str
    of_code: UserCodeFault | None = None
    """The fault of the client's code, if that is the cause."""
    of_memory: bool = False
    """Whether the GPU's memory did not suffice."""


class Worker:
    """Runs any client of a run, one at a time; Ray makes an actor of it.

    `decoded` is the folder from which it maps the run's data, if there is one on its machine; it
    may be written after the worker has started.
    """

    def __init__(self, config: Config, state_dir: str, decoded: Path | None = None) -> None:
        self._config, self._state_dir = config, state_dir
        self._data = RunData.of(config.run, shared=decoded)
        self._use_gpu(config.run.engine.gpus_per_client)

    def call(self, partition: int, name: str, instruction: Any, *, alone: bool = False) -> Any:
        """Call the method `name` of a client; return its result, or `Failed`.

        `alone`: no other worker computes meanwhile, and this one may take the whole GPU.
        """
        node_config = {"partition-id": partition, "num-partitions": self._config.run.clients}
        if alone:
            make_room()
            self._use_gpu(1.0)
        try:
            node = read_node(node_config, self._config.run, self._state_dir, self._data)
            client = open_client(self._config, node).to_client()
            return getattr(client, name)(instruction)
        except torch.OutOfMemoryError as error:
            return Failed(str(too_small(error)), traceback.format_exc(), of_memory=True)
        except Exception as error:
            fault = UserCodeFault.of(error) if is_user_code_error(error) else None
            return Failed(str(error), traceback.format_exc(), fault)
        finally:
            if alone:
                make_room()
                self._use_gpu(self._config.run.engine.gpus_per_client)

    def make_room(self) -> None:
        """Give back the GPU's memory that this worker does not need at the moment."""
        make_room()

    def is_ready(self) -> bool:
        """Return True: the process has started, and has imported what it needs."""
        return True

    def _use_gpu(self, share: float) -> None:
        """Bound this worker's part of its GPU's memory, if it has one."""
        if find_device(self._config.run.engine.device).type == "cuda":
            torch.cuda.set_per_process_memory_fraction(share or 1.0)


@dataclass(frozen=True)
class Machine:
    """A machine of the cluster, or more exactly one of Ray's nodes."""

    node: str
    """Ray's id of it."""
    address: str
    cpus: float
    gpus: float

    def workers(self, engine: EngineSettings, *, on_gpu: bool) -> int:
        """Return how many workers have room here."""
        by_processor = int(self.cpus / engine.cpus_per_client)
        if not on_gpu:
            return by_processor
        # A worker cannot use parts of two GPUs.
        return min(by_processor, int(self.gpus) * int(1 / (engine.gpus_per_client or 1)))


class LostError(Exception):
    """A worker that is lost, with its process or its machine."""


@dataclass(frozen=True, eq=False)
class Placed:
    """A worker and its machine."""

    machine: Machine
    actor: Any


Task = Callable[[Any], Any]
"""Starts a task on an actor, and returns Ray's reference to its result."""


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

    def run(self, who: str, task: Task, timeout: float | None, *, alone: bool = False) -> Any:
        """Return the result of a task on any worker; on another one if that is lost.

        `alone`: no other task runs on any worker meanwhile, and the other workers give back the
        memory of their GPUs before. Raises LostError if the second worker is lost too, or none is
        left, and TimeoutError after `timeout` seconds, with the time to wait for a worker.
        """
        import ray

        if alone:
            self.notice(f"{who} {ASKED_ALONE}")
        end = None if timeout is None else time.monotonic() + timeout
        for tried in range(1, TRIES + 1):
            with self._worker(end, alone=alone) as placed:
                try:
                    return ray.get(task(placed.actor), timeout=_left(end))
                except ray.exceptions.GetTimeoutError:
                    self._replace(placed)  # it is still at work, and might never end
                    raise TimeoutError("did not answer in time") from None
                except ray.exceptions.RayError as error:
                    LOG.warning("%s", error)
                    lost = LostError(type(error).__name__)
                    is_last = tried == TRIES
                    outcome = "fails in this round" if is_last else "is asked again on another"
                    self.notice(
                        f"the worker of {who} on {placed.machine.address} is lost ({lost}): it "
                        f"{outcome}"
                    )
                    self._replace(placed)
                    if is_last:
                        raise lost from error
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
    def _worker(self, end: float | None, *, alone: bool) -> Iterator[Placed]:
        """Take a worker for the block. `alone`: all others are idle, and stay so."""
        import ray

        if alone:
            self._one_alone.acquire()
            self._is_reserved = True
        try:
            placed = self._take(end, alone=alone)
            try:
                # Idle workers give back their memory; one that is lost has none.
                if alone and (refs := [each.actor.make_room.remote() for each in self._idle]):
                    ray.wait(refs, num_returns=len(refs), timeout=ROOM_WITHIN)
                yield placed
            finally:
                self._give_back(placed)
        finally:
            if alone:
                with self._changed:
                    self._is_reserved = False
                    self._changed.notify_all()
                self._one_alone.release()

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


def _left(end: float | None) -> float | None:
    return None if end is None else max(0.0, end - time.monotonic())


def _end(placed: Placed) -> None:
    import ray

    with contextlib.suppress(Exception):  # it may be gone already
        ray.kill(placed.actor, no_restart=True)
