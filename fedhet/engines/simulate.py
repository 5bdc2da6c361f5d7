"""A whole federation from this machine: on Ray's workers here or on a cluster, or in this process.

This is the only module that starts simulations; `fedhet.engines` is what trains their clients.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import ModelError, SettingsError
from fedhet.client_runtime.node import read_node
from fedhet.client_runtime.samples import ClientSamples
from fedhet.config.resolve import Config, check, resolve
from fedhet.config.sources import of_method, read_toml
from fedhet.data.sources import paths_of
from fedhet.data.spec import Split
from fedhet.data.store import RunData
from fedhet.engines.backend import cluster_for, engine_of, show_waiting, with_backend
from fedhet.learning.devices import settled
from fedhet.models import is_user_model
from fedhet.models.libraries import check_weights, is_pretrained
from fedhet.runs.directory import BASELINE
from fedhet.runs.log import Watcher
from fedhet.runs.measures import forget_peak
from fedhet.server.app import components
from fedhet.wire.identity import ClientInfo

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
    with _trained(config, directory, watchers, begun):
        from fedhet import report  # pandas and matplotlib: the clients need not wait for them

        return report.write(directory)


def train(
    config: Config,
    directory: Path,
    watchers: Iterable[Watcher] = (),
    *,
    begun: float | None = None,
) -> None:
    """Run `config` to its end as `simulate` does, without a report: figures and a page.

    They take longer than a small run; `fedhet report` writes them from what is in `directory`.
    """
    with _trained(config, directory, watchers, begun, reported=False):
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
    forget_peak()
    watchers = tuple(watchers)
    what = f"reading {config.run.data.dataset}, and splitting it between the clients"
    show_waiting(watchers, what)
    config = settled_for(config, directory)
    data = RunData.of(config.run)
    check_files(config, data)
    with contextlib.ExitStack() as ending:
        # Clients of this run may stay open in this process; its data does not.
        ending.callback(data.forget)
        checked = config.run.engine.backend == "auto"
        if checked:
            check(config, data)
            check_own_models(config, data)
        on, reason = with_backend(config, data, directory)
        if reason:
            show_waiting(watchers, reason)
        own = ending.enter_context(cluster_for(on, data, directory, watchers))
        if not checked:
            check(config, data)
            check_own_models(config, data)
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
        with _logging_to(directory, "flower.log"):
            for line in data.dataset.notes:
                logging.getLogger("flwr").info("%s", line)
            engine.run(parts)
        with concurrently(ending.pop_all().close):
            yield


def check_files(config: Config, data: RunData) -> None:
    """Raise FedhetError if the dataset or pretrained weights are not on this machine."""
    for name in filter(is_pretrained, config.run.models.pool):
        check_weights(name)
    if not all(path.exists() for path in paths_of(config.run.data)):
        check(config, data)  # says what is missing, or downloads it


def check_own_models(config: Config, data: RunData) -> None:
    """Set up a client without samples for each model of one's own. Raises ModelError.

    A method may need more of a model than a forward pass, such as another feature width.
    """
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


@contextlib.contextmanager
def concurrently(close: Callable[[], None]) -> Iterator[None]:
    """Call `close` in a thread while the block runs, and wait for it."""
    with ThreadPoolExecutor(1) as pool:
        closed = pool.submit(close)
        yield
        closed.result()


def baseline_of(config: Config, directory: Path, method: str) -> Config:
    """Return the same experiment with another method, in the folder of a run's baseline.

    It resumes what is there. Raises SettingsError if that method cannot be run so.
    """
    if method == config.method.name:
        raise SettingsError(f"'against' = {method!r} is the run's own method: name another one")
    place = str((directory / BASELINE).resolve())
    return resolve({**of_method(config.flat(), method), "out": place, "resume": True})


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
def _logging_to(directory: Path, name: str) -> Iterator[None]:
    """Redirect Flower's log to a file inside the block."""
    logger = logging.getLogger("flwr")
    before = list(logger.handlers)
    descriptor = Folder(directory).open(name, os.O_WRONLY | os.O_APPEND)
    handler = logging.StreamHandler(os.fdopen(descriptor, "a", encoding="utf-8"))
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    try:
        yield
    finally:
        logger.handlers[:] = before
        handler.stream.close()
