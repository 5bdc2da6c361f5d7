"""Access to a deployed server, its sites, and its runs.

This module uses Flower's command line to register nodes, and to follow runs. It uses Flower's
control API to list sites and to start runs, because the command line neither shows the registered
names of sites nor signs apps.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from fedhet.base import __version__
from fedhet.base.disk import read_file, read_pem
from fedhet.base.errors import FedhetError, error_reason
from fedhet.config.sources import to_flower
from fedhet.deployment.certs import LOCAL_HOSTS, read_certificate, sign_app
from fedhet.deployment.transport import check_transport, transport_of
from fedhet.runs.units import message_of
from fedhet.settings.addresses import join_host_port, split_host_port
from fedhet.settings.schema import nest

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from fedhet.config.resolve import Config

CONNECTION = "fedhet-server"
"""Name of the connection in Flower's configuration. It must not be the name of a directory, because
Flower would run that directory as an app."""
COMPLETED = "finished:completed"
FORWARDED = "the sites receive the signatures of this app"
"""Note in the server's reply to a signed run. Flower's own server drops signatures."""
_FLOWER_LINE = re.compile(
    r"(INFO|DEBUG)\b|Using SuperLink|Success|ERROR\b.*(ServerApp raised|Exit Code: 201)"
    r"|An unhandled exception occurred in the ServerApp|For more information, visit: "
    "<https://flower"
)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_FRAME = re.compile("[─│╭╮╰╯]+")
_UNREACHABLE = "Connection to the SuperLink is unavailable"
POLL_SECONDS = 5.0
"""Seconds between two checks that the server of a run still replies."""
START_SECONDS = 15.0
"""Seconds for which a server may be unreachable after its start."""
REPLY_SECONDS = 10.0
"""Time limit for a reply of the server, in seconds."""
NUM_RUNS = 3
"""Number of most recent runs to show."""
NUM_LOG_LINES = 8
"""Number of lines to show from the end of a run's log."""
_FEDHET_ERROR = re.compile(r"fedhet\.base\.errors\.\w+: ")


@dataclass(frozen=True)
class Connection:
    """Connection to a server through Flower's command line."""

    home: Path
    """Directory of Flower's configuration."""
    address: str
    """HOST:PORT of the server's control API."""
    authority: Path
    """Certificate of the CA that signed the server's certificate."""

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the server. Raises FedhetError if the address is invalid."""
        try:
            return split_host_port(self.address)
        except ValueError as error:
            raise FedhetError(f"server: {error}") from None

    def prepare(self) -> None:
        """Write the configuration of Flower's command line.

        Raises FedhetError if the address is not HOST:PORT.
        """
        address = join_host_port(*self.endpoint)
        connection = {"address": address, "root-certificates": str(self.authority.resolve())}
        superlinks = {"default": CONNECTION, CONNECTION: connection}
        _write_toml(self.home / "config.toml", {"superlink": superlinks})
        shutil.rmtree(self._empty_directory, ignore_errors=True)
        self._empty_directory.mkdir(parents=True)

    def register(self, public_key: Path, name: str) -> bool:
        """Register a node under its client's name, and return whether its key is new."""
        try:
            self.flwr("supernode", "register", public_key, CONNECTION, "--name", name)
        except FedhetError as error:
            if "already" in str(error):
                return False
            raise
        return True

    def follow(self, run_id: str, say: Callable[[str], None]) -> None:
        """Show the log of a run until the run ends.

        Also reports when the server stops replying or replies again, because Flower's command line
        prints nothing for a minute if the server does not reply.

        Args:
            run_id: Flower's id of the run.
            say: Function that shows a line to the user.
        """
        ended = threading.Event()

        def poll() -> None:
            is_silent = False
            while not ended.wait(POLL_SECONDS):
                if self.is_listening() == is_silent:
                    is_silent = not is_silent
                    state = "does not reply; waiting for it" if is_silent else "replies again"
                    say(f"the server at {self.address} {state}")

        poller = threading.Thread(target=poll, daemon=True)
        poller.start()
        command = [program("flwr"), "log", run_id, CONNECTION, "--stream"]
        try:
            stream: subprocess.Popen[str] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self._options()
            )
            with stream:
                try:
                    for line in filter_log(stream.stdout or ()):
                        say(line)
                finally:
                    stream.terminate()
        finally:
            ended.set()
            poller.join()

    def check_reachable(self) -> str:
        """Check that the server replies, and return its time, i.e. the header `Date` of the reply.

        Returns an empty string if the reply has no such header. Raises FedhetError if the CA's
        certificate cannot be read, if no server replies, or if its certificate is rejected.
        """
        with self._explained("the port of Flower's control API with TLS"):
            context = ssl.create_default_context(cafile=str(self.authority))
            host, port = self.endpoint
            client = http.client.HTTPSConnection(host, port, timeout=REPLY_SECONDS, context=context)
            with contextlib.closing(client):
                client.request("GET", "/")
                return client.getresponse().headers.get("Date") or ""

    def check_transport(self) -> None:
        """Check, like `check_reachable`, the address at which the server serves sites.

        Also raises FedhetError if the server uses another transport than this site's Flower.
        """
        with self._explained("the server's port for sites with TLS"):
            transport = transport_of(self.endpoint, self.authority)
        check_transport(self.address, transport)

    @contextlib.contextmanager
    def _explained(self, expected: str) -> Iterator[None]:
        """Convert errors of a connection in the block to FedhetError."""
        if not self.authority.is_file():
            raise FedhetError(f"{self.authority}: file not found, expected the CA's certificate")
        read_certificate(self.authority)
        host, rule = self.endpoint[0], f"expected {expected}"
        try:
            yield
        except ssl.SSLCertVerificationError as error:
            raise FedhetError(
                f"server {self.address}: certificate rejected ({error.verify_message}), expected a "
                f"certificate for {host} signed by the CA of {self.authority}. Use the CA "
                "certificate of this server, and an address listed in its certificate (`fedhet "
                "certs --host`)."
            ) from None
        except ssl.SSLError as error:
            raise FedhetError(
                f"server {self.address}: TLS error ({error.reason}), {rule}"
            ) from None
        except http.client.HTTPException as error:
            raise FedhetError(
                f"server {self.address}: not an HTTP server ({type(error).__name__}), {rule}"
            ) from None
        except OSError as error:
            raise FedhetError(
                f"no server found at {self.address} ({error_reason(error)}). Check that the server "
                "is running and that the port is open or forwarded."
            ) from None

    def is_listening(self) -> bool:
        """Return whether any process listens at the server's address."""
        return listens(*self.endpoint)

    def flwr(self, *words: object) -> str:
        """Run Flower's command line and return its output. Raises FedhetError if it fails."""
        absolute = [word.resolve() if isinstance(word, Path) else word for word in words]
        command, end = [program("flwr"), *map(str, absolute)], time.monotonic() + START_SECONDS
        while True:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                command, capture_output=True, check=False, **self._options()
            )
            if _UNREACHABLE not in done.stdout + done.stderr or time.monotonic() > end:
                break
            time.sleep(1.0)
        if done.returncode != 0 or '"success": false' in done.stdout:
            message = done.stdout
            with contextlib.suppress(ValueError):  # The output may not be JSON.
                report = json.loads(message)
                fields = report.items() if isinstance(report, dict) else ()
                message = next((f"{v} " for k, v in fields if "message" in k), message)
            text = _FRAME.sub(" ", _COLOR.sub("", message + done.stderr))
            output = " ".join(text.split())
            raise FedhetError(f"`flwr {' '.join(map(str, words[:2]))}` failed: {output[-500:]}")
        return done.stdout

    @property
    def _empty_directory(self) -> Path:
        """Empty working directory, in which Flower's command line finds no project to modify."""
        return self.home / "nowhere"

    def _options(self) -> dict[str, Any]:
        """Return the `subprocess` options for Flower's command line."""
        text = {"encoding": "utf-8", "errors": "replace"}
        return {"cwd": self._empty_directory, "env": self.environment(), **text}

    def environment(self) -> dict[str, str]:
        """Return the environment variables for Flower's programs."""
        programs = str(Path(sys.executable).parent)
        # Bypass proxies, because a proxy cannot reach this machine's loopback interface, and
        # `check_reachable` has reached the server directly. gRPC and Python read the variable under
        # different names.
        direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), *LOCAL_HOSTS]
        without_proxy = ",".join(filter(None, [*direct, self.endpoint[0]]))
        return {
            **os.environ,
            "FLWR_HOME": str(self.home.resolve()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "no_proxy": without_proxy,
            "NO_PROXY": without_proxy,
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
            # This module parses the output, and a site's log must not depend on the locale.
            "PYTHONIOENCODING": "utf-8",
        }


def filter_log(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a server's log, except Flower's lines and tracebacks of fedhet's errors.

    An error of fedhet is shortened to its message. Tracebacks of other errors are unchanged.
    """
    trace: list[str] = []
    for line in lines:
        text = message_of(line.rstrip())
        plain = _COLOR.sub("", text)
        if plain.startswith("Traceback (most recent call last)") or (trace and plain[:1] == " "):
            trace.append(text)
        elif trace and (match := _FEDHET_ERROR.match(plain)):
            yield f"error: {plain[match.end() :]}"
            trace = []
        elif plain and not _FLOWER_LINE.match(plain):
            yield from trace
            yield text
            trace = []
    yield from trace


def submit(
    config: Config,
    connection: Connection,
    say: Callable[[str], None],
    key: Ed25519PrivateKey | None = None,
) -> None:
    """Execute a run on a deployment, and wait until the run ends.

    Args:
        config: Configuration of the run.
        connection: Connection to the server.
        say: Function that shows a line to the user.
        key: Private key of the publisher that signs the run's app, or None to send it unsigned.

    Raises:
        FedhetError: If the run failed, or if the server does not forward the signature.
        SettingsError: If the method supports only simulations.
    """
    # Import lazily: `doctor` must work on a machine where PyTorch cannot be imported.
    from fedhet.config.resolve import check_deployable

    check_deployable(config)
    connection.check_reachable()
    say(f"sending the run to {connection.address} …")
    run_id = _start_run(connection, build_app(config), key)
    say(f"run {run_id} on {connection.address}; waiting for the server app to start …")
    connection.follow(run_id, say)
    try:
        listed = connection.flwr("list", CONNECTION, "--run-id", run_id, "--format", "json")
    except FedhetError:
        if connection.is_listening():
            raise
        raise FedhetError(
            f"the server at {connection.address} stopped during run {run_id}. The run's directory "
            "keeps the finished rounds. Start the server again with the same --database, and "
            "submit the run again with the same --out and --set resume=true."
        ) from None
    status = str(json.loads(listed)["runs"][0]["status"])
    if status != COMPLETED:
        raise FedhetError(
            f"run {run_id} ended with status {status!r}. See the output above and the server's log."
        )


def build_app(config: Config) -> bytes:
    """Build the Flower app of a run.

    The app contains only settings and no code, because each site uses its own installation of
    fedhet.
    """
    from flwr.cli.build import build_fab_from_files

    components = {
        "serverapp": "fedhet.server.app:app",
        "clientapp": "fedhet.client_runtime.app:app",
    }
    settings = nest(to_flower(config.flat()))
    flower = {"publisher": "fedhet", "components": components, "config": settings}
    project = {"name": "fedhet-run", "version": __version__, "dependencies": []}
    content = tomli_w.dumps({"project": project, "tool": {"flwr": {"app": flower}}})
    return bytes(build_fab_from_files({"pyproject.toml": content.encode()})[0])


def _start_run(connection: Connection, app: bytes, key: Ed25519PrivateKey | None) -> str:
    """Start a run of an app, and return Flower's id of the run.

    Raises FedhetError if the run does not start, or if the server does not forward the signature.
    """
    from flwr.proto.control_pb2 import StartRunRequest, StopRunRequest
    from flwr.proto.fab_pb2 import Fab

    verifications = sign_app(key, app) if key is not None else {}
    fab = Fab(hash_str=hashlib.sha256(app).hexdigest(), content=app, verifications=verifications)
    with _client(connection) as client:
        started = client.StartRun(StartRunRequest(fab=fab))
        is_lost = bool(verifications) and started.note != FORWARDED
        if is_lost and started.HasField("run_id"):
            client.StopRun(StopRunRequest(run_id=started.run_id))
    if not started.HasField("run_id"):
        raise FedhetError(f"server {connection.address}: the run did not start")
    if is_lost:
        raise FedhetError(
            f"server {connection.address}: the sites would not receive the signature of the run, "
            "so the run was stopped. Start the server with `fedhet server` instead of "
            "`flower-superlink`."
        )
    return str(started.run_id)


@contextlib.contextmanager
def interrupted_by_terminate() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C in the block, so that processes and files are cleaned up."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listens(host: str, port: int) -> bool:
    """Return whether any process listens at an address."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 5.0):
        return True
    return False


def program(name: str) -> str:
    """Return the path of a Flower command, next to this Python or on the PATH.

    Raises FedhetError if the command is not found.
    """
    sibling = Path(sys.executable).parent / name
    path = str(sibling) if sibling.exists() else shutil.which(name)
    if path is None:
        raise FedhetError(f"command {name} not found. Install Flower with `pip install flwr`.")
    return path


def _write_toml(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Site:
    """Registered site of a deployment."""

    name: str
    node: int
    """Flower's node id."""
    state: str
    """State of the site: online, offline, or registered (never online)."""
    since: datetime | None
    """Time at which the site went online or offline, in UTC."""
    key: bytes = b""
    """Public key, in Flower's serialization."""


@dataclass(frozen=True)
class DeployedRun:
    """Run on a deployed server."""

    number: int
    state: str
    """Flower's status of the run: pending, running, finished:completed, …"""
    lines: tuple[str, ...]
    """Last lines of the run's log."""


def sites(connection: Connection) -> list[Site]:
    """Return the registered sites, sorted by name. Raises FedhetError if the request fails."""
    from flwr.proto.control_pb2 import ListNodesRequest

    with _client(connection) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    registered = []
    for node in nodes:
        if node.status != "unregistered":
            times = {"online": node.last_activated_at, "offline": node.last_deactivated_at}
            since = times.get(node.status)
            changed = datetime.fromisoformat(since) if since else None
            registered.append(Site(node.name, node.node_id, node.status, changed, node.public_key))
    return sorted(registered, key=lambda site: (site.name, site.node))


def register(
    connection: Connection, keys: Sequence[tuple[str, Path]], *, replace: bool = False
) -> Iterator[str]:
    """Register public keys under client names, and yield a line about each key.

    Flower's server accepts any number of keys under one name, so this function rejects a second
    key. All keys are checked before the first key is registered. Registering a key again has no
    effect.

    Args:
        connection: The connection to the server.
        keys: Pairs of a client's name and the file of its public key.
        replace: Whether a key may replace (and unregister) another key with the same name.

    Raises:
        FedhetError: If a file is not a public key, if a name belongs to another key, or if a key is
            registered under another name.
    """
    requested = [(name, path, _public_key(path)) for name, path in keys]
    registered = sites(connection)
    for index, (name, path, key) in enumerate(requested):
        earlier = requested[:index]
        if any(name == other_name or key == other_key for other_name, _, other_key in earlier):
            raise FedhetError(f"{path}: expected a different name and key in each file")
        current = next((site.name for site in registered if site.key == key), name)
        if current != name:
            raise FedhetError(
                f"{path}: this key is registered as '{current}', expected '{name}'. Remove "
                f"'{current}' with `fedhet sites {connection.address} --remove {current}`, and "
                "create a new key pair."
            )
        if not replace and any(site.name == name and site.key != key for site in registered):
            raise FedhetError(
                f"{path}: a different key is registered as '{name}' on {connection.address}. "
                "Choose another --name, or replace the registered key with --replace."
            )
    for name, path, key in requested:
        former = [site for site in registered if site.name == name]
        if any(site.key == key for site in former):
            yield f"{name} is already registered with this key"
        elif connection.register(path, name):
            yield f"{name} is now registered"
        else:
            raise FedhetError(
                f"{path}: this key was removed from the server and cannot be registered again. "
                "Create a new key pair with `fedhet certs DIR --key NAME`."
            )
        # Unregister last, so that the name always has a key, even if registering fails.
        for site in former:
            if site.key != key:
                _unregister(connection, site)
                yield f"the former key of {name} is no longer accepted"


def _public_key(path: Path) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    key = read_pem(path, load_ssh_public_key, "a public key in OpenSSH format")
    if not isinstance(key, EllipticCurvePublicKey):
        rule = "expected an EC key, as created by `fedhet certs DIR --key NAME`"
        raise FedhetError(f"{path}: unsupported type of key, {rule}")
    return public_key_to_bytes(key)


def unregister(connection: Connection, name: str) -> int:
    """Unregister all sites named `name`, and return their number.

    Raises FedhetError if the request fails.
    """
    named = [site for site in sites(connection) if site.name == name]
    for site in named:
        _unregister(connection, site)
    return len(named)


def _unregister(connection: Connection, site: Site) -> None:
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    with _client(connection) as client:
        client.UnregisterNode(UnregisterNodeRequest(node_id=site.node))


def newest_runs(connection: Connection) -> list[DeployedRun]:
    """Return a server's last runs, newest first. Raises FedhetError if the request fails."""
    from flwr.proto.control_pb2 import ListRunsRequest, StreamLogsRequest

    with _client(connection) as client:
        runs = client.ListRuns(ListRunsRequest(limit=NUM_RUNS)).run_dict.values()
        deployed = []
        for run in sorted(runs, key=lambda run: run.pending_at, reverse=True):
            request = StreamLogsRequest(run_id=run.run_id, after_timestamp=0.0)
            log = next((part.log_output for part in client.StreamLogs(request)), "")
            lines = [*filter_log(log.splitlines())][-NUM_LOG_LINES:]
            state = ":".join(filter(None, (run.status.status, run.status.sub_status)))
            deployed.append(DeployedRun(run.run_id, state, tuple(lines)))
    return deployed


@contextlib.contextmanager
def _client(connection: Connection) -> Iterator[Any]:
    """Yield a client for the control API, and convert errors in the block to FedhetError."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    read_certificate(connection.authority)
    client = ControlHttpClient.from_server_address(
        server_address=connection.address,
        insecure=False,
        root_certificates=read_file(connection.authority),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fedhet")],
    )
    try:
        yield client
    except Exception as error:
        raise FedhetError(f"request to server {connection.address} failed: {error}") from None
    finally:
        client.close()
