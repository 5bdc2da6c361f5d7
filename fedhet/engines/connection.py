"""Start or join a Ray cluster, and set environment variables for training processes.

In every step of a training loop, glibc returns the pages of large freed blocks to the system and
then requests them again. The size threshold adapts to the freed blocks, but only up to 32 MiB, and
the activations of a batch are larger. Thousands of page faults per step take a tenth of the time or
more. With thresholds of 1 GiB, glibc keeps the pages, so a process may hold up to 1 GiB of freed
memory. Huge pages, if glibc (2.35) and the system support them, reduce the initial page faults.

By default, Ray listens on all interfaces without authentication, so anyone who can reach one of its
ports can execute any function. All users can read its logs and sockets in /tmp/ray. A cluster
started by this module uses only the loopback interface, a token, and a private directory.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from fedhet.base.errors import FedhetError, error_reason, error_text
from fedhet.settings.addresses import AUTO, split_host_port

TUNABLES = "GLIBC_TUNABLES"
KEEPING_PAGES = ":".join(
    (
        f"glibc.malloc.mmap_threshold={2**30}",
        f"glibc.malloc.trim_threshold={2**30}",
        "glibc.malloc.hugetlb=1",
    )
)
"""Value of TUNABLES, which glibc reads at the start of a process; glibc ignores unknown
tunables."""
FORWARDED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "FLWR_TELEMETRY_ENABLED",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    TUNABLES,
)
"""Environment variables that are forwarded to a cluster's workers, in addition to FEDHET_*."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of directories that contain installed packages."""


def for_training() -> dict[str, str]:
    """Return additional environment variables for a training process.

    If the user has set GLIBC_TUNABLES, its value is not replaced.
    """
    return {} if TUNABLES in os.environ else {TUNABLES: KEEPING_PAGES}


@contextlib.contextmanager
def inherited(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables during the block, for processes that the block starts."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def for_workers() -> dict[str, str]:
    """Return the environment variables of workers on all machines of a cluster.

    PYTHONPATH starts with the directories of the user's modules, because a module that is sent to a
    machine may import other modules. The machine's original PYTHONPATH follows.
    """
    forwarded = {k: v for k, v in os.environ.items() if k in FORWARDED or k.startswith("FEDHET_")}
    path = os.pathsep.join([*user_paths(), "${PYTHONPATH}"])
    return {**for_training(), **forwarded, "PYTHONPATH": path}


def code_of(modules: Iterable[str]) -> list[str]:
    """Return the directory or file of each module's top-level package.

    Modules in the standard library, and modules that are not found, are omitted.
    """
    library, paths = Path(sysconfig.get_path("stdlib")).resolve(), []
    for name in dict.fromkeys(module.partition(".")[0] for module in modules):
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        path = Path(next(iter(spec.submodule_search_locations or [spec.origin or "built-in"])))
        is_installed = not INSTALLED.isdisjoint(path.parts)
        is_standard = path.resolve().is_relative_to(library) and not is_installed
        if (path.suffix == ".py" or path.is_dir()) and not is_standard:
            paths.append(str(path))
    return paths


def user_paths() -> list[str]:
    """Return the directories on `sys.path` that contain no installed packages.

    Directories with installed packages are excluded, because they may differ on another machine.
    """
    library = Path(sysconfig.get_path("stdlib")).resolve()
    directories = [Path(path or ".").resolve() for path in sys.path]
    paths = [
        str(path)
        for path in directories
        if path.is_dir() and INSTALLED.isdisjoint(path.parts) and not path.is_relative_to(library)
    ]
    return list(dict.fromkeys(paths))


# --- Ray

CONNECT_SECONDS = 10.0
"""Time limit for connecting to a cluster's address; Ray itself would try for minutes."""
BACKGROUND = ThreadPoolExecutor(1)
"""Executor whose thread lives until this process ends, because Ray's processes end with the thread
that started them."""
_starting: list[Future[None]] = []
"""Future of the cluster that starts in the background, until `start` has waited for it."""
_stopping: list[Future[None]] = []
"""Future of a task that closes a cluster that was still starting when it was no longer needed."""
_directories: list[tempfile.TemporaryDirectory[str]] = []
"""Directory of the running cluster, which is removed at the latest when this process ends."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Start a Ray cluster in the background; in the block, `start` waits for the cluster.

    The cluster is stopped after the block if `start` was not called. If the block raises an error
    while the cluster is starting, the caller can use `abandon` to end the process without waiting.
    """
    _starting.append(BACKGROUND.submit(_start))
    try:
        yield
    except FedhetError:
        if not is_starting():
            _stop_if_unused()
        raise
    _stop_if_unused()


def is_starting() -> bool:
    """Return whether a cluster is starting in the background."""
    return any(not last.done() for last in (*_starting[-1:], *_stopping[-1:]))


def end_later(close: Callable[[], None]) -> None:
    """Call `close` in the background after the cluster has started."""
    _stopping[:] = [BACKGROUND.submit(close)]


def abandon() -> None:
    """Kill a cluster that is starting.

    The process must end afterward, because a thread of Ray keeps waiting for the cluster.
    """
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    if _directories:
        _directories.pop().cleanup()


def _stop_if_unused() -> None:
    if _starting and _starting.pop().exception() is None:
        leave()


def start() -> None:
    """Start a Ray cluster on this machine, for this process only.

    Raises FedhetError if Ray cannot be started.
    """
    if _starting:
        _starting.pop().result()
    else:
        _start()


def _start() -> None:
    ray = _ray()
    try:
        variables = {"PYTHONPATH": os.pathsep.join(user_paths()), **for_training()}
        with _private_directory() as directory, inherited(variables):
            # Without an address, Ray would join an existing cluster on this machine or at
            # RAY_ADDRESS.
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=directory,
            )
    except Exception as error:  # Ray raises several types of errors, some with several lines.
        leave()
        raise FedhetError(
            f"cannot start Ray on this machine ({error_text(error)}). Use --backend inline to run "
            "without Ray."
        ) from error


@contextlib.contextmanager
def _private_directory() -> Iterator[str]:
    """Provide a private directory for a Ray cluster that is started in the block.

    The cluster uses the loopback interface and requires a token. Ray's processes inherit the token
    from the environment, so it does not appear on a command line. This process keeps the token
    until it leaves the cluster.
    """
    from ray._private import ray_constants

    # Use /tmp, like Ray, because the path of a socket is limited to about 100 characters.
    parent = os.environ.get("RAY_TMPDIR", "/tmp" if os.path.isdir("/tmp") else None)  # noqa: S108
    _directories.append(tempfile.TemporaryDirectory("", "fedhet-ray-", parent, True))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    before = ray_constants.ENABLE_RAY_CLUSTER
    # Make Ray use the loopback interface; Ray's address option alone does not ensure this.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with inherited({**token, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            _read_environment()
            # Use a subdirectory, because Ray makes its directory readable by all users.
            yield os.path.join(_directories[-1].name, "ray")
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def _read_environment() -> None:
    """Make Ray read the authentication token again. Otherwise, Ray reads it only once."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect(address: str, modules: Iterable[str]) -> None:
    """Join a Ray cluster, and send fedhet and other modules to its workers.

    Args:
        address: HOST:PORT of the cluster, or "auto".
        modules: Modules that workers import. The versions on this machine are sent.

    Raises:
        FedhetError: If no cluster runs at the address, or if this machine is not part of it.
    """
    ray = _ray()
    if address != AUTO:
        try:
            socket.create_connection(split_host_port(address), CONNECT_SECONDS).close()
        except OSError as error:
            raise FedhetError(
                f"no Ray cluster found at {address} ({error_reason(error)}). Start a cluster "
                "with `ray start --head`, which prints its address."
            ) from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": for_workers(), "py_modules": code_of(["fedhet", *modules])},
        )
    except Exception as error:  # Ray raises several types of errors, some with several lines.
        ray.shutdown()
        option = "" if address == AUTO else f" --address={address}"
        raise FedhetError(
            f"cannot join the Ray cluster {address!r} ({error_text(error)}). Add this machine with "
            f"`ray start{option}`, and set RAY_AUTH_MODE and the token to the cluster's values."
        ) from error


def _ray() -> Any:
    """Set the environment variables that Ray reads, and import Ray.

    Raises FedhetError if this process has already joined Ray.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # With this value (Ray's future default), a worker without an assigned GPU still sees all GPUs.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        raise FedhetError("this process has already joined Ray. Call ray.shutdown() before a run.")
    return ray


def leave() -> None:
    """Leave the cluster. If this process started the cluster, stop it and remove its files."""
    import ray

    ray.shutdown()
    if _directories:
        _directories.pop().cleanup()
        _read_environment()
