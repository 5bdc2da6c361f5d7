"""The environment of processes that are started here, and Ray: started for this process, or joined.

glibc gives the pages of freed memory back to the system, and takes them again, at every step of a
training loop: its threshold for that follows the sizes that are freed, up to 32 MiB at most, and
a batch's activations are larger. Thousands of page faults a step cost a tenth of the time and
more. Thresholds of a GiB keep the pages, and huge pages, where glibc has them (2.35) and the system
allows them, make the first faults fewer. What a process has freed stays with it, up to a GiB.

By itself Ray listens on all interfaces without authentication: whoever can reach one of its ports
can have it run any function. Its logs and sockets lie in /tmp/ray, readable by all. A cluster that
is started here has the loopback interface alone, a token, and a folder of its own.
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
from fedhet.settings.text import AUTO, split_host_port

TUNABLES = "GLIBC_TUNABLES"
KEEPING_PAGES = ":".join(
    (
        f"glibc.malloc.mmap_threshold={2**30}",
        f"glibc.malloc.trim_threshold={2**30}",
        "glibc.malloc.hugetlb=1",
    )
)
"""glibc reads it before a process begins; an older one ignores what it does not know."""
CARRIED = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "FLWR_TELEMETRY_ENABLED",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO",
    TUNABLES,
)
"""Environment variables that a cluster's workers inherit from this process, besides FEDHET_*."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Names of the folders in which packages are installed."""


def for_training() -> dict[str, str]:
    """Return the variables of a process that trains, besides those that it inherits.

    What the user has set stays.
    """
    return {} if TUNABLES in os.environ else {TUNABLES: KEEPING_PAGES}


@contextlib.contextmanager
def inherited(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block: processes that are started in it inherit them."""
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
    """Return the environment variables that the workers on all machines of a cluster get.

    A machine's own PYTHONPATH comes after the folders of the user's modules here, from which a
    module that is sent may import others.
    """
    carried = {k: v for k, v in os.environ.items() if k in CARRIED or k.startswith("FEDHET_")}
    path = os.pathsep.join([*own_paths(), "${PYTHONPATH}"])
    return {**for_training(), **carried, "PYTHONPATH": path}


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


# --- Ray

REACHABLE_WITHIN = 10.0
"""Seconds for a connection to the cluster's address; Ray itself would try for minutes."""
BACKGROUND = ThreadPoolExecutor(1)
"""Its thread lives as long as this process: Ray's processes end with the one that started them."""
_starting: list[Future[None]] = []
"""The start of a cluster for which nobody has waited yet."""
_ending: list[Future[None]] = []
"""The end of a cluster that was still starting when nobody needed it any more."""
_folders: list[tempfile.TemporaryDirectory[str]] = []
"""The folder of the cluster that runs; it is removed when this process ends, at the latest."""


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
    if _folders:
        _folders.pop().cleanup()


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
        with _private() as folder, inherited(own):
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
            f"cannot start Ray on this machine ({error_text(error)}); "
            "--backend inline runs without it"
        ) from error


@contextlib.contextmanager
def _private() -> Iterator[str]:
    """Yield a folder for a cluster that is started inside the block, on loopback and with a token.

    All of Ray's processes inherit the token from the environment: it is on no command line. This
    process keeps it until it leaves the cluster.
    """
    from ray._private import ray_constants

    # Below /tmp, as Ray's own: the path of a socket may have a hundred characters.
    place = os.environ.get("RAY_TMPDIR", "/tmp" if os.path.isdir("/tmp") else None)  # noqa: S108
    _folders.append(tempfile.TemporaryDirectory("", "fedhet-ray-", place, True))
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    reachable = ray_constants.ENABLE_RAY_CLUSTER
    # So Ray takes the loopback interface; its own option for an address does not.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        with inherited({**token, ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            _read_environment()
            yield os.path.join(_folders[-1].name, "ray")  # Ray opens its folder to all
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = reachable


def _read_environment() -> None:
    """Let Ray read again whether it is to use a token and which; else it does so once."""
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()


def connect(address: str, modules: Iterable[str]) -> None:
    """Join the cluster, and send it fedhet and `modules`: its workers import them as they are here.

    Raises FedhetError if no cluster runs there, or this machine is not part of it.
    """
    ray = _ray()
    if address != AUTO:
        try:
            socket.create_connection(split_host_port(address), REACHABLE_WITHIN).close()
        except OSError as error:
            raise FedhetError(
                f"no Ray cluster answers at {address} ({error_reason(error)}): `ray start --head` "
                "starts one, and prints its address"
            ) from error
    try:
        ray.init(
            address=address,
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": for_workers(), "py_modules": code_of(["fedhet", *modules])},
        )
    except Exception as error:  # Ray raises errors of several kinds, and of several lines
        ray.shutdown()
        there = "" if address == AUTO else f" --address={address}"
        raise FedhetError(
            f"cannot join the Ray cluster {address!r} from this machine: `ray start{there}` makes "
            "it one of the cluster's, and RAY_AUTH_MODE and its token must be set here as there "
            f"(Ray says: {error_text(error)})"
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


def leave() -> None:
    """Leave the cluster; one that this process has started ends, with its folder and token."""
    import ray

    ray.shutdown()
    if _folders:
        _folders.pop().cleanup()
        _read_environment()
