"""What trains a run's clients: this process, Ray's workers here, or those of a cluster.

`with_backend` chooses, `engine_of` starts what was chosen, and `InlineProxy` is a client in this
process; those on Ray are in `fedhet.engines.ray`.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager

from fedhet.base.errors import one_line
from fedhet.client_runtime.node import Node, open_client, read_node
from fedhet.config.resolve import Config
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import ASKED_ALONE, make_room, too_small, with_gpu_share
from fedhet.learning.devices import compute_for, find_device
from fedhet.models import Refitted, assign, build_any
from fedhet.runs.log import Watcher
from fedhet.runs.units import plural
from fedhet.server.calls import ClientCodeError, CodeFault, DirectProxy, is_of_code
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import refused

if TYPE_CHECKING:
    from fedhet.engines.ray.cluster import LocalCluster


RAY_SECONDS = 15.0
"""Processor time for starting and ending Ray, its workers, and their imports, in seconds."""


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


def with_backend(config: Config, data: RunData, directory: Path) -> tuple[Config, str]:
    """Return the settings with the backend that `auto` means for a run, and the reason.

    Ray trains if it is needed, or if its workers save more time than Ray takes to start. The
    results are the same on both backends.
    """
    engine, pace, default = config.run.engine, config.run.pace, EngineSettings()
    if engine.backend != "auto":
        return config, ""
    device = find_device(engine.device)
    waits = pace.may_be_late or pace.stragglers > 0
    reasons = {
        "'engine.ray-address' is set": bool(engine.ray_address),
        "'engine.cpus-per-client' is set": engine.cpus_per_client != default.cpus_per_client,
        "'engine.gpus-per-client' is set": engine.gpus_per_client != default.gpus_per_client,
        "the device is a GPU": device.type == "cuda" and device.index is None,
        "rounds close by this machine's clock": waits and not pace.is_simulated,
    }
    if reason := next((words for words, holds in reasons.items() if holds), ""):
        backend = "ray"
    else:
        cpus = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        # A run of several in parallel, each in a child process, leaves the other CPUs to them.
        workers = min(len(cpus), config.run.clients) if parent_process() is None else 1
        bound = RAY_SECONDS / (1 - 1 / workers) if workers > 1 else math.inf
        work = _seconds_of_work(config, data, directory, bound) if workers > 1 else 0.0
        backend = "ray" if work > bound else "inline"
        about = "more than" if work > bound else "about"
        reason = f"{about} {work:.0f} s of work" if workers > 1 else "Ray would have one worker"
    chosen = config.replacing(engine=engine.model_copy(update={"backend": backend}))
    place = {"ray": "on Ray", "inline": "in this process"}[backend]
    return chosen, f"training {place}: {reason}"


def _seconds_of_work(config: Config, data: RunData, directory: Path, bound: float) -> float:
    """Estimate the processor time of the remaining rounds, from one training step of each model.

    Returns a lower estimate as soon as it exceeds `bound`.
    """
    run, clients = config.run, config.run.clients
    done = 0
    with contextlib.suppress(OSError):
        if run.resume:
            done = (directory / "metrics.jsonl").read_bytes().count(b"\n")
    rounds = max(run.rounds - done, 0)
    epochs = run.training.local_epochs
    epochs = fmean(epochs) if isinstance(epochs, tuple) else epochs
    sizes = [tuple(map(len, data.split_rows(client))) for client in range(clients)]
    common = len(data.common_test) if data.common_test is not None else 0
    trained = rounds * run.fraction * epochs * fmean(train for train, _ in sizes)
    evaluated = rounds / run.evaluate_every * fmean(test + common for _, test in sizes)
    own, spec = config.flat(), config.method.spec
    others = [str(own[f"{run.method}.{name.replace('_', '-')}"]) for name in spec.own_models]
    models = Counter(assign(run.models.pool, clients, run.seed, run.models.assignment))
    models.update(dict.fromkeys(others, clients))
    work = 0.0
    for name, count in models.items():
        # Evaluation takes a forward pass, about a third of a training step.
        samples = count * (trained + evaluated / 3)
        work += samples * _seconds_per_sample(name, data, config)
        if work > bound:
            break
    return work


def _seconds_per_sample(name: str, data: RunData, config: Config) -> float:
    """Measure the processor time of a training step, in seconds for each sample.

    Returns infinity for a model that cannot be trained like that.
    """
    run, dataset = config.run, data.dataset
    compute = compute_for(run.engine)
    largest = run.training.batch_size
    largest = max(largest) if isinstance(largest, tuple) else largest
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so that this thread does all the work
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_any(
                name, dataset.shape, len(dataset.classes), seed=run.seed, kind=dataset.kind
            )
            if isinstance(model, Refitted):
                return 0.0
            compute.place(model).train()
            seconds = size = 0.0
            for step, size in enumerate((2, 2, min(largest, len(dataset.train)))):
                batch = dataset.train.take(torch.arange(int(size)).numpy())
                begun = time.thread_time()
                with compute.autocast():
                    logits = model(compute.images(batch.x)).float()
                    loss = torch.nn.functional.cross_entropy(logits, compute.held(batch.y))
                loss.backward()  # type: ignore[no-untyped-call]
                seconds = time.thread_time() - begun
                if step and seconds > 0.5:  # the first step warms up
                    break
            return seconds / size
    except Exception:  # the first round reports it
        return math.inf
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def cluster_for(
    config: Config, data: RunData, directory: Path, watchers: Sequence[Watcher]
) -> Iterator[LocalCluster | None]:
    """Start the run's own Ray cluster on this machine, if it trains on one, while others load data.

    Raises SettingsError.
    """
    engine = config.run.engine
    if engine.backend == "ray" and engine.device.startswith("cuda:"):  # which Ray cannot give
        rule = "cuda on Ray, which assigns the GPUs of CUDA_VISIBLE_DEVICES to its workers"
        raise refused("engine.device", engine.device, rule)
    if engine.backend != "ray" or engine.ray_address:
        yield None
        return
    from fedhet.engines.ray.cluster import LocalCluster

    config = with_gpu_share(config, data)
    with contextlib.closing(LocalCluster(config, data, directory, _notice(watchers))) as ray:
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
        return
    from fedhet.engines.ray.cluster import ReachableClients, fit, joined_workers

    if own is not None:
        show_waiting(watchers, "waiting for Ray to start")
        pool = own.pool()
        count = len(pool.places)
        starting = f"starting with {plural(count, 'worker')}"
        yield Engine(own.run, count, starting, ReachableClients(pool, config.run.clients))
        return
    address = config.run.engine.ray_address
    show_waiting(watchers, f"joining the Ray cluster {address}, asking its machines")
    config = with_gpu_share(config, data)
    with joined_workers(config, directory, _notice(watchers)) as pool:
        count, machines = len(pool.places), plural(len({*pool.places}), "machine")
        starting = f"starting with {plural(count, 'worker')} on {machines}"
        yield Engine(fit, count, starting, ReachableClients(pool, config.run.clients))


def _notice(watchers: Sequence[Watcher]) -> Callable[[str], None]:
    def notice(text: str) -> None:
        for watcher in watchers:
            watcher.notice(one_line(text))

    return notice


def show_waiting(watchers: Iterable[Watcher], what: str) -> None:
    """Show what the run waits for."""
    for watcher in watchers:
        watcher.waiting(what)


def run_inline(
    config: Config,
    data: RunData,
    state_dir: Path,
    parts: ServerAppComponents,
    notice: Callable[[str], None],
) -> None:
    """Run the federation; its clients keep their states in `state_dir`.

    `notice` is called for each client for which others had to make room on the GPU.
    """
    server, rounds = parts.server, parts.config
    assert isinstance(server, Server)
    assert isinstance(rounds, ServerConfig)
    server.set_max_workers(1)
    for partition in range(config.run.clients):
        node_config = {"partition-id": partition, "num-partitions": config.run.clients}
        node = read_node(node_config, config.run, str(state_dir), data)
        server.client_manager().register(InlineProxy(config, node, notice))
    server.fit(rounds.num_rounds, rounds.round_timeout)


class InlineProxy(DirectProxy):
    """A client in this process."""

    # Flower's server calls clients from several threads, but torch's generators and the data caches
    # are shared by the process: call one client at a time.
    _one_at_a_time = threading.Lock()

    def __init__(
        self, config: Config, node: Node, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(node.name)
        self._config, self._node, self._notice = config, node, notice

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`, without a time limit. Raises ClientCodeError."""
        try:
            with self._one_at_a_time:
                return self._called(name, instruction)
        except Exception as error:
            if not is_of_code(error):
                raise
            raise ClientCodeError(CodeFault.of(error)) from error

    def _called(self, name: str, instruction: Any) -> Any:
        """Call the client; if the GPU's memory does not suffice, once more without the others."""

        def called() -> Any:
            client = open_client(self._config, self._node).to_client()
            return getattr(client, name)(instruction)

        try:
            return called()
        except torch.OutOfMemoryError:
            self._notice(f"{self.cid} {ASKED_ALONE}")
        make_room()
        try:
            return called()
        except torch.OutOfMemoryError as error:
            raise too_small(error) from error
