"""Starting a Ray cluster of one machine, or joining one; its workers' code and environment."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from fedhet.base.errors import FedhetError, reason_of, words_of
from fedhet.engines.environment import TUNABLES, for_training, inherited
from fedhet.engines.ray.private import forget, private, remove_folder
from fedhet.settings.text import AUTO, host_and_port

REACHABLE_WITHIN = 10.0
"""Seconds for a connection to the cluster's address; Ray itself would try for minutes."""
CARRIED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "FLWR_TELEMETRY_ENABLED",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    TUNABLES,
)
"""Environment variables that the workers inherit from this process, besides those of fedhet."""
OURS = "FEDHET_"
"""The prefix of fedhet's environment variables."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders in which packages are installed."""


BACKGROUND = ThreadPoolExecutor(1)
"""Its thread lives as long as this process: Ray's processes end with the one that started them."""
_starting: list[Future[None]] = []
"""The start of a cluster for which nobody has waited yet."""
_ending: list[Future[None]] = []
"""The end of a cluster that was still starting when nobody needed it any more."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start a Ray cluster in the background; `start` waits for it, and it ends if nobody does.

    If the block fails before, its error need not wait either: see `is_starting`.
    """
    _starting.append(BACKGROUND.submit(_start))
    try:
        yield
    except FedhetError:
        if not is_starting():
            _end_unless_awaited()
        raise
    _end_unless_awaited()


def is_starting() -> bool:
    """Return whether a cluster has begun to start, and nobody waits for it."""
    return any(not last.done() for last in (*_starting[-1:], *_ending[-1:]))


def end_later(close: Callable[[], None]) -> None:
    """Call `close` in the background, once the cluster that is starting has started."""
    _ending[:] = [BACKGROUND.submit(close)]


def abandon() -> None:
    """Kill a cluster that is starting. This process must end then: Ray waits for it in a thread."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    remove_folder()


def _end_unless_awaited() -> None:
    if _starting and _starting.pop().exception() is None:
        leave()


def start() -> None:
    """Start a Ray cluster on this machine, for this process alone. Raises FedhetError."""
    if _starting:
        _starting.pop().result()
    else:
        _start()


def _start() -> None:
    ray = _ray()
    try:
        own = {"PYTHONPATH": os.pathsep.join(own_paths()), **for_training()}
        with private() as folder, inherited(own):
            # Without an address Ray joins a cluster of this machine, or that of RAY_ADDRESS.
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=folder,
            )
    except Exception as error:  # Ray raises errors of several kinds, and of several lines
        leave()
        raise FedhetError(
            f"cannot start Ray on this machine ({words_of(error)}); "
            "--backend inline runs without it"
        ) from error


def connect(address: str, modules: Iterable[str]) -> None:
    """Join the cluster, and send it fedhet and `modules`: its workers import them as they are here.

    Raises FedhetError if no cluster runs there, or this machine is not part of it.
    """
    ray = _ray()
    if address != AUTO:
        _reach(address)
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": environment(), "py_modules": code_of(["fedhet", *modules])},
        )
    except Exception as error:  # Ray raises errors of several kinds, and of several lines
        ray.shutdown()
        there = "" if address == AUTO else f" --address={address}"
        raise FedhetError(
            f"cannot join the Ray cluster {address!r} from this machine: `ray start{there}` makes "
            "it one of the cluster's, and RAY_AUTH_MODE and its token must be set here as there "
            f"(Ray says: {words_of(error)})"
        ) from error


def _ray() -> Any:
    """Return the module, with what it reads from the environment set. Raises FedhetError."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray's future default: a worker without a GPU share still sees all GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        raise FedhetError("this process has joined Ray already: call ray.shutdown() before a run")
    return ray


def _reach(address: str) -> None:
    try:
        socket.create_connection(host_and_port(address), REACHABLE_WITHIN).close()
    except OSError as error:
        raise FedhetError(
            f"no Ray cluster answers at {address} ({reason_of(error)}): `ray start --head` starts "
            "one, and prints its address"
        ) from error


def leave() -> None:
    """Leave the cluster, which keeps running unless this process has started it."""
    import ray

    ray.shutdown()
    forget()


def environment() -> dict[str, str]:
    """Return the environment variables that the workers of all machines get.

    A machine's own PYTHONPATH comes after the folders of the user's modules here, from which a
    module that is sent may import others.
    """
    carried = {
        name: value
        for name, value in os.environ.items()
        if name in CARRIED or name.startswith(OURS)
    }
    return {
        **for_training(),
        **carried,
        "PYTHONPATH": os.pathsep.join([*own_paths(), "${PYTHONPATH}"]),
    }


def code_of(modules: Iterable[str]) -> list[str]:
    """Return the folder or the file of each module's top-level package, Python's own left out."""
    library, found = Path(sysconfig.get_path("stdlib")).resolve(), []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        place = Path(next(iter(spec.submodule_search_locations or [spec.origin or "built-in"])))
        installed = not INSTALLED.isdisjoint(place.parts)
        is_pythons = place.resolve().is_relative_to(library) and not installed
        if (place.suffix == ".py" or place.is_dir()) and not is_pythons:
            found.append(str(place))
    return found


def own_paths() -> list[str]:
    """Return the folders from which modules are imported that are not installed.

    What is installed may lie elsewhere on another machine.
    """
    library = Path(sysconfig.get_path("stdlib")).resolve()
    found = [Path(path or ".").resolve() for path in sys.path]
    own = [
        str(path)
        for path in found
        if path.is_dir() and INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(library)
    ]
    return list(dict.fromkeys(own))
