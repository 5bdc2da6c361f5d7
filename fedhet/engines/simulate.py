"""Simulation of a federation, with clients in this process or on Ray workers.

`simulate` executes a run and writes its report; `train` writes no report. `choose_backend` chooses
the execution backend, and `engine_of` starts it. The module `cluster` implements Ray workers on
this machine or on a cluster.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import parent_process
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import torch
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import ModelError, SettingsError, one_line
from fedhet.base.seeding import isolated
from fedhet.client_runtime.node import Node, open_client, read_node
from fedhet.client_runtime.samples import ClientSamples, info_of
from fedhet.config.resolve import Config, check, resolve
from fedhet.config.secure import Peers, simulated_peers, write_simulated
from fedhet.config.sources import read_toml, settings_for_method
from fedhet.data.sources import paths_of
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import (
    RETRIED_ALONE,
    memory_error,
    release_memory,
    with_gpu_share,
)
from fedhet.learning.devices import compute_for, find_device, resolve_precision
from fedhet.models import Refitted, assign, build_any, is_user_model
from fedhet.models.libraries import check_weights, is_pretrained
from fedhet.runs.directory import BASELINE, check_same, data_places, open_data, with_places
from fedhet.runs.log import Watcher
from fedhet.runs.measures import reset_peak_memory
from fedhet.runs.units import plural
from fedhet.server.app import components
from fedhet.server.calls import DirectProxy, UserCodeError, UserCodeFault, is_user_code_error
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import invalid_setting, kebab

if TYPE_CHECKING:
    from fedhet import report
    from fedhet.engines.cluster import LocalCluster

RAY_SECONDS = 15.0
"""CPU time for starting and stopping Ray and its workers, including imports, in seconds."""


def simulate(
    config: Config,
    directory: Path,
    watchers: Iterable[Watcher] = (),
    *,
    begun: float | None = None,
) -> report.Run:
    """Execute a run, write its report, and return the run.

    Args:
        config: Configuration of the run.
        directory: Directory for the results.
        watchers: Observers of the run.
        begun: Start time of the command, as returned by `time.perf_counter`; None means now.

    Raises:
        FedhetError: If the run failed. If this machine cannot execute the run, the error is raised
            before any training.
    """
    with isolated(), _trained(config, directory, watchers, begun):
        # Import lazily, so that the clients do not wait for pandas and matplotlib.
        from fedhet import report

        return report.write_all(directory)


def train(config: Config, directory: Path, watchers: Iterable[Watcher] = ()) -> None:
    """Execute a run like `simulate`, but without a report.

    Writing a report takes longer than a small run; `fedhet report` writes the report from the
    files in `directory`.
    """
    with isolated(), _trained(config, directory, watchers, None, with_report=False):
        pass


@contextlib.contextmanager
def _trained(
    config: Config,
    directory: Path,
    watchers: Iterable[Watcher],
    begun: float | None,
    *,
    with_report: bool = True,
) -> Iterator[None]:
    """Execute a run on entry, and shut Ray down in the background while the block runs.

    With `with_report`, the report's libraries are imported while Ray workers train.
    """
    begun = time.perf_counter() if begun is None else begun
    reset_peak_memory()
    watchers = tuple(watchers)
    show_waiting(watchers, f"reading {config.run.data.dataset} and splitting it among the clients")
    config = resolve_auto(config, directory)
    if config.run.resume and (directory / "config.toml").exists():
        check_same(config, directory)  # Other settings of the data would also change its digest.
    data = open_data(config, directory)
    # Before Ray starts, let `check` report or download missing files.
    for name in filter(is_pretrained, config.run.models.pool):
        check_weights(name)
    if not all(path.exists() for path in paths_of(config.run.data)):
        check(config, data)
    with contextlib.ExitStack() as stack:
        # This run's clients may stay open in this process, but must not keep the run's data in
        # memory.
        stack.callback(data.forget)
        is_undecided = config.run.engine.backend == "auto"
        if is_undecided:
            check_models_and_data(config, data)
        # The records keep 'auto' rather than the decision, so that a resumed run decides again.
        backend, reason = choose_backend(config, data, directory)
        if reason:
            show_waiting(watchers, reason)
        cluster = stack.enter_context(cluster_for(backend, config, data, directory, watchers))
        if not is_undecided:  # Check while Ray workers start.
            check_models_and_data(config, data)
        engine = stack.enter_context(engine_of(backend, config, data, directory, watchers, cluster))
        if with_report and backend == "ray":

            def import_report() -> None:
                # Ignore errors, because the import for the report raises them again.
                with contextlib.suppress(Exception):
                    importlib.import_module("fedhet.report")

            threading.Thread(target=import_report, daemon=True).start()
        parts = components(
            config, directory, workers=engine.workers, watchers=watchers, begun=begun,
            manager=engine.manager, data=data,
        )  # fmt: skip
        partition = {
            "classes": list(data.strata()[0]),
            "counts": data.label_counts(),
            "owners": data.owners(),
            "test_samples": data.test_samples(),
            "digest": data.digest,
            "places": data_places(config),
        }
        write_text(directory / "partition.json", json.dumps(partition))
        if config.run.privacy.secure_aggregation:
            write_simulated(directory / "state", *peers_of(data), within=directory)
        if engine.starting:
            show_waiting(watchers, engine.starting)
        with _logging_to(directory / "flower.log"):
            for line in data.dataset.notes:
                logging.getLogger("flwr").info("%s", line)
            engine.run(parts)
        with ThreadPoolExecutor(1) as pool:
            stopped = pool.submit(stack.pop_all().close)
            yield
            stopped.result()


def check_models_and_data(config: Config, data: RunData) -> None:
    """Check the models, the data, and the device.

    Raises FedhetError if this machine cannot execute the run. Also sets up a client without samples
    for each user model, because a method may require more of a model than a forward pass, such as a
    different feature width.
    """
    check(config, data)
    for name in filter(is_user_model, dict.fromkeys(config.run.models.pool)):
        try:
            options = {"partition-id": 0, "num-partitions": config.run.clients, "device": "cpu"}
            node = read_node({**options, "model": name}, config.run, data=data)
            described = data.dataset.format
            info, space = info_of(described, node.name, name), torch.arange(described.outputs)
            samples = ClientSamples.empty(info, described, space)
            config.method.client(config, node, samples=samples).setup()
        except ModelError:
            raise
        except Exception as error:  # The first round reports an error in the method.
            logging.getLogger("fedhet").debug("setup of %s failed: %s", name, error)


def peers_of(data: RunData) -> tuple[Peers, dict[str, X25519PrivateKey]]:
    """Return new peers for the clients of a simulation, and their private keys by name.

    In classification, each client lists the classes of its training samples. All clients have the
    same weight.
    """
    labels, names = data.dataset.train.y, [*data.label_counts()]
    rows = [data.split_rows(index)[0] for index in range(len(names))]
    classes = {
        name: [str(label) for label in sorted({*labels[own].tolist()})]
        for name, own in zip(names, rows, strict=True)
        if data.dataset.format.task.has_distribution
    }
    return simulated_peers(names, classes=classes)


def baseline_of(config: Config, directory: Path, method: str) -> Config:
    """Return the configuration of a run's baseline, i.e. the same experiment with another method.

    The baseline is resumed if it exists. Raises SettingsError if the method does not support the
    experiment.
    """
    if method == config.method.name:
        raise SettingsError(f"against: expected a method other than the run's, got {method!r}")
    out = str((directory / BASELINE).resolve())
    return resolve({**settings_for_method(config.flat(), method), "out": out, "resume": True})


def resolve_auto(config: Config, directory: Path) -> Config:
    """Replace `auto` in the engine settings with values for this machine.

    A resumed run keeps the values in its config.toml, which were chosen on the machine where the
    run started. A run can thus be repeated or resumed on another machine. It also keeps the place
    of its data, so that it can be resumed from another working directory.
    """
    config_file = directory / "config.toml"
    if not (config.run.resume and config_file.exists()):
        return config.replacing(engine=resolve_precision(config.run.engine))
    saved, changes = read_toml(config_file), {}
    for name in ("precision", "channels_last"):
        value = saved.get(f"engine.{name.replace('_', '-')}")
        if getattr(config.run.engine, name) == "auto" and value is not None:
            changes[name] = value
    config = with_places(config, directory)
    return config.replacing(engine=config.run.engine.model_copy(update=changes))


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Redirect Flower's log to a file during the block."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    descriptor = Folder(path.parent).open(path.name, os.O_WRONLY | os.O_APPEND)
    handler = logging.StreamHandler(os.fdopen(descriptor, "a", encoding="utf-8"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.stream.close()


# --- Execution backends


@dataclass(frozen=True)
class Engine:
    """Execution backend of a run, i.e. this process or the workers of a Ray cluster."""

    run: Callable[[ServerAppComponents], None]
    """Function that runs Flower's server to the end."""
    workers: int = 1
    """Number of clients that train at the same time."""
    starting: str = ""
    """Progress message before the first round."""
    manager: ClientManager | None = None
    """Registry of all clients, or None if the clients are not known from the start."""


def choose_backend(config: Config, data: RunData, directory: Path) -> tuple[str, str]:
    """Choose the backend if it is `auto`, and return the reason for the choice.

    The backend is Ray if it is required, or if its workers save more time than Ray takes to start.
    The results are the same on both backends.

    Returns:
        The backend, ray or inline, and the reason, or "" if the settings name the backend.
    """
    engine, pace, default = config.run.engine, config.run.pace, EngineSettings()
    if engine.backend != "auto":
        return engine.backend, ""
    device = find_device(engine.device)
    has_late_clients = pace.may_be_late or pace.stragglers > 0
    reasons = {
        "'engine.ray-address' is set": bool(engine.ray_address),
        "'engine.cpus-per-client' is set": engine.cpus_per_client != default.cpus_per_client,
        "'engine.gpus-per-client' is set": engine.gpus_per_client != default.gpus_per_client,
        "the device is a GPU": device.type == "cuda" and device.index is None,
        "rounds are timed with this machine's clock": has_late_clients and not pace.is_simulated,
    }
    if reason := next((text for text, is_true in reasons.items() if is_true), ""):
        backend = "ray"
    else:
        cpus = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))(0)
        # In a child process, leave the other CPUs to parallel runs.
        workers = min(len(cpus), config.run.clients) if parent_process() is None else 1
        backend, reason = "inline", "Ray would have only one worker"
        if workers > 1:
            bound = RAY_SECONDS / (1 - 1 / workers)
            work = _seconds_of_work(config, data, directory, bound)
            backend, about = ("ray", "more than") if work > bound else ("inline", "about")
            reason = f"{about} {work:.0f} s of work"
    return backend, f"training {'on Ray' if backend == 'ray' else 'in this process'}: {reason}"


def _seconds_of_work(config: Config, data: RunData, directory: Path, bound: float) -> float:
    """Estimate the CPU seconds for the remaining rounds from a training step of each model.

    Stops with an incomplete estimate as soon as it exceeds `bound`.
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
    trained = rounds * run.fraction * epochs * fmean(train for train, *_ in sizes)
    evaluated = rounds / run.evaluate_every * fmean(sum(tests) + common for _, *tests in sizes)
    method_settings = config.method_settings.flat()
    others = [str(method_settings[kebab(name)]) for name in config.method.spec.model_settings]
    models = Counter(assign(run.models.pool, clients, run.seed, run.models.assignment))
    models.update(dict.fromkeys(others, clients))
    work = 0.0
    for name, count in models.items():
        # Evaluation has no backward pass, so a sample takes about a third of its training time.
        samples = count * (trained + evaluated / 3)
        work += samples * _seconds_per_sample(name, data, config)
        if work > bound:
            break
    return work


def _seconds_per_sample(name: str, data: RunData, config: Config) -> float:
    """Measure the CPU time of a training step, in seconds per sample.

    Returns 0 for models without gradients, and infinity if the step fails.
    """
    run, dataset, described = config.run, data.dataset, data.dataset.format
    compute = compute_for(run.engine)
    batch_size = run.training.batch_size
    batch_size = max(batch_size) if isinstance(batch_size, tuple) else batch_size
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # Use one thread, because `thread_time` measures only this thread.
    try:
        with torch.random.fork_rng(devices=[]):
            model = build_any(
                name, described.shape, described.outputs, seed=run.seed, kind=described.kind,
                task=described.task,
            )  # fmt: skip
            if isinstance(model, Refitted):
                return 0.0
            compute.place(model).train()
            seconds = size = 0.0
            for step, size in enumerate((2, 2, min(batch_size, len(dataset.train)))):
                batch = dataset.train.take(torch.arange(int(size)).numpy())
                begun = time.thread_time()
                with compute.autocast():
                    logits = model(compute.to_inputs(batch.x)).float()
                    loss = described.task.loss()(logits, compute.to_device(batch.y))
                loss.backward()  # type: ignore[no-untyped-call]
                seconds = time.thread_time() - begun
                if step and seconds > 0.5:  # Ignore the first step (warm-up).
                    break
            return seconds / size
    except Exception:  # The first round reports the error.
        return math.inf
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def cluster_for(
    backend: str, config: Config, data: RunData, directory: Path, watchers: Sequence[Watcher]
) -> Iterator[LocalCluster | None]:
    """Start a Ray cluster on this machine in the background, if the run needs one.

    Yields None if the run trains in this process or joins an existing cluster. Raises SettingsError
    if the engine settings are unsuitable for a cluster on this machine.
    """
    engine = config.run.engine
    if backend == "ray" and engine.device.startswith("cuda:"):
        problem = "Ray assigns the GPUs in CUDA_VISIBLE_DEVICES to its workers"
        raise invalid_setting("engine.device", engine.device, "cuda", problem)
    if backend != "ray" or engine.ray_address:
        yield None
        return
    from fedhet.engines.cluster import LocalCluster

    config = with_gpu_share(config, data)
    with contextlib.closing(LocalCluster(config, data, directory, _notice(watchers))) as ray:
        yield ray


@contextlib.contextmanager
def engine_of(
    backend: str,
    config: Config,
    data: RunData,
    directory: Path,
    watchers: Sequence[Watcher],
    cluster: LocalCluster | None,
) -> Iterator[Engine]:
    """Provide a run's execution backend in the block. Raises FedhetError if it cannot start."""
    if backend == "inline":
        notice, states = _notice(watchers), directory / "state"
        yield Engine(lambda parts: run_inline(config, data, states, parts, notice))
        return
    from fedhet.engines.cluster import ReachableClients, fit, joined_workers

    if cluster is not None:
        show_waiting(watchers, "waiting for Ray to start")
        pool = cluster.pool()
        count = len(pool.places)
        starting = f"starting with {plural(count, 'worker')}"
        yield Engine(cluster.run, count, starting, ReachableClients(pool, config.run.clients))
        return
    address = config.run.engine.ray_address
    show_waiting(watchers, f"joining the Ray cluster {address} and checking its machines")
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


def show_waiting(watchers: Iterable[Watcher], text: str) -> None:
    """Show the user why the run is waiting."""
    for watcher in watchers:
        watcher.waiting(text)


def run_inline(
    config: Config,
    data: RunData,
    state_dir: Path,
    parts: ServerAppComponents,
    notice: Callable[[str], None],
) -> None:
    """Run a federation in this process.

    Args:
        config: Configuration of the run.
        data: Data of the run.
        state_dir: Directory of the clients' states.
        parts: Components of Flower's server.
        notice: Function called with a message if a client runs out of GPU memory and is called
            again.
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
    """Proxy for a client in this process."""

    # Flower's server calls clients from several threads, but the clients share torch's generators
    # and the data caches, so only one client is called at a time.
    _one_at_a_time = threading.Lock()

    def __init__(
        self, config: Config, node: Node, notice: Callable[[str], None] = lambda text: None
    ) -> None:
        super().__init__(node.name)
        self._config, self._node, self._notice = config, node, notice

    def call(self, name: str, instruction: Any, timeout: float | None) -> Any:
        """Call the client's method `name`, without a time limit.

        If the client runs out of GPU memory, all clients release their memory, and the client is
        called once more. Raises UserCodeError if user code fails.
        """

        def call_client() -> Any:
            return getattr(open_client(self._config, self._node).to_client(), name)(instruction)

        try:
            with self._one_at_a_time:
                try:
                    return call_client()
                except torch.OutOfMemoryError:
                    self._notice(f"{self.cid} {RETRIED_ALONE}")
                # Retry outside the handler, because its exception refers to the client's tensors.
                release_memory()
                try:
                    return call_client()
                except torch.OutOfMemoryError as error:
                    raise memory_error(error) from error
        except Exception as error:
            if not is_user_code_error(error):
                raise
            raise UserCodeError(UserCodeFault.from_exception(error)) from error
