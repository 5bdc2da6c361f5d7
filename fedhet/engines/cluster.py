"""A run's clients on a Ray cluster: one of its own on this machine, or one that it joins.

Flower's server runs in this process, as everywhere; its clients are called in Ray's actors. Ray is
imported where it is used: a run in one process does without it.
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
"""What must be installed on every machine; the code of fedhet itself is sent there."""


class ReachableClients(SimpleClientManager):
    """The clients of a run, which any worker trains; they end the run when no worker is left."""

    def __init__(self, pool: WorkerPool, clients: int) -> None:
        super().__init__()
        self._pool = pool
        for partition in range(clients):
            self.register(WorkerProxy(client_name(partition, clients), partition, pool))

    def all(self) -> dict[str, ClientProxy]:
        """Return all clients. Raises FedhetError if no worker is left."""
        if self._pool.is_lost:
            raise FedhetError(
                "no worker is left on Ray: its machines are gone, or none starts on them; "
                "--resume continues the run when they are back"
            )
        return super().all()


class WorkerProxy(DirectProxy):
    """A client that any worker of the cluster can run."""

    def __init__(self, name: str, partition: int, pool: WorkerPool) -> None:
        super().__init__(name)
        self._partition, self._pool = partition, pool

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client on a worker. Raises ClientCallError or UserCodeError."""

        def started(actor: Any, *, alone: bool = False) -> Any:
            return actor.call.remote(self._partition, name, instruction, alone=alone)

        try:
            result = self._pool.run(self.cid, started, timeout)
            if isinstance(result, Failed) and result.of_memory:
                result = self._pool.run(self.cid, partial(started, alone=True), timeout, alone=True)
        except (LostError, TimeoutError) as error:
            raise ClientCallError(str(error)) from error
        if not isinstance(result, Failed):
            return result
        if result.of_code is not None:
            raise UserCodeError(result.of_code)
        LOG.error("%s", result.trace)  # the error's own words leave it out
        raise ClientCallError(result.reason)


class ClientCallError(Exception):
    """A client that failed, or whose worker is lost or late, in its own words."""


def fit(parts: ServerAppComponents) -> None:
    """Run the server through its rounds. Raises FedhetError if no worker is left."""
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.fit(rounds.num_rounds, rounds.round_timeout)


class LocalCluster:
    """A Ray cluster on this machine, which starts in a thread while the run loads its data."""

    def __init__(
        self, config: Config, data: RunData, directory: Path, notice: Callable[[str], None]
    ) -> None:
        """Begin to start it; `notice` is called for each worker that is lost.

        `config` says what `auto` means here, since the workers get it at once.
        """
        self._config, self._data, self._decoded = config, data, directory / "decoded"
        self._started = BACKGROUND.submit(self._start, directory / "state", notice)

    def _start(self, states: Path, notice: Callable[[str], None]) -> WorkerPool:
        start()
        try:
            machines = taking_clients(running_machines(), self._config.run.engine)
            return start_workers(machines, absolute(self._config), states, notice, self._decoded)
        except BaseException:
            leave()
            raise

    def pool(self) -> WorkerPool:
        """Wait until it has started. Raises FedhetError if it cannot, or has too few processors."""
        pool = self._started.result()
        if threading.current_thread() is threading.main_thread():
            # Restore Python's handler: Ray's own prints a stack trace on SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        return pool

    def run(self, parts: ServerAppComponents) -> None:
        """Run the federation on data that all workers map from one copy. Raises FedhetError."""
        try:
            self._data.share(self._decoded)
            fit(parts)
        finally:
            shutil.rmtree(self._decoded, ignore_errors=True)

    def close(self) -> None:
        """End its workers, and Ray; while they start, an error does not wait for that."""
        if self._started.cancel():  # Ray has not started: nobody needs it any more
            return
        if self._started.done():
            self._end()
        else:
            end_later(self._end)

    def _end(self) -> None:
        with contextlib.suppress(Exception):  # it has not started, and there is nothing to end
            self.pool().close()
            leave()


@contextlib.contextmanager
def joined_workers(
    config: Config, directory: Path, notice: Callable[[str], None]
) -> Iterator[WorkerPool]:
    """Join the cluster of `engine.ray-address`, and leave it in the end; the cluster keeps running.

    `notice` is called for each worker that is lost. Raises FedhetError, before anything is trained,
    if the cluster cannot be joined, or one of its machines cannot take part; no directory of a run
    is left then.
    """
    engine = config.run.engine
    device = find_device(engine.device).type  # the workers train on what this machine trains on
    on_workers = absolute(config.replacing(engine=engine.model_copy(update={"device": device})))
    with contextlib.ExitStack() as leaving:
        with _shared(directory, go_on=config.run.resume):
            connect(engine.ray_address, modules_of(config))
            leaving.callback(leave)
            machines = taking_clients(running_machines(), engine)
            check_machines(machines, needs_of(on_workers, directory), engine.join_timeout)
            pool = start_workers(machines, on_workers, directory / "state", notice)
            leaving.callback(pool.close)
            pool.wait(engine.join_timeout)
        yield pool


@contextlib.contextmanager
def _shared(directory: Path, *, go_on: bool) -> Iterator[None]:
    """Make the run's directory, for the machines to look at; if the block fails, as it was before.

    Raises StateError if it holds another run.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if not (go_on and directory.exists()):
        create(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def running_machines() -> list[Machine]:
    """Return the machines that the cluster has now, sorted by address."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    hosts = Counter(node["NodeManagerAddress"] for node in nodes)
    found = []
    for node in nodes:
        host, name, has = node["NodeManagerAddress"], node["NodeID"], node["Resources"]
        address = host if hosts[host] == 1 else f"{host} (Ray's node {name[:8]})"
        found.append(Machine(name, address, has.get("CPU", 0.0), has.get("GPU", 0.0)))
    return sorted(found, key=lambda machine: (machine.address, machine.node))


def taking_clients(machines: Sequence[Machine], engine: EngineSettings) -> list[Machine]:
    """Return the machines with processors for a worker. Raises SettingsError if there is none."""
    able = [machine for machine in machines if machine.workers(engine, on_gpu=False)]
    if not able:
        cpus = max((machine.cpus for machine in machines), default=0.0)
        expected = f"at most {cpus:g}, the number of CPUs of the largest machine"
        raise invalid_setting("engine.cpus-per-client", engine.cpus_per_client, expected)
    return able


def places(
    machines: Sequence[Machine], engine: EngineSettings, clients: int, *, on_gpu: bool
) -> list[Machine]:
    """Return a machine for each worker, in turn while they have room; at most one for each client.

    Raises FedhetError if there is room for none.
    """
    rooms = [machine.workers(engine, on_gpu=on_gpu) for machine in machines]
    turns = range(max(rooms, default=0))
    placed = [m for turn in turns for m, room in zip(machines, rooms, strict=True) if turn < room]
    if not placed:
        raise FedhetError(
            "no machine of the Ray cluster has a GPU that Ray knows of: `ray start` finds them by "
            "itself, or gets their number by --num-gpus"
        )
    return placed[:clients]


def start_workers(
    machines: Sequence[Machine],
    config: Config,
    states: Path,
    notice: Callable[[str], None],
    decoded: Path | None = None,
) -> WorkerPool:
    """Start workers on the machines, as many as have room; see `Worker` and `WorkerPool`."""
    import ray  # only now: `connect` and `start` set what it reads from the environment

    engine = config.run.engine
    on_gpu = find_device(engine.device).type == "cuda"
    placed = places(machines, engine, config.run.clients, on_gpu=on_gpu)
    actor = ray.remote(
        num_cpus=engine.cpus_per_client,
        num_gpus=engine.gpus_per_client if on_gpu else 0,
        max_restarts=0,
        max_task_retries=0,
    )(Worker)
    settings = ray.put(config)

    def begin(machine: Machine) -> Any:
        there = actor.options(scheduling_strategy=pinned(machine))
        return there.remote(settings, str(states), decoded)

    return WorkerPool(placed, begin, notice)


def pinned(machine: Machine) -> Any:
    """Return Ray's scheduling strategy for tasks on this machine alone."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return NodeAffinitySchedulingStrategy(machine.node, soft=False)


def modules_of(config: Config) -> list[str]:
    """Return the modules that a run's workers import by name: its method, models and dataset."""
    source, place = find_source(config.run.data.dataset)
    return [
        *[half.__module__ for half in (config.method.strategy, config.method.client)],
        *[name.partition(":")[0] for name in config.run.models.pool if is_user_model(name)],
        *([place.partition(":")[0]] if source.imports else []),
    ]


def needs_of(config: Config, directory: Path) -> Needs:
    """Return what a run needs of each machine. `config` has absolute paths."""
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


def check_machines(machines: Sequence[Machine], needs: Needs, patience: float) -> None:
    """Let every machine look for what a run needs; `patience` is how long to wait, in seconds.

    Raises FedhetError if one of them lacks it. The lines of all machines are the error's notes, if
    there are several.
    """
    import ray

    directory = Path(needs.directory)
    with Folder(directory).replacing(needs.token) as path:  # machines recognize the directory by it
        path.write_text(needs.token, encoding="utf-8")
    try:
        task = ray.remote(num_cpus=0, max_retries=0)(inspection.faults)
        asked = {
            machine.address: task.options(scheduling_strategy=pinned(machine)).remote(needs)
            for machine in machines
        }
        refs, lines = list(asked.values()), []
        answered, _ = ray.wait(refs, num_returns=len(refs), timeout=patience)
        for address, ref in asked.items():
            found = [f"has not answered within {patience:g} s"]
            if ref in answered:
                try:
                    found = ray.get(ref)
                except Exception as error:  # of Ray, or of whatever is installed there
                    found = [f"cannot be asked: {error_text(error)}"]
            lines.append([one_line(f"{address}: {line}") for line in found])
    finally:
        Folder(directory).remove(path.name for path in directory.glob(f"{needs.token}*"))
    faults = [line for found in lines for line in found]
    if len(faults) == 1:
        raise FedhetError(faults[0])
    if faults:
        refusal = FedhetError(
            f"{sum(map(bool, lines))} of {plural(len(machines), 'machine')} of the Ray cluster "
            f"cannot take part, and nothing was trained; the first fault: {faults[0]}"
        )
        for line in faults:
            refusal.add_note(line)
        raise refusal
