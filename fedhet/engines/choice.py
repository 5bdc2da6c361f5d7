"""What trains a run's clients: this process, Ray's workers here, or those of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.server import ServerAppComponents
from flwr.server.client_manager import ClientManager

from fedhet.config.resolve import Config
from fedhet.data import RunData
from fedhet.engines.gpu_memory import with_gpu_share
from fedhet.engines.inline import run_inline
from fedhet.errors import one_line
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural
from fedhet.settings.schema import refused

if TYPE_CHECKING:
    from fedhet.engines.ray.local_cluster import LocalCluster


@dataclass(frozen=True)
class Engine:
    """What trains the clients of a run: this process, or the workers of a Ray cluster."""

    run: Callable[[ServerAppComponents], None]
    workers: int = 1
    """Clients that train at once."""
    starting: str = ""
    """What the run waits for before the first round."""
    manager: ClientManager | None = None
    """The clients, if the engine knows them from the start."""


@contextlib.contextmanager
def cluster_for(
    config: Config, data: RunData, directory: Path, watchers: Sequence[Watcher]
) -> Iterator[LocalCluster | None]:
    """Start the run's own Ray cluster on this machine, if it trains on one, while others load data.

    Raises SettingsError.
    """
    engine = config.run.engine
    if engine.backend == "ray":
        _refuse_numbered_gpu(config)
    if engine.backend != "ray" or engine.ray_address:
        yield None
        return
    from fedhet.engines.ray.local_cluster import local_cluster

    config = with_gpu_share(config, data)
    with local_cluster(config, data, directory, _notice(watchers)) as ray:
        yield ray


@contextlib.contextmanager
def engine_of(
    config: Config,
    data: RunData,
    directory: Path,
    watchers: Sequence[Watcher],
    own: LocalCluster | None,
) -> Iterator[Engine]:
    """Return what trains the clients. Raises FedhetError if it is not there or not ready."""
    if config.run.engine.backend == "inline":
        notice, states = _notice(watchers), directory / "state"
        yield Engine(lambda parts: run_inline(config, data, states, parts, notice))
    elif own is not None:
        show_waiting(watchers, "waiting for Ray to start")
        workers = own.workers()
        starting = f"starting with {plural(workers.count, 'worker')}"
        yield Engine(own.run, workers.count, starting, workers.clients)
    else:
        from fedhet.engines.ray.joined_cluster import joined_workers

        address = config.run.engine.ray_address
        show_waiting(watchers, f"joining the Ray cluster {address}, asking its machines")
        config = with_gpu_share(config, data)
        with joined_workers(config, directory, _notice(watchers)) as workers:
            machines = plural(workers.machines, "machine")
            starting = f"starting with {plural(workers.count, 'worker')} on {machines}"
            yield Engine(workers.run, workers.count, starting, workers.clients)


def _notice(watchers: Sequence[Watcher]) -> Callable[[str], None]:
    def notice(text: str) -> None:
        for watcher in watchers:
            watcher.notice(one_line(text))

    return notice


def _refuse_numbered_gpu(config: Config) -> None:
    """Raise SettingsError if `engine.device` is a GPU with a number, which Ray cannot give."""
    if (device := config.run.engine.device).startswith("cuda:"):
        rule = "cuda on Ray, which assigns the GPUs of CUDA_VISIBLE_DEVICES to its workers"
        raise refused("engine.device", device, rule)


def show_waiting(watchers: Iterable[Watcher], what: str) -> None:
    """Show what the run waits for."""
    for watcher in watchers:
        watcher.waiting(what)
