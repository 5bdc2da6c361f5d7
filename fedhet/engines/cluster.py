"""Run clients on a Ray cluster: a local cluster started for the run, or an existing one.

Flower's server runs in this process, and calls the clients in Ray actors. Functions import Ray
lazily, because a run in one process does not need it.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.base.disk import Folder
from fedhet.base.errors import FedhetError, error_text, one_line
from fedhet.config.resolve import Config, absolute
from fedhet.data.sources import find_source, paths_of
from fedhet.data.store import RunData
from fedhet.data.texts import encoder_directory, encoder_parts, is_encoder
from fedhet.engines import inspection
from fedhet.engines.connection import BACKGROUND, connect, end_later, leave, start
from fedhet.engines.inspection import Needs
from fedhet.engines.workers import Failed, LostError, Machine, Worker, WorkerPool
from fedhet.learning.devices import find_device
from fedhet.models import is_user_model
from fedhet.runs.directory import create
from fedhet.runs.units import plural
from fedhet.server.calls import DirectProxy, UserCodeError
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import invalid_setting
from fedhet.wire.identity import client_name

LOG = logging.getLogger("flwr")
REQUIRED = ("flwr", "torch", "torchvision", "pydantic", "sklearn", "safetensors", "flwr_datasets")
"""Packages that must be installed on every machine; fedhet's code is sent to the machines."""


class ReachableClients(SimpleClientManager):
    """Registry of a run's clients. Any worker can train any client."""

    def __init__(self, pool: WorkerPool, clients: int) -> None:
        super().__init__()
        self._pool = pool
        for partition in range(clients):
            self.register(WorkerProxy(client_name(partition, clients), partition, pool))

    def all(self) -> dict[str, ClientProxy]:
        """Return all clients. Raises FedhetError if no worker is left."""
        if self._pool.is_lost:
            raise FedhetError(
                "no worker is left on Ray: its machines are lost, or workers cannot start on them. "
                "Use --resume to continue the run when the machines are available."
            )
        return super().all()


class WorkerProxy(DirectProxy):
    """Proxy for a client that any worker in the cluster can run."""

    def __init__(self, name: str, partition: int, pool: WorkerPool) -> None:
        super().__init__(name)
        self._partition, self._pool = partition, pool

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client on a worker.

        Raises ClientCallError if the call fails, and UserCodeError if user code fails.
        """

        def task(actor: Any, *, alone: bool = False) -> Any:
            return actor.call.remote(self._partition, name, instruction, alone=alone)

        try:
            result = self._pool.run(self.cid, task, timeout)
            if isinstance(result, Failed) and result.is_out_of_memory:
                result = self._pool.run(self.cid, partial(task, alone=True), timeout, alone=True)
        except (LostError, TimeoutError) as error:
            raise ClientCallError(str(error)) from error
        if not isinstance(result, Failed):
            return result
        if result.user_code_fault is not None:
            raise UserCodeError(result.user_code_fault)
        LOG.error("%s", result.traceback)
        raise ClientCallError(result.reason)


class ClientCallError(Exception):
    """Raised if a client failed, or if its worker was lost or did not reply in time."""


def fit(parts: ServerAppComponents) -> None:
    """Run Flower's server until the run ends. Raises FedhetError if no worker is left."""
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.fit(rounds.num_rounds, rounds.round_timeout)


class LocalCluster:
    """Ray cluster that a background thread starts on this machine."""

    def __init__(
        self, config: Config, data: RunData, directory: Path, notice: Callable[[str], None]
    ) -> None:
        """Start the cluster and its workers in the background.

        Args:
            config: Configuration of the run, without `auto` settings.
            data: Data of the run.
            directory: The run's directory.
            notice: Function called with a message if a worker is lost.
        """
        self._config, self._data, self._decoded = config, data, directory / "decoded"
        self._started = BACKGROUND.submit(self._start, directory / "state", notice)

    def _start(self, states: Path, notice: Callable[[str], None]) -> WorkerPool:
        start()
        try:
            machines = usable_machines(running_machines(), self._config.run.engine)
            return start_workers(machines, absolute(self._config), states, notice, self._decoded)
        except BaseException:
            leave()
            raise

    def pool(self) -> WorkerPool:
        """Wait until the cluster has started, and return its workers.

        Raises FedhetError if Ray cannot be started, or if the machine has too few CPUs.
        """
        pool = self._started.result()
        if threading.current_thread() is threading.main_thread():
            # Restore Python's signal handler, because Ray's handler prints a stack trace on
            # SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        return pool

    def run(self, parts: ServerAppComponents) -> None:
        """Run a federation. All workers map the same copy of the data.

        Raises FedhetError if the cluster did not start or no worker is left.
        """
        try:
            self._data.share(self._decoded)
            fit(parts)
        finally:
            shutil.rmtree(self._decoded, ignore_errors=True)

    def close(self) -> None:
        """Stop the workers and Ray, in the background if they are still starting."""
        if self._started.cancel():  # Ray has not begun to start.
            return
        if self._started.done():
            self._stop()
        else:
            end_later(self._stop)

    def _stop(self) -> None:
        with contextlib.suppress(Exception):  # If the start failed, there is nothing to stop.
            self.pool().close()
            leave()


@contextlib.contextmanager
def joined_workers(
    config: Config, directory: Path, notice: Callable[[str], None]
) -> Iterator[WorkerPool]:
    """Join the Ray cluster at 'engine.ray-address', and provide workers in the block.

    The cluster keeps running afterward. If an error is raised before the block, a new run
    directory is removed.

    Args:
        config: Configuration of the run.
        directory: The run's directory.
        notice: Function called with a message if a worker is lost.

    Raises:
        FedhetError: If the cluster cannot be joined, or if one of its machines cannot take part.
    """
    engine = config.run.engine
    device = find_device(engine.device).type  # Workers use the same type of device as this machine.
    worker_config = absolute(config.replacing(engine=engine.model_copy(update={"device": device})))
    with contextlib.ExitStack() as stack:
        with _created(directory, resume=config.run.resume):
            connect(engine.ray_address, modules_of(config))
            stack.callback(leave)
            machines = usable_machines(running_machines(), engine)
            check_machines(machines, needs_of(worker_config, directory), engine.join_timeout)
            pool = start_workers(machines, worker_config, directory / "state", notice)
            stack.callback(pool.close)
            pool.wait(engine.join_timeout)
        yield pool


@contextlib.contextmanager
def _created(directory: Path, *, resume: bool) -> Iterator[None]:
    """Create the run's directory for the block, and remove new directories if the block fails.

    Raises StateError if the directory contains another run.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if not (resume and directory.exists()):
        create(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def running_machines() -> list[Machine]:
    """Return the machines currently in the cluster, sorted by address."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    hosts = Counter(node["NodeManagerAddress"] for node in nodes)
    machines = []
    for node in nodes:
        host, name, resources = node["NodeManagerAddress"], node["NodeID"], node["Resources"]
        address = host if hosts[host] == 1 else f"{host} (Ray node {name[:8]})"
        cpus, gpus = resources.get("CPU", 0.0), resources.get("GPU", 0.0)
        machines.append(Machine(name, address, cpus, gpus))
    return sorted(machines, key=lambda machine: (machine.address, machine.node))


def usable_machines(machines: Sequence[Machine], engine: EngineSettings) -> list[Machine]:
    """Return the machines with enough CPUs for a worker. Raises SettingsError if there are none."""
    usable = [machine for machine in machines if machine.max_workers(engine, on_gpu=False)]
    if not usable:
        max_cpus = max((machine.cpus for machine in machines), default=0.0)
        expected = f"at most {max_cpus:g}, the number of CPUs of the largest machine"
        raise invalid_setting("engine.cpus-per-client", engine.cpus_per_client, expected)
    return usable


def place_workers(
    machines: Sequence[Machine], engine: EngineSettings, clients: int, *, on_gpu: bool
) -> list[Machine]:
    """Assign workers to machines round-robin, with at most one worker per client.

    Returns the machine of each worker. Raises FedhetError if no machine can run a worker.
    """
    limits = [machine.max_workers(engine, on_gpu=on_gpu) for machine in machines]
    turns = range(max(limits, default=0))
    placed = [
        machine
        for turn in turns
        for machine, limit in zip(machines, limits, strict=True)
        if turn < limit
    ]
    if not placed:
        raise FedhetError(
            "no machine of the Ray cluster has a GPU registered with Ray. `ray start` detects GPUs "
            "automatically; otherwise set their number with --num-gpus."
        )
    return placed[:clients]


def start_workers(
    machines: Sequence[Machine],
    config: Config,
    states: Path,
    notice: Callable[[str], None],
    decoded: Path | None = None,
) -> WorkerPool:
    """Start as many workers as the machines can run.

    Args:
        machines: Machines of the cluster.
        config: Configuration of the run, with absolute paths.
        states: Directory of the clients' states.
        notice: Function that shows a message to the user.
        decoded: Directory from which workers map the run's data. If it is None, each worker reads
            the dataset.
    """
    # Import Ray after `connect` or `start`, which set the environment variables that Ray reads.
    import ray

    engine = config.run.engine
    on_gpu = find_device(engine.device).type == "cuda"
    placed = place_workers(machines, engine, config.run.clients, on_gpu=on_gpu)
    actor = ray.remote(
        num_cpus=engine.cpus_per_client,
        num_gpus=engine.gpus_per_client if on_gpu else 0,
        max_restarts=0,
        max_task_retries=0,
    )(Worker)
    settings = ray.put(config)

    def start_worker(machine: Machine) -> Any:
        on_machine = actor.options(scheduling_strategy=pinned(machine))
        return on_machine.remote(settings, str(states), decoded)

    return WorkerPool(placed, start_worker, notice)


def pinned(machine: Machine) -> Any:
    """Return the Ray scheduling strategy that runs a task only on the given machine."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(machine.node, soft=False)


def modules_of(config: Config) -> list[str]:
    """Return the modules that workers import by name, for the method, user models and dataset."""
    source, location = find_source(config.run.data.dataset)
    return [
        *[side.__module__ for side in (config.method.strategy, config.method.client)],
        *[name.partition(":")[0] for name in config.run.models.pool if is_user_model(name)],
        *([location.partition(":")[0]] if source.imports else []),
    ]


def needs_of(config: Config, directory: Path) -> Needs:
    """Return a run's requirements for each machine. The paths in `config` must be absolute."""
    run, names = config.run, config.run.models.pool
    encoders = [encoder_directory(encoder_parts(name)[2]) for name in names if is_encoder(name)]
    modules = dict.fromkeys([*REQUIRED, *modules_of(config)])
    return Needs(
        directory=str(directory),
        token=f".fedhet-{secrets.token_hex(8)}",
        device=find_device(run.engine.device).type,
        torch=inspection.version_of("torch"),
        data={
            path: inspection.listing(path) for path in [*map(str, paths_of(run.data)), *encoders]
        },
        modules=tuple(filter(inspection.is_found, modules)),
    )


def check_machines(machines: Sequence[Machine], needs: Needs, timeout: float) -> None:
    """Check a run's requirements on every machine.

    Args:
        machines: Machines of the cluster.
        needs: Requirements of the run.
        timeout: Maximum time to wait for the machines, in seconds.

    Raises:
        FedhetError: If a machine cannot take part. If there are several faults, the error's notes
            list all of them.
    """
    import ray

    directory = Path(needs.directory)
    # A machine that finds the token shares the directory.
    with Folder(directory).replacing(needs.token) as path:
        path.write_text(needs.token, encoding="utf-8")
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(inspection.faults)
        refs = {
            machine.address: task.options(scheduling_strategy=pinned(machine)).remote(needs)
            for machine in machines
        }
        finished, _ = ray.wait(list(refs.values()), num_returns=len(refs), timeout=timeout)
        faults_by_machine = []
        for address, ref in refs.items():
            faults = [f"did not reply within {timeout:g} s"]
            if ref in finished:
                try:
                    faults = ray.get(ref)
                # The error may be from Ray or from packages on the machine.
                except Exception as error:
                    faults = [f"cannot be checked: {error_text(error)}"]
            faults_by_machine.append([one_line(f"{address}: {fault}") for fault in faults])
    finally:
        Folder(directory).remove(path.name for path in directory.glob(f"{needs.token}*"))
    lines = [line for faults in faults_by_machine for line in faults]
    if len(lines) == 1:
        raise FedhetError(lines[0])
    if lines:
        refusal = FedhetError(
            f"{sum(map(bool, faults_by_machine))} of {plural(len(machines), 'machine')} of the Ray "
            f"cluster cannot take part, so no client was trained; first fault: {lines[0]}"
        )
        for line in lines:
            refusal.add_note(line)
        raise refusal
