"""Process of a site that keeps PyTorch, Flower, and fedhet imported between messages.

For each message, Flower's SuperExec starts the program `flwr-clientapp` from PATH. Its imports take
seconds of CPU time, often more than the training. A site therefore puts `programs/flwr-clientapp`
first on PATH. This program sends its arguments, environment, and file descriptors to the worker
through a socket in the site's state directory, and exits with the status of the message's process.
The worker forks for each message, so nothing remains of a message but its files. A worker that
processed all messages of a run itself would save another 0.2 s of CPU time per message, but would
have to keep runs, their permissions, and their memory apart. The program starts the worker if none
is running. Without a worker, the program executes Flower's own command.
"""

# `programs/flwr-clientapp` executes this file without site-packages, and once per message. For this
# reason, modules that only the worker needs are imported in functions.
from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.process import BaseProcess
    from pathlib import Path
    from typing import Any, NoReturn

COMMAND = "flwr-clientapp"
WORKER_VARIABLE = "FEDHET_WARM_WORKER"
"""Environment variable that disables the worker if its value is 0."""
DIRECTORY_VARIABLE = "FEDHET_WORKER_DIR"
"""Environment variable with the directory of the worker's socket."""
PYTHON_VARIABLE = "FEDHET_PYTHON"
"""Environment variable with the Python interpreter of `programs/flwr-clientapp`."""
PRELOADED = ("fedhet.client_runtime.app", "torchvision")
"""Modules that the worker imports, in addition to Flower's command."""
START_SECONDS = 120.0
"""Time limit for the imports of a worker, in seconds."""
OWNER_SECONDS = 1.0
"""Seconds between two checks that a site that uses the worker is running."""
RECEIVE_SECONDS = 10.0
"""Time limit for the content of a message's request, in seconds."""
FAILED = 1
"""Exit status of a message whose process ended without one."""


def with_worker(environment: Mapping[str, str], state: Path) -> dict[str, str]:
    """Return the environment of a site's service in which Flower uses a worker.

    Args:
        environment: Environment variables of the service. Without changes, they are returned if
            FEDHET_WARM_WORKER is 0.
        state: State directory of the site.
    """
    if environment.get(WORKER_VARIABLE) == "0":
        return dict(environment)
    programs = os.path.join(os.path.dirname(os.path.abspath(__file__)), "programs")
    return {
        **environment,
        "PATH": os.pathsep.join([programs, environment.get("PATH", os.defpath)]),
        PYTHON_VARIABLE: sys.executable,
        DIRECTORY_VARIABLE: os.path.join(os.path.abspath(state), "_worker"),
    }


def prepare(environment: Mapping[str, str]) -> None:
    """Start the worker of a site, unless it is disabled, and wait until its imports are complete.

    Flower gives up on a message that no process has accepted within 30 s. On a busy machine, the
    imports may take longer, so a site must not receive a message before they are complete.

    Args:
        environment: Environment variables of the site's service, from `with_worker`.
    """
    owner = os.getpid()
    if directory := environment.get(DIRECTORY_VARIABLE):
        with contextlib.suppress(OSError), _connect(directory, owner) as connection:
            _send(connection, {"owner": owner})
            connection.recv(1)


# --- the program that Flower starts


def request(arguments: list[str]) -> NoReturn:
    """Let the worker process a message, and exit with the status of the message's process.

    Executes Flower's own command if there is no worker.
    """
    owner = os.getppid()
    message = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "owner": owner,
    }
    is_processed, status = False, b""
    directory = os.environ[DIRECTORY_VARIABLE]
    with contextlib.suppress(OSError), _connect(directory, owner) as connection:
        _send(connection, message)
        is_processed = bool(connection.recv(1))
        connection.settimeout(None)
        status = connection.recv(1)
    if is_processed:
        sys.exit(status[0] if status else FAILED)
    print(f"{COMMAND}: no worker, so this message takes longer", file=sys.stderr)  # noqa: T201
    command = os.path.join(os.path.dirname(sys.executable), COMMAND)
    os.execv(command, [COMMAND, *arguments])  # noqa: S606


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    body = json.dumps(message).encode()
    connection.settimeout(START_SECONDS)
    socket.send_fds(connection, [len(body).to_bytes(4)], [0, 1, 2])
    connection.sendall(body)


def _connect(directory: str, owner: int) -> socket.socket:
    """Connect to the worker, which is started if necessary. Raises OSError if this fails.

    In a state directory from another user, a symlink could redirect the files to any directory.
    """
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.path.islink(directory):
        raise OSError(f"{directory} is a symlink")
    os.chmod(directory, 0o700)  # Fails if the directory belongs to another user.
    here = os.open(".", os.O_RDONLY)
    # Use a relative path, because the length of a socket's path is limited to about 100 characters.
    os.chdir(directory)
    try:
        process, end = None, time.monotonic() + START_SECONDS
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect("socket")
                return connection
            except OSError:
                connection.close()
                # A worker ends with status 0 if another worker has started in the meantime.
                if (process is not None and process.poll()) or time.monotonic() > end:
                    raise
            if process is None:
                module = "fedhet.deployment.worker"
                command = [sys.executable, "-P", "-m", module, str(owner)]
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL)  # noqa: S603
            time.sleep(0.01)
    finally:
        os.fchdir(here)
        os.close(here)


# --- the worker


def serve(load: Callable[[], Callable[[], object]], owner: int) -> None:
    """Process the messages of the socket in the current directory until no site uses the worker.

    Returns immediately if another worker uses the directory.

    Args:
        load: Function that imports everything and returns the function that processes a message.
        owner: Process ID of the site's service that starts the worker, or of its SuperExec.
    """
    import fcntl
    import gc
    import signal

    lock = os.open("lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(FileNotFoundError):
        os.unlink("socket")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            before = os.umask(0o177)
            listener.bind("socket")
            os.umask(before)
            listener.listen()  # Messages wait while this process imports.
            command = load()
            # Otherwise, the garbage collector copies the shared objects by writing to them.
            gc.collect()
            gc.freeze()
            _accept(listener, lock, command, {owner})
    finally:
        gc.unfreeze()  # Otherwise, libraries report leaks when this process ends.
        os.unlink("socket")  # Programs that copy directories may fail on a socket.
        os.close(lock)


def load_command() -> Callable[[], object]:
    """Import the modules that process messages, and return the function of Flower's command.

    The modules start no thread of Python and do not use CUDA, because a forked process has neither
    threads nor CUDA. OpenBLAS stops its threads before a fork.
    """
    import importlib
    from importlib import metadata

    from fedhet.server import nodes

    for module in PRELOADED:
        importlib.import_module(module)
    nodes.retry_pulls_soon()
    (entry_point,) = metadata.entry_points(group="console_scripts", name=COMMAND)
    command: Callable[[], object] = entry_point.load()
    return command


def _accept(
    listener: socket.socket, lock: int, command: Callable[[], object], owners: set[int]
) -> None:
    import multiprocessing
    from multiprocessing.connection import wait

    fork = multiprocessing.get_context("fork")
    running: dict[socket.socket, BaseProcess] = {}
    while any(map(_is_running, owners)):
        sentinels = {process.sentinel: connection for connection, process in running.items()}
        for ready in wait([listener, *running, *sentinels], OWNER_SECONDS):
            if ready is listener:
                connection, _ = listener.accept()
                try:
                    message, descriptors = _receive(connection)
                except (OSError, ValueError):
                    connection.close()
                    continue
                owners.add(message["owner"])
                if "arguments" in message:
                    sockets = [listener, connection, *running]
                    running[connection] = fork.Process(
                        target=_process, args=(command, message, descriptors, sockets, lock)
                    )
                    running[connection].start()
                    _reply(connection, 0)
                else:  # The site was waiting for the imports.
                    connection.close()
                for descriptor in descriptors:
                    os.close(descriptor)
            elif ready in sentinels:
                connection = sentinels[ready]
                process = running.pop(connection)
                process.join()
                status = process.exitcode
                _reply(connection, FAILED if status is None or status < 0 else status)
                process.close()
                connection.close()
            elif ready in running:  # The program was killed.
                running.pop(ready).terminate()
                ready.close()


def _is_running(pid: int) -> bool:
    """Return whether a process runs.

    A zombie does not run. Its parent may wait for the end of its output, which the worker has open.
    """
    import psutil

    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Receive a message's request and file descriptors.

    Raises OSError or ValueError if the program has ended, e.g. to execute Flower's own command.
    """
    connection.settimeout(RECEIVE_SECONDS)
    size, descriptors, _, _ = socket.recv_fds(connection, 4, 3)
    with connection.makefile("rb") as content:
        message = json.loads(content.read(int.from_bytes(size)))
    connection.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        connection.recv(1)
        raise ConnectionError
    connection.setblocking(True)
    return message, descriptors


def _reply(connection: socket.socket, value: int) -> None:
    with contextlib.suppress(OSError):  # The program was killed.
        connection.sendall(bytes([value]))


def _process(
    command: Callable[[], object],
    message: dict[str, Any],
    descriptors: list[int],
    sockets: list[socket.socket],
    lock: int,
) -> None:
    """Process a message in a forked process, as Flower's own command does."""
    import signal

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for each in sockets:
        each.close()
    os.close(lock)
    for target, descriptor in enumerate(descriptors):
        os.dup2(descriptor, target)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(message["environment"])
    os.chdir(message["directory"])
    sys.argv = [COMMAND, *message["arguments"]]
    command()


if __name__ == "__main__":
    if __package__:
        with contextlib.suppress(KeyboardInterrupt):
            serve(load_command, owner=int(sys.argv[1]))
    else:  # `programs/flwr-clientapp` executes this file by its path.
        request(sys.argv[1:])
