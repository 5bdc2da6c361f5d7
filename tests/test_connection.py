"""Messages of Flower's command line, as users see them."""

import contextlib
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

from fedhet.base.errors import FedhetError
from fedhet.cli import deploy
from fedhet.cli.deploy import connected
from fedhet.config.resolve import resolve
from fedhet.deployment import control
from fedhet.deployment.certs import make, make_node_key
from fedhet.deployment.control import Connection, filter_log, submit

HEAD = [
    "\x1b[92mINFO \x1b[0m:      Start `flwr-serverapp` process\n",
    "note: waiting for 3 clients, 2 are there\n",
    "\x1b[91mERROR \x1b[0m:     ServerApp raised an exception\n",
    "Traceback (most recent call last):\n",
    '  File "run_serverapp.py", line 221, in run_serverapp\n',
    "    context = run_(\n",
    "              ^^^^^\n",
]
TAIL = [
    "\n",
    "\x1b[91mERROR \x1b[0m:     Exit Code: 201\n",
    "An unhandled exception occurred in the ServerApp.\n",
    "For more information, visit: <https://flower.ai/docs/framework/1.39/en/ref-exit-codes/201.html>\n",
]


def test_fedhet_error_is_one_line():
    lines = [*HEAD, "fedhet.base.errors.StateError: runs/first holds a run already\n", *TAIL]
    assert list(filter_log(lines)) == [
        "note: waiting for 3 clients, 2 are there",
        "error: runs/first holds a run already",
    ]


@pytest.mark.parametrize("tail", [TAIL, []])
def test_other_error_has_its_traceback(tail):
    said = list(filter_log([*HEAD, "ValueError: 3\n", *tail]))
    assert said == [HEAD[1].rstrip(), *(line.rstrip() for line in HEAD[3:]), "ValueError: 3"]


def test_truncated_traceback_is_printed():
    assert list(filter_log(HEAD))[1:] == [line.rstrip() for line in HEAD[3:]]


def test_error_has_no_colors_or_frames(monkeypatch, tmp_path):
    said = (
        "╭─ Error ─────╮\n│ Connection is │\n│ unavailable.  │\n╰───────────────╯\n\x1b[91mx\x1b[0m"
    )
    done = subprocess.CompletedProcess([], 1, "", said)
    monkeypatch.setattr(control.subprocess, "run", lambda *words, **options: done)
    with pytest.raises(FedhetError) as caught:
        Connection(tmp_path, "h:1", Path("ca.crt")).flwr("list")
    assert str(caught.value) == "`flwr list` failed: Error Connection is unavailable. x"


def test_starting_server_is_retried(monkeypatch, tmp_path):
    refusal = '{"success": false, "error-message": "Connection to the SuperLink is unavailable. P"}'
    left = [refusal, refusal, '{"run-id": 7}']
    clock = iter(range(100))

    def reply(*words, **options):
        return subprocess.CompletedProcess([], 0, left.pop(0), "")

    monkeypatch.setattr(control.subprocess, "run", reply)
    monkeypatch.setattr(control.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(control.time, "monotonic", lambda: next(clock))
    assert Connection(tmp_path, "h:1", Path("ca.crt")).flwr("run") == '{"run-id": 7}'
    left = [refusal] * 50
    with pytest.raises(FedhetError, match="SuperLink"):
        Connection(tmp_path, "h:1", Path("ca.crt")).flwr("run")
    assert len(left) > 20, "it is not tried for ever"


PROJECT = """
[project]
name = "x"
version = "1.0.0"
license = "MIT"

[tool.flwr.app]
publisher = "somebody"
components = { serverapp = "x:app", clientapp = "x:app" }

[tool.flwr.federations]
default = "NAME"

[tool.flwr.federations.NAME]
address = "203.0.113.1:9"
insecure = true
"""


@pytest.mark.parametrize("where", [".", control.CONNECTION])
def test_project_in_the_working_directory_is_ignored(monkeypatch, tmp_path, where):
    """Flower reads an old project file in any working directory, and rewrites its configuration."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(control, "START_SECONDS", 0)
    project = tmp_path / where / "pyproject.toml"
    project.parent.mkdir(exist_ok=True)
    project.write_text(PROJECT.replace("NAME", control.CONNECTION))
    make_node_key(tmp_path / "site-0")
    make(tmp_path / "keys", [], [], 30)
    (tmp_path / "keys" / "ca.crt").rename(tmp_path / "ca.crt")
    opened = Connection(Path("home"), "127.0.0.1:9", Path("ca.crt"))
    opened.prepare()
    configured = (tmp_path / "home" / "config.toml").read_text()
    with pytest.raises(FedhetError) as caught:
        opened.register(Path("site-0.pub"), "site-0")
    assert "legacy" not in str(caught.value)
    assert "migrat" not in str(caught.value).lower()
    assert (tmp_path / "home" / "config.toml").read_text() == configured
    assert project.read_text() == PROJECT.replace("NAME", control.CONNECTION)


def test_server_that_does_not_listen_raises(monkeypatch, tmp_path):
    sent = []
    monkeypatch.setattr(Connection, "flwr", lambda self, *words: sent.append(words))
    make(tmp_path / "keys", [], [], 30)
    authority = tmp_path / "keys" / "ca.crt"
    with listening(tmp_path / "keys") as address:
        Connection(tmp_path, address, authority).check_reachable()
    with pytest.raises(FedhetError, match=address):
        submit(resolve({"method": "local"}), Connection(tmp_path, address, authority), print)
    assert sent == []


@contextlib.contextmanager
def listening(keys, reply=b"HTTP/1.1 400 Bad Request\r\n\r\n"):
    """Start a server with or without the TLS certificate in a directory, and yield its address."""

    def serve():
        with contextlib.suppress(OSError):
            while True:
                connected = server.accept()[0]
                with contextlib.suppress(OSError):
                    secured = tls and tls.wrap_socket(connected, server_side=True)
                    (secured or connected).recv(2**16)
                    (secured or connected).sendall(reply)
                    (secured or connected).close()
                connected.close()

    tls = keys and ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    if keys:
        tls.load_cert_chain(keys / "server.pem", keys / "server.key")
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)


def test_invalid_ca_or_key_raises_before_flower_is_called(monkeypatch, tmp_path, call):
    """Flower's command line would print a JSON object."""
    monkeypatch.setattr(Connection, "flwr", lambda self, *words: pytest.fail("it was called"))
    for name in ("one", "other"):
        make(tmp_path / name, [], ["site-0"], 30)
    key, ca = tmp_path / "one/nodes/site-0", tmp_path / "one/ca.crt"
    words = {}
    one, servers = tmp_path / "one", contextlib.ExitStack()
    with servers:
        address, plain, silent = map(
            servers.enter_context, (listening(one), listening(None), listening(one, b""))
        )
        for what, server, file, given in (
            ("other authority", address, tmp_path / "other/ca.crt", f"{key}.pub"),
            ("no certificate", address, tmp_path / "one/ca.key", f"{key}.pub"),
            ("private key", address, ca, key),
            ("no TLS", plain, ca, f"{key}.pub"),
            ("port of the sites", silent, ca, f"{key}.pub"),
            ("no port", "https://127.0.0.1", ca, f"{key}.pub"),
        ):
            status, _, words[what] = call("register", given, "--server", server, "--ca", file)
            assert status == 2
            assert words[what].count("\n") == 1
    assert "certificate rejected" in words["other authority"]
    assert "expected a certificate in PEM format" in words["no certificate"]
    assert "expected a public key in OpenSSH format" in words["private key"]
    assert "TLS error" in words["no TLS"]
    assert "not an HTTP server (RemoteDisconnected)" in words["port of the sites"]
    assert "expected HOST:PORT" in words["no port"]


def test_terminated_command_leaves_no_directory(monkeypatch, tmp_path):
    for step in ("prepare", "check_reachable"):
        monkeypatch.setattr(Connection, step, lambda self: None)
    homes = []

    def terminated():
        with connected("h:1", tmp_path / "ca.crt") as connection:
            homes.append(connection.home)
            assert homes[0].is_dir()
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt):
        terminated()
    assert not homes[0].exists()


def test_site_that_never_connected_is_listed(capsys):
    since = datetime(2026, 1, 2, tzinfo=UTC)
    deploy._list_sites(
        [control.Site("site-a", 1, "registered", None), control.Site("site-b", 2, "offline", since)]
    )
    _, first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines())
    assert first == "site-a never connected 1"
    assert second == "site-b offline 2026-01-02 00:00:00 2"


def test_error_in_flower_json_is_the_message(monkeypatch, tmp_path):
    done = subprocess.CompletedProcess([], 1, '{"success": false, "error-message": "No\\nrun"}', "")
    monkeypatch.setattr(control.subprocess, "run", lambda *words, **options: done)
    with pytest.raises(FedhetError, match=r"flwr list.*No run"):
        Connection(tmp_path, "h:1", Path("ca.crt")).flwr("list")


def test_flower_programs_ignore_proxies_and_path(monkeypatch, tmp_path):
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("PATH")
    found = Connection(tmp_path, "h:1", Path("ca.crt")).environment()
    assert found["no_proxy"] == found["NO_PROXY"] == "example.org,localhost,127.0.0.1,::1,h"
    assert found["https_proxy"] == "http://127.0.0.1:9"
    assert str(Path(sys.executable).parent) in found["PATH"].split(":")
    assert found["PYTHONIOENCODING"] == "utf-8"


class FlowerServer:
    """Flower's rules for registered keys: a key is accepted once, a name any number of times."""

    def __init__(self, monkeypatch, folder):
        self.registered, self.removed = [], []
        monkeypatch.setattr(control, "sites", lambda connection: list(self.registered))
        monkeypatch.setattr(control, "_unregister", self.unregister)
        monkeypatch.setattr(Connection, "register", lambda _, path, name: self.register(path, name))
        self.connection = Connection(folder / "home", "fed.example.org:8000", folder / "ca.crt")

    def register(self, path, name):
        key = control._public_key(path)
        if any(site.key == key for site in [*self.registered, *self.removed]):
            return False
        self.registered.append(control.Site(name, len(self.registered), "registered", None, key))
        return True

    def unregister(self, connection, site):
        self.registered.remove(site)
        self.removed.append(site)

    def register_sites(self, *pairs, **options):
        return list(control.register(self.connection, pairs, **options))

    def keys(self):
        return [(site.name, site.key) for site in self.registered]


@pytest.fixture
def server(monkeypatch, tmp_path):
    return FlowerServer(monkeypatch, tmp_path)


def public(tmp_path, name):
    return make_node_key(tmp_path / name)[1]


def test_registered_name_raises_without_replace(server, tmp_path):
    first, second = public(tmp_path, "first"), public(tmp_path, "second")
    assert server.register_sites(("site-a", first)) == ["site-a is now registered"]
    before = server.keys()
    with pytest.raises(FedhetError, match=r"'site-a'.*--replace"):
        server.register_sites(("site-b", public(tmp_path, "third")), ("site-a", second))
    assert server.keys() == before, "nothing is registered if one of the keys is refused"
    assert server.register_sites(("site-a", first)) == [
        "site-a is already registered with this key"
    ]
    assert server.keys() == before
    said = server.register_sites(("site-a", second), replace=True)
    assert said[1] == "the former key of site-a is no longer accepted"
    assert server.keys() == [("site-a", control._public_key(second))]
    with pytest.raises(FedhetError, match=r"first\.pub"):
        server.register_sites(("site-a", first), replace=True)
    assert server.keys() == [("site-a", control._public_key(second))]


def test_duplicate_keys_or_names_raise(server, tmp_path):
    first, second = public(tmp_path, "first"), public(tmp_path, "second")
    server.register_sites(("site-a", first))
    before = server.keys()
    with pytest.raises(FedhetError, match=r"'site-a'.*'site-b'"):
        server.register_sites(("site-b", first))
    for pairs in ([("site-b", second), ("site-b", public(tmp_path, "third"))],
                  [("site-b", second), ("site-c", second)]):  # fmt: skip
        with pytest.raises(FedhetError, match=r"name and key"):
            server.register_sites(*pairs)
    assert server.keys() == before


def test_invalid_public_key_raises(server, tmp_path):
    make_node_key(tmp_path / "private")
    (tmp_path / "ed25519.pub").write_bytes(
        b"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIIDdLJOFkiKOhFHNNMaFR7EzdNJgqVG1LXoyYkcm7WFL x\n"
    )
    for name, fault in (
        ("private", "expected a public key in OpenSSH format"),
        ("nothing.pub", "No such file"),
        ("ed25519.pub", "expected an EC key"),
    ):
        with pytest.raises(FedhetError, match=fault) as caught:
            server.register_sites(("site-a", tmp_path / name))
        assert "\n" not in str(caught.value)
    assert server.keys() == []
