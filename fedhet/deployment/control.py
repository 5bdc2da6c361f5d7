"""What a deployed server says of its sites and runs: Flower's control API, called directly.

Flower's command line lists sites by numbers; only the API has the names they registered with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from fedhet.base.errors import FedhetError, reason_of
from fedhet.deployment.flower_cli import Connection, readable

FEW_LINES = 8
"""Of a run's log, its last ones."""


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
    found = [_site(node) for node in nodes if node.status != "unregistered"]
    return sorted(found, key=lambda site: (site.name, site.node))


def _site(node: Any) -> Site:
    times = {"online": node.last_activated_at, "offline": node.last_deactivated_at}
    since = times.get(node.status)
    when = datetime.fromisoformat(since) if since else None
    return Site(node.name, node.node_id, node.status, when, node.public_key)


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
        raise FedhetError(f"{path}: cannot be read as a public key ({reason_of(error)})") from None
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
