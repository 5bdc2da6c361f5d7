"""Connection between sites and server, which depends on the installed version of Flower.

Up to Flower 1.39, sites use gRPC on a separate port. From Flower 1.40, they use HTTP, and Flower
serves them on the same port as its control API, which authenticates nobody. This module then opens
a second port, and places a barrier between this port and Flower.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, MutableMapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from fedhet.base.errors import FedhetError, error_reason
from fedhet.settings.addresses import join_host_port

Address = tuple[str, int]
"""Host and port."""
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GRPC, HTTP = "gRPC", "HTTP"
REQUIREMENTS = {GRPC: "flwr[simulation]>=1.39,<1.40", HTTP: "flwr[simulation]>=1.40,<1.43"}
"""Versions of Flower that use each transport."""
FLOWER = Version(metadata.version("flwr"))
TRANSPORT = GRPC if FLOWER.release < (1, 40) else HTTP
"""Transport of the installed version of Flower."""
PROBE_SECONDS = 5.0
"""Time limit for a reply of the server's port for sites, in seconds."""
_SITES_PATH = re.compile(rb"/v1/fleet(/[A-Za-z0-9_-]+)+")
"""Paths of Flower's API for sites. Escapes, dots, and empty segments are refused, not resolved."""


class Barrier:
    """ASGI app that passes only the requests of sites to Flower, except on the control port."""

    def __init__(self, app: App, control_port: int) -> None:
        self._app, self._control_port = app, control_port

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse a connection."""
        if scope["type"] == "lifespan" or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            empty = [(b"content-length", b"0")]
            await send({"type": "http.response.start", "status": 404, "headers": empty})
            await send({"type": "http.response.body"})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _may_pass(self, scope: Scope) -> bool:
        # `server` is the address of the socket, which no client can choose.
        if (scope.get("server") or (None, None))[1] == self._control_port:
            return True
        raw = scope.get("raw_path") or b""
        is_of_sites = scope["type"] == "http" and _SITES_PATH.fullmatch(raw) is not None
        # Flower's router reads `path`, without `root_path`.
        return is_of_sites and scope["path"] == raw.decode() and not scope.get("root_path")


def open_to_sites(sites: Address) -> list[str]:
    """Prepare Flower's SuperLink in this process to serve sites at an address of their own.

    Returns:
        Options of `flower-superlink`, in addition to the address of the control API.

    Raises:
        FedhetError: If the installed version of Flower is unknown, because sites could then reach
            the control API, or if the address is in use.
    """
    if TRANSPORT == GRPC:
        return ["--fleet-api-address", join_host_port(*sites)]
    flower = importlib.import_module("flwr.superlink.cli.flower_superlink")
    uvicorn = getattr(flower, "uvicorn", None)
    if FLOWER.release >= (1, 43) or uvicorn is None:
        raise FedhetError(
            f"Flower {FLOWER}: unsupported, because sites might reach the control API. Install "
            f"`{REQUIREMENTS[HTTP]}` with pip."
        )
    opened = listen(sites)

    def run(app: App, *, host: str, port: int, **options: Any) -> None:
        server = uvicorn.Server(uvicorn.Config(Barrier(app, port), **options))
        with contextlib.suppress(KeyboardInterrupt):  # as uvicorn.run does
            server.run(sockets=[listen((host, port)), opened])

    # Flower gets no other part of uvicorn, so it cannot open a port without the barrier.
    flower.uvicorn = SimpleNamespace(run=run)  # type: ignore[attr-defined]
    return []


def listen(address: Address) -> socket.socket:
    """Return a socket that listens at an address. Raises FedhetError if it cannot be opened."""
    try:
        family = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0][0]
        both = family == socket.AF_INET6
        return socket.create_server(address, family=family, backlog=2048, dualstack_ipv6=both)
    except OSError as error:
        reason = error_reason(error)
        raise FedhetError(f"{join_host_port(*address)}: cannot listen ({reason})") from None


def transport_of(address: Address, authority: Path | None = None) -> str:
    """Return the transport of a server, from a TLS handshake at its address for sites.

    Args:
        address: The server's address for sites.
        authority: File of the CA's certificate, or None to skip the verification; no data is sent.

    Raises:
        OSError: If the server cannot be reached, or if the handshake fails.
    """
    context = ssl.create_default_context(cafile=authority and str(authority))
    if authority is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    with (
        socket.create_connection(address, PROBE_SECONDS) as connection,
        context.wrap_socket(connection, server_hostname=address[0]) as encrypted,
    ):
        return GRPC if encrypted.selected_alpn_protocol() == "h2" else HTTP


def check_transport(server: str, transport: str) -> None:
    """Check that a server's transport is the transport of the installed version of Flower.

    Raises FedhetError if they differ, because the site cannot communicate with the server then.
    """
    if transport != TRANSPORT:
        raise FedhetError(
            f"server {server}: expected {TRANSPORT}, which Flower {FLOWER} at this site uses, got "
            f"{transport}. Install `{REQUIREMENTS[transport]}` at this site with pip, or "
            f"`{REQUIREMENTS[TRANSPORT]}` at the server."
        )
