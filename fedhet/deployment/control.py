"""What a deployed server says of its sites and runs: Flower's control API, called directly.

Flower's command line lists sites by numbers; only the API has the names they registered with.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fedhet.deployment.flower_cli import Connection, readable
from fedhet.errors import FedhetError

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
    return Site(
        node.name, node.node_id, node.status, datetime.fromisoformat(since) if since else None
    )


def unregister(connection: Connection, name: str) -> int:
    """Unregister the sites with this name; return how many there were. Raises FedhetError."""
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    named = [site for site in sites(connection) if site.name == name]
    with _client(connection) as client:
        for site in named:
            client.UnregisterNode(UnregisterNodeRequest(node_id=site.node))
    return len(named)


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
