"""Joining an existing Ray cluster, whose machines then train a run's clients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fedhet.config.resolve import Config, absolute
from fedhet.engines.ray.connection import connect, leave
from fedhet.engines.ray.machines import (
    Machine,
    check_machines,
    modules_of,
    pinned,
    places,
    question_of,
    running_machines,
    taking_clients,
)
from fedhet.engines.ray.pool import WorkerPool
from fedhet.engines.ray.ray_clients import Workers, actor_of
from fedhet.learning.devices import find_device
from fedhet.runs.directory import make_empty


@contextlib.contextmanager
def joined_workers(
    config: Config, directory: Path, notice: Callable[[str], None]
) -> Iterator[Workers]:
    """Join the cluster of `engine.ray-address`, and leave it in the end; the cluster keeps running.

    `notice` is called for each worker that is lost. Raises FedhetError, before anything is trained,
    if the cluster cannot be joined, or one of its machines cannot take part; no directory of a run
    is left then.
    """
    engine = config.run.engine
    on_workers = _for_workers(config)
    with contextlib.ExitStack() as leaving:
        with _shared(directory, go_on=config.run.resume):
            connect(engine.ray_address, modules_of(config))
            leaving.callback(leave)
            machines = taking_clients(running_machines(), engine)
            check_machines(machines, question_of(on_workers, directory), engine.join_timeout)
            on_gpu = find_device(engine.device).type == "cuda"
            placed = places(machines, engine, config.run.clients, on_gpu=on_gpu)
            pool = WorkerPool(placed, _starter(on_workers, directory, on_gpu=on_gpu), notice)
            leaving.callback(pool.close)
            pool.wait(engine.join_timeout)
        yield Workers(config, pool)


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

    actor = actor_of(config.run.engine, on_gpu=on_gpu)
    settings, states = ray.put(config), str(directory / "state")
    return lambda machine: actor.options(scheduling_strategy=pinned(machine)).remote(
        settings, states
    )
