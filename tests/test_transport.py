"""The server's port for sites: only Flower's API for sites replies there, and nodes must match."""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import flwr.proto
import grpc
import pytest
from fastapi import FastAPI, Request, WebSocket
from fastapi.routing import iter_route_contexts
from flwr.superlink.main import create_app
from interruption import until
from packaging.requirements import Requirement
from packaging.version import Version
from typer.testing import CliRunner

from fedhet.base.errors import FedhetError
from fedhet.cli import app
from fedhet.deployment import certs, control, doctor, processes, transport
from fedhet.deployment.local import LocalDeployment, free_port
from fedhet.deployment.transport import GRPC, HTTP, TRANSPORT

HEALTHY = Path(__file__).parents[1] / "docker" / "healthy.py"
FLOWER = importlib.import_module("flwr.superlink.cli.flower_superlink")
MODULES = [
    importlib.import_module(f"flwr.proto.{each.name}")
    for each in pkgutil.iter_modules(flwr.proto.__path__)
    if each.name.endswith("_pb2")
]
CALLS = {
    f"/{service.full_name}/{call.name}"
    for module in MODULES
    for service in module.DESCRIPTOR.services_by_name.values()
    for call in service.methods
}
"""All gRPC calls of the installed Flower."""


def routes():
    """Return all pairs of a method and a path that the installed Flower registers."""
    contexts = iter_route_contexts(create_app().routes)
    registered = {(m, each.path) for each in contexts for m in each.methods or ("GET",)}
    assert {("GET", "/docs"), ("GET", "/openapi.json"), ("GET", "/health")} <= registered
    assert {("POST", f"/v1/control/{name}") for name in ("list-nodes", "start-run")} <= registered
    assert any(path.startswith("/v1/runtime/") for _, path in registered)
    assert (HTTP == TRANSPORT) == any(path.startswith("/v1/fleet/") for _, path in registered)
    return sorted(registered)


# --- the barrier, with an app that replies to everything ----------------------------------------


def reaches_everything():
    """Return an app that replies to any request with the path that it received."""
    app = FastAPI(openapi_url=None)

    @app.api_route("/{path:path}", methods=["GET", "POST", "HEAD", "OPTIONS", "PUT"])
    async def reply(request: Request):
        return {"reached": request.scope["path"]}

    @app.websocket("/{path:path}")
    async def accept(websocket: WebSocket):
        await websocket.accept()

    return app


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """Serve this app on two ports, as `fedhet server` does from Flower 1.40."""
    keys = tmp_path_factory.mktemp("keys")
    certs.make(keys, [], [], 30)
    sites, controls = free_port(), free_port()
    servers = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "TRANSPORT", HTTP)
        patch.setattr(transport, "FLOWER", Version("1.42"))
        uvicorn = FLOWER.uvicorn
        start = uvicorn.Server
        patch.setattr(FLOWER, "uvicorn", uvicorn)
        patch.setattr(uvicorn, "Server", lambda config: servers.append(start(config)) or servers[0])
        assert transport.open_to_sites(("127.0.0.1", sites)) == []
        options = {
            "ssl_certfile": str(keys / certs.SERVER_CERTIFICATE),
            "ssl_keyfile": str(keys / certs.SERVER_KEY),
        }
        address = {"host": "127.0.0.1", "port": controls, "reload": False, "workers": 1}
        thread = threading.Thread(
            target=FLOWER.uvicorn.run, args=(reaches_everything(),), kwargs=address | options
        )
        thread.start()
        until(lambda: servers and servers[0].started)
    yield sites, controls, keys / certs.CA_CERTIFICATE
    servers[0].should_exit = True
    thread.join(30)
    assert not thread.is_alive()


def exchange(port, *requests, context=None):
    """Send requests over one TLS connection; return all that the server sends."""
    context = context or unverified()
    with (
        socket.create_connection(("127.0.0.1", port), 5.0) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        connection.settimeout(5.0)
        received = b""
        for request in requests:
            connection.sendall(request.encode("latin-1"))
        try:
            while data := connection.recv(65536):
                received += data
        except (TimeoutError, OSError):
            pass
    return received


def unverified():
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def request(target, method="GET", *headers, close=True):
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.append("Host: localhost")
    if close:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""])


REFUSED = [
    "/", "*", "/docs", "/openapi.json", "/health", "/v1/control/list-nodes", "/v1/runtime/x",
    "/v1/fleet", "/v1/fleet/", "/v1/fleet//pull-messages", "//v1/fleet/pull-messages",
    "/v1/fleet/../control/list-nodes", "//v1/fleet/../control/list-nodes",
    "/v1/fleet/%2e%2e/control/list-nodes", "/v1/fleet/..%2fcontrol%2flist-nodes",
    "/v1/fleet/%2E%2E/control/list-nodes", "/v1/control/list-nodes/../../fleet/pull-messages",
    "/v1/fleet%2fpull-messages", "/%76%31/fleet/pull-messages", "/v1/fleet/pull%2dmessages",
    "/V1/FLEET/pull-messages", "/v1/Fleet/pull-messages", "/v1/fleet/pull-messages;a=b",
    "/v1/fleet/pull-messages%00", "/v1/fleet/pull-messages%0a", "/v1/fleet/pull-messages%3f",
    "/v1/fleet/pull-messages/", "/v1/fleet/.", "/v1/fleet\\pull-messages", "/v1/fleetcontrol/x",
    "/v1/control/list-nodes?/v1/fleet/pull-messages", "/v1/control/list-nodes#/v1/fleet/x",
    "https://localhost/v1/control/list-nodes", "https://localhost/v1/fleet/../control/list-nodes",
    "https://localhost/v1/fleet/@evil/v1/control/list-nodes", "localhost:443",
    "/v1/fleet/\u00e9", "/v1/fleet/%c3%a9",
]  # fmt: skip


@pytest.mark.parametrize("target", REFUSED)
def test_barrier_passes_no_other_path(guarded, target):
    sites, _, _ = guarded
    for method in ("GET", "POST", "CONNECT" if target == "localhost:443" else "OPTIONS"):
        reply = exchange(sites, request(target, method))
        assert b"reached" not in reply, target
        assert not reply or re.match(rb"HTTP/1.1 (404|400) ", reply), reply


def test_barrier_passes_paths_of_sites_and_everything_on_the_control_port(guarded):
    sites, controls, authority = guarded
    context = ssl.create_default_context(cafile=str(authority))
    for target in ("/v1/fleet/pull-messages", "/v1/fleet/pull-messages?a=/v1/control/list-nodes"):
        for method in ("GET", "POST", "PUT"):
            reply = exchange(sites, request(target, method), context=context)
            assert b'{"reached":"/v1/fleet/pull-messages"}' in reply
    for target in ("/v1/control/list-nodes", "/docs", "/v1/fleet/pull-messages"):
        assert b"reached" in exchange(controls, request(target))


HEADERS = [
    "Host: localhost/v1/fleet/x?", "Host: localhost:8000", "X-Forwarded-Prefix: /v1/fleet",
    "X-Forwarded-Port: 8000", "X-Forwarded-Host: localhost:8000", "X-Original-URL: /v1/fleet/x",
    "X-Rewrite-URL: /v1/fleet/x", "X-HTTP-Method-Override: GET", "Forwarded: host=localhost:8000",
    "X-Forwarded-For: 127.0.0.1", "X-Script-Name: /v1/fleet", "Upgrade: h2c",
]  # fmt: skip


@pytest.mark.parametrize("header", HEADERS)
def test_no_header_opens_the_barrier(guarded, header):
    sites, controls, _ = guarded
    words = request("/v1/control/list-nodes", "POST", header)
    assert b"reached" not in exchange(sites, words)
    if "?" not in header:
        assert b"reached" in exchange(controls, words), "the header is not refused by itself"


def test_barrier_checks_every_request_of_a_connection(guarded):
    sites, _, _ = guarded
    first = request("/v1/fleet/pull-messages", close=False)
    second = request("/v1/control/list-nodes")
    reply = exchange(sites, first, second)
    assert reply.count(b"HTTP/1.1 ") == 2
    assert reply.count(b"reached") == 1
    body = "Content-Length: 5"
    hidden = request("/v1/fleet/x", "POST", body, close=False) + "aaaaa" + second
    assert exchange(sites, hidden).count(b"reached") == 1


def test_barrier_refuses_websockets_of_sites(guarded):
    sites, controls, _ = guarded
    upgrade = (
        "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13",
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    )  # fmt: skip
    for target in ("/v1/control/x", "/v1/fleet/x"):
        words = request(target, "GET", *upgrade, close=False)
        assert b" 101 " not in exchange(sites, words)
    assert b" 101 " in exchange(controls, words)


def test_barrier_is_closed_if_the_port_is_unknown():
    """Without the socket's address, e.g. for a Unix socket, everything counts as from a site."""
    barrier = transport.Barrier(None, 8000)
    path = {"path": "/v1/control/list-nodes", "raw_path": b"/v1/control/list-nodes"}
    for server in (None, ("/run/socket", None), ("127.0.0.1", 9092)):
        assert not barrier._may_pass({"type": "http", "server": server, **path})
    assert barrier._may_pass({"type": "http", "server": ("127.0.0.1", 8000), **path})
    fleet = {"type": "http", "server": None, "path": "/v1/fleet/x", "raw_path": b"/v1/fleet/x"}
    assert barrier._may_pass(fleet)
    for other in ({"raw_path": None}, {"path": "/docs"}, {"root_path": "/v1"}, {"type": "other"}):
        assert not barrier._may_pass(fleet | other)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--address", "0.0.0.0"], "--address: expected HOST:PORT"),
        (["--control", "http://x:1"], "--control: expected HOST:PORT"),
        (
            ["--address", "0.0.0.0:8000"],
            "--control: expected another port than --address, got 8000",
        ),
        (["--insecure"], "--insecure: unsupported option, see `fedhet server --help`"),
        (["--hos", "0.0.0.0"], "--hos: unsupported option"),
        (["--fleet-api-type=grpc-adapter"], "--fleet-api-type: unsupported option"),
        (["--allow-runtime"], "--allow-runtime: unsupported option"),
    ],
)
def test_server_refuses_options_that_change_its_ports_or_protection(tmp_path, words, says):
    certs.make(tmp_path, [], [], 30)
    done = CliRunner().invoke(app, ["server", str(tmp_path), *words])
    assert says in str(done.exception), done.output


def test_server_refuses_a_key_of_another_certificate(tmp_path):
    certs.make(tmp_path, [], [], 30)
    certs.make(tmp_path / "other", [], [], 30)
    (tmp_path / certs.SERVER_KEY).write_bytes((tmp_path / "other" / certs.SERVER_KEY).read_bytes())
    with pytest.raises(FedhetError, match=r"server\.key: expected the key of server\.pem"):
        processes.run_server(tmp_path, "127.0.0.1:9092", "127.0.0.1:8000", tmp_path / "db", [])


def test_server_does_not_start_without_its_barrier(monkeypatch):
    monkeypatch.setattr(transport, "TRANSPORT", HTTP)
    address = ("127.0.0.1", free_port())
    for version in ("1.43.0", "1.43.0.dev20261130", "2.0"):
        monkeypatch.setattr(transport, "FLOWER", Version(version))
        with pytest.raises(FedhetError, match=rf"Flower {Version(version)}: unsupported"):
            transport.open_to_sites(address)
    monkeypatch.setattr(transport, "FLOWER", Version("1.42.0"))
    with monkeypatch.context() as patch:
        patch.delattr(FLOWER, "uvicorn")
        with pytest.raises(FedhetError, match="unsupported"):
            transport.open_to_sites(address)
    assert not control.listens(*address)
    with monkeypatch.context() as patch:
        patch.setattr(FLOWER, "uvicorn", FLOWER.uvicorn)
        transport.open_to_sites(address)
        with pytest.raises(AttributeError):
            FLOWER.uvicorn.Server  # noqa: B018
    with socket.create_server(("127.0.0.1", 0)) as used:
        taken = used.getsockname()
        with pytest.raises(FedhetError, match=rf"127.0.0.1:{taken[1]}: cannot listen \(Address"):
            transport.listen(taken)


def test_supported_versions_are_those_of_the_package():
    project = tomllib.loads((HEALTHY.parents[1] / "pyproject.toml").read_text())["project"]
    (wanted,) = (each for each in project["dependencies"] if each.startswith("flwr["))
    known = [Requirement(each).specifier for each in transport.REQUIREMENTS.values()]
    for version in ("1.38.9", "1.39.0", "1.39.5", "1.40.0", "1.42.9", "1.43.0"):
        assert Requirement(wanted).specifier.contains(version) == any(
            each.contains(version) for each in known
        )


# --- a real server -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Start `fedhet server` with the installed Flower."""
    deployment = LocalDeployment(tmp_path_factory.mktemp("server"), nodes=0)
    deployment.prepare()
    try:
        deployment.start_server()
        yield deployment
    finally:
        deployment.stop()


@pytest.mark.parametrize("verified", [False, True])
def test_sites_reach_no_other_route_of_flower(server, verified):
    """Walk the router of the installed Flower, without and with the CA's certificate."""
    authority = str(server.certs / certs.CA_CERTIFICATE)
    context = ssl.create_default_context(cafile=authority) if verified else unverified()
    registered = routes()
    for method, path in registered:
        if path.startswith("/v1/fleet/"):
            continue
        words = request(path.replace("{", "").replace("}", ""), method)
        reply = exchange(server.fleet_port, words, context=context)
        if TRANSPORT == GRPC:
            assert not reply.startswith(b"HTTP/"), path
        else:
            head, body = reply.split(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 404 "), path
            assert b"content-type" not in head, "Flower's reply has one"
            assert body == b"", path
        behind = exchange(server.control_port, words, context=context)
        assert not re.match(rb"HTTP/1.1 404 ", behind), path


def test_sites_reach_no_other_call_of_flower(server):
    """Try every gRPC call of the installed Flower with only the CA's certificate."""
    authority = (server.certs / certs.CA_CERTIFICATE).read_bytes()
    credentials = grpc.ssl_channel_credentials(authority)
    codes = {}
    with grpc.secure_channel(f"localhost:{server.fleet_port}", credentials) as channel:
        for call in sorted(CALLS):
            with pytest.raises(grpc.RpcError) as failed:
                channel.unary_unary(call)(b"", timeout=10)
            codes[call] = failed.value.code()
    assert any("Control/ListNodes" in call for call in codes)
    served = {call for call, code in codes.items() if code != grpc.StatusCode.UNIMPLEMENTED}
    if TRANSPORT == GRPC:
        assert served
        assert all(call.startswith("/flwr.proto.Fleet/") for call in served)
    else:
        assert {codes[call] for call in served} == {grpc.StatusCode.UNAVAILABLE}


def test_control_api_replies_only_on_the_control_port(server):
    connection = server.connection
    assert control.sites(connection) == []
    public = control.Connection(
        connection.home, f"localhost:{server.fleet_port}", connection.authority
    )
    for request_of in (control.sites, control.newest_runs):
        with pytest.raises(FedhetError):
            request_of(public)


def test_handshake_tells_the_transport(server):
    address = ("localhost", server.fleet_port)
    assert transport.transport_of(address) == TRANSPORT
    assert transport.transport_of(address, server.certs / certs.CA_CERTIFICATE) == TRANSPORT


def healthy(*words):
    done = subprocess.run([sys.executable, HEALTHY, *map(str, words)], capture_output=True)
    return done.returncode == 0


@pytest.mark.slow
def test_health_check_notices_a_server_that_hangs_or_has_exited(tmp_path):
    deployment = LocalDeployment(tmp_path, nodes=1)
    deployment.prepare()
    authority = deployment.certs / certs.CA_CERTIFICATE
    server = f"https://127.0.0.1:{deployment.control_port}", authority
    port = free_port()
    node = (f"http://127.0.0.1:{port}",)
    try:
        deployment.start_server()
        deployment.register(0)
        assert healthy(*server)
        deployment.start_node(0, port=port)
        until(lambda: healthy(*node))
        for name, address in (("server", server), ("site-0", node)):
            process = deployment.processes[name]
            process.send_signal(signal.SIGSTOP)
            assert not healthy(*address)
            process.send_signal(signal.SIGCONT)
            until(lambda address=address: healthy(*address))
            deployment.stop(name)
            assert not healthy(*address)
    finally:
        deployment.stop()


# --- a node and a server with different transports ------------------------------------------------


SUPERNODE = "flwr.supernode.cli.flower_supernode"


@pytest.fixture
def other(tmp_path):
    """Serve TLS handshakes like a server whose Flower uses the other transport."""
    certs.make(tmp_path, [], [], 30)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / certs.SERVER_CERTIFICATE, tmp_path / certs.SERVER_KEY)
    if TRANSPORT == HTTP:
        context.set_alpn_protocols(["h2"])
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve():
            while True:
                try:
                    connection, _ = listening.accept()
                    context.wrap_socket(connection, server_side=True).close()
                except ssl.SSLError:
                    continue
                except OSError:
                    return

        threading.Thread(target=serve, daemon=True).start()
        yield f"localhost:{listening.getsockname()[1]}", tmp_path / certs.CA_CERTIFICATE
        listening.shutdown(socket.SHUT_RDWR)


def test_node_of_another_transport_says_what_to_install(other, monkeypatch):
    address, authority = other
    monkeypatch.setattr(SUPERNODE, lambda: pytest.fail("Flower was started"))
    words = ["--superlink", address, "--root-certificates", str(authority)]
    got = GRPC if TRANSPORT == HTTP else HTTP
    with pytest.raises(FedhetError) as fault:
        processes.run_node(words, lambda _: None)
    text = str(fault.value)
    assert text.startswith(f"server {address}: expected {TRANSPORT}, which Flower 1.")
    assert f"got {got}. Install `{transport.REQUIREMENTS[got]}` at this site" in text
    (finding,) = doctor.check_sites_address(address, authority)
    assert (finding.level, finding.text) == ("error", text.removeprefix("server "))


def test_node_starts_even_if_the_server_does_not_reply_yet(monkeypatch):
    started = []
    monkeypatch.setattr(SUPERNODE, lambda: started.append(sys.argv))
    monkeypatch.setattr(sys, "argv", ["fedhet"])
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.setattr("flwr.supernode.start_client_internal.time", None)
    word = f"--superlink=localhost:{free_port()}"
    processes.run_node([word], lambda _: None)
    assert started == [["flower-supernode", word]]
    assert os.environ["FLWR_SUPEREXEC_TASK_POLL_INTERVAL"] == "0.1"


def test_doctor_checks_a_sites_connection(server, other):
    address, authority = f"localhost:{server.fleet_port}", server.certs / certs.CA_CERTIFICATE
    (finding,) = doctor.check_sites_address(address, authority)
    assert (finding.level, finding.subject) == ("ok", "server")
    assert finding.text.startswith(f"{address} replies to sites over {TRANSPORT}")
    (finding,) = doctor.check_sites_address(address, other[1])
    assert (finding.level, "certificate rejected" in finding.text) == ("error", True)
    (finding,) = doctor.check_sites_address(f"localhost:{free_port()}", authority)
    assert (finding.level, "no server found" in finding.text) == ("error", True)
