"""A whole federation from this machine: its clients train in this process, or on Ray's workers.

`simulate` makes a run with its report, `train` one without; `with_backend` chooses what trains the
clients, and `engine_of` starts it. `cluster` has Ray's workers, on this machine or on a cluster.
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
from flwr.server import Server, ServerAppComponents, ServerConfig
from flwr.server.client_manager import ClientManager

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import ModelError, SettingsError, one_line
from fedhet.client_runtime.node import Node, open_client, read_node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.config.resolve import Config, check, resolve
from fedhet.config.sources import read_toml, settings_for_method
from fedhet.data.sources import paths_of
from fedhet.data.spec import Split
from fedhet.data.store import RunData
from fedhet.engines.gpu_memory import ASKED_ALONE, make_room, too_small, with_gpu_share
from fedhet.learning.devices import compute_for, find_device, settled
from fedhet.models import Refitted, assign, build_any, is_user_model
from fedhet.models.libraries import check_weights, is_pretrained
from fedhet.runs.directory import BASELINE
from fedhet.runs.log import Watcher
from fedhet.runs.measures import reset_peak_memory
from fedhet.runs.units import plural
from fedhet.server.app import components
from fedhet.server.calls import DirectProxy, UserCodeError, UserCodeFault, is_user_code_error
from fedhet.settings.engine import EngineSettings
from fedhet.settings.schema import invalid_setting, kebab
from fedhet.wire.identity import ClientInfo

if TYPE_CHECKING:
    from fedhet import report
    from fedhet.engines.cluster import LocalCluster

RAY_SECONDS = 15.0
"""Processor time for starting and ending Ray, its workers, and their imports, in seconds."""


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
    with _trained(config, directory, watchers, begun):
        from fedhet import report  # pandas and matplotlib: the clients need not wait for them

        return report.write(directory)


def train(config: Config, directory: Path, watchers: Iterable[Watcher] = ()) -> None:
    """Run `config` to its end as `simulate` does, without a report: figures and a page.

    They take longer than a small run; `fedhet report` writes them from what is in `directory`.
    """
    with _trained(config, directory, watchers, None, reported=False):
        pass


@contextlib.contextmanager
def _trained(
    config: Config,
    directory: Path,
    watchers: Iterable[Watcher],
    begun: float | None,
    *,
    reported: bool = True,
) -> Iterator[None]:
    """Run `config` to its end; Ray, if it trains, ends while the block runs.

    `reported`: the block writes a report, whose libraries are imported while workers train.
    """
    begun = time.perf_counter() if begun is None else begun
    reset_peak_memory()
    watchers = tuple(watchers)
    show_waiting(
        watchers, f"reading {config.run.data.dataset}, and splitting it between the clients"
    )
    config = settled_for(config, directory)
    data = RunData.of(config.run)
    # Look for missing files before Ray starts: `check` says which, or downloads them.
    for name in filter(is_pretrained, config.run.models.pool):
        check_weights(name)
    if not all(path.exists() for path in paths_of(config.run.data)):
        check(config, data)
    with contextlib.ExitStack() as ending:
        # Clients of this run may stay open in this process; its data does not.
        ending.callback(data.forget)
        undecided = config.run.engine.backend == "auto"
        if undecided:
            check_models_and_data(config, data)
        on, reason = with_backend(config, data, directory)
        if reason:
            show_waiting(watchers, reason)
        own = ending.enter_context(cluster_for(on, data, directory, watchers))
        if not undecided:  # while Ray's workers start
            check_models_and_data(config, data)
        engine = ending.enter_context(engine_of(on, data, directory, watchers, own))
        if reported and on.run.engine.backend == "ray":

            def import_report() -> None:
                with contextlib.suppress(Exception):  # the report's own import raises it again
                    importlib.import_module("fedhet.report")

            threading.Thread(target=import_report, daemon=True).start()
        parts = components(
            config, directory, workers=engine.workers, watchers=watchers, begun=begun,
            manager=engine.manager, data=data,
        )  # fmt: skip
        counts = {"classes": list(data.dataset.classes), "counts": data.label_counts()}
        write_text(directory / "partition.json", json.dumps(counts))
        if engine.starting:
            show_waiting(watchers, engine.starting)
        with _logging_to(directory / "flower.log"):
            for line in data.dataset.notes:
                logging.getLogger("flwr").info("%s", line)
            engine.run(parts)
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(ending.pop_all().close)
            yield
            ended.result()


def check_models_and_data(config: Config, data: RunData) -> None:
    """Raise FedhetError if this machine cannot run `config`.

    Also sets up a client without samples for each of the user's own models: a method may need more
    of a model than a forward pass, such as another feature width.
    """
    check(config, data)
    for name in filter(is_user_model, dict.fromkeys(config.run.models.pool)):
        try:
            place = {"partition-id": 0, "num-partitions": config.run.clients, "device": "cpu"}
            node = read_node({**place, "model": name}, config.run, data=data)
            shape, classes = tuple(data.dataset.shape), len(data.dataset.classes)
            nothing = Split(torch.zeros(0, *shape), torch.zeros(0, dtype=torch.int64))
            info = ClientInfo(node.name, name, 0, classes, data.dataset.kind, shape)
            samples = ClientSamples(info, nothing, nothing, {}, torch.arange(classes), 0)
            config.method.client(config, node, samples=samples).setup()
        except ModelError:
            raise
        except Exception as error:  # of the method: the first round says where it arose
            logging.getLogger("fedhet").debug("set-up of %s: %s", name, error)


def baseline_of(config: Config, directory: Path, method: str) -> Config:
    """Return the same experiment with another method, in the folder of a run's baseline.

    It resumes what is there. Raises SettingsError if that method cannot be run so.
    """
    if method == config.method.name:
        raise SettingsError(f"'against' = {method!r} is the run's own method: name another one")
    place = str((directory / BASELINE).resolve())
    return resolve({**settings_for_method(config.flat(), method), "out": place, "resume": True})


def settled_for(config: Config, directory: Path) -> Config:
    """Return the settings with what `auto` means here, or meant where the run was begun.

    They stand in config.toml, so that the run can be repeated, or resumed, on another machine.
    """
    there = directory / "config.toml"
    if not (config.run.resume and there.exists()):
        return config.replacing(engine=settled(config.run.engine))
    before, changes = read_toml(there), {}
    for name in ("precision", "channels_last"):
        kept = before.get(f"engine.{name.replace('_', '-')}")
        if getattr(config.run.engine, name) == "auto" and kept is not None:
            changes[name] = kept
    return config.replacing(engine=config.run.engine.model_copy(update=changes))


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    """Redirect Flower's log to a file inside the block."""
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


# --- what trains the clients


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
        backend, reason = "inline", "Ray would have one worker"
        if workers > 1:
            bound = RAY_SECONDS / (1 - 1 / workers)
            work = _seconds_of_work(config, data, directory, bound)
            backend, about = ("ray", "more than") if work > bound else ("inline", "about")
            reason = f"{about} {work:.0f} s of work"
    chosen = config.replacing(engine=engine.model_copy(update={"backend": backend}))
    return chosen, f"training {'on Ray' if backend == 'ray' else 'in this process'}: {reason}"


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
    own = config.method_settings.flat()
    others = [str(own[kebab(name)]) for name in config.method.spec.model_settings]
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
                    logits = model(compute.to_inputs(batch.x)).float()
                    loss = torch.nn.functional.cross_entropy(logits, compute.to_device(batch.y))
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
    if engine.backend == "ray" and engine.device.startswith("cuda:"):
        problem = "Ray assigns the GPUs in CUDA_VISIBLE_DEVICES to its workers"
        raise invalid_setting("engine.device", engine.device, "cuda", problem)
    if engine.backend != "ray" or engine.ray_address:
        yield None
        return
    from fedhet.engines.cluster import LocalCluster

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
    from fedhet.engines.cluster import ReachableClients, fit, joined_workers

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
        """Call the client's method `name`, without a time limit. Raises UserCodeError.

        If the GPU's memory does not suffice, call it once more without the other clients.
        """

        def called() -> Any:
            return getattr(open_client(self._config, self._node).to_client(), name)(instruction)

        try:
            with self._one_at_a_time:
                try:
                    return called()
                except torch.OutOfMemoryError:
                    self._notice(f"{self.cid} {ASKED_ALONE}")
                make_room()  # outside of the handler, which holds the failed client's tensors
                try:
                    return called()
                except torch.OutOfMemoryError as error:
                    raise too_small(error) from error
        except Exception as error:
            if not is_user_code_error(error):
                raise
            raise UserCodeError(UserCodeFault.of(error)) from error
