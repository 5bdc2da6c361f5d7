"""What trains a run's clients: this process, a Ray of its own, or the machines of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flwr.server import ServerAppComponents
from flwr.server.client_manager import ClientManager

from fedhet.config.resolve import Config
from fedhet.engines.inline import run_inline
from fedhet.engines.own_ray import ray_workers, refuse_numbered_gpu, run_on_ray, set_up_ray
from fedhet.errors import one_line
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural


@dataclass(frozen=True)
class Engine:
    """What trains the clients of a run: this process, a Ray of its own, or a cluster."""

    run: Callable[[ServerAppComponents], None]
    workers: int = 1
    """Clients that train at once."""
    starting: str = ""
    """What there is to wait for before the first round."""
    manager: ClientManager | None = None
    """The clients, if the engine knows them from the start."""


@contextlib.contextmanager
def engine_of(config: Config, directory: Path, watchers: Sequence[Watcher]) -> Iterator[Engine]:
    """Return what trains the clients. Raises FedhetError if a cluster is not there or not ready."""
    states = directory / "state"
    if config.run.engine.backend == "inline":
        yield Engine(lambda parts: run_inline(config, states, parts))
    elif not config.run.engine.ray_address:
        workers = ray_workers(config)
        yield Engine(
            lambda parts: run_on_ray(config, directory, states, parts),
            workers,
            f"starting Ray with {plural(workers, 'worker')}",
        )
    else:
        with _cluster(config, directory, watchers) as cluster:
            yield cluster


@contextlib.contextmanager
def _cluster(config: Config, directory: Path, watchers: Sequence[Watcher]) -> Iterator[Engine]:
    from fedhet.cluster.joined import joined

    def notice(text: str) -> None:
        for watcher in watchers:
            watcher.notice(one_line(text))

    refuse_numbered_gpu(config)
    set_up_ray()
    tell(watchers, f"joining the Ray cluster {config.run.engine.ray_address}, asking its machines")
    with joined(config, directory, notice) as cluster:
        machines = plural(cluster.machines, "machine")
        yield Engine(
            cluster.run,
            cluster.workers,
            f"starting with {plural(cluster.workers, 'worker')} on {machines}",
            cluster.manager,
        )


def tell(watchers: Iterable[Watcher], what: str) -> None:
    """Tell watchers what the run waits for."""
    for watcher in watchers:
        watcher.waiting(what)
