"""Keys and certificates for a deployment: CA, server certificate, node keys, and publisher keys.

A deployment with an existing certificate authority needs only the node keys and a publisher key.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import ipaddress
import json
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedhet.base.disk import read_pem, read_text
from fedhet.base.errors import FedhetError, SettingsError, StateError, error_reason, safe_repr
from fedhet.runs.units import plural
from fedhet.settings.addresses import read_host
from fedhet.wire.identity import is_name

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")

CA_CERTIFICATE, CA_KEY = "ca.crt", "ca.key"
SERVER_CERTIFICATE, SERVER_KEY = "server.pem", "server.key"
NODES = "nodes"
PUBLISHER_KEY, PUBLISHER = ".publisher.key", ".publisher.yaml"
"""Endings of a publisher's private key, and of its public file, which `flower-supernode
--trusted-entities` reads."""
AUTHORITY_DAYS = 3650
"""Minimum lifetime of the CA in days, because a new CA certificate must be copied to every site."""
PRIVATE_PEM_KEY = "an unencrypted private key in PEM format"
PRIVATE_SSH_KEY = "an unencrypted private key in OpenSSH format"
RENEWAL_PERIOD = datetime.timedelta(days=30)
"""Remaining lifetime below which a certificate should be renewed."""


def make(directory: Path, hosts: Sequence[str], nodes: Sequence[str], days: int) -> list[Path]:
    """Create a CA, a server certificate and a key pair per node, unless they exist.

    Args:
        directory: Directory that contains all files.
        hosts: Names and addresses under which nodes reach the server; loopback is always included.
        nodes: Names of the nodes.
        days: Lifetime of the server certificate, in days.

    Returns:
        The new files.

    Raises:
        FedhetError: If a name is invalid, if a file cannot be written, or if a server certificate
            exists although `hosts` are given.
    """
    _check_names(nodes)
    names = list(dict.fromkeys(_host(host) for host in (*LOCAL_HOSTS, *hosts)))
    written: list[Path] = []
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not (directory / CA_CERTIFICATE).exists():
            written += _make_authority(directory, max(days, AUTHORITY_DAYS))
        if not (directory / SERVER_CERTIFICATE).exists():
            certificate, key = _signed(directory, names, days)
            paths = directory / SERVER_CERTIFICATE, directory / SERVER_KEY
            written += _write_pair(paths[0], certificate, paths[1], key)
        elif hosts:
            raise FedhetError(
                f"{directory / SERVER_CERTIFICATE} already exists. Remove it to create a "
                f"certificate for {', '.join(hosts)}."
            )
        for node in nodes:
            if not (directory / NODES / node).exists():
                written += make_node_key(directory / NODES / node)
    except OSError as error:
        raise FedhetError(f"cannot write keys in {directory}: {error_reason(error)}") from None
    return written


def renew(directory: Path, hosts: Sequence[str], days: int) -> list[Path]:
    """Replace the server's key and certificate. The same CA signs the new certificate.

    Sites trust the CA and need no change. The server reads the new files when it starts.

    Args:
        directory: Directory that contains all files.
        hosts: Names and addresses to add to the names in the current certificate.
        days: Lifetime of the new certificate, in days.

    Returns:
        The replaced files.

    Raises:
        FedhetError: If the certificate cannot be renewed. In this case, no file was replaced.
    """
    extensions = read_certificate(directory / SERVER_CERTIFICATE).extensions
    current: list[x509.GeneralName] = []
    with contextlib.suppress(x509.ExtensionNotFound):
        current = [*extensions.get_extension_for_class(x509.SubjectAlternativeName).value]
    names = [*current, *(name for name in map(_host, hosts) if name not in current)]
    paths = (directory / SERVER_CERTIFICATE, directory / SERVER_KEY)
    certificate, key = _signed(directory, names, days)
    new = [path.with_name(f".{path.name}.new") for path in paths]
    try:
        for path in new:
            path.unlink(missing_ok=True)
        _write_pair(new[0], certificate, new[1], key)
        for path, final in reversed([*zip(new, paths, strict=True)]):
            path.replace(final)
    except OSError as error:
        raise FedhetError(f"cannot renew {paths[0]}: {error_reason(error)}") from None
    return [*paths]


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM format. Raises FedhetError if it cannot be read."""
    return read_pem(path, x509.load_pem_x509_certificate, "a certificate in PEM format")


def read_server(directory: Path) -> None:
    """Check a server's three files. Raises FedhetError if one is invalid or the key is wrong."""
    read_certificate(directory / CA_CERTIFICATE)
    certificate, path = read_certificate(directory / SERVER_CERTIFICATE), directory / SERVER_KEY
    key = read_pem(path, partial(load_pem_private_key, password=None), PRIVATE_PEM_KEY)
    if key.public_key() != certificate.public_key():
        raise FedhetError(f"{path}: expected the key of {SERVER_CERTIFICATE}, got another key")


def expiry(path: Path) -> str:
    """Describe a certificate's expiry. Raises FedhetError if the certificate is unreadable."""
    end = read_certificate(path).not_valid_after_utc
    days = (end - datetime.datetime.now(datetime.UTC)).days
    if days < 0:
        return f"{path} expired on {end:%Y-%m-%d}, {plural(-days, 'day')} ago"
    return f"{path} expires on {end:%Y-%m-%d}, in {plural(days, 'day')}"


def make_node_key(path: Path) -> list[Path]:
    """Create a key pair for a node (ECDSA P-384, OpenSSH format).

    The private key stays at the site; only the public key is registered with the server.

    Args:
        path: Path of the private key; the public key is written to the same path with `.pub`.

    Returns:
        The private and the public key file.

    Raises:
        FedhetError: If a file already exists, or if the file name is not a valid node name.
    """
    _check_names([path.name])
    public_path = path.with_name(f"{path.name}.pub")
    for file in (path, public_path):
        if file.exists():
            raise FedhetError(f"{file} already exists")
    key = ec.generate_private_key(ec.SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write_once(path, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    _write_once(public_path, public + b"\n", mode=0o644)
    return [path, public_path]


def make_publisher_key(directory: Path, name: str) -> list[Path]:
    """Create a publisher's key pair (Ed25519). The publisher signs the apps that sites may run.

    Args:
        directory: Output directory.
        name: Name of the publisher, which is part of the file names.

    Returns:
        NAME.publisher.key, the private key, and NAME.publisher.yaml, the file for the sites.

    Raises:
        FedhetError: If a file already exists or cannot be written, or if the name is invalid.
    """
    _check_names([name], "publisher name")
    paths = [directory / f"{name}{ending}" for ending in (PUBLISHER_KEY, PUBLISHER)]
    for path in paths:
        if path.exists():
            raise FedhetError(f"{path} already exists")
    key = Ed25519PrivateKey.generate()
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    entry = f"{_publisher_id(key.public_key())}: {public} {name}\n"
    try:
        _write_once(
            paths[0], key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
        )
        _write_once(paths[1], entry.encode(), mode=0o644)
    except OSError as error:
        raise FedhetError(f"cannot write keys in {directory}: {error_reason(error)}") from None
    return paths


def read_publisher_key(path: Path) -> Ed25519PrivateKey:
    """Read a publisher's private key. Raises SettingsError if it is invalid or not secret."""
    advice = "Create one with `fedhet certs DIR --publisher NAME`."
    read = partial(load_ssh_private_key, password=None)
    try:
        key = read_pem(path, read, PRIVATE_SSH_KEY, secret=True)
    except StateError as error:
        raise SettingsError(f"{error}. {advice}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"{path}: expected an Ed25519 key, got another type of key. {advice}")
    return key


def read_publishers(path: Path) -> dict[str, str]:
    """Read the publishers that a site trusts, as OpenSSH public keys by id.

    Flower would accept an empty file, and then run unsigned apps.

    Raises:
        SettingsError: If the file is invalid or empty.
    """
    # Import lazily: `doctor` and `certs` must also work on a machine without Flower.
    import yaml

    advice = "Create it with `fedhet certs DIR --publisher NAME`, on the publisher's machine."
    try:
        publishers = yaml.safe_load(read_text(path, 2**20))
    except StateError as error:
        raise SettingsError(f"{error}. {advice}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        reason = " ".join(error_reason(error).split())
        raise SettingsError(f"{path}: cannot read the publishers ({reason}). {advice}") from None
    if not isinstance(publishers, dict) or not publishers:
        got = f"a {type(publishers).__name__}" if publishers else "none"
        raise SettingsError(f"{path}: expected at least one publisher, got {got}. {advice}")
    for name, text in publishers.items():
        key: object = None
        with contextlib.suppress(ValueError, UnsupportedAlgorithm, AttributeError):
            key = load_ssh_public_key(text.encode())
        if not isinstance(name, str) or not isinstance(key, Ed25519PublicKey):
            rule = "an id and an Ed25519 public key in OpenSSH format"
            raise SettingsError(f"{path}: {safe_repr(name)}: expected {rule}. {advice}")
    return publishers


def sign_app(key: Ed25519PrivateKey, content: bytes) -> dict[str, str]:
    """Sign an app, and return the verifications that `flower-supernode` checks.

    Flower's format: Ed25519 over the time (8 bytes, big-endian) and the SHA-256 digest of the app.
    """
    signed_at = int(time.time())
    signature = key.sign(signed_at.to_bytes(8, "big") + hashlib.sha256(content).digest())
    encoded = base64.urlsafe_b64encode(signature).decode().rstrip("=")
    verification = json.dumps({"signature": encoded, "signed_at": signed_at})
    return {_publisher_id(key.public_key()): verification, "valid_license": "Valid"}


def _publisher_id(key: Ed25519PublicKey) -> str:
    """Return the id of a publisher, by which a site finds the key for a signature."""
    return f"ed25519-{hashlib.sha256(key.public_bytes_raw()).hexdigest()[:32]}"


def _make_authority(directory: Path, days: int) -> list[Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhet development CA")])
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False,
        decipher_only=False,
    )  # fmt: skip
    certificate = (
        _certificate(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    return _write_pair(directory / CA_CERTIFICATE, certificate, directory / CA_KEY, key)


def _signed(
    directory: Path, hosts: Sequence[x509.GeneralName], days: int
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    """Create a server key, and a certificate signed by the CA in the directory."""
    path = directory / CA_KEY
    try:
        authority = read_certificate(directory / CA_CERTIFICATE)
        signer = read_pem(path, partial(load_pem_private_key, password=None), PRIVATE_PEM_KEY)
    except StateError as error:
        advice = "Sign the server's certificate with your own certificate authority."
        raise FedhetError(f"{error}. {advice}") from None
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise FedhetError(f"{path}: expected an EC key, as created by `fedhet certs`")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fedhet server")])
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    certificate = (
        _certificate(name, authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(signer, hashes.SHA256())
    )
    return certificate, key


def _certificate(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        # Tolerate clocks that differ by up to an hour.
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _host(host: str) -> x509.GeneralName:
    """Convert a host to a name for a certificate. The host may start with `*.`.

    Raises FedhetError if the host is invalid.
    """
    start = "*." if host.startswith("*.") else ""
    try:
        name = read_host(host.removeprefix(start))
    except ValueError as error:
        raise FedhetError(f"--host: {error}") from None
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return x509.DNSName(start + name)
    if start or "%" in name:
        raise FedhetError(
            f"--host: expected an address without a '*.' prefix or a zone, got {host!r}"
        )
    return x509.IPAddress(address)


def _check_names(names: Sequence[str], subject: str = "node name") -> None:
    for name in names:
        if not is_name(name):
            rule = "letters, digits, '.', '_' and '-'"
            raise FedhetError(f"{subject} must consist of {rule}, got '{name}'")


def _write_pair(
    certificate_path: Path,
    certificate: x509.Certificate,
    key_path: Path,
    key: ec.EllipticCurvePrivateKey,
) -> list[Path]:
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    _write_once(key_path, private)
    _write_once(certificate_path, certificate.public_bytes(Encoding.PEM), mode=0o644)
    return [certificate_path, key_path]


def _write_once(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Write a new file, without overwriting an existing file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
