"""Ray workers of a run: the actor that trains clients, and a pool of actors.

Flower's own pool of Ray actors keeps dead actors, so all later tasks on these actors fail. Flower's
simulation also scans all messages for each client ten times a second. This pool removes a lost
worker, starts a new worker if the machine is still available, and calls the client on another
worker.
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
from fedhet.engines.gpu_memory import RETRIED_ALONE, memory_error, release_memory
from fedhet.learning.devices import find_device
from fedhet.server.calls import UserCodeFault, is_user_code_error
from fedhet.settings.engine import EngineSettings

LOG = logging.getLogger("flwr")
POLL_SECONDS = 0.5
"""Interval between two checks for started workers, in seconds."""
RELEASE_SECONDS = 30.0
"""Maximum time to wait for idle workers to release GPU memory, in seconds."""
MAX_ATTEMPTS = 2
"""Maximum number of workers on which a call is tried, if workers are lost."""


@dataclass(frozen=True)
class Failed:
    """Picklable description of a client's error, because not every exception can be pickled."""

    reason: str
    traceback: str
    user_code_fault: UserCodeFault | None = None
    """Error in the client's code, or None if the failure has another cause."""
    is_out_of_memory: bool = False
    """Whether the client ran out of GPU memory."""


class Worker:
    """Ray actor that calls clients, one at a time, in a separate process."""

    def __init__(self, config: Config, state_dir: str, decoded: Path | None = None) -> None:
        """Create the worker.

        Args:
            config: Configuration of the run.
            state_dir: Directory of the clients' states.
            decoded: Directory from which the worker maps the run's data, if it is on this machine.
                The data may be written after the worker has started.
        """
        self._config, self._state_dir = config, state_dir
        self._data = RunData.for_run(config.run, shared=decoded)
        self._use_gpu(config.run.engine.gpus_per_client)

    def call(self, partition: int, name: str, instruction: Any, *, alone: bool = False) -> Any:
        """Call a method of a client, and return its result or `Failed`.

        Args:
            partition: Index of the client.
            name: Name of the method.
            instruction: Argument of the method.
            alone: Whether no other worker is busy, so that this worker may use the full GPU.
        """
        node_config = {"partition-id": partition, "num-partitions": self._config.run.clients}
        if alone:
            release_memory()
            self._use_gpu(1.0)
        try:
            node = read_node(node_config, self._config.run, self._state_dir, self._data)
            client = open_client(self._config, node).to_client()
            return getattr(client, name)(instruction)
        except torch.OutOfMemoryError as error:
            return Failed(str(memory_error(error)), traceback.format_exc(), is_out_of_memory=True)
        except Exception as error:
            fault = UserCodeFault.from_exception(error) if is_user_code_error(error) else None
            return Failed(str(error), traceback.format_exc(), fault)
        finally:
            if alone:
                release_memory()
                self._use_gpu(self._config.run.engine.gpus_per_client)

    def release_memory(self) -> None:
        """Release GPU memory that this worker does not currently need."""
        release_memory()

    def is_ready(self) -> bool:
        """Return True once the process has started and finished its imports."""
        return True

    def _use_gpu(self, fraction: float) -> None:
        """Limit this worker to a fraction of its GPU's memory, if it has a GPU."""
        if find_device(self._config.run.engine.device).type == "cuda":
            torch.cuda.set_per_process_memory_fraction(fraction or 1.0)


@dataclass(frozen=True)
class Machine:
    """Machine of the cluster, i.e. a Ray node."""

    node: str
    """Ray's node id."""
    address: str
    cpus: float
    gpus: float

    def max_workers(self, engine: EngineSettings, *, on_gpu: bool) -> int:
        """Return the maximum number of workers on this machine."""
        by_cpu = int(self.cpus / engine.cpus_per_client)
        if not on_gpu:
            return by_cpu
        # A worker cannot use fractions of two GPUs.
        return min(by_cpu, int(self.gpus) * int(1 / (engine.gpus_per_client or 1)))


class LostError(Exception):
    """Raised if a worker is lost because its process or machine has died."""


@dataclass(frozen=True, eq=False)
class PlacedWorker:
    """Ray actor of a worker, and the machine on which it runs."""

    machine: Machine
    actor: Any


Task = Callable[[Any], Any]
"""Function that starts a task on an actor, and returns Ray's reference to the result."""


class WorkerPool:
    """Pool of a run's Ray workers. Each worker executes one task at a time."""

    def __init__(
        self,
        places: Sequence[Machine],
        start: Callable[[Machine], Any],
        notice: Callable[[str], None],
    ) -> None:
        """Start the workers.

        Args:
            places: The machine of each worker.
            start: Function that starts an actor on a machine. The actor must have a method
                `is_ready`.
            notice: Function that shows a message to the user.
        """
        self.places = tuple(places)
        self._start, self.notice = start, notice
        self._changed = threading.Condition()
        self._idle: deque[PlacedWorker] = deque()
        self._busy: set[PlacedWorker] = set()
        self._starting: dict[Any, PlacedWorker] = {}
        """Workers that are starting, by the Ray reference to the result of `is_ready`."""
        self._exclusive = threading.Lock()
        self._is_reserved = False
        """Whether a task runs alone or is waiting for the other tasks to end."""
        for machine in places:
            self._start_worker(machine)

    def wait(self, timeout: float) -> None:
        """Wait until a worker has started.

        Raises FedhetError if no worker starts within `timeout` seconds.
        """
        try:
            worker = self._acquire(time.monotonic() + timeout)
        except TimeoutError:
            raise FedhetError(
                f"no worker has started on the Ray cluster within {timeout:g} s. Check with `ray "
                "status` whether another program uses its CPUs."
            ) from None
        self._release(worker)

    @property
    def is_lost(self) -> bool:
        """Whether all workers are lost, and no worker is starting."""
        with self._changed:
            self._collect_started()
            return not (self._idle or self._busy or self._starting)

    def run(self, client: str, task: Task, timeout: float | None, *, alone: bool = False) -> Any:
        """Run a task on any worker, and on another worker if the first worker is lost.

        Args:
            client: Client name, shown in notices.
            task: The task.
            timeout: Time limit in seconds, including the wait for a worker, or None for no limit.
            alone: If True, no other task runs on any worker meanwhile. The other workers release
                their GPU memory first.

        Returns:
            The result of the task.

        Raises:
            LostError: If the second worker is also lost, or if no worker is left.
            TimeoutError: If the time limit is exceeded.
        """
        import ray

        if alone:
            self.notice(f"{client} {RETRIED_ALONE}")
        deadline = None if timeout is None else time.monotonic() + timeout
        for attempt in range(1, MAX_ATTEMPTS + 1):
            with self._worker(deadline, alone=alone) as worker:
                try:
                    return ray.get(task(worker.actor), timeout=_remaining(deadline))
                except ray.exceptions.GetTimeoutError:
                    self._replace(worker)  # The worker is still busy, and might never finish.
                    raise TimeoutError("did not reply in time") from None
                except ray.exceptions.RayError as error:
                    LOG.warning("%s", error)
                    lost = LostError(type(error).__name__)
                    is_last = attempt == MAX_ATTEMPTS
                    outcome = "fails in this round" if is_last else "is called on another worker"
                    self.notice(
                        f"the worker of {client} on {worker.machine.address} is lost ({lost}): the "
                        f"client {outcome}"
                    )
                    self._replace(worker)
                    if is_last:
                        raise lost from error
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Kill all workers."""
        with self._changed:
            for worker in (*self._idle, *self._busy, *self._starting.values()):
                _kill(worker)
            self._idle.clear()
            self._busy.clear()
            self._starting.clear()

    @contextlib.contextmanager
    def _worker(self, deadline: float | None, *, alone: bool) -> Iterator[PlacedWorker]:
        """Reserve a worker for the block; with `alone`, all other workers stay idle."""
        import ray

        if alone:
            self._exclusive.acquire()
            self._is_reserved = True
        try:
            worker = self._acquire(deadline, alone=alone)
            try:
                # Ignore errors, because a lost worker uses no memory.
                if alone and (refs := [w.actor.release_memory.remote() for w in self._idle]):
                    ray.wait(refs, num_returns=len(refs), timeout=RELEASE_SECONDS)
                yield worker
            finally:
                self._release(worker)
        finally:
            if alone:
                with self._changed:
                    self._is_reserved = False
                    self._changed.notify_all()
                self._exclusive.release()

    def _acquire(self, deadline: float | None, *, alone: bool = False) -> PlacedWorker:
        with self._changed:
            while True:
                self._collect_started()
                may_start = not self._busy if alone else not self._is_reserved
                if self._idle and may_start:
                    worker = self._idle.popleft()
                    self._busy.add(worker)
                    return worker
                if not (self._idle or self._busy or self._starting):
                    raise LostError("no worker is left on Ray")
                remaining = _remaining(deadline)
                if remaining == 0:
                    raise TimeoutError("no worker was free in time")
                self._changed.wait(
                    POLL_SECONDS if remaining is None else min(POLL_SECONDS, remaining)
                )

    def _release(self, worker: PlacedWorker) -> None:
        """Mark a worker as idle, unless it has been replaced."""
        with self._changed:
            if worker in self._busy:
                self._busy.remove(worker)
                self._idle.append(worker)
            self._changed.notify()

    def _replace(self, worker: PlacedWorker) -> None:
        """Kill a worker and, if its machine still exists, start a new worker there."""
        with self._changed:
            self._busy.discard(worker)
            _kill(worker)
            self._start_worker(worker.machine)

    def _start_worker(self, machine: Machine) -> None:
        worker = PlacedWorker(machine, self._start(machine))
        self._starting[worker.actor.is_ready.remote()] = worker

    def _collect_started(self) -> None:
        """Mark workers that have started as idle, and drop workers whose machine is gone."""
        import ray

        if not self._starting:
            return
        refs = list(self._starting)
        started, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        for ref in started:
            worker = self._starting.pop(ref)
            try:
                ray.get(ref)
                self._idle.append(worker)
            except Exception as error:
                LOG.warning("%s", error)
                self.notice(
                    f"no worker can start on {worker.machine.address} ({type(error).__name__}): "
                    "the run continues without this worker"
                )


def _remaining(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _kill(worker: PlacedWorker) -> None:
    import ray

    with contextlib.suppress(Exception):  # The actor may already be dead.
        ray.kill(worker.actor, no_restart=True)
