"""A run's clients, which the workers of a Ray cluster train.

Flower's server runs in this process, as everywhere; its clients are called in Ray's actors.
"""

from __future__ import annotations

import logging
from typing import Any

from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import SimpleClientManager
from flwr.server.client_proxy import ClientProxy

from fedhet.base.errors import FedhetError
from fedhet.config.resolve import Config
from fedhet.engines.ray.pool import LostError, WorkerPool
from fedhet.engines.ray.worker import Failed, Worker
from fedhet.server.direct_proxy import DirectProxy
from fedhet.server.own_code import ClientCodeError
from fedhet.settings.engine import EngineSettings
from fedhet.wire.identity import client_name

LOG = logging.getLogger("flwr")


class Workers:
    """The workers of a run, on one machine or several, and its clients, which they train."""

    def __init__(self, config: Config, pool: WorkerPool) -> None:
        self.pool = pool
        self.count, self.machines = len(pool.places), len(set(pool.places))
        self.clients = ReachableClients(pool)
        for partition in range(config.run.clients):
            name = client_name(partition, config.run.clients)
            self.clients.register(WorkerProxy(name, partition, pool))

    def run(self, parts: ServerAppComponents) -> None:
        """Run the server through its rounds. Raises FedhetError if no worker is left."""
        server, rounds = parts.server, parts.config
        assert isinstance(server, Server)
        assert isinstance(rounds, ServerConfig)
        server.fit(rounds.num_rounds, rounds.round_timeout)


def actor_of(engine: EngineSettings, *, on_gpu: bool) -> Any:
    """Return Ray's class of a worker's actors, with what each takes of its machine."""
    import ray

    return ray.remote(
        num_cpus=engine.cpus_per_client,
        num_gpus=engine.gpus_per_client if on_gpu else 0,
        max_restarts=0,
        max_task_retries=0,
    )(Worker)


class ReachableClients(SimpleClientManager):
    """Flower's list of clients, which ends the run when no worker is left for them."""

    def __init__(self, pool: WorkerPool) -> None:
        super().__init__()
        self._pool = pool

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
        """Call the client on a worker. Raises ClientCallError or ClientCodeError."""
        place = self._partition
        try:
            result = self._pool.run(
                self.cid, lambda actor: actor.call.remote(place, name, instruction), timeout
            )
            if isinstance(result, Failed) and result.of_memory:
                result = self._pool.run_alone(
                    self.cid,
                    lambda actor: actor.call.remote(place, name, instruction, alone=True),
                    timeout,
                )
        except (LostError, TimeoutError) as error:
            raise ClientCallError(str(error)) from error
        if isinstance(result, Failed):
            raise _error_of(result)
        return result


def _error_of(failed: Failed) -> Exception:
    """Return the error of a client that failed; log what its own words leave out."""
    if failed.of_code is not None:
        return ClientCodeError(failed.of_code)
    LOG.error("%s", failed.trace)
    return ClientCallError(failed.reason)


class ClientCallError(Exception):
    """A client that failed, or whose worker is lost or late, in its own words."""
