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

from fedhet.base.disk import Folder, write_text
from fedhet.base.errors import SettingsError
from fedhet.config.resolve import Config, check, resolve
from fedhet.config.sources import of_method, read_toml
from fedhet.data.store import RunData
from fedhet.engines.choice import cluster_for, engine_of, show_waiting, with_backend
from fedhet.engines.readiness import check_files, check_own_models
from fedhet.learning.devices import settled
from fedhet.runs.files import BASELINE
from fedhet.runs.log import Watcher
from fedhet.runs.measures import forget_peak
from fedhet.server.app import components

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
            threading.Thread(target=_import_report, daemon=True).start()
        parts = components(
            config,
            directory,
            workers=engine.workers,
            watchers=watchers,
            begun=begun,
            manager=engine.manager,
            data=data,
        )
        _write_partition(data, directory)
        if engine.starting:
            show_waiting(watchers, engine.starting)
        with _logging_to(directory, "flower.log"):
            for line in data.dataset.notes:
                logging.getLogger("flwr").info("%s", line)
            engine.run(parts)
        with concurrently(ending.pop_all().close):
            yield


def _import_report() -> None:
    with contextlib.suppress(Exception):  # the report's own import raises it again
        importlib.import_module("fedhet.report")


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


def _write_partition(data: RunData, directory: Path) -> None:
    """Write the number of samples of each class at each client."""
    content = {"classes": list(data.dataset.classes), "counts": data.label_counts()}
    write_text(directory / "partition.json", json.dumps(content))


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
