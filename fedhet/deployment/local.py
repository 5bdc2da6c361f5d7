"""A deployment on this machine: Flower's SuperLink and SuperNodes as processes, over gRPC.

The same as on separate machines (docs/deploy.md), with temporary keys: TLS, authenticated nodes,
and a separate state directory per node. This is the only module that starts processes.
"""

from __future__ import annotations

import contextlib
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

from fedhet.base.errors import FedhetError
from fedhet.client_runtime.node import (
    ALLOW_MODELS_VARIABLE,
    ALLOW_PATHS_VARIABLE,
    STATE_DIR_VARIABLE,
)
from fedhet.config.resolve import Config, absolute
from fedhet.data.store import RunData
from fedhet.deployment import certs
from fedhet.deployment.control import Connection, interrupted_by_terminate, listens, program, submit
from fedhet.engines.connection import for_training
from fedhet.engines.simulate import check_models_and_data
from fedhet.wire.identity import client_name

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_768)
"""Below the ephemeral ports of Linux and macOS."""
START_SECONDS = 120.0
STOP_SECONDS = 10.0


@dataclass
class LocalDeployment:
    """A SuperLink and `nodes` SuperNodes on loopback; all their files are below `root`.

    Leaving the context stops every started process and its descendants.
    """

    root: Path
    nodes: int
    host: str = LOOPBACK
    within: Callable[[str], Sequence[str]] = lambda name: ()
    """Command prefix of a process, by its name: `ip netns exec …`, `nice`."""

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
        """Make keys and certificates, and configure Flower's command line with the server."""
        certs.make(self.certs, [self.host], [site_name(k) for k in range(self.nodes)], days=30)
        self.connection.prepare()
        (self.root / "log").mkdir(exist_ok=True)

    def start_server(self) -> None:
        """Start the SuperLink and wait until it listens; its database persists after a stop."""
        self._start(
            "server",
            "flower-superlink",
            *("--ssl-ca-certfile", self.certs / certs.CA_CERTIFICATE),
            *("--ssl-certfile", self.certs / certs.SERVER_CERTIFICATE),
            *("--ssl-keyfile", self.certs / certs.SERVER_KEY),
            "--enable-supernode-auth",
            *("--fleet-api-address", f"{self.host}:{self.fleet_port}"),
            *("--host", self.host, "--port", self.control_port),
            *("--database", self.root / "superlink.db"),
            "--disable-runtime-dependency-installation",
        )
        end = time.monotonic() + START_SECONDS
        for port in (self.control_port, self.fleet_port):
            while not listens(self.host, port):
                if time.monotonic() > end or self.processes["server"].poll() is not None:
                    words = " ".join(self.log_of("server").split())[-500:] or "its log is empty"
                    raise FedhetError(f"the server does not start: {words}")
                time.sleep(0.1)

    def register(self, index: int) -> None:
        """Register node `index` at the server with its public key and its client's name."""
        key = self.certs / certs.NODES / f"{site_name(index)}.pub"
        self.connection.register(key, client_name(index, self.nodes))

    def start_node(self, index: int, **options: object) -> None:
        """Start SuperNode `index`; `options` override its default options."""
        given = {
            "root-certificates": self.certs / certs.CA_CERTIFICATE,
            "superlink": f"{self.host}:{self.fleet_port}",
            "auth-supernode-private-key": self.certs / certs.NODES / site_name(index),
            "port": free_port(),
            "node-config": f"partition-id={index} num-partitions={self.nodes} allow-downloads=true",
            **options,
        }
        words = []
        for name, value in given.items():  # an empty value makes a switch, None omits the option
            if value is not None:
                words += [f"--{name}", str(value)] if str(value) else [f"--{name}"]
        environment = {
            STATE_DIR_VARIABLE: str(self.root / "state" / site_name(index)),
            # The run is the user's own, and so is this machine.
            ALLOW_MODELS_VARIABLE: "*",
            ALLOW_PATHS_VARIABLE: "/",
            **for_training(),
        }
        self._start(site_name(index), "flower-supernode", *words, environment=environment)

    def log_of(self, name: str) -> str:
        """Return what the server or a node has logged."""
        return (self.root / "log" / f"{name}.log").read_text(encoding="utf-8", errors="replace")

    def stop(self, *names: str) -> None:
        """Stop processes by name, or all, including their descendants."""
        ended = [self.processes.pop(name) for name in names or list(self.processes)]
        end_trees(ended)

    def _start(
        self,
        name: str,
        executable: str,
        *words: object,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        command = [*self.within(name), program(executable), *map(str, words)]
        with (self.root / "log" / f"{name}.log").open("ab") as log:
            self.processes[name] = psutil.Popen(
                command,
                env={**self.connection.environment(), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,  # the server's database holds what clients send
            )


def deploy_local(
    config: Config, directory: Path, keep: Path | None, say: Callable[[str], None]
) -> None:
    """Run `config` on a deployment on this machine until it ends; results are in `directory`.

    Keys, logs and the sites' state go to a temporary folder, or to `keep`. Raises FedhetError if
    the run fails; the folder is then kept.
    """
    say(f"reading {config.run.data.dataset}, and splitting it between the clients")
    data = RunData.of(config.run)
    check_models_and_data(config, data)
    placed = absolute(config).replacing(out=str(directory))
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise FedhetError(f"{keep} is not empty; give another folder with --keep")
    root = Path(tempfile.mkdtemp(prefix="fedhet-")) if keep is None else keep.resolve()
    root.mkdir(parents=True, exist_ok=True)
    with interrupted_by_terminate(), LocalDeployment(root, config.run.clients) as deployment:
        say(f"server and {deployment.nodes} nodes on {deployment.host}, TLS, logs in {root}")
        try:
            submit(placed, deployment.connection, say)
        except FedhetError as error:
            raise FedhetError(f"{error}; logs are in {root / 'log'}") from None
    if keep is None:
        shutil.rmtree(root)


def site_name(index: int) -> str:
    """Return the name of the process and of the key of node `index`."""
    return f"site-{index}"


def free_port() -> int:
    """Return an unused port on loopback. Raises FedhetError if none is found.

    Not an ephemeral port: the system might give it to an outgoing connection before its use.
    """
    for port in random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((LOOPBACK, port))
            return port
    raise FedhetError(f"no free port was found in {PORTS.start} to {PORTS.stop - 1}")


def end_trees(roots: Sequence[psutil.Popen]) -> None:
    """Stop processes and all their descendants: terminate first, kill if still running."""
    trees: list[psutil.Process] = []
    for root in roots:
        with contextlib.suppress(psutil.NoSuchProcess):
            trees += psutil.Process(root.pid).children(recursive=True)
        trees.append(root)
    for process in trees:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    _, alive = psutil.wait_procs(trees, timeout=STOP_SECONDS)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=STOP_SECONDS)
