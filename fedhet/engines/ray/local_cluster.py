"""A Ray cluster of a run's own, on this machine: it starts and ends with the run."""

from __future__ import annotations

import contextlib
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from flwr.server import ServerAppComponents

from fedhet.config.resolve import Config, absolute
from fedhet.data.store import RunData
from fedhet.engines.ray.connection import BACKGROUND, end_later, leave, start
from fedhet.engines.ray.machines import places, running_machines, taking_clients
from fedhet.engines.ray.pool import WorkerPool
from fedhet.engines.ray.ray_clients import Workers, actor_of
from fedhet.learning.devices import find_device


class LocalCluster:
    """A Ray cluster on this machine, which starts in a thread while the run loads its data."""

    def __init__(
        self,
        config: Config,
        data: RunData,
        directory: Path,
        notice: Callable[[str], None],
    ) -> None:
        self._config, self._data, self._decoded = config, data, directory / "decoded"
        self._started = BACKGROUND.submit(self._start, directory / "state", notice)

    def workers(self) -> Workers:
        """Wait until it has started. Raises FedhetError if it cannot, or has too few processors."""
        workers = self._started.result()
        if threading.current_thread() is threading.main_thread():
            # Restore Python's handler: Ray's own prints a stack trace on SIGTERM.
            signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)
        return workers

    def run(self, parts: ServerAppComponents) -> None:
        """Run the federation on data that all workers map from one copy. Raises FedhetError."""
        try:
            self._data.share(self._decoded)
            self.workers().run(parts)
        finally:
            shutil.rmtree(self._decoded, ignore_errors=True)

    def end(self) -> None:
        """End its workers, and Ray; while they start, an error does not wait for that."""
        if self._started.cancel():  # Ray has not started: nobody needs it any more
            return
        if self._started.done():
            self._close()
        else:
            end_later(self._close)

    def _close(self) -> None:
        with contextlib.suppress(Exception):  # it has not started, and there is nothing to end
            self.workers().pool.close()
            leave()

    def _start(self, states: Path, notice: Callable[[str], None]) -> Workers:
        start()
        try:
            return self._workers(states, notice)
        except BaseException:
            leave()
            raise

    def _workers(self, states: Path, notice: Callable[[str], None]) -> Workers:
        import ray

        engine = self._config.run.engine
        on_gpu = find_device(engine.device).type == "cuda"
        machines = taking_clients(running_machines(), engine)
        actor, settings = actor_of(engine, on_gpu=on_gpu), ray.put(absolute(self._config))
        placed = places(machines, engine, self._config.run.clients, on_gpu=on_gpu)
        pool = WorkerPool(
            placed, lambda _: actor.remote(settings, str(states), self._decoded), notice
        )
        return Workers(self._config, pool)


@contextlib.contextmanager
def local_cluster(
    config: Config, data: RunData, directory: Path, notice: Callable[[str], None]
) -> Iterator[LocalCluster]:
    """Start a Ray cluster in the background of the block; end it after the block.

    `notice` is called for each worker that is lost. `config` says what `auto` means here, since the
    workers get it at once.
    """
    ray = LocalCluster(config, data, directory, notice)
    try:
        yield ray
    finally:
        ray.end()
