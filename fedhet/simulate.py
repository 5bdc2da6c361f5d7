"""A whole federation from this machine: Flower's simulation on Ray, in this process, or a cluster.

This is the only module that starts simulations.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from flwr.server import Server, ServerApp, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager

from fedhet import data
from fedhet.client.cache import open_client
from fedhet.client.node import Node, read_node
from fedhet.client_app import simulated_app
from fedhet.config.resolve import Config, absolute, check
from fedhet.config.sources import read_toml
from fedhet.data.decoded import write_decoded
from fedhet.devices import find_device, settled
from fedhet.errors import one_line
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural
from fedhet.server.called import CalledProxy
from fedhet.server_app import components
from fedhet.settings.schema import refused
from fedhet.storage import replacing

if TYPE_CHECKING:
    from fedhet import report


def simulate(
    config: Config,
    directory: Path,
    watchers: Iterable[Watcher] = (),
    *,
    begun: float | None = None,
) -> report.Run:
    """Run `config` to its end, write its report into `directory`, and return the run.

    `begun` is when the command began, by `time.perf_counter`; None: now. Raises FedhetError before
    any training if this machine cannot run it.
    """
    begun = time.perf_counter() if begun is None else begun
    watchers = tuple(watchers)
    _tell(watchers, f"reading {config.run.data.dataset}, and splitting it between the clients")
    check(config)
    config = settled_for(config, directory)
    with _engine(config, directory, watchers) as engine:
        parts = components(
            config,
            directory,
            workers=engine.workers,
            watchers=watchers,
            begun=begun,
            manager=engine.manager,
        )
        _write_partition(config, directory)
        if engine.starting:
            _tell(watchers, engine.starting)
        with _logging_to(directory / "flower.log"):
            engine.run(parts)
    from fedhet import report  # pandas and matplotlib: the clients need not wait for them

    return report.write(directory)


def _tell(watchers: Iterable[Watcher], what: str) -> None:
    """Tell watchers what the run waits for."""
    for watcher in watchers:
        watcher.waiting(what)


def settled_for(config: Config, directory: Path) -> Config:
    """Return the settings with what `auto` means here, or meant where the run was begun.

    They stand in config.toml, so that the run can be made again, or resumed, on another machine.
    """
    there = directory / "config.toml"
    if not (config.run.resume and there.exists()):
        return config.replacing(engine=settled(config.run.engine))
    begun, changes = read_toml(there), {}
    for name in ("precision", "channels_last"):
        kept = begun.get(f"engine.{name.replace('_', '-')}")
        if getattr(config.run.engine, name) == "auto" and kept is not None:
            changes[name] = kept
    return config.replacing(engine=config.run.engine.model_copy(update=changes))


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
def _engine(config: Config, directory: Path, watchers: Sequence[Watcher]) -> Iterator[Engine]:
    """Return what trains the clients. Raises FedhetError if a cluster is not there or not ready."""
    if config.run.engine.backend == "inline":
        yield Engine(lambda parts: _run_inline(config, directory, parts))
    elif not config.run.engine.ray_address:
        workers = ray_workers(config)
        yield Engine(
            lambda parts: _run_on_ray(config, directory, parts),
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

    _refuse_numbered_gpu(config)
    _set_up_ray()
    _tell(watchers, f"joining the Ray cluster {config.run.engine.ray_address}, asking its machines")
    with joined(config, directory, notice) as cluster:
        machines = plural(cluster.machines, "machine")
        yield Engine(
            cluster.run,
            cluster.workers,
            f"starting with {plural(cluster.workers, 'worker')} on {machines}",
            cluster.manager,
        )


def _set_up_ray() -> None:
    """Set what Ray reads from the environment when it is imported."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default: a worker without a GPU share still sees all GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def _run_on_ray(config: Config, directory: Path, parts: ServerAppComponents) -> None:
    from flwr.simulation import run_simulation

    _set_up_ray()
    with _decoded(config, directory) as decoded:
        run_simulation(
            server_app=ServerApp(server_fn=lambda context: parts),
            client_app=simulated_app(absolute(config), _state_dir(directory), decoded),
            num_supernodes=config.run.clients,
            backend_config=own_ray(config),
        )


@contextlib.contextmanager
def _decoded(config: Config, directory: Path) -> Iterator[Path]:
    """Have the run's data in a folder, from which the workers map it, inside the block."""
    folder = directory / "decoded"
    write_decoded(data.DataSpec.of(config.run), folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def own_ray(config: Config) -> dict[str, dict[str, Any]]:
    """Return what Flower passes to Ray: one of the run's own, though there may be a cluster."""
    # Without an address Ray joins a cluster that runs on this machine, or is in RAY_ADDRESS.
    return {
        "init_args": {"address": "local", "include_dashboard": False, "log_to_driver": False},
        "client_resources": {
            "num_cpus": config.run.engine.cpus_per_client,
            "num_gpus": _gpu_share(config),
        },
    }


def _run_inline(config: Config, directory: Path, parts: ServerAppComponents) -> None:
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.set_max_workers(1)
    for partition in range(config.run.clients):
        node_config = {"partition-id": partition, "num-partitions": config.run.clients}
        node = read_node(node_config, config.run, _state_dir(directory))
        server.client_manager().register(InlineProxy(config, node))
    server.fit(rounds.num_rounds, rounds.round_timeout)


class InlineProxy(CalledProxy):
    """A client in this process."""

    # Flower's server calls clients from several threads, but torch's generators and the data caches
    # are shared by the process: call one client at a time.
    _one_at_a_time = threading.Lock()

    def __init__(self, config: Config, node: Node) -> None:
        super().__init__(node.name)
        self._config = config
        self._node = node

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`; it takes the time that it takes."""
        with self._one_at_a_time:
            client = open_client(self._config, self._node).to_client()
            return getattr(client, name)(instruction)


def _state_dir(directory: Path) -> str:
    return str(directory / "state")


def _gpu_share(config: Config) -> float:
    if find_device(config.run.engine.device).type != "cuda":
        return 0.0
    return config.run.engine.gpus_per_client


def ray_workers(config: Config) -> int:
    """Return Ray's number of workers. Raises SettingsError if no worker would fit."""
    engine = config.run.engine
    cpus = os.cpu_count() or 1
    if engine.cpus_per_client > cpus:
        raise refused(
            "engine.cpus-per-client", engine.cpus_per_client, f"at most this machine's {cpus}"
        )
    workers = int(cpus / engine.cpus_per_client)
    _refuse_numbered_gpu(config)
    if share := _gpu_share(config):
        # A worker cannot use parts of two GPUs.
        workers = min(workers, torch.cuda.device_count() * int(1 / share))
    return max(1, min(workers, config.run.clients))


def _refuse_numbered_gpu(config: Config) -> None:
    if (device := config.run.engine.device).startswith("cuda:"):
        rule = "cuda on Ray, which deals the GPUs of CUDA_VISIBLE_DEVICES to its workers"
        raise refused("engine.device", device, rule)


def _write_partition(config: Config, directory: Path) -> None:
    """Write the number of samples of each class at each client."""
    spec = data.DataSpec.of(config.run)
    counts: Mapping[str, list[int]] = data.label_counts(spec)
    content = {"classes": list(data.load(spec).classes), "counts": dict(counts)}
    with replacing(directory / "partition.json") as path:
        path.write_text(json.dumps(content), encoding="utf-8")


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Redirect Flower's log to a file inside the block."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    handler = logging.FileHandler(path, encoding="utf-8", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.close()
