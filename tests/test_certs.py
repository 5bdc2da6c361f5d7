"""Keys and certificates: TLS and Flower accept them, and no file is ever replaced."""

from __future__ import annotations

import socket
import ssl
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from typer.testing import CliRunner

from fedhet.base.errors import FedhetError, SettingsError
from fedhet.cli import app
from fedhet.deployment import certs
from fedhet.settings.addresses import join_host_port, split_host_port


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("certs") / "new"
    return folder, certs.make(folder, ["fed.example.org", "10.0.0.7"], ["site-0", "site-1"], 30)


def handshake(server_folder, authority, hostname):
    """Do a TLS handshake over a socket, and return the client's message."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(
        server_folder / certs.SERVER_CERTIFICATE, server_folder / certs.SERVER_KEY
    )
    client = ssl.create_default_context(cafile=authority)
    near, far = socket.socketpair()

    def serve():
        try:
            server.wrap_socket(far, server_side=True).close()
        except (ssl.SSLError, OSError):
            far.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(near, server_hostname=hostname) as secured:
            return secured.version()
    finally:
        near.close()
        thread.join()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1", "fed.example.org", "10.0.0.7"])
def test_server_is_trusted_under_its_names(made, host):
    folder, _ = made
    assert handshake(folder, folder / certs.CA_CERTIFICATE, host) == "TLSv1.3"


def test_other_name_is_not_trusted(made):
    folder, _ = made
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(folder, folder / certs.CA_CERTIFICATE, "evil.example.org")


def test_other_authority_is_not_trusted(made, tmp_path):
    folder, _ = made
    certs.make(tmp_path, [], [], 30)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(folder, tmp_path / certs.CA_CERTIFICATE, "localhost")


def test_node_has_its_own_key_pair(made):
    folder, _ = made
    publics = set()
    for name in ("site-0", "site-1"):
        private = load_ssh_private_key((folder / certs.NODES / name).read_bytes(), None)
        public = load_ssh_public_key((folder / certs.NODES / f"{name}.pub").read_bytes())
        assert isinstance(private.curve, ec.SECP384R1)
        assert private.public_key() == public
        publics.add(public.public_numbers())
    assert len(publics) == 2


def test_private_keys_are_readable_only_by_the_owner(made):
    folder, written = made
    for path in written:
        public = path.suffix in {".crt", ".pem", ".pub"}
        assert path.stat().st_mode & 0o777 == (0o644 if public else 0o600), path
    assert folder.stat().st_mode & 0o077 == 0


def test_existing_files_are_kept_and_missing_files_added(tmp_path):
    first = certs.make(tmp_path, [], ["site-0"], 30)
    before = {path: path.read_bytes() for path in first}
    added = certs.make(tmp_path, [], ["site-0", "site-1"], 30)
    assert [path.name for path in added] == ["site-1", "site-1.pub"]
    assert {path: path.read_bytes() for path in first} == before
    assert certs.make(tmp_path, [], ["site-1"], 30) == []


def test_existing_server_certificate_raises(tmp_path):
    certs.make(tmp_path, [], [], 30)
    with pytest.raises(FedhetError, match=r"server\.pem"):
        certs.make(tmp_path, ["fed.example.org"], [], 30)


def test_certificate_of_a_foreign_authority_raises(tmp_path):
    certs.make(tmp_path, [], [], 30)
    (tmp_path / certs.SERVER_CERTIFICATE).unlink()
    (tmp_path / certs.CA_KEY).write_text("not a key")
    with pytest.raises(FedhetError, match=r"ca\.key"):
        certs.make(tmp_path, [], [], 30)


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        ([], ["../x"], r"node name must consist of .*, got '\.\./x'"),
        (["hö st"], [], "--host: expected a host name or an IP address.* got 'hö st'"),
    ],
)
def test_invalid_name_raises(tmp_path, hosts, nodes, message):
    with pytest.raises(FedhetError, match=message):
        certs.make(tmp_path, hosts, nodes, 30)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("fed.example.org", "DNS:fed.example.org"),
        ("fed.example.org.", "DNS:fed.example.org"),
        ("fl_server", "DNS:fl_server"),
        ("*.example.org", "DNS:*.example.org"),
        ("bücher.example", "DNS:xn--bcher-kva.example"),
        ("10.0.0.7", "IP:10.0.0.7"),
        ("fd00::2", "IP:fd00::2"),
        ("[FD00:0::2]", "IP:fd00::2"),
        ("", None),
        (".", None),
        ("fed.example.org:9092", None),
        ("10.0.0.7:9092", None),
        ("[fd00::2]:9092", None),
        ("https://fed.example.org", None),
        ("fed.example.org/x", None),
        ("fed example", None),
        (" fed.example.org", None),
        ("fed..example", None),
        ("-fed.example", None),
        ("256.0.0.7", None),
        ("10.0.7", None),
        ("[10.0.0.7]", None),
        ("[fed.example]", None),
        ("*.10.0.0.7", None),
        ("a.*.example", None),
        ("me@fed.example", None),
        ("fe80::1%eth0", None),
        ("x" * 64, None),
        ("a." * 130, None),
    ],
)
def test_certificate_accepts_only_names_and_addresses(host, expected):
    if expected is None:
        with pytest.raises(FedhetError, match=r"^--host: expected a(n address| host name)"):
            certs._host(host)
        return
    name = certs._host(host)
    assert f"{'DNS' if isinstance(name, x509.DNSName) else 'IP'}:{name.value}" == expected


def test_invalid_host_writes_no_file(tmp_path):
    with pytest.raises(FedhetError):
        certs.make(tmp_path / "keys", ["https://fed.example.org"], ["site-0"], 30)
    assert not (tmp_path / "keys").exists()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fed.example.org:8000", ("fed.example.org", 8000)),
        ("fed.example.org.:1", ("fed.example.org", 1)),
        ("fl_server:65535", ("fl_server", 65535)),
        ("10.0.0.7:8000", ("10.0.0.7", 8000)),
        ("[fd00::2]:8000", ("fd00::2", 8000)),
        ("[fe80::1%eth0]:8000", ("fe80::1%eth0", 8000)),
        *((text, None) for text in (
            "", ":", ":8000", "fed.example.org", "fed.example.org:", "fd00::2:8000", "fd00::2",
            "fed:0", "fed:65536", "fed:٣", "fed: 1", "fed:+1", "https://fed:8000", "fed:8000/",
            "fe d:1", "[fed]:1", "a:b:1", "fed:8000 ",
        )),
    ],
)  # fmt: skip
def test_host_and_port_are_parsed(given, expected):
    if expected is None:
        with pytest.raises(ValueError, match=r"expected (HOST:PORT|a host name)"):
            split_host_port(given)
        return
    assert split_host_port(given) == expected
    assert split_host_port(join_host_port(*expected)) == expected


def test_renewed_certificate_keeps_hosts_and_sites(tmp_path):
    certs.make(tmp_path, ["fed.example.org"], [], 3)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert "in 2 days" in certs.expiry(tmp_path / certs.SERVER_CERTIFICATE)
    assert "in 3649 days" in certs.expiry(tmp_path / certs.CA_CERTIFICATE)
    certs.renew(tmp_path, ["10.0.0.9"], 90)
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert before.keys() == after.keys()
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {certs.SERVER_CERTIFICATE, certs.SERVER_KEY}
    assert (tmp_path / certs.SERVER_KEY).stat().st_mode & 0o777 == 0o600
    assert "in 89 days" in certs.expiry(tmp_path / certs.SERVER_CERTIFICATE)
    (tmp_path / "at-a-site.crt").write_bytes(before[certs.CA_CERTIFICATE])
    for host in ("fed.example.org", "localhost", "10.0.0.9"):
        assert handshake(tmp_path, tmp_path / "at-a-site.crt", host)


def test_failed_renewal_keeps_the_files(tmp_path):
    with pytest.raises(FedhetError):
        certs.renew(tmp_path, [], 90)
    certs.make(tmp_path, [], [], 3)
    (tmp_path / certs.CA_KEY).unlink()
    before = (tmp_path / certs.SERVER_CERTIFICATE).read_bytes()
    with pytest.raises(FedhetError, match="certificate authority"):
        certs.renew(tmp_path, [], 90)
    assert (tmp_path / certs.SERVER_CERTIFICATE).read_bytes() == before


def test_second_key_of_a_site_raises(tmp_path):
    done = CliRunner().invoke(app, ["certs", str(tmp_path / "new"), "--key", "site-a"])
    assert done.exit_code == 0, done.output
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"site-a", "site-a.pub"}
    with pytest.raises(FedhetError, match="site-a"):
        certs.make_node_key(tmp_path / "new" / "site-a")
    with pytest.raises(FedhetError, match="node name"):
        certs.make_node_key(tmp_path / "a key")


def test_command(tmp_path):
    done = CliRunner().invoke(app, ["certs", str(tmp_path), "--nodes", "2", "--node", "lab"])
    assert done.exit_code == 0
    names = {path.name for path in (tmp_path / certs.NODES).iterdir()}
    assert names == {"site-0", "site-0.pub", "site-1", "site-1.pub", "lab", "lab.pub"}
    for words in (
        ["--renew", "--nodes", "3"],
        ["--key", "x", "--node", "y"],
        ["--key", "x", "--renew"],
    ):
        done = CliRunner().invoke(app, ["certs", str(tmp_path), *words])
        assert isinstance(done.exception, SettingsError), words
