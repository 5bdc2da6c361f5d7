"""Joining a Ray cluster that is there, and running a federation on its machines.

Flower's server runs in this process, as everywhere; its clients are called in Ray's actors.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet import data
from fedhet.cluster.connection import connect, leave
from fedhet.cluster.machines import (
    Machine,
    check_machines,
    pinned,
    places,
    question_of,
    running_machines,
    taking_clients,
)
from fedhet.cluster.pool import LostError, Pool
from fedhet.cluster.worker import Failed, Worker
from fedhet.config.resolve import Config, absolute
from fedhet.devices import find_device
from fedhet.errors import FedhetError
from fedhet.runs.directory import make_empty
from fedhet.server.called import CalledProxy
from fedhet.settings.engine import EngineSettings

LOG = logging.getLogger("flwr")


class Joined:
    """A cluster whose machines can run a federation."""

    def __init__(self, clients: int, pool: Pool, workers: int, machines: int) -> None:
        self.workers, self.machines = workers, machines
        self.manager = ReachableClients(pool)
        for partition in range(clients):
            name = data.client_name(partition, clients)
            self.manager.register(WorkerProxy(name, partition, pool))

    def run(self, parts: ServerAppComponents) -> None:
        """Run the federation. Raises FedhetError if no machine is left to run it on."""
        server, rounds = parts.server, parts.config
        assert isinstance(server, Server)
        assert isinstance(rounds, ServerConfig)
        server.fit(rounds.num_rounds, rounds.round_timeout)


@contextlib.contextmanager
def joined(config: Config, directory: Path, notice: Callable[[str], None]) -> Iterator[Joined]:
    """Join the cluster of `engine.ray-address`, and leave it in the end; it goes on without us.

    `notice` is told of workers that are lost. Raises FedhetError, before anything is trained, if
    the cluster cannot be joined, or one of its machines cannot take part; no directory of a run is
    left then.
    """
    engine = config.run.engine
    on_workers = _for_workers(config)
    with contextlib.ExitStack() as leaving:
        with _shared(directory, go_on=config.run.resume):
            connect(engine.ray_address)
            leaving.callback(leave)
            machines = taking_clients(running_machines(), engine)
            check_machines(machines, question_of(on_workers, directory), engine.join_timeout)
            on_gpu = find_device(engine.device).type == "cuda"
            dealt = places(machines, engine, config.run.clients, on_gpu=on_gpu)
            start = _starter(on_workers, directory, on_gpu=on_gpu)
            pool = Pool(dealt, start, notice)
            leaving.callback(pool.close)
            pool.wait(engine.join_timeout)
        yield Joined(config.run.clients, pool, len(dealt), len(set(dealt)))


def _for_workers(config: Config) -> Config:
    """Return the settings for the workers: they train on what this machine trains on."""
    kind = find_device(config.run.engine.device).type
    return absolute(config.replacing(engine=config.run.engine.model_copy(update={"device": kind})))


@contextlib.contextmanager
def _shared(directory: Path, *, go_on: bool) -> Iterator[None]:
    """Make the run's directory, for the machines to look at; if the block fails, as it was before.

    Raises StateError if it holds another run.
    """
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    if not (go_on and directory.exists()):
        make_empty(directory)
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            for path in missing:
                path.rmdir()
        raise


def _starter(config: Config, directory: Path, *, on_gpu: bool) -> Callable[[Machine], Any]:
    """Return a function that starts a worker on a machine."""
    import ray

    engine: EngineSettings = config.run.engine
    actor = ray.remote(
        num_cpus=engine.cpus_per_client,
        num_gpus=engine.gpus_per_client if on_gpu else 0,
        max_restarts=0,
        max_task_retries=0,
    )(Worker)
    settings, states = ray.put(config), str(directory / "state")
    return lambda machine: actor.options(scheduling_strategy=pinned(machine)).remote(
        settings, states
    )


class ReachableClients(SimpleClientManager):
    """Flower's list of clients, which ends the run when no worker is left for them."""

    def __init__(self, pool: Pool) -> None:
        super().__init__()
        self._pool = pool

    def all(self) -> dict[str, ClientProxy]:
        """Return all clients. Raises FedhetError if no worker is left."""
        if self._pool.is_lost:
            raise FedhetError(
                "no worker is left on the Ray cluster: its machines are gone; --resume goes on "
                "with the run when they are back"
            )
        return super().all()


class WorkerProxy(CalledProxy):
    """A client that any worker of the cluster can run."""

    def __init__(self, name: str, partition: int, pool: Pool) -> None:
        super().__init__(name)
        self._partition, self._pool = partition, pool

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client on a worker. Raises ClientCallError, in the client's words."""
        try:
            result = self._pool.run(
                self.cid,
                lambda actor: actor.call.remote(self._partition, name, instruction),
                timeout,
            )
        except (LostError, TimeoutError) as error:
            raise ClientCallError(str(error)) from error
        if isinstance(result, Failed):
            LOG.error("%s", result.trace)
            raise ClientCallError(result.reason)
        return result


class ClientCallError(Exception):
    """A client that failed, or whose worker is lost or late, in its own words."""
