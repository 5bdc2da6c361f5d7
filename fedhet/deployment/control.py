"""A deployed server: its sites and runs, through Flower's command line and its control API.

Flower's command line registers nodes and starts and follows runs. It lists sites by numbers; only
the control API has the names they registered with.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

import tomli_w

from fedhet.base import __version__
from fedhet.base.errors import FedhetError, error_reason
from fedhet.config.resolve import Config, check_deployable
from fedhet.config.sources import to_flower
from fedhet.deployment.certs import LOCAL_HOSTS, read_certificate
from fedhet.runs.units import message_of
from fedhet.settings.schema import nest
from fedhet.settings.text import join_host_port, split_host_port

CONNECTION = "fedhet-server"
"""The connection's name; Flower would take a folder of this name for an app in its old form."""
COMPLETED = "finished:completed"
_FLOWERS_OWN = re.compile(
    r"(INFO|DEBUG)\b|Using SuperLink|Success|ERROR\b.*(ServerApp raised|Exit Code: 201)"
    r"|An unhandled exception occurred in the ServerApp|For more information, visit: <https://flower"
)
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_FRAME = re.compile("[─│╭╮╰╯]+")
_UNREACHABLE = "Connection to the SuperLink is unavailable"
LOOK_SECONDS = 5.0
"""Between two looks whether the server of a run that is followed still answers."""
PATIENCE = 15.0
"""Seconds for which a server that has just started may be unreachable."""
FEW_LINES = 8
"""Of a run's log, its last ones."""
_OURS = re.compile(r"fedhet\.base\.errors\.\w+: ")


@dataclass(frozen=True)
class Connection:
    """Flower's command line for one server; its configuration is below `home`."""

    home: Path
    address: str
    """HOST:PORT of the server's control API."""
    authority: Path
    """The certificate of the CA that signed the server's certificate."""

    @property
    def place(self) -> tuple[str, int]:
        """The host and the port of the server. Raises FedhetError."""
        try:
            return split_host_port(self.address)
        except ValueError as error:
            raise FedhetError(f"server: {error}") from None

    def prepare(self) -> None:
        """Write the connection to the configuration of Flower's command line.

        Raises FedhetError for an address that is not HOST:PORT, and for a file without the
        certificate of a CA.
        """
        address = join_host_port(*self.place)
        if not self.authority.is_file():
            raise FedhetError(f"{self.authority}: no such file; it must be the CA's certificate")
        read_certificate(self.authority)
        connection = {"address": address, "root-certificates": str(self.authority.resolve())}
        superlinks = {"default": CONNECTION, CONNECTION: connection}
        _write_toml(self.home / "config.toml", {"superlink": superlinks})
        shutil.rmtree(self._nowhere, ignore_errors=True)
        self._nowhere.mkdir(parents=True)

    def register(self, public_key: Path, name: str) -> bool:
        """Register a node under its client's name; False if its key is already registered."""
        try:
            self.flwr("supernode", "register", public_key, CONNECTION, "--name", name)
        except FedhetError as error:
            if "already" in str(error):
                return False
            raise
        return True

    def follow(self, run_id: str, say: Callable[[str], None]) -> None:
        """Pass the log lines of the run's server to `say` until the run is over.

        Also say when the server does not answer, and when it does again: Flower's command line is
        silent for a minute then.
        """
        ended = threading.Event()

        def look() -> None:
            gone = False
            while not ended.wait(LOOK_SECONDS):
                if self.answers() == gone:
                    gone = not gone
                    now = "does not answer; waiting for it" if gone else "answers again"
                    say(f"the server at {self.address} {now}")

        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        command = [program("flwr"), "log", run_id, CONNECTION, "--stream"]
        try:
            stream: subprocess.Popen[str] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **self._options()
            )
            with stream:
                try:
                    for line in readable(stream.stdout or ()):
                        say(line)
                finally:
                    stream.terminate()
        finally:
            ended.set()
            looking.join()

    def require_answer(self) -> None:
        """Raise FedhetError if no server listens at the address, or its certificate is refused."""
        context = ssl.create_default_context(cafile=str(self.authority))
        try:
            with socket.create_connection(self.place, 5.0) as plain:
                context.wrap_socket(plain, server_hostname=self.place[0]).close()
        except ssl.SSLCertVerificationError as error:
            raise FedhetError(
                f"server {self.address}: certificate refused ({error.verify_message}), expected a "
                f"certificate for {self.place[0]} signed by the CA of {self.authority}. Give the "
                "server's own CA certificate, and an address for which `fedhet certs --host` made "
                "the server's."
            ) from None
        except ssl.SSLError as error:
            raise FedhetError(
                f"server {self.address}: no TLS ({error.reason}), expected the port of Flower's "
                "control API with TLS"
            ) from None
        except OSError:
            raise FedhetError(
                f"no server answers at {self.address}: is it running, and is the port forwarded?"
            ) from None

    def answers(self) -> bool:
        """Return whether something listens at the server's address."""
        return listens(*self.place)

    def flwr(self, *words: object) -> str:
        """Return the output of Flower's command line. Raises FedhetError if it fails."""
        absolute = [word.resolve() if isinstance(word, Path) else word for word in words]
        command, end = [program("flwr"), *map(str, absolute)], time.monotonic() + PATIENCE
        while True:
            done: subprocess.CompletedProcess[str] = subprocess.run(
                command, capture_output=True, check=False, **self._options()
            )
            if _UNREACHABLE not in done.stdout + done.stderr or time.monotonic() > end:
                break
            time.sleep(1.0)
        if done.returncode != 0 or '"success": false' in done.stdout:
            message = done.stdout
            with contextlib.suppress(ValueError):  # it is not Flower's JSON
                found = json.loads(message)
                fields = found.items() if isinstance(found, dict) else ()
                message = next((f"{v} " for k, v in fields if "message" in k), message)
            text = _FRAME.sub(" ", _COLOR.sub("", message + done.stderr))
            output = " ".join(text.split())
            raise FedhetError(f"`flwr {' '.join(map(str, words[:2]))}` failed: {output[-500:]}")
        return done.stdout

    @property
    def _nowhere(self) -> Path:
        """An empty folder in which Flower's command line runs: it reads and changes projects."""
        return self.home / "nowhere"

    def _options(self) -> dict[str, Any]:
        """Return where and how Flower's command line runs."""
        text = {"encoding": "utf-8", "errors": "replace"}
        return {"cwd": self._nowhere, "env": self.environment(), **text}

    def environment(self) -> dict[str, str]:
        """Return the environment for all of Flower's programs that are started here."""
        programs = str(Path(sys.executable).parent)
        # A proxy cannot reach this machine's loopback, and `require_answer` has reached the server
        # without one. gRPC and Python read one name each.
        direct = [os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), *LOCAL_HOSTS]
        without_proxy = ",".join(filter(None, [*direct, self.place[0]]))
        return {
            **os.environ,
            "FLWR_HOME": str(self.home.resolve()),
            "FLWR_TELEMETRY_ENABLED": "0",
            "no_proxy": without_proxy,
            "NO_PROXY": without_proxy,
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "PATH": os.pathsep.join([programs, os.environ.get("PATH", os.defpath)]),
            # Their output is read here, and a site's log must not depend on the locale.
            "PYTHONIOENCODING": "utf-8",
        }


def readable(lines: Iterable[str]) -> Iterator[str]:
    """Yield a server's log without Flower's own lines, and of our errors only the message.

    The traceback of any other error is kept in full.
    """
    trace: list[str] = []
    for line in lines:
        text = message_of(line.rstrip())
        plain = _COLOR.sub("", text)
        if plain.startswith("Traceback (most recent call last)") or (trace and plain[:1] == " "):
            trace.append(text)
        elif trace and (ours := _OURS.match(plain)):
            yield f"error: {plain[ours.end() :]}"
            trace = []
        elif plain and not _FLOWERS_OWN.match(plain):
            yield from trace
            yield text
            trace = []
    yield from trace


def submit(config: Config, connection: Connection, say: Callable[[str], None]) -> None:
    """Run `config` on the deployment at `connection` until it ends.

    The app that is sent has the settings and no code: each site uses its own installation. Raises
    FedhetError if the run fails, and SettingsError for a method that is only simulated.
    """
    check_deployable(config)
    connection.require_answer()
    say(f"sending the run to {connection.address} …")
    components = {
        "serverapp": "fedhet.server.app:app",
        "clientapp": "fedhet.client_runtime.app:app",
    }
    settings = nest(to_flower(config.flat()))
    flower = {"publisher": "fedhet", "components": components, "config": settings}
    project = {"name": "fedhet-run", "version": __version__, "dependencies": []}
    app = connection.home / "app"
    shutil.rmtree(app, ignore_errors=True)
    _write_toml(app / "pyproject.toml", {"project": project, "tool": {"flwr": {"app": flower}}})
    started = json.loads(connection.flwr("run", app, CONNECTION, "--format", "json"))
    run_id = str(started["run-id"])
    say(f"run {run_id} on {connection.address}; waiting for its server app to start …")
    connection.follow(run_id, say)
    try:
        listed = connection.flwr("list", CONNECTION, "--run-id", run_id, "--format", "json")
    except FedhetError:
        if connection.answers():
            raise
        raise FedhetError(
            f"the server at {connection.address} has gone, with run {run_id}. Its rounds are in "
            "the run's directory: start the server again with the same --database, and submit the "
            "run again with the same --out and --set resume=true"
        ) from None
    status = str(json.loads(listed)["runs"][0]["status"])
    if status != COMPLETED:
        raise FedhetError(f"run {run_id} ended as {status!r}: see above, and the server's log")


@contextlib.contextmanager
def interrupted_by_terminate() -> Iterator[None]:
    """Let SIGTERM end the block as Ctrl-C does, so that it leaves no process and no folder."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def listens(host: str, port: int) -> bool:
    """Return whether something listens at an address."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), 5.0):
        return True
    return False


def program(name: str) -> str:
    """Return the path of one of Flower's commands: next to this Python, or on the PATH."""
    sibling = Path(sys.executable).parent / name
    found = str(sibling) if sibling.exists() else shutil.which(name)
    if found is None:
        raise FedhetError(f"cannot find {name}: it comes with Flower, `pip install flwr`")
    return found


def _write_toml(path: Path, content: Mapping[str, object]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tomli_w.dumps(content), encoding="utf-8")


@dataclass(frozen=True)
class Site:
    """A registered site of a deployment."""

    name: str
    node: int
    """Flower's number for it."""
    state: str
    """online, offline, or registered: it has never been online."""
    since: datetime | None
    """When it went online or offline, in UTC."""
    key: bytes = b""
    """The site's public key, in Flower's serialization."""


@dataclass(frozen=True)
class DeployedRun:
    """A run on a deployed server."""

    number: int
    state: str
    """Flower's: pending, running, finished:completed, …"""
    lines: tuple[str, ...]
    """The last lines of its log."""


def sites(connection: Connection) -> list[Site]:
    """Return the registered sites, by name. Raises FedhetError."""
    from flwr.proto.control_pb2 import ListNodesRequest

    with _client(connection) as client:
        nodes = client.ListNodes(ListNodesRequest()).nodes_info
    found = []
    for node in nodes:
        if node.status != "unregistered":
            times = {"online": node.last_activated_at, "offline": node.last_deactivated_at}
            since = times.get(node.status)
            when = datetime.fromisoformat(since) if since else None
            found.append(Site(node.name, node.node_id, node.status, when, node.public_key))
    return sorted(found, key=lambda site: (site.name, site.node))


def register(
    connection: Connection, keys: Sequence[tuple[str, Path]], *, replace: bool = False
) -> Iterator[str]:
    """Register public keys under their names, and yield a line for each key.

    Flower's server accepts any number of keys under one name, so the names are compared here. All
    keys are checked before the first is registered. Registering a key again changes nothing.

    Args:
        connection: The connection to the server.
        keys: Pairs of a client's name and the file of its public key.
        replace: Whether a key may take a name from another key, which is then unregistered.

    Raises:
        FedhetError: If a file is no public key, a name belongs to another key, or the key was
            registered under another name.
    """
    given = [(name, path, _public_key(path)) for name, path in keys]
    known = sites(connection)
    for index, (name, path, key) in enumerate(given):
        if any(name == other or key == theirs for other, _, theirs in given[:index]):
            raise FedhetError(f"{path}: expected a different name and key in each file")
        other = next((site.name for site in known if site.key == key), name)
        if other != name:
            raise FedhetError(
                f"{path}: this key is registered as '{other}', expected '{name}'. Remove it with "
                f"`fedhet sites {connection.address} --remove {other}`, and make a new key pair"
            )
        if not replace and any(site.name == name and site.key != key for site in known):
            raise FedhetError(
                f"{path}: another key is registered as '{name}' at {connection.address}. Choose "
                "another --name, or let this key take the other's place with --replace"
            )
    for name, path, key in given:
        former = [site for site in known if site.name == name]
        if any(site.key == key for site in former):
            yield f"{name} is already registered with this key"
        elif connection.register(path, name):
            yield f"{name} is now registered"
        else:
            raise FedhetError(
                f"{path}: this key was removed from the server, which never accepts it again. "
                "Make a new key pair with `fedhet certs DIR --key NAME`"
            )
        # Only now, so that the name always has a key, even if registering fails.
        for site in former:
            if site.key != key:
                _unregister(connection, site)
                yield f"the key that was registered as {name} before is no longer accepted"


def _public_key(path: Path) -> bytes:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    try:
        key = load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise FedhetError(
            f"{path}: cannot be read as a public key ({error_reason(error)})"
        ) from None
    if not isinstance(key, EllipticCurvePublicKey):
        rule = "expected an EC key, as made by `fedhet certs DIR --key NAME`"
        raise FedhetError(f"{path}: unsupported type of key, {rule}")
    return public_key_to_bytes(key)


def unregister(connection: Connection, name: str) -> int:
    """Unregister the sites with this name; return how many there were. Raises FedhetError."""
    named = [site for site in sites(connection) if site.name == name]
    for site in named:
        _unregister(connection, site)
    return len(named)


def _unregister(connection: Connection, site: Site) -> None:
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    with _client(connection) as client:
        client.UnregisterNode(UnregisterNodeRequest(node_id=site.node))


def newest_runs(connection: Connection, most: int = 3) -> list[DeployedRun]:
    """Return the last runs of a server, the newest first, with the end of their logs.

    Raises FedhetError.
    """
    from flwr.proto.control_pb2 import ListRunsRequest, StreamLogsRequest

    with _client(connection) as client:
        runs = client.ListRuns(ListRunsRequest(limit=most)).run_dict.values()
        found = []
        for run in sorted(runs, key=lambda run: run.pending_at, reverse=True):
            request = StreamLogsRequest(run_id=run.run_id, after_timestamp=0.0)
            log = next((part.log_output for part in client.StreamLogs(request)), "")
            lines = [*readable(log.splitlines())][-FEW_LINES:]
            state = ":".join(filter(None, (run.status.status, run.status.sub_status)))
            found.append(DeployedRun(run.run_id, state, tuple(lines)))
    return found


@contextlib.contextmanager
def _client(connection: Connection) -> Iterator[Any]:
    """Yield a client of the control API, whose errors are raised as FedhetError."""
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    client = ControlHttpClient.from_server_address(
        server_address=connection.address,
        insecure=False,
        root_certificates=connection.authority.read_bytes(),
        interceptors=[RuntimeVersionHttpInterceptor(component_name="fedhet")],
    )
    try:
        yield client
    except Exception as error:
        raise FedhetError(f"the server at {connection.address} did not answer: {error}") from None
    finally:
        client.close()
