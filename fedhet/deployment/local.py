"""Deployment on this machine, with Flower's SuperLink and SuperNodes as processes.

A local deployment works like a deployment on separate machines (docs/deploy.md), with TLS,
authenticated nodes, and a separate state directory per node, but uses temporary keys.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from fedhet.base.disk import STATE_DIR_VARIABLE
from fedhet.base.errors import FedhetError
from fedhet.client_runtime.node import ALLOW_MODELS_VARIABLE, ALLOW_PATHS_VARIABLE
from fedhet.config.resolve import Config, absolute
from fedhet.config.secure import simulated_files, write_simulated
from fedhet.data.store import RunData
from fedhet.deployment import certs
from fedhet.deployment.control import Connection, interrupted_by_terminate, listens, program, submit
from fedhet.engines.connection import for_training
from fedhet.engines.simulate import check_models_and_data, peers_of
from fedhet.wire.identity import client_name

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Candidate ports, which are below the ephemeral ports of Linux and macOS."""
START_SECONDS = 120.0
"""Time limit for the start of the server, in seconds."""
STOP_SECONDS = 10.0
"""Time for processes to terminate before they are killed, in seconds."""


@dataclass
class LocalDeployment:
    """Context manager for a SuperLink and SuperNodes on this machine.

    Leaving the context stops every started process and its descendants.
    """

    root: Path
    """Directory that contains all files of the deployment."""
    nodes: int
    """Number of SuperNodes."""
    host: str = LOOPBACK
    command_prefix: Callable[[str], Sequence[str]] = lambda name: ()
    """Function that returns the command prefix of a process, e.g. `ip netns exec …` or `nice`."""
    secure: bool = False
    """Whether the nodes have keys for secure aggregation in `root` (see `peers_of`)."""
    min_samples: int = 1
    """Node setting `min-samples-per-class`, because sites with peers ignore the run's value."""

    def __post_init__(self) -> None:
        self.fleet_port, self.control_port = free_port(), free_port()
        self.certs = self.root / "certs"
        self.processes: dict[str, psutil.Popen] = {}
        self.connection = Connection(
            self.root / "flower",
            f"{self.host}:{self.control_port}",
            self.certs / certs.CA_CERTIFICATE,
        )

    def __enter__(self) -> LocalDeployment:
        try:
            self.prepare()
            self.start_server()
            for index in range(self.nodes):
                self.register(index)
            for index in range(self.nodes):
                self.start_node(index)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def prepare(self) -> None:
        """Create keys and certificates, and write the configuration of Flower's command line."""
        certs.make(self.certs, [self.host], [site_name(k) for k in range(self.nodes)], days=30)
        self.connection.prepare()
        (self.root / "log").mkdir(exist_ok=True)

    def start_server(self) -> None:
        """Start the server, and wait until it listens. An existing database is reused."""
        self._start(
            "server",
            "fedhet",
            *("server", self.certs),
            *("--address", f"{self.host}:{self.fleet_port}"),
            *("--control", self.connection.address),
            *("--database", self.root / "superlink.db"),
        )
        end = time.monotonic() + START_SECONDS
        for port in (self.control_port, self.fleet_port):
            while not listens(self.host, port):
                if time.monotonic() > end or self.processes["server"].poll() is not None:
                    log = " ".join(self.log_of("server").split())[-500:] or "its log is empty"
                    raise FedhetError(f"the server did not start: {log}")
                time.sleep(0.1)

    def register(self, index: int) -> None:
        """Register a node with the server, under its client's name."""
        key = self.certs / certs.NODES / f"{site_name(index)}.pub"
        self.connection.register(key, client_name(index, self.nodes))

    def start_node(self, index: int, **options: object) -> None:
        """Start a SuperNode.

        Args:
            index: Index of the node.
            options: Command-line options that override the defaults; an empty value means a flag,
                and None omits the option.
        """
        node_config = (
            f"partition-id={index} num-partitions={self.nodes} allow-downloads=true "
            f"min-samples-per-class={self.min_samples}"
        )
        if self.secure:
            files = simulated_files(self.root, client_name(index, self.nodes))
            node_config += ' peers="{}" peers-key="{}"'.format(*files)
        arguments = {
            "root-certificates": self.certs / certs.CA_CERTIFICATE,
            "superlink": f"{self.host}:{self.fleet_port}",
            "auth-supernode-private-key": self.certs / certs.NODES / site_name(index),
            "port": free_port(),
            "node-config": node_config,
            **options,
        }
        words = []
        for name, value in arguments.items():
            if value is not None:
                words += [f"--{name}", str(value)] if str(value) else [f"--{name}"]
        environment = {
            STATE_DIR_VARIABLE: str(self.root / "state" / site_name(index)),
            # Permit everything, because both the run and this machine belong to the user.
            ALLOW_MODELS_VARIABLE: "*",
            ALLOW_PATHS_VARIABLE: "/",
            **for_training(),
        }
        self._start(site_name(index), "fedhet", "node", *words, environment=environment)

    def log_of(self, name: str) -> str:
        """Return the log of the server or of a node."""
        return (self.root / "log" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def stop(self, *names: str) -> None:
        """Stop the given processes (by default, all processes) and their descendants."""
        end_trees([self.processes.pop(name) for name in names or list(self.processes)])

    def _start(
        self,
        name: str,
        executable: str,
        *words: object,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [*self.command_prefix(name), program(executable), *map(str, words)]
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                command,
                env={**self.connection.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # The server's database contains messages from clients.
            )


def deploy_local(
    config: Config, directory: Path, keep: Path | None, say: Callable[[str], None]
) -> None:
    """Execute a run in a local deployment, i.e. with all processes on this machine.

    Args:
        config: Configuration of the run.
        directory: Directory for the results.
        keep: Directory for keys, logs and the states of the sites; by default, a temporary
            directory, which is deleted if the run succeeds.
        say: Function that shows a message to the user.

    Raises:
        FedhetError: If the run fails.
    """
    say(f"reading {config.run.data.dataset} and splitting it among the clients")
    data = RunData.for_run(config.run)
    check_models_and_data(config, data)
    config = absolute(config).replacing(out=str(directory))
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise FedhetError(f"--keep: directory must be empty, got {keep}")
    root = Path(tempfile.mkdtemp(prefix="fedhet-")) if keep is None else keep.resolve()
    root.mkdir(parents=True, exist_ok=True)
    secure = config.run.privacy.secure_aggregation
    if secure:
        write_simulated(root, *peers_of(data))
    least = config.run.engine.min_samples_per_class
    with (
        interrupted_by_terminate(),
        LocalDeployment(root, config.run.clients, secure=secure, min_samples=least) as deployment,
    ):
        say(f"server and {deployment.nodes} nodes on {deployment.host}, TLS, logs in {root}")
        try:
            submit(config, deployment.connection, say)
        except FedhetError as error:
            reason = str(error).rstrip(".")
            raise FedhetError(f"{reason}. The logs are in {root / 'log'}.") from None
    if keep is None:
        shutil.rmtree(root)


def site_name(index: int) -> str:
    """Return the name of a node's process and key."""
    return f"site-{index}"


def free_port() -> int:
    """Return an unused port on loopback. Raises FedhetError if none is found.

    The port is not ephemeral, because the system might assign an ephemeral port to an outgoing
    connection in the meantime.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise FedhetError(f"no free port found from {PORTS.start} to {PORTS.stop - 1}")


def members_of(pid: int) -> list[psutil.Process]:
    """Return the descendants of a process, and the other processes of the session that it leads.

    A site's worker is no descendant of the site, because it outlives the program that starts it.
    """
    members: list[psutil.Process] = []
    with contextlib.suppress(psutil.NoSuchProcess):
        members += psutil.Process(pid).children(recursive=True)
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            members += [process] if os.getsid(process.pid) == pid != process.pid else []
    return list(dict.fromkeys(members))


def end_trees(roots: Sequence[psutil.Popen]) -> None:
    """Terminate processes and their members, and kill processes that do not end."""
    trees: list[psutil.Process] = []
    for root in roots:
        trees += [*members_of(root.pid), root]
    for process in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(trees, timeout=STOP_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_SECONDS)
